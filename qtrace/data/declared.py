"""The inputs that an imported file declares: their names as keys of a batch, and their sizes.

Signs in the first batch that the data are not those that the network was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from megengine import Tensor

from qtrace.errors import CalibrationError
from qtrace.graph.interface import TensorInfo, argument_names, list_inputs, read_inputs
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import op_label, owner, users

if TYPE_CHECKING:
    from qtrace.config import Preprocess

__all__ = [
    "cast_to_declared",
    "check_declared",
    "cure_for_shape",
    "cures_for_shapes",
    "find_unusual",
    "name_arguments",
]

_SAMPLES = "the first axis counts the samples"


def name_arguments(batch: Mapping[Any, Any], model: TracedModule) -> dict[str, Any] | None:
    """Returns a batch by the names of the model's arguments; None if its keys are no inputs.

    Args:
        batch: values by the names of the inputs, in the file that the model was imported from, or
            the arguments of ``forward``, which are identifiers.
        model: the module that will be called.
    """
    arguments = argument_names(model)
    declared = {info.name: name for name, info in read_inputs(model).items()}
    if declared and set(batch) <= set(declared):  # first: a file's name may be another input's argument
        return {declared[key]: value for key, value in batch.items()}
    return dict(batch) if set(batch) <= set(arguments) else None


def check_declared(model: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any], index: int) -> None:
    """Refuses inputs of other sizes than the file fixes from which the model was imported.

    The first axis counts samples and may have any size, unless an op needs the number. Modules of MegEngine's
    own declare no sizes: the traced ones are an example.

    Args:
        model: the module that will be called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        index: the number of the batch, for messages.

    Raises:
        CalibrationError: naming the input, both shapes and a cure.
    """
    declared = read_inputs(model)
    if not declared:
        return
    traced = dict(zip(declared, (shape for _, shape in list_inputs(model)), strict=True))
    values = {**dict(zip(argument_names(model), args, strict=False)), **kwargs}
    for name, info in declared.items():
        value = values.get(name)
        if info.sizes is None or not isinstance(value, Tensor):
            continue
        shape = tuple(int(n) for n in value.shape)
        fixed = _fixed(model, name)
        if _fits(shape, info.sizes) and (0 not in fixed or shape[0] == info.sizes[0]):
            continue
        cure = cure_for_shape(shape, traced[name]) or (
            "give data of this size (in a recipe, preprocess.size), or import a file that leaves it open"
        )
        cure = f"{cure} ({next(iter(fixed.values()))})" if fixed else cure
        raise CalibrationError(
            f"batch {index} gives {info.name!r} of shape {shape}, but the file that the model was imported "
            f"from fixes it to {_written(info)}: {cure}."
        )


def cast_to_declared(
    model: TracedModule, args: Sequence[Any], kwargs: Mapping[str, Any], index: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts inputs to the types as which the graph carries the inputs of its imported file.

    Integers that the file takes as uint16, say, become int32, and pixels, which are read as float32, uint8
    again where the file takes these. The graph carries float16 as float32: such inputs are rounded to
    float16, so that it computes on what an exported file computes on.

    Args:
        model: the module that will be called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        index: the number of the batch, for messages.

    Raises:
        CalibrationError: when the type of the file does not have the numbers of an input.
    """
    declared = read_inputs(model)
    if not declared:
        return tuple(args), dict(kwargs)

    def cast(name: str, value: Any) -> Any:
        info = declared.get(name)
        if info is None or not isinstance(value, Tensor):
            return value
        if info.dtype == "float16":
            with np.errstate(over="ignore"):  # a number beyond float16 is infinite, which the caller refuses
                return Tensor(value.numpy().astype(np.float16).astype(np.float32))
        if np.dtype(value.dtype).name == info.carried_dtype:
            return value
        given = value.numpy()
        with np.errstate(invalid="ignore"):
            carried = given.astype(info.carried_dtype)
        if carried.dtype.kind != "f" and not np.array_equal(carried, given):
            number = given[carried != given].flat[0]
            with np.errstate(invalid="ignore"):
                beyond = np.trunc(number).astype(np.dtype(info.dtype)) == number
            if beyond:
                limits = np.iinfo(info.carried_dtype)
                raise CalibrationError(
                    f"batch {index} gives {info.name!r} numbers such as {number:.0f}, which {info.dtype} "
                    f"has, but MegEngine computes with {limits.bits} bits: give integers from {limits.min} "
                    f"to {limits.max}."
                )
            raise CalibrationError(
                f"batch {index} gives {info.name!r} numbers such as {number:g}, but the imported "
                f"file takes {info.dtype}, which lacks them: give numbers that it takes."
            )
        return Tensor(carried)

    names = [*argument_names(model), *("" for _ in args)]
    return (
        tuple(cast(name, value) for name, value in zip(names, args, strict=False)),
        {name: cast(name, value) for name, value in kwargs.items()},
    )


def _fixed(model: TracedModule, name: str) -> dict[int, str]:
    """Returns the axes of an input that the file leaves open and an op fixes, with a sentence on each."""
    record = read_open_axes(model)
    axes = () if record is None else record.fixed
    return {axis.axis: str(axis) for axis in axes if axis.input == name}


def _fits(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    pairs = enumerate(zip(shape, sizes, strict=False))
    return len(shape) == len(sizes) and all(axis == 0 or n in (None, size) for axis, (size, n) in pairs)


def _written(info: TensorInfo) -> str:
    return "(" + ", ".join("?" if n is None else str(n) for n in info.sizes or ()) + ")"


def cure_for_shape(shape: Sequence[int], traced: Sequence[int]) -> str:
    """Returns how to correct an array whose axes are in another order or number; "" if nothing says so.

    Args:
        shape: the shape of the array.
        traced: the shape of the input.
    """
    if len(traced) != 4 or tuple(shape) == tuple(traced):
        return ""
    channels = {"NCHW": traced[1], "NHWC": traced[3]}
    if len(shape) == 4:
        fits = tuple(shape[1:]) == (traced[3], *traced[1:3])  # NCHW, by every size
        if shape[3] == channels["NCHW"] != shape[1] and not fits:
            return "it looks like NHWC: transpose (0, 3, 1, 2)"
        if shape[1] == channels["NHWC"] != shape[3]:
            return "it looks like NCHW: transpose (0, 2, 3, 1)"
    if len(shape) == 3:
        if shape[0] == channels["NCHW"]:
            return f"it looks like one sample: write x[None], as {_SAMPLES}"
        if shape[2] == channels["NCHW"]:
            return f"it looks like one image, HWC: write x.transpose(2, 0, 1)[None], as {_SAMPLES}"
    if len(shape) == 2 and channels["NCHW"] == 1:
        return f"it looks like one image without channels: write x[None, None], as {_SAMPLES}"
    return ""


def cures_for_shapes(model: TracedModule, values: Iterable[Any]) -> str:
    """Returns the first cure of `cure_for_shape` for the inputs of a call, in their order; "" without one."""
    pairs = zip((value for value in values if isinstance(value, Tensor)), list_inputs(model), strict=False)
    cures = (cure_for_shape(tuple(int(n) for n in value.shape), shape) for value, (_, shape) in pairs)
    return next(filter(None, cures), "")


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
