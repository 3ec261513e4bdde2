"""The noise of a file's outputs beside those of the float file: that of the worst group of columns.

Files do not tell which rows they select. Where a graph selects, the graph that a file is exported from runs
instead, and float computes the same rows: by position, a pair of exchanged rows would be noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtrace.graph.types import TracedModule
from qtrace.outputs import ColumnGroup, GroupedErrors, find_groups
from qtrace.outputs.counted import noise_weight
from qtrace.outputs.replay import SelectedShares
from qtrace.sensitivity.running import rows_of

__all__ = ["Outputs", "group_weights", "measure_noise", "measure_row_noise", "output_groups"]

Outputs = Sequence[Sequence[np.ndarray]]
"""For each batch the values of every output."""


def output_groups(traced: TracedModule, exact: Outputs) -> tuple[ColumnGroup, ...]:
    """Returns the groups of columns of the outputs; () without batches, or where their ranks differ."""
    return find_groups(traced, exact) if exact else ()


def group_weights(
    groups: Sequence[ColumnGroup], exact: Outputs, counts: Sequence[int]
) -> dict[ColumnGroup, float]:
    """Returns for each group how much more its noise counts than beside its power.

    Args:
        groups: the groups of columns of the float outputs.
        exact: the outputs of the float file.
        counts: the number of samples of each batch.
    """
    weights = {}
    for group in groups:
        parts = [group.select(batch[group.output]) for batch in exact]
        weights[group] = noise_weight(parts, counts)
    return weights


def measure_noise(weights: Mapping[ColumnGroup, float], exact: Outputs, own: Outputs) -> tuple[float, ...]:
    """Returns for each half of the samples the noise of the worst group, relative to its power.

    Of integers it is the share of those that differ. It is infinite where outputs cannot be compared: other
    shapes or types, or values that float alone has finite.

    Args:
        weights: the groups of columns of the float outputs, from `group_weights`.
        exact: the outputs of the float file.
        own: the outputs in their place.
    """
    pairs = list(zip(exact, own, strict=True))
    if any(not _alike(a, b) for a, b in pairs):
        return (math.inf, math.inf)
    samples = [_samples(batch, weights) for batch in exact]
    middle, start = (sum(samples) + 1) // 2, 0
    halves: list[list[tuple[list[np.ndarray], list[np.ndarray]]]] = [[], []]
    for (a, b), count in zip(pairs, samples, strict=True):
        cut = min(max(middle - start, 0), count)
        for half, (first, last) in zip(halves, ((0, cut), (cut, count)), strict=True):
            if first == 0 and last == count:
                half.append((list(a), list(b)))
            elif first < last:
                half.append(([v[first:last] for v in a], [v[first:last] for v in b]))
        start += count
    return tuple(_worst(weights, half or halves[0]) for half in halves)


def measure_row_noise(
    exact: TracedModule, graph: TracedModule, batches: Sequence[Any], counts: Sequence[int]
) -> tuple[float, ...]:
    """Returns for each half of the batches the noise of the rows that a graph selects, or their lost share.

    Args:
        exact: the flat graph in float.
        graph: the graph in its place.
        batches: inputs as for `qtrace.calibrate`.
        counts: the number of samples of each batch.
    """
    own, tapes = rows_of(graph, batches)
    same, replays = rows_of(exact, batches, [tape.places for tape in tapes])
    if any(not _alike(a, b) for a, b in zip(same, own, strict=True)):
        return (math.inf, math.inf)
    groups, selected = output_groups(exact, same), SelectedShares.of(exact)
    weights = group_weights(groups, same, counts)
    middle = (len(batches) + 1) // 2
    halves = [slice(0, middle), slice(middle, None)] if middle < len(batches) else [slice(None)] * 2
    noises = []
    for half in halves:
        shares, pairs = selected.empty(), []
        for a, b, tape in zip(same[half], own[half], replays[half], strict=True):
            shares.add(tape.shares)
            blanked = ([shares.blank(i, v, tape.shares) for i, v in enumerate(side)] for side in (a, b))
            pairs.append((next(blanked), next(blanked)))
        lost = max(map(shares.lost, range(len(shares.reaching))), default=0.0)
        noises.append(max(_worst(weights, pairs), lost))
    return tuple(noises)


def _alike(exact: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> bool:
    """Whether outputs have the same number, types, shapes and finite values."""
    if len(exact) != len(own):
        return False
    for a, b in zip(exact, own, strict=True):
        if a.shape != b.shape or (a.dtype.kind == "f") != (b.dtype.kind == "f"):
            return False
        if a.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                missing = ~(np.isfinite(a) & np.isfinite(b))
            if missing.any() and not np.array_equal(a[missing], b[missing], equal_nan=True):
                return False
    return True


def _samples(outputs: Sequence[np.ndarray], groups: Iterable[ColumnGroup]) -> int:
    """Returns the number of samples of a batch; 1 where the first axis is not that of samples."""
    counts = {len(value) if value.ndim else 1 for value in outputs}
    columns = any(group.axis == 0 for group in groups)
    scalars = any(not value.ndim for value in outputs)
    return max(counts.pop(), 1) if len(counts) == 1 and not columns and not scalars else 1


def _worst(
    weights: Mapping[ColumnGroup, float], pairs: Sequence[tuple[list[np.ndarray], list[np.ndarray]]]
) -> float:
    """Returns the noise of the worst group, or the share of the integers of an output that differ.

    Args:
        weights: for each group how much more its noise counts than beside its power.
        pairs: for each batch float's outputs and those in their place.
    """
    errors = GroupedErrors(tuple(weights))
    unequal: dict[int, list[int]] = {}
    for exact, own in pairs:
        errors.add(exact, own)
        for place, (a, b) in enumerate(zip(exact, own, strict=True)):
            if a.dtype.kind != "f":
                counts = unequal.setdefault(place, [0, 0])
                counts[0] += int(np.count_nonzero(a != b))
                counts[1] += a.size
    noises = [share * weights[group] for group, share in errors.shares().items()]
    noises += [count / max(size, 1) for count, size in unequal.values()]
    return max(noises, default=0.0)
