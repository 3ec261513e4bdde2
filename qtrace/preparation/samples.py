"""The first images of a user's samples, on which ``prepare`` measures and some algorithms learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, count_samples, every_second, first_samples, refuse_nan, split_samples
from qtrace.graph.inference import OpError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.open_axes import infer_types, read_open_axes
from qtrace.graph.types import TensorNode, TracedModule

__all__ = [
    "cut_call",
    "cut_images",
    "first_calls",
    "halve_samples",
    "holds_infinite_data",
    "read_calls",
    "split_calls",
    "takes_call",
]

_MOST_PIXELS = 1 << 20
_CUT_SIDE = 960  # a multiple of the strides of detectors


def read_calls(samples: Iterable[Any], model: TracedModule, count: int) -> list[Any]:
    """Returns the arguments of calls for the first ``count`` images of ``samples``."""

    def read() -> Iterator[Any]:
        for index, batch in enumerate(samples):
            arguments = as_arguments(batch, model, index)
            refuse_nan(arguments, index, model)
            yield arguments

    return first_calls(read(), count, model)


def holds_infinite_data(arguments: Any) -> bool:
    """Returns whether an array of a call mixes infinity with data, unlike a mask of one or two numbers."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        if array.dtype.kind == "f" and np.isinf(array).any():
            finite = array[np.isfinite(array)]
            if not finite.size or len(np.unique(finite)) > 2:
                return True
    return False


def first_calls(calls: Iterable[Any], count: int, model: TracedModule) -> list[Any]:
    """Returns ``calls`` up to the first ``count`` images, in whole batches if the model fixes their size."""
    first: list[Any] = []
    for arguments in calls:
        first.append(cut_call(arguments, count, model) or arguments)
        count -= count_samples(first[-1])
        if count <= 0:
            break
    return first


def cut_call(arguments: Any, count: int, model: TracedModule) -> Any:
    """Returns the first samples of a call; None if they cannot be cut off, or ``model`` refuses so few."""
    few = first_samples(arguments, count)
    known = few is not None and takes_call(few, model)
    return few if known else first_samples(arguments, count, model)


def split_calls(calls: Iterable[Any], model: TracedModule) -> list[Any]:
    """Returns calls with single samples; those with several if ``model`` takes no others.

    What is measured on them does not depend on the size of the user's batches then.
    """
    single: list[Any] = []
    for arguments in calls:
        single += split_samples(arguments) if cut_call(arguments, 1, model) is not None else [arguments]
    return single


def halve_samples(batches: Iterable[Any], model: TracedModule) -> list[Any]:
    """Returns every second sample of batches, as batches; every second batch if ``model`` fixes their size.

    What is only compared from layer to layer needs no more.
    """
    halved: list[Any] = []
    for number, batch in enumerate(batches):
        arguments = as_arguments(batch, model, number)
        if count_samples(arguments) > 1 and cut_call(arguments, 1, model) is not None:
            args, kwargs = every_second(arguments)
            halved.append(kwargs or args)
        elif number % 2 == 0:
            halved.append(batch)
    return halved


def cut_images(calls: list[Any], model: TracedModule) -> list[Any]:
    """Cuts the middle out of images of more than a million pixels, if the network takes any size.

    A run that follows roundings keeps every tensor of a network: at 1760x1760 more than 8 GB for a small one.
    """
    record = read_open_axes(model)
    nodes = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    if record is None or len(nodes) != 1 or not {2, 3} <= set(record.of(nodes[0])):
        return calls
    return [_cut_image(call, nodes[0], model) for call in calls]


def _cut_image(call: Any, node: TensorNode, model: TracedModule) -> Any:
    args, kwargs = call
    values = [*args, *kwargs.values()]
    if len(values) != 1 or values[0].ndim != 4:
        return call
    height, width = (int(n) for n in values[0].shape[2:])
    if height * width <= _MOST_PIXELS:
        return call
    top, left = max(0, height - _CUT_SIDE) // 2, max(0, width - _CUT_SIDE) // 2
    part = values[0][:, :, top : top + _CUT_SIDE, left : left + _CUT_SIDE]
    try:
        infer_types(model, {node.name: tuple(map(int, part.shape))})
    except OpError:
        return call
    return (part,) if args else (), dict.fromkeys(kwargs, part)


def takes_call(arguments: Any, model: TracedModule) -> bool:
    """Returns whether the batch is open, as an import has proved, and no edit since then has fixed it.

    Shapes are inferred, which takes less time than a run.
    """
    record = read_open_axes(model)
    nodes = [node for node in model.graph.inputs if isinstance(node, TensorNode)]
    if record is None or not nodes or not all(0 in record.of(node) for node in nodes):
        return False
    args, kwargs = arguments
    values = Interpreter(model).bind(args, kwargs)[1][1:]
    try:
        infer_types(model, {node.name: value.shape for node, value in zip(nodes, values, strict=True)})
    except OpError:
        return False
    return True
