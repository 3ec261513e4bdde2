"""Compares the float graph of a network with the network itself, on samples of the user's data.

Quantization is measured next to the float graph. If that computes something else than the network, every
figure is about another network, and none of them shows it.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Tensor

from qtrace.comparing.selections import SORTS, find_selecting, read_ranking
from qtrace.config.checking import algorithms, is_packaged
from qtrace.data import Batch
from qtrace.data.base import batch_length
from qtrace.data.batches import (
    as_arguments,
    count_samples,
    evaluating,
    every_second,
    first_samples,
    number_batches,
    refuse_nan,
    split_samples,
)
from qtrace.data.opening import cut_batch
from qtrace.errors import GraphError
from qtrace.graph.differences import values
from qtrace.graph.inference import OpError
from qtrace.graph.interface import read_interface
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.native import lower
from qtrace.graph.open_axes import infer_types, read_open_axes
from qtrace.graph.types import CallFunction, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, tensor_inputs
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import in_phase

__all__ = [
    "Faithfulness",
    "Original",
    "Run",
    "UnpreparedGraph",
    "are_samples_apart",
    "arrays_of",
    "cut_call",
    "cut_images",
    "first_calls",
    "halve_samples",
    "holds_infinite_data",
    "read_batches",
    "read_calls",
    "run_graph",
    "split_calls",
    "takes_call",
]


# A network that its graph is compared with: a graph, or what `qtrace.quantizing` opens with it.

Run = Callable[[Batch], list[np.ndarray]]
"""A network that gives its outputs for a batch, and may keep a state from call to call."""


class Original(abc.ABC):
    """A network as the user gave it.

    Attributes:
        name: the network in words.
        keeps_state: whether a call may change the results of the next ones.
        precision: the relative error of one operation.
        granularity: the absolute error of activations that are close to 0.
    """

    name: str
    keeps_state: bool = False
    precision: float = 2.0**-23
    granularity: float = 0.0

    @abc.abstractmethod
    def start(self) -> Run:
        """Returns the network in the state in which the user gave it."""


class UnpreparedGraph(Original):
    """A graph as it was given, before it is prepared."""

    name = "the graph that was given"

    def __init__(self, traced: TracedModule) -> None:
        self._traced = traced

    @cached_property
    def _plain(self) -> TracedModule:
        """The graph without MegEngine's own fake quants, which are no part of the float network."""
        return lower(self._traced)[0]

    def start(self) -> Run:
        """Returns the graph, which keeps no state."""
        return lambda batch: run_graph(self._plain, batch)


def run_graph(model: TracedModule, batch: Batch) -> list[np.ndarray]:
    """Returns the outputs of a graph for a batch."""
    args, kwargs = as_arguments(batch, model)
    with evaluating(model), quiet_engine(model):
        return arrays_of(values(Interpreter(model, waits=True).run(*args, **kwargs)))


def arrays_of(results: list[Any]) -> list[np.ndarray]:
    """Returns the arrays among the results of a call."""
    return [value for value in results if isinstance(value, np.ndarray)]


# The first images of a user's samples, on which ``prepare`` measures and some algorithms learn.

_CUT_SIDE = 1024  # of the square that is left of larger images, a multiple of the strides of detectors


