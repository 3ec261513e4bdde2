"""Running a model on batches: arguments, eval mode, and errors that name the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.module import LSTM, RNN, Module

from qtrace.data.base import GIVE_BATCHES, read_array, what_is_no_iterable
from qtrace.data.declared import cast_to_declared, check_declared, cures_for_shapes, name_arguments
from qtrace.errors import CalibrationError, GraphError, shorten_list
from qtrace.gradients.recurrent import checked_shapes
from qtrace.graph.failures import short
from qtrace.graph.flatten import flatten
from qtrace.graph.interface import has_traced_structure, list_inputs
from qtrace.graph.nonfinite import search_nonfinite
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import modules_of

__all__ = [
    "ENOUGH_SAMPLES",
    "as_arguments",
    "can_run",
    "check_batches",
    "check_run",
    "count_samples",
    "evaluating",
    "every_second",
    "find_values",
    "first_samples",
    "number_batches",
    "refuse_nan",
    "split_samples",
    "translate_errors",
]

ENOUGH_SAMPLES = 8
"""Fewer samples do not speak for others: figures of one, two and four were 82, 37 and 28 dB too high."""

_RACING = (F.gather, F.linspace, F.arange)
_INT32 = np.iinfo(np.int32)

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(batch: Any, model: TracedModule, index: int = 0) -> _Arguments:
    """Converts a batch to the arguments of a call: arrays become float32 or integer Tensors.

    Args:
        batch: a Tensor or array; a tuple or list of them, one for each argument; or a dict, by the names
            of the model's arguments, or of the inputs in the file that the model was imported from. A dict
            with other keys is the model's one argument.
        model: the module that will be called.
        index: the number of the batch, for messages.

    Raises:
        CalibrationError: when the batch is not made of arrays, does not hold the model's inputs, or has
            other sizes than an imported file fixes.
    """
    value = _map_values(batch, lambda leaf: _tensor(leaf, index))
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
    pairs: Iterator[tuple[int, Any]]
    pairs = batches.numbered() if hasattr(batches, "numbered") else enumerate(batches)
    return pairs


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
    first = getattr(index, "first", 0)
    for key, argument in (*enumerate(args), *kwargs.items()):
        for value in _values(argument):
            if value.dtype.kind == "f" and value.size and (found := test(value)).any():
                place = [int(axis[0]) for axis in np.nonzero(found)]
                return f"input {key} at {place}" + (f" (sample {first + place[0]})" if place else "")
    return ""


def _values(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _values(item)
    else:
        yield value.numpy()


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

    samples = _map_values(arguments, cut)
    if len(sizes) != 1 or sizes.pop() <= count:
        return None
    return samples if model is None or can_run(model, samples) else None


def split_samples(arguments: _Arguments) -> list[_Arguments]:
    """Returns a call for each sample of a batch whose Tensors share their first axis."""

    def sample(number: int) -> _Arguments:
        return _map_values(arguments, lambda value: value[number : number + 1] if value.ndim else value)

    return [sample(number) for number in range(count_samples(arguments))]


def every_second(arguments: _Arguments) -> _Arguments:
    """Returns every second sample of a batch whose Tensors share their first axis."""
    return _map_values(arguments, lambda value: value[::2] if value.ndim else value)


def can_run(model: TracedModule, arguments: _Arguments, samples: int | None = None) -> bool:
    """Returns whether ``model`` can be called with ``arguments``, the result of `as_arguments`.

    Args:
        model: the module.
        arguments: its arguments.
        samples: the number of samples that every result must have; None for any.
    """
    results: list[Tensor] = []
    try:
        _map_values(_call_at_once(model, arguments), results.append)
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
    level, mge.config.async_level = mge.config.async_level, 0
    try:
        with evaluating(model):
            return model(*arguments[0], **arguments[1])
    finally:
        mge.config.async_level = level


def count_samples(arguments: _Arguments) -> int:
    """Returns the length of the first axis of the first tensor that has one; 1 without one.

    Tensors in dicts, tuples and lists count as those outside of them.
    """
    shapes: list[tuple[int, ...]] = []
    _map_values(arguments, lambda value: shapes.append(tuple(getattr(value, "shape", ()))))
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

    Within the block MegEngine's recurrent layers refuse inputs of wrong shapes, which their kernels misread,
    and graphs that read places by ``F.gather`` run without a queue, in which it gives other rows at random.
    """
    flags = [(module, module.training) for module in modules_of(model)]
    for module, _ in flags:
        module.train(False, recursive=False)
    recurrent = any(isinstance(module, (LSTM, RNN)) for module, _ in flags)
    level = mge.config.async_level
    if any(_races(module) for module, _ in flags):
        mge.config.async_level = 0
    try:
        with checked_shapes() if recurrent else nullcontext():
            yield
    finally:
        mge.config.async_level = level
        for module, training in flags:
            module.training = training


def _races(module: Module) -> bool:
    """Whether a graph of a module calls a function whose kernels race with each other in a queue."""
    graphs = module.argdef_graph_map.values() if isinstance(module, TracedModule) else ()
    return any(getattr(expr, "func", None) in _RACING for graph in graphs for expr in graph._exprs)


def _map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to the values in nested dicts, tuples and lists."""
    if isinstance(value, Mapping):
        return {k: _map_values(v, change) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_map_values(v, change) for v in value]
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
