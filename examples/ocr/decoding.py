"""From the recogniser's probabilities to text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

BLANK = 0


def read_characters(file: Path) -> list[str]:
    """Reads the characters from the metadata of the recogniser's ONNX file.

    Returns:
        What each class stands for: nothing for the blank, then the characters of the file, then the space.
    """
    import onnx

    metadata = {entry.key: entry.value for entry in onnx.load(str(file)).metadata_props}
    if "character" not in metadata:
        raise ValueError(f"{file} has no entry 'character' in its metadata: it is no recogniser of PP-OCR.")
    return ["", *metadata["character"].split("\n"), " "]


def decode(probabilities: np.ndarray, characters: list[str]) -> list[str]:
    """Decodes greedily by the rule of CTC: one class a column, repetitions once, no blanks.

    Args:
        probabilities: N x columns x classes.
        characters: what each class stands for.
    """
    if probabilities.shape[2] != len(characters):
        raise ValueError(
            f"the network has {probabilities.shape[2]} classes, and its metadata {len(characters)}."
        )
    texts = []
    for classes in probabilities.argmax(axis=2):
        changes = np.append(True, classes[1:] != classes[:-1])
        texts.append("".join(characters[c] for c in classes[changes & (classes != BLANK)]).strip())
    return texts
