"""Running a model on batches: arguments, eval mode, and errors that name the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.module import LSTM, RNN, Module

from qtrace.data.base import GIVE_BATCHES, LEAST_VALUES, read_array, what_is_no_iterable
from qtrace.errors import CalibrationError, GraphError, shorten_list
from qtrace.gradients.recurrent import checked_shapes
from qtrace.graph.failures import short
from qtrace.graph.flatten import flatten
from qtrace.graph.interface import TensorInfo, argument_names, has_traced_structure, list_inputs, read_inputs
from qtrace.graph.kernels import synchronous
from qtrace.graph.nonfinite import search_nonfinite
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import modules_of, op_label, owner, users

if TYPE_CHECKING:
    from qtrace.config import Preprocess

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
        array = value.numpy()
        with np.errstate(invalid="ignore"):
            carried = array.astype(info.carried_dtype)
        if carried.dtype.kind != "f" and not np.array_equal(carried, array):
            number = array[carried != array].flat[0]
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


_LEAST_BRIGHT = 32  # the largest value of a dark image of raw pixels is larger


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
        elif array.size >= LEAST_VALUES and array.min() == array.max():
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
    if array.ndim != 4 or array[0].size < LEAST_VALUES:
        return False
    image = array[0]
    return (
        image.min() >= 0
        and _LEAST_BRIGHT < image.max() <= np.iinfo(np.uint8).max
        and np.array_equal(image, np.rint(image))
    )


def _expects_normalized(node: TensorNode, preprocess: Preprocess | None) -> bool:
    """Whether the recipe normalizes; else whether a convolution reads the input as it is."""
    if preprocess is not None:
        plain = np.all(np.asarray(preprocess.mean) == 0) and np.all(np.asarray(preprocess.std) == 1)
        return not plain or preprocess.scale != 1
    readers = list(users(node))
    while len(readers) == 1 and owner(readers[0]) is not None and not _is_conv(readers[0]):
        readers = list(users(readers[0].outputs[0]))  # what rounds the input is a module
    return any(map(_is_conv, readers))


def _is_conv(expr: Any) -> bool:
    return op_label(expr) in ("Conv2d", "F.conv2d")


# Fewer samples do not speak for others: figures of one, two and four were 82, 37 and 28 dB too high.
ENOUGH_SAMPLES = 8

HELD_EVERY = 4  # one in so many samples, or batches, is held back: ranges need the rest

MOST_VALUES = 32 * 3 * 224 * 224  # of inputs that are kept, or run ahead: 32 usual images

_RACING = (F.gather, F.linspace, F.arange)
_INT32 = np.iinfo(np.int32)

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(batch: Any, model: TracedModule, index: int = 0) -> _Arguments:
    """Converts a batch to the arguments of a call: arrays become float32 or integer Tensors.

    Args:
        batch: a Tensor or array; a tuple or list of them, one for each argument; or a dict. Its names are the
            model's arguments, or the inputs in the file that the model was imported from. A dict with other
            keys is the model's one argument.
        model: the module that will be called.
        index: the number of the batch, for messages.

    Raises:
        CalibrationError: when the batch is not made of arrays, does not hold the model's inputs, or has
            other sizes than an imported file fixes.
    """
    value = map_values(batch, lambda leaf: _tensor(leaf, index))
    candidates: list[_Arguments] = [((value,), {})]
    if isinstance(batch, (tuple, list)):
        candidates = [(tuple(value), {})]
    elif isinstance(batch, Mapping) and (named := name_arguments(value, model)) is not None:
        candidates.insert(0, ((), named))
    for args, kwargs in candidates:
        if has_traced_structure(model, args, kwargs):
            check_declared(model, args, kwargs, index)
            return cast_to_declared(model, args, kwargs, index)
    raise CalibrationError(
        f"batch {index} gives {_describe_batch(*candidates[-1])}, but the model takes "
        f"{_describe_inputs(batch, list_inputs(model))}."
    )


def check_batches(batches: Any, name: str = "batches", reader: str = "") -> None:
    """Refuses one batch where several are expected, whose first axis would be taken for an axis of batches.

    Args:
        batches: the argument of a function.
        name: the name of the argument.
        reader: who reads the first batches only, so that an iterator would lose them; "" if all are read.

    Raises:
        CalibrationError: when ``batches`` is no iterable of batches, or an iterator that would lose some.
    """
    if problem := what_is_no_iterable(batches):
        raise CalibrationError(f"{name} is {problem}.")
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"{name} is one {type(batches).__name__}: give an iterable of batches, such as a list of arrays."
        )
    if reader and iter(batches) is batches:
        raise CalibrationError(
            f"{name} is an iterator, from which {reader} would take batches that calibrate then misses: give "
            "a list, or an object whose __iter__ begins anew."
        )


def number_batches(batches: Any) -> Iterator[tuple[int, Any]]:
    """Returns batches with the numbers that their source gives them, or which count them."""
    return batches.numbered() if hasattr(batches, "numbered") else enumerate(batches)


def refuse_nan(arguments: _Arguments, index: int, model: TracedModule, source: str = "") -> None:
    """Refuses a batch with NaN, which each runtime maps to another integer, unless it is meant.

    It is meant if the graph moves it, asks for it, selects other values, or gives NaN at the same places.

    Args:
        arguments: the result of `as_arguments`.
        index: the number of the batch.
        model: the graph that reads the batch.
        source: the name of the data, where there are others; "" for none.

    Raises:
        CalibrationError: when a value is NaN, and an op or a rounding calculates with it.
    """
    if not (place := find_values(arguments, np.isnan, index)):
        return
    flat = flatten(model)
    with evaluating(flat), translate_errors(model, arguments, index):
        search = search_nonfinite(flat, *arguments)
    if search.calculates_with_nan():
        raise CalibrationError(
            f"{source}{', ' if source else ''}batch {index} holds NaN, which is no integer, first in "
            f"{place}: repair the data; NaN that is meant needs F.isnan and prepare(samples=)."
        )


def find_values(arguments: _Arguments, test: Callable[[np.ndarray], np.ndarray], index: int = 0) -> str:
    """Returns where the first value of a batch stands that a test holds for; "" if there is none.

    Args:
        arguments: the result of `as_arguments`.
        test: returns a boolean for each value of an array of floats.
        index: the number of the batch, which may know the number of its first sample in the data.
    """
    args, kwargs = arguments
    for key, argument in (*enumerate(args), *kwargs.items()):
        leaves: list[Any] = []
        map_values(argument, leaves.append)
        for value in (leaf.numpy() for leaf in leaves):
            if value.dtype.kind == "f" and value.size and (matches := test(value)).any():
                place = [int(axis[0]) for axis in np.nonzero(matches)]
                return f"input {key} at {place}" + (
                    f" (sample {getattr(index, 'first', 0) + place[0]})" if place else ""
                )
    return ""


def first_samples(arguments: _Arguments, count: int, model: TracedModule | None = None) -> _Arguments | None:
    """Cuts a batch to its first samples; None unless all its Tensors that have axes share a longer first one.

    Args:
        arguments: the result of `as_arguments`.
        count: number of samples.
        model: the module that will be called; the result is None if it cannot run on so few samples, as one
            whose batch is fixed. None to leave this open.
    """
    sizes: set[int] = set()

    def cut(value: Any) -> Any:
        sizes.update(map(int, value.shape[:1]))  # none of a setting
        return value[:count] if value.ndim else value

    samples = map_values(arguments, cut)
    if len(sizes) != 1 or sizes.pop() <= count:
        return None
    return samples if model is None or can_run(model, samples) else None


def split_samples(arguments: _Arguments) -> list[_Arguments]:
    """Returns a call for each sample of a batch whose Tensors share their first axis."""

    def sample(number: int) -> _Arguments:
        return map_values(arguments, lambda value: value[number : number + 1] if value.ndim else value)

    return [sample(number) for number in range(count_samples(arguments))]


def every_second(arguments: _Arguments) -> _Arguments:
    """Returns every second sample of a batch whose Tensors share their first axis."""
    return map_values(arguments, lambda value: value[::2] if value.ndim else value)


def can_run(model: TracedModule, arguments: _Arguments, samples: int | None = None) -> bool:
    """Returns whether ``model`` can be called with ``arguments``, the result of `as_arguments`.

    Args:
        model: the module.
        arguments: its arguments.
        samples: the number of samples that every result must have; None for any.
    """
    results: list[Tensor] = []
    try:
        map_values(_call_at_once(model, arguments), results.append)
    except (AssertionError, TypeError, RuntimeError, ValueError):  # MegEngine's are of no class of their own
        return False
    except GraphError:  # of a node that is kept as in the file
        return False
    return samples is None or all(value.ndim and len(value) == samples for value in results)


def check_run(model: TracedModule, arguments: _Arguments, index: int) -> None:
    """Runs ``model`` on a batch, to refuse one on which it fails.

    Args:
        model: the module.
        arguments: its arguments, the result of `as_arguments`.
        index: the number of the batch.

    Raises:
        CalibrationError: when it fails.
    """
    with translate_errors(model, arguments, index):
        _call_at_once(model, arguments)


def _call_at_once(model: TracedModule, arguments: _Arguments) -> Any:
    """Calls ``model`` in eval mode without a queue, so that an error of a kernel is raised here."""
    with synchronous(), evaluating(model):
        return model(*arguments[0], **arguments[1])


def count_samples(arguments: _Arguments) -> int:
    """Returns the length of the first axis of the first tensor that has one; 1 without one.

    Tensors in dicts, tuples and lists count as those outside of them.
    """
    shapes: list[tuple[int, ...]] = []
    map_values(arguments, lambda value: shapes.append(tuple(getattr(value, "shape", ()))))
    return next((int(shape[0]) for shape in shapes if shape), 1)


@contextmanager
def translate_errors(model: TracedModule, arguments: _Arguments, index: int) -> Iterator[None]:
    """Re-raises MegEngine's errors as a `CalibrationError` with the batch, its shapes and the traced ones.

    Args:
        model: the module that is called inside.
        arguments: the arguments of the call, from `as_arguments`.
        index: the number of the batch.

    Raises:
        CalibrationError: for errors of MegEngine.
    """
    try:
        yield
    except (AssertionError, TypeError, RuntimeError, ValueError) as error:
        args, kwargs = arguments
        cure = cures_for_shapes(model, (*args, *kwargs.values())) or "so give such shapes"
        raise CalibrationError(
            f"batch {index} gives {_describe_batch(*arguments)}, which does not fit the model: it was traced "
            f"with {_listed(list_inputs(model))}, {cure} ({short(error)})."
        ) from error


@contextmanager
def evaluating(model: TracedModule) -> Iterator[None]:
    """Puts the model in eval mode and gives every module its training flag back in the end.

    Within the block MegEngine's recurrent layers refuse inputs of wrong shapes, which their kernels misread.
    Graphs that read places by ``F.gather`` run without a queue, in which it gives other rows at random.
    """
    flags = [(module, module.training) for module in modules_of(model)]
    for module, _ in flags:
        module.train(False, recursive=False)
    recurrent = any(isinstance(module, (LSTM, RNN)) for module, _ in flags)
    races = any(_races(module) for module, _ in flags)
    try:
        with checked_shapes() if recurrent else nullcontext(), synchronous() if races else nullcontext():
            yield
    finally:
        for module, training in flags:
            module.training = training


def _races(module: Module) -> bool:
    """Whether a graph of a module calls a function whose kernels race with each other in a queue."""
    graphs = module.argdef_graph_map.values() if isinstance(module, TracedModule) else ()
    return any(getattr(expr, "func", None) in _RACING for graph in graphs for expr in graph._exprs)


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to the values in nested dicts, tuples and lists."""
    if isinstance(value, Mapping):
        return {k: map_values(v, change) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_values(v, change) for v in value]
        return items if isinstance(value, list) else tuple(items)  # also of a named tuple
    return change(value)


