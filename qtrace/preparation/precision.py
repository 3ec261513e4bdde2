"""The precision that a prepared graph really has: bits of weights and inputs, layer by layer."""

from __future__ import annotations

from collections import Counter

from qtrace.preparation.annotation import Annotation

__all__ = ["count_precisions", "describe_precision"]


def count_precisions(annotation: Annotation) -> dict[str, int]:
    """Counts the layers of a prepared or converted graph by precision, the most frequent first.

    A layer is an op of role ``compute``: a convolution, a linear layer or a product.

    Args:
        annotation: what was decided for the graph.

    Returns:
        ``w8a8`` for weights and inputs of 8 bits on integers, ``a8`` for a product of two computed tensors,
        ``w8a8_dynamic`` where each batch has a range of its own, ``w4`` for a float layer with weights of 4
        bits, and ``float`` -> the number of layers.
    """
    bits = {site.group: site.plan.scheme.bits for site in annotation.sites if site.plan is not None}
    dynamic = {name for entry in annotation.dynamic for name in entry.consumers}
    counts: Counter[str] = Counter()
    for note in annotation.notes:
        if note.role != "compute":
            continue
        read = [bits[name] for name in note.inputs if name in bits]
        if note.name in dynamic:
            counts[f"w{bits[note.weight]}a8_dynamic"] += 1
            continue
        weight = f"w{bits[note.weight]}" if note.weight in bits else ""
        if note.state != "int" or not read:
            counts[weight or "float"] += 1
            continue
        counts[f"{weight}a{max(read)}"] += 1
    return dict(counts.most_common())


def describe_precision(annotation: Annotation) -> str:
    """Returns the precision in words: ``precision: w8a8 in 52 of 53 layers, float in 1``."""
    counts = count_precisions(annotation)
    total = sum(counts.values())
    if not total:
        return "precision: no layers"
    (first, number), *others = counts.items()
    parts = [f"{first} in all {total} layers" if not others else f"{first} in {number} of {total} layers"]
    return f"precision: {', '.join([*parts, *(f'{name} in {count}' for name, count in others)])}"
