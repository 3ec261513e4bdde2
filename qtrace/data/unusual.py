"""Signs in the first batch that the data are not those that the network was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from megengine import Tensor

from qtrace.data.declared import cure_for_shape
from qtrace.graph.signature import argument_names, list_inputs
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import op_label, owner, users

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = ["find_unusual"]

_MAX_PIXEL = 255
_LEAST_PIXELS = 64  # values of an image that say that it is one
_IMAGE_CHANNELS = (1, 3, 4)
_LEAST_BRIGHT = 32  # the largest value of a dark image of raw pixels is larger
_LEAST_VALUES = 16  # of an input whose values should differ
_STEPS = 3  # modules between the input and its first layer


def find_unusual(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], model: TracedModule, preprocess: Preprocess | None
) -> list[str]:
    """Describes what is unusual about a batch, each with what to do; the user may be right all the same.

    * Axes in another order than the traced ones, which the network happens to accept.
    * Raw pixels, whole numbers from 0 to 255, where the recipe's ``preprocess`` or the first layer of the
      graph expects others.
    * The same number everywhere, unless it is one of several inputs and no image.

    Args:
        arguments: the arguments of a call.
        model: the module that will be called.
        preprocess: the recipe's ``preprocess``; None without one.
    """
    unusual = []
    for name, shape, node, value in _inputs(arguments, model):
        array = value.numpy()
        if array.dtype.kind != "f" or not array.size:
            continue
        if cure := cure_for_shape(array.shape, shape):
            unusual.append(f"input {name} has the shape {array.shape}, traced was {shape}: {cure}")
        elif array.size >= _LEAST_VALUES and array.min() == array.max():
            if array.ndim == 4 or len(list_inputs(model)) == 1:
                number = float(array.flat[0])
                unusual.append(f"input {name} is {number:g} everywhere: look at what reads the data")
        elif _are_raw_pixels(array) and _expects_normalized(node, preprocess):
            unusual.append(
                f"input {name} holds whole numbers up to {array.max():g}, such as raw pixels: unless the "
                "network was trained on them, normalize them as in training"
            )
    return unusual


def _inputs(
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]], model: TracedModule
) -> Iterator[tuple[str, tuple[int, ...], TensorNode, Tensor]]:
    """Yields name, traced shape, node and value of each input of a call whose arguments are tensors."""
    args, kwargs = arguments
    names, nodes = argument_names(model), [n for n in model.graph.inputs if isinstance(n, TensorNode)]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(names) != len(nodes) or not all(isinstance(values.get(name), Tensor) for name in names):
        return
    for name, (shown, shape), node in zip(names, list_inputs(model), nodes, strict=True):
        yield shown, shape, node, values[name]


def _are_raw_pixels(array: np.ndarray) -> bool:
    if array.ndim != 4 or array.shape[1] not in _IMAGE_CHANNELS or array[0].size < _LEAST_PIXELS:
        return False
    image = array[0]
    return (
        image.min() >= 0
        and _LEAST_BRIGHT < image.max() <= _MAX_PIXEL
        and np.array_equal(image, np.rint(image))
    )


def _expects_normalized(node: TensorNode, preprocess: Preprocess | None) -> bool:
    """Whether the recipe normalizes; else whether a convolution reads the input as it is."""
    if preprocess is not None:
        plain = np.all(np.asarray(preprocess.mean) == 0) and np.all(np.asarray(preprocess.std) == 1)
        return not plain or preprocess.scale != 1
    for _ in range(_STEPS):
        readers = list(users(node))
        if any(op_label(reader) in ("Conv2d", "F.conv2d") for reader in readers):
            return True
        if len(readers) != 1 or owner(readers[0]) is None:  # what rounds the input is a module
            return False
        node = readers[0].outputs[0]
    return False
