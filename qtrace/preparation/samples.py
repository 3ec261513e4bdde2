"""The first images of a user's samples, on which ``prepare`` measures and some algorithms learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, count_samples, first_samples, refuse_nan
from qtrace.graph.types import TracedModule

__all__ = ["first_calls", "holds_infinite_data", "read_calls"]


def read_calls(samples: Iterable[Any], model: TracedModule, count: int) -> list[Any]:
    """Returns the arguments of calls for the first ``count`` images of ``samples``."""

    def read() -> Iterator[Any]:
        for index, batch in enumerate(samples):
            arguments = as_arguments(batch, model, index)
            refuse_nan(arguments, index)
            yield arguments

    return first_calls(read(), count, model)


def holds_infinite_data(arguments: Any) -> bool:
    """Returns whether an array of a call mixes infinity with data, unlike a mask of one or two numbers."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            finite = array[np.isfinite(array)]
            if not finite.size or len(np.unique(finite)) > 2:
                return True
    return False


def first_calls(calls: Iterable[Any], count: int, model: TracedModule) -> list[Any]:
    """Returns ``calls`` up to the first ``count`` images, in whole batches if the model fixes their size."""
    first: list[Any] = []
    for arguments in calls:
        first.append(first_samples(arguments, count, model) or arguments)
        count -= count_samples(first[-1])
        if count <= 0:
            break
    return first