def read_calls(samples: Iterable[Any], model: TracedModule, count: int) -> list[Any]:
    """Returns the arguments of calls for the first ``count`` images of ``samples``."""

    def read() -> Iterator[Any]:
        for index, batch in number_batches(samples):
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

    What is only compared from layer to layer needs no more, and of large images the middle.
    """
    halved: list[Any] = []
    for number, batch in enumerate(batches):
        arguments = as_arguments(batch, model, number)
        if count_samples(arguments) > 1 and cut_call(arguments, 1, model) is not None:
            halved.append(every_second(arguments))
        elif number % 2 == 0:
            halved.append(arguments)
    return [kwargs or args for args, kwargs in cut_images(halved, model)]


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
    if height * width <= _CUT_SIDE * _CUT_SIDE:
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


_LOG = logging.getLogger("qtrace")

# In units of the relative error of an operation: what the order of sums makes of deep networks is below the
# first; a difference below the second times what the last bits of the inputs make of the outputs is rounding.
_ALLOWED, _SENSITIVE = 2**13, 64
# The most that is allowed: of the largest value of an output, where half precision would allow more, and the
# share of integers that differ, such as places of maxima.
_MOST_ALLOWED, _UNEQUAL = 0.05, 0.1
# The smallest magnitude of an output that a difference is relative to.
_LEAST_RANGE = float(np.finfo(np.float32).resolution)

Outputs = list[np.ndarray]


class Faithfulness:
    """The outputs of a network for samples of the data, next to which its graph is compared.

    Args:
        original: the network; None for one that does not run here, which is not compared.
        traced: its graph.
        data: the calibration data.

    Raises:
        GraphError: when the network keeps a state that changes its results.
    """

    def __init__(self, original: Original | None, traced: TracedModule, data: Iterable[Batch]) -> None:
        self._traced = traced
        self._original = original
        self._picked: tuple[bool, ...] = ()
        self._expected: list[tuple[Batch, Outputs]] = []
        batch = next(iter(data), None)
        if self._original is None or batch is None:
            return
        samples = _first_samples(batch, traced, 2 if self._original.keeps_state else 1)
        for candidate in (samples, [batch]):
            try:
                self._expected = self._run(self._original, candidate)
                break
            except GraphError:
                raise
            except Exception as error:  # of the user's code, which may fail on a single sample
                _LOG.debug("%s is not compared with its graph: %s", self._original.name, error)

    def check(self, prepared: TracedModule) -> None:
        """Compares a prepared graph, which algorithms of the config may have changed, in float.

        Raises:
            GraphError: when it computes something else than the network.
        """
        if self._original is None or not self._expected:
            return
        # Among equal values runtimes pick other places, and each of them is right.
        self._picked = _find_picked(prepared)
        names = [name for name, _ in algorithms(QuantizedModel(prepared).config)]
        if all(map(is_packaged, names)):  # one of the user's own may change values on purpose
            with in_phase(prepared, "float"):
                problem = self._difference(self._original, prepared)
            if not problem:
                return
        if own := self._difference(self._original, self._traced):
            raise GraphError(
                f"the graph does not compute what {self._original.name} computes: on the first samples of "
                f"the data {own}. Look for a value that it keeps between calls, or computes outside of the "
                "graph, as in Python or numpy. If you find none, please report it."
            )
        if all(map(is_packaged, names)):
            raise GraphError(
                "prepare changed what the network computes in float: on the first samples of the data "
                f"{problem}. Leave algorithms out of ptq ({', '.join(names)}), and please report it."
            )

    def _run(self, original: Original, batches: Sequence[Batch]) -> list[tuple[Batch, Outputs]]:
        """Runs the network on batches in turn, and on the first one again; [] if it draws random numbers.

        Raises:
            GraphError: when a call changes the results of the next ones.
        """
        run = original.start()
        results = [run(batch) for batch in batches]
        if original.keeps_state and (problem := self._compared(original, results[0], run(batches[0]))):
            if not self._compared(original, results[0], original.start()(batches[0])):
                raise _refuse_state(original, problem)
            return _are_random(original)
        return list(zip(batches, results, strict=True))

    def _difference(self, original: Original, model: TracedModule) -> str:
        """Returns how a graph differs from the network; "" if it does not beyond rounding."""
        for batch, expected in self._expected:
            outputs = run_graph(model, batch)
            if len(outputs) != len(expected):  # results that are no outputs, which nobody can tell apart
                _LOG.debug("%s has other outputs than its graph, and is not compared", original.name)
                return ""
            problem = self._compared(original, expected, outputs)
            if not problem:
                continue
            run = original.start()
            # onnxruntime draws the same random numbers at the first run of each session.
            repeated = (self._compared(original, run(batch), expected) for _ in range(2))
            if other := next(filter(None, repeated), ""):
                if original.keeps_state:
                    raise _refuse_state(original, other)
                self._expected = _are_random(original)
                return ""
            if not _has_copies(self._traced) and not _is_rounding(original, batch, expected, outputs):
                return problem
        return ""

    def _compared(self, original: Original, expected: Outputs, outputs: Outputs) -> str:
        """Says in words how outputs differ from the expected ones; "" if they do not."""
        for index, (first, second) in enumerate(zip(expected, outputs, strict=True)):
            picked = index < len(self._picked) and self._picked[index]
            if not picked and (problem := _describe_difference(original, first, second)):
                return f"{self._named(index)} {problem}"
        return ""

    def _named(self, index: int) -> str:
        interface = read_interface(self._traced)
        return f"output {index if interface is None else repr(interface.outputs[index].name)}"


def are_samples_apart(traced: TracedModule, batch: Batch) -> bool:
    """Returns whether the outputs of a sample depend only on it, and have it on their first axis.

    They do not where the first axis counts steps of time, tokens or nodes of a graph.

    Args:
        traced: the network.
        batch: a batch that it takes, as it takes the last sample of it.
    """
    count = batch_length(batch)
    together, single = run_graph(traced, batch), run_graph(traced, cut_batch(batch, count - 1, count))
    if not all(output.ndim and len(output) == count for output in together):
        return False
    pairs = zip((output[-1:] for output in together), single, strict=True)
    return not any(_describe_difference(UnpreparedGraph(traced), *pair) for pair in pairs)


def _describe_difference(original: Original, first: np.ndarray, second: np.ndarray) -> str:
    """Says how an output differs from the expected one; "" if it does not beyond rounding."""
    if first.shape != second.shape:
        return f"has the shape {first.shape}, and {second.shape} in the graph"
    difference = _distance(first, second, original.granularity)
    if first.dtype.kind in "iub":
        return f"differs in {difference:.0%} of its numbers" if difference > _UNEQUAL else ""
    allowed = min(_ALLOWED * original.precision, _MOST_ALLOWED)
    return f"differs by {difference:.2g} of its largest value" if difference > allowed else ""


def read_batches(samples: Iterable[Any]) -> Iterator[Batch]:
    """Yields the batches of a user as tuples or dicts of arrays, up to one of another structure."""
    for batch in samples:
        if isinstance(batch, Mapping):
            named = {str(name): _as_array(value) for name, value in batch.items()}
            arrays = [value for value in named.values() if value is not None]
        else:
            values = batch if isinstance(batch, (tuple, list)) else (batch,)
            arrays = [value for value in map(_as_array, values) if value is not None]
            named = {}
        if len(arrays) != (len(batch) if isinstance(batch, (Mapping, tuple, list)) else 1):
            return
        yield dict(zip(named, arrays, strict=True)) if named else tuple(arrays)


def _as_array(value: Any) -> np.ndarray | None:
    """Returns the array of a tensor or array; None for other values."""
    if isinstance(value, np.ndarray):
        return value
    return np.asarray(value.numpy()) if isinstance(value, Tensor) else None


def _refuse_state(original: Original, problem: str) -> GraphError:
    return GraphError(
        f"a call of {original.name} changes the results of the next ones, as it keeps a state in eval mode, "
        f"which a graph lacks: in another call {problem}. Use a local variable for a value that only one "
        "call needs; else return it as an output, or take it as an input."
    )


def _are_random(original: Original) -> list[tuple[Batch, Outputs]]:
    _LOG.info("%s draws random numbers, and is not compared with its graph", original.name)
    return []


def _is_rounding(original: Original, batch: Batch, expected: Outputs, outputs: Outputs) -> bool:
    """Whether a change in the last bits of the inputs changes the outputs about as much."""
    noise = 0.0
    for seed in range(3):
        nudged = _nudged(batch, seed, original.precision)
        noise = max(noise, _largest(expected, original.start()(nudged)))
    return _largest(expected, outputs) <= _SENSITIVE * noise


def _first_samples(batch: Batch, traced: TracedModule, count: int) -> list[Batch]:
    """Returns the first samples of a batch, each as a batch; the batch if the graph takes no single one."""
    if batch_length(batch) < 2 or cut_call(as_arguments(batch, traced), 1, traced) is None:
        return [batch]
    return [cut_batch(batch, index, index + 1) for index in range(count)]


def _nudged(batch: Batch, seed: int, precision: float) -> Batch:
    """Returns a batch whose floats differ in their last bits, and in the bits of the largest one."""
    random = np.random.default_rng(seed)

    def nudge(value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f":
            return value
        signs = 2 * random.integers(0, 2, value.shape) - 1
        # A black image has no last bits: what a norm makes of its roundings shows with those of 1.
        size = np.abs(value) + (np.abs(value).max(initial=0.0) or 1.0)
        return (value + 2 * precision * signs * size).astype(value.dtype)

    if isinstance(batch, dict):
        return {key: nudge(value) for key, value in batch.items()}
    return tuple(map(nudge, batch))


def _largest(expected: Outputs, outputs: Outputs) -> float:
    if [e.shape for e in expected] != [o.shape for o in outputs]:
        return np.inf
    return max((_distance(e, o) for e, o in zip(expected, outputs, strict=True)), default=0.0)


def _distance(expected: np.ndarray, output: np.ndarray, granularity: float = 0.0) -> float:
    """Returns the largest difference relative to the largest value, and for integers the share that differs.

    Values that are infinite or NaN in the network itself do not count, nor what is below the granularity.
    """
    if not expected.size:
        return 0.0
    if expected.dtype.kind in "iub":
        return float(np.mean(expected != output))
    finite = np.isfinite(expected)
    first, second = expected[finite].astype(np.float64), output[finite].astype(np.float64)
    largest = max(float(np.abs(first).max(initial=0)), _LEAST_RANGE)
    difference = max(float(np.abs(first - second).max(initial=0)) - granularity, 0.0) / largest
    return difference if np.isfinite(difference) else np.inf


def _find_picked(model: TracedModule) -> tuple[bool, ...]:
    """Returns for each output of a flat graph whether it depends on the places that a selection finds.

    The scores that a top-k or a sort gives are the same in any order of equal ones.
    """
    selecting = set(find_selecting(model))
    picked: set[Node] = set()
    for expr in exprs(model):
        if not picked.isdisjoint(tensor_inputs(expr)):
            picked.update(expr.outputs)
        elif expr in selecting:
            call = read_ranking(expr)
            picked.update(expr.outputs[-1:] if call is not None and call.kind in SORTS else expr.outputs)
    return tuple(node in picked for node in model.graph.outputs)


def _has_copies(traced: TracedModule) -> bool:
    """Whether the trace copies a view that kernels of MegEngine's misread in the module itself."""
    pads = (e for e in exprs(traced) if isinstance(e, CallFunction) and e.func is F.nn.pad)
    return any(expr.outputs[0].name.endswith("_copy") for expr in pads)