def _tensor(value: Any, index: int) -> Any:
    if isinstance(value, Tensor):
        return value
    array = read_array(value, index)
    if array.dtype.kind == "f":
        return Tensor(array.astype(np.float32))
    if array.dtype.kind in "iu" and array.dtype.itemsize >= _INT32.dtype.itemsize:
        return Tensor(_as_int32(array, index))
    return Tensor(array)


def _as_int32(array: np.ndarray, index: int) -> np.ndarray:
    """Converts integers to int32, as which MegEngine carries them; refuses those that it cannot hold."""
    for value in (int(array.min()), int(array.max())) if array.size else ():
        if not _INT32.min <= value <= _INT32.max:
            raise CalibrationError(
                f"batch {index} holds the integer {value}, and MegEngine computes with 32 bits: give "
                f"integers from {_INT32.min} to {_INT32.max}."
            )
    return array.astype(np.int32)


def _describe_inputs(batch: Any, inputs: list[tuple[str, tuple[int, ...]]]) -> str:
    """Describes the inputs of a model, and how to correct a batch of others."""
    names = {name for name, _ in inputs}
    if isinstance(batch, Mapping) and set(batch) > names:
        more = ", ".join(sorted(repr(key) for key in set(batch) - names))
        advice = f"leave out what is no input, such as labels ({more})"
    elif isinstance(batch, Mapping) and set(batch) != names:
        advice = "name them so" if len(batch) <= len(inputs) else f"name one of them so, or {GIVE_BATCHES}"
    elif isinstance(batch, (tuple, list)) and batch and all(isinstance(i, (tuple, list)) for i in batch):
        advice = "make one array of each list of numbers"
    elif isinstance(batch, (tuple, list)) and len(batch) > len(inputs):
        advice = "leave out what is no input, such as labels"
    else:
        advice = "give one array for each"
    return f"{_count(len(inputs))}, {_listed(inputs)}: {advice}"


def _describe_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describes the inputs of a batch with their shapes."""
    named = args[0] if len(args) == 1 and isinstance(args[0], Mapping) else None if args else kwargs
    if named is not None:
        return _and([f"{key!r} of shape {_shape(value)}" for key, value in named.items()])
    several = "s" if len(args) > 1 else ""
    return f"{_count(len(args))} of shape{several} {_and([_shape(value) for value in args])}"


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shape(item)}' for key, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{shorten_list(map(_shape, value))}]"
    return str(tuple(int(n) for n in value.shape))


def _listed(inputs: list[tuple[str, tuple[int, ...]]]) -> str:
    return _and([f"{name} of shape {shape}" for name, shape in inputs])


def _count(number: int) -> str:
    return f"{number} input{'' if number == 1 else 's'}"


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nothing"
