"""Text to render: words and numbers of receipts, signs and forms, drawn at random."""

from __future__ import annotations

import numpy as np

_WORDS = (
    "total amount invoice receipt order number price tax cash change thank you please gate platform track "
    "departure arrival exit entrance open closed street avenue station hotel museum library coffee bread "
    "sugar water juice apple lemon garden window bridge river summer winter Monday Friday April October "
    "south quick brown fox jumps over lazy dog zebra yellow judge vexing wizard network image tensor scale"
)


def phrase(random: np.random.RandomState, longest: int) -> str:
    """Draws words and numbers, at most ``longest`` characters with single spaces between them."""
    words = [_word(random)]
    while random.rand() < 0.8:
        word = _word(random)
        if len(" ".join([*words, word])) > longest:
            break
        words.append(word)
    return " ".join(words)


def _word(random: np.random.RandomState) -> str:
    kind = random.rand()
    if kind < 0.6:
        word = _WORDS.split()[random.randint(len(_WORDS.split()))]
        return (word, word.capitalize(), word.upper())[random.randint(3)]
    if kind < 0.75:
        return f"{random.randint(1000)}.{random.randint(100):02d}"
    if kind < 0.9:
        return str(random.randint(1, 100000))
    letters = "ABCDEFGHKLMNPRSTUVWXYZ"
    return f"{letters[random.randint(len(letters))]}{random.randint(10, 1000)}"
