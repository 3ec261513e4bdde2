"""The first difference between two runs or two traces of a module, or between a batch and its samples.

The outputs decide. An op may join the samples in another axis if a later op takes them apart again. Where an
output differs, the cause is the first op that reads values that agree and gives values that do not. Its
inputs are bit-identical on both sides. After each op whose values agree, the samples continue with the values
of the batch. So no rounding error accumulates and no index computed from values flips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from megengine import Tensor
from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, Expr, GetAttr, Input
from megengine.traced_module.node import Node, TensorNode
from megengine.traced_module.pytree import tree_flatten
from megengine.traced_module.traced_module import InternalGraph

from qtrace.display import Displayed
from qtrace.errors import GraphError
from qtrace.gradients import plain
from qtrace.graph.failures import describe_failure, short
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import ENGINE_ERRORS, Interpreter, interpret, last_uses, static_nodes
from qtrace.graph.kernels import quiet_engine
from qtrace.graph.notes import source_line
from qtrace.graph.tracing.example_inputs import to_tensors
from qtrace.graph.walk import check_traced, module_path, op_label
from qtrace.process import on_engine_thread

# Finds the first difference between two runs or two traces of one module.

_RTOL = 1e-5  # of the largest value of the output; both sides run the same kernels


def values(result: Any) -> list[Any]:
    """Returns the leaves of a forward's result, tensors as arrays, after every op has run."""
    leaves = tree_flatten(result, is_leaf=lambda _: True)[0]
    return [_plain_leaf(leaf) for leaf in leaves]


def _plain_leaf(leaf: Any) -> Any:
    """Returns a tensor as an array, and an array, which is no tensor of the result, as a list."""
    if isinstance(leaf, Tensor):
        return leaf.numpy()
    return leaf.tolist() if isinstance(leaf, np.ndarray) else leaf


def output_mismatch(left: list[Any], right: list[Any]) -> str | None:
    """Describes how ``right`` differs from ``left``, both from ``values``; None if equal. NaN equals NaN.

    ``right`` may lack what is no array: a trace returns only tensors.
    """
    if len(left) != len(right):
        left = [value for value in left if isinstance(value, np.ndarray)]
    if len(left) != len(right):
        return f"it returns {len(right)} values instead of {len(left)}"
    for index, (x, y) in enumerate(zip(left, right, strict=True)):
        if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
            continue
        if x.shape != y.shape:
            return f"output {index} has shape {y.shape} instead of {x.shape}"
        if x.dtype != y.dtype:
            return f"output {index} is {y.dtype} instead of {x.dtype}"
        error = _error(x, y)
        if error is not None:
            return f"output {index} is off by up to {error:.3g}"
    return None


def _error(x: np.ndarray, y: np.ndarray) -> float | None:
    if np.array_equal(x, y):  # nearly always
        return None
    if x.dtype.kind != "f":
        return float(np.max(np.abs(x.astype(np.float64) - y.astype(np.float64))))
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return float("inf")
    if not finite.any():
        return None
    x, y = x[finite].astype(np.float64), y[finite].astype(np.float64)
    error = float(np.max(np.abs(x - y)))
    return error if error > _RTOL * float(np.max(np.abs(x))) else None


@dataclass(frozen=True)
class TraceDifference:
    """The first expr of a trace that differs from another trace of the same module, with the reason."""

    expr: Expr
    reason: str

    def __str__(self) -> str:
        return f"first at {describe(self.expr)}: {self.reason}"


def describe(expr: Expr) -> str:
    """Describes an expr by its printed form, its op, the module whose forward calls it and its line."""
    printed = " ".join(repr(expr).split())
    if len(printed) > 140:
        printed = printed[:137] + "..."
    path = module_path(expr)
    line = source_line(expr)
    place = (repr(path) if path else "the top module") + (f", {line}" if line else "")
    return f"`{printed}` ({op_label(expr)} in {place})"


def first_difference(old: TracedModule, new: TracedModule) -> TraceDifference | None:
    """Finds the first expr of ``old``, in execution order, that differs from ``new``; None if equal."""
    return _GraphComparison().graphs(old.graph, new.graph)


class _GraphComparison:
    """Walks two graphs side by side and pairs their nodes."""

    def __init__(self) -> None:
        self.pair: dict[Node, Node] = {}
        self.compared: set[tuple[Any, Any]] = set()

    def graphs(self, old: InternalGraph, new: InternalGraph) -> TraceDifference | None:
        if (old, new) in self.compared:
            return None
        self.compared.add((old, new))
        self.bind(old._inputs, new._inputs)
        for a, b in zip_longest(old._exprs, new._exprs):
            if a is None or b is None:
                if a is None:
                    return TraceDifference(_last(old), f"the module goes on with {op_label(b)} there")
                return TraceDifference(a, "the module does not run it there")
            reason = self.reason(a, b)
            if reason:
                return TraceDifference(a, reason)
            inner = (getattr(a, "graph", None), getattr(b, "graph", None))
            if inner[0] is not None and inner[1] is not None:
                deeper = self.graphs(*inner)
                if deeper:
                    return deeper
            self.bind(a.outputs, b.outputs)
        if len(old._outputs) != len(new._outputs):
            return TraceDifference(_last(old), "the module returns another number of values there")
        for x, y in zip(old._outputs, new._outputs, strict=True):
            if self.pair.get(x) is not y:
                return TraceDifference(x.expr, f"the module returns {op_label(y.expr)}'s output there")
        return None

    def bind(self, old: list[Node], new: list[Node]) -> None:
        self.pair.update((x, y) for x, y in zip(old, new, strict=False))

    def reason(self, a: Expr, b: Expr) -> str | None:
        """Returns the reason why ``b`` is not the same step as ``a``; None if it is."""
        if type(a) is not type(b) or _target(a) != _target(b):
            return f"the module runs {op_label(b)} there"
        if isinstance(a, Constant) and isinstance(a.value, Tensor):
            if not _same_value(a.value.numpy(), b.value.numpy()):
                return "it is a constant, but the module computes it from its input"
            return None
        if isinstance(a, Apply) and not _same_value(a.opdef.__getstate__(), b.opdef.__getstate__()):
            return "its settings were computed from the input"
        constants, others = a.const_val or [], b.const_val or []
        for (i, x), (j, y) in zip(constants, others, strict=False):
            if i == j and not _same_value(x, y):
                return f"it holds {_short(x)} where the module has {_short(y)}"
        if len(constants) != len(others) or len(a.inputs) != len(b.inputs):
            return "the module gives it other arguments there"
        if any(self.pair.get(x) is not y for x, y in zip(a.inputs, b.inputs, strict=True)):
            return "the module gives it other values to read there"
        return None


def _last(graph: InternalGraph) -> Expr:
    return graph._exprs[-1] if graph._exprs else graph._outputs[0].expr


def _target(expr: Expr) -> Any:
    if isinstance(expr, GetAttr):
        return expr.name
    if isinstance(expr, CallMethod):
        return expr.method
    if isinstance(expr, CallFunction):
        return plain(expr.func)
    if isinstance(expr, Apply):
        return type(expr.opdef)
    return type(expr.value) if isinstance(expr, Constant) and isinstance(expr.value, Module) else None


def _same_value(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        x, y = np.asarray(x), np.asarray(y)
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
    try:
        return bool(x == y or repr(x) == repr(y))  # repr settles NaN
    except (TypeError, ValueError, RuntimeError):
        return repr(x) == repr(y)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."


def random_exprs(traced: TracedModule) -> list[Expr]:
    """Returns the exprs that draw random numbers."""
    random = []
    for expr in traced.graph.exprs():
        name = type(expr.opdef).__name__ if isinstance(expr, Apply) else ""
        if isinstance(expr, CallFunction):
            name = expr.func.__name__ if expr.func.__name__ == "dropout" else ""
        if name.endswith("RNG") or name in ("Dropout", "dropout"):
            random.append(expr)
    return random


# Compares a graph on a batch with the same graph on each sample of the batch, op by op.

# Of the largest value of a tensor: another engine computes it, or kernels sum in another order. The latter is
# 1/40 of a step of 8 bits.
NETWORK_RTOL, SAMPLE_RTOL = 1e-3, 1e-4

Kind = Literal["view", "random", "fails", "shape", "samples"]


@dataclass(frozen=True)
class SampleDifference:
    """The first op whose result for a batch is not made of its results for the samples.

    Attributes:
        node: the name of the op's first result in the flat graph.
        op: the op, such as ``F.softmax``.
        line: file and line of the model that made it; "" if unknown.
        kind: ``view``: MegEngine's kernel misreads a view, and is right for a copy of it; ``random``: the op
            draws random numbers. ``fails``: it does not run on one sample; ``shape``: the shapes do not fit;
            ``samples``: it combines samples, or its kernel is wrong for batches.
        problem: the difference as the end of a sentence that begins with the op.
    """

    node: str
    op: str
    line: str
    kind: Kind
    problem: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op}{f', {self.line}' if self.line else ''}) {self.problem}"


@dataclass(frozen=True, repr=False)
class SamplesReport(Displayed):
    """Whether a graph computes each sample of a batch as it computes the sample by itself.

    Attributes:
        samples: the number of samples of the batch.
        outputs: the names of the outputs that differ.
        difference: the first op that causes it; None if no output differs.
    """

    samples: int
    outputs: tuple[str, ...]
    difference: SampleDifference | None

    def _text(self, max_width: int | None) -> str:
        return str(self)

    @property
    def passed(self) -> bool:
        """Whether every output agrees."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"A batch of {self.samples} gives what its samples give one by one."
        return (
            f"A batch of {self.samples} differs from its samples one by one in {', '.join(self.outputs)}: "
            f"first, {self.difference}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        difference = self.difference
        return {
            "passed": self.passed,
            "samples": self.samples,
            "outputs": list(self.outputs),
            "difference": None if difference is None else dict(vars(difference)),
        }


@on_engine_thread
def check_samples(traced: TracedModule, *inputs: Any, **kwargs: Any) -> SamplesReport:
    """Compares ``traced`` on a batch with ``traced`` on each of its samples, and names the first op at fault.

    An output agrees if it is the same for all samples, or can be cut along one axis into the outputs of the
    samples, within 1e-4 of its largest value. Costs two forwards of the batch.

    Args:
        traced: a traced module; it is not changed. *inputs: the inputs of its forward, Tensors or arrays. The
            first axis of the first one counts the samples, N >= 2. Every tensor whose first axis has this
            size is cut into N. The others are given to each sample whole.
        **kwargs: keyword inputs of its forward.

    Returns:
        The report; its ``str`` is a sentence.

    Raises:
        GraphError: when there are fewer than two samples, when ``traced`` does not take the inputs, or when
            an op fails on the batch.
    """
    check_traced(traced, "check_samples takes")
    flat = flatten(traced)
    values = list(to_tensors(inputs)), dict(zip(kwargs, to_tensors(tuple(kwargs.values())), strict=True))
    tensors = Interpreter(flat).bind(tuple(values[0]), values[1])[1]
    batched = [t for t in tensors if isinstance(t, Tensor) and t.ndim]
    count = int(batched[0].shape[0]) if batched else 0
    if count < 2:
        raise GraphError(
            f"check_samples compares a batch with its samples, but the first input has {count} "
            f"sample{'' if count == 1 else 's'}: give at least two along the first axis."
        )
    with quiet_engine(flat):
        return _Comparison(flat, tensors, count).run()


class _Comparison:
    """One run of a flat graph on a batch and on its samples."""

    def __init__(self, flat: TracedModule, inputs: Sequence[Any], count: int) -> None:
        self.graph, self.count = flat.graph, count
        self.random = set(random_exprs(flat))
        # Sizes differ by nature between a batch and a sample; what is computed from them is compared.
        self.sizes = {n for n in static_nodes(flat) if n.dtype is not None and np.dtype(n.dtype).kind != "f"}
        self.batch: dict[Node, Any] = dict(zip(self.graph._inputs, inputs, strict=True))
        self.samples: list[dict[Node, Any]] = [
            {n: _cut_input(v, i, count) for n, v in self.batch.items()} for i in range(count)
        ]
        self.differs: set[Node] = set()
        self.problems: dict[Expr, tuple[Kind, str]] = {}

    def run(self) -> SamplesReport:
        frees = last_uses(self.graph)
        for expr in self.graph._exprs:
            self._step(expr)
            for node in frees[expr]:
                for values in (self.batch, *self.samples):
                    values.pop(node, None)
        outputs = [n for n in dict.fromkeys(self.graph._outputs) if n in self.differs]
        return SamplesReport(self.count, tuple(str(n._name) for n in outputs), self._first_cause(outputs))

    def _step(self, expr: Expr) -> None:
        """Runs ``expr`` on both sides; notes a problem if its results differ though its inputs agree."""
        inputs = [self.batch[n] for n in expr.inputs]
        try:
            results = interpret(expr, inputs) or ()
        except ENGINE_ERRORS as error:
            raise GraphError(describe_failure(expr, inputs, error)) from error
        self.batch.update(zip(expr.outputs, results, strict=True))
        singles, problem = self._run_samples(expr)
        for index, node in enumerate(expr.outputs):
            if not isinstance(node, TensorNode):
                for values, outputs in zip(self.samples, singles, strict=True):
                    values[node] = outputs[index]
            elif not singles:
                self.differs.add(node)
            else:
                problem = self._compare(expr, index, [outputs[index] for outputs in singles]) or problem
        if problem is not None:
            self.problems[expr] = problem

    def _run_samples(self, expr: Expr) -> tuple[list[Sequence[Any]], tuple[Kind, str] | None]:
        """Returns the results of ``expr`` for each sample; none, with the reason, if it cannot be run."""
        singles: list[Sequence[Any]] = []
        for index, values in enumerate(self.samples):
            if not all(n in values for n in expr.inputs):
                return [], None
            try:
                singles.append(interpret(expr, [values[n] for n in expr.inputs]) or ())
            except ENGINE_ERRORS as error:
                return [], (
                    "fails",
                    f"fails on sample {index} alone, perhaps by a fixed size ({short(error)})",
                )
        return singles, None

    def _compare(self, expr: Expr, index: int, singles: list[Any]) -> tuple[Kind, str] | None:
        """Compares one result; returns how it differs, and continues with the batch's values if it agrees."""
        node = expr.outputs[index]
        arrays = [_array(single) for single in singles]
        whole = _array(self.batch[node])
        error, pieces = _best_cut(whole, arrays)
        agrees = error is not None and error <= SAMPLE_RTOL
        for values, single, piece in zip(self.samples, singles, pieces, strict=True):
            values[node] = _like(single, piece) if agrees and piece is not None else single
        if agrees or node in self.sizes:
            return None
        self.differs.add(node)
        if any(n in self.differs for n in expr.inputs):
            return None
        return self._explain(expr, index, whole, arrays, error)

    def _explain(
        self, expr: Expr, index: int, whole: np.ndarray, arrays: list[np.ndarray], error: float | None
    ) -> tuple[Kind, str]:
        if expr in self.random:
            return "random", "draws random numbers: leave it out of evaluation"
        if error is None:
            shapes = " and ".join(str(shape) for shape in dict.fromkeys(a.shape for a in arrays))
            return "shape", f"has the shape {whole.shape} for the batch and {shapes} for one sample"
        if self._is_right_for_copies(expr, index, arrays):
            return "view", (
                f"is off by {error:.2g} of its largest value: MegEngine's kernel takes a view such as "
                "x[..., :2] for contiguous memory; trace the model with qtrace.trace, which copies the view, "
                "or put F.nn.pad(x, ((0, 0),) * x.ndim) behind the view"
            )
        return "samples", (
            f"is off by {error:.2g} of its largest value: it combines samples, or its kernel is wrong for "
            "batches"
        )

    def _is_right_for_copies(self, expr: Expr, index: int, arrays: list[np.ndarray]) -> bool:
        """Returns whether the result agrees if every input is contiguous in memory."""
        inputs = [self.batch[n] for n in expr.inputs]
        copies = [_like(v, v.numpy()) if isinstance(v, Tensor) else v for v in inputs]
        error, _ = _best_cut(_array((interpret(expr, copies) or ())[index]), arrays)
        return error is not None and error <= SAMPLE_RTOL

    def _first_cause(self, outputs: Sequence[Node]) -> SampleDifference | None:
        """Walks back from the outputs through values that differ to the first expr that reads none."""
        causes: set[Expr] = set()
        visited: set[Node] = set()
        pending = list(outputs)
        while pending:
            node = pending.pop()
            if node in visited or isinstance(node.expr, Input):
                continue
            visited.add(node)
            earlier = [n for n in node.expr.inputs if n in self.differs]
            pending += earlier
            if not earlier:
                causes.add(node.expr)
        first = next((e for e in self.graph._exprs if e in causes), None)
        if first is None:
            return None
        kind, problem = self.problems[first]
        return SampleDifference(
            str(first.outputs[0]._name), op_label(first), source_line(first), kind, problem
        )


def _cut_input(value: Any, index: int, count: int) -> Any:
    if not isinstance(value, Tensor) or not value.ndim or int(value.shape[0]) != count:
        return value
    return _like(value, _array(value)[index : index + 1])


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.numpy())


def _like(tensor: Tensor, array: np.ndarray) -> Tensor:
    """Returns ``array`` as a contiguous Tensor of the kind of ``tensor``."""
    return Tensor(np.ascontiguousarray(array), dtype=tensor.dtype, device=tensor.device)


def _best_cut(
    whole: np.ndarray, singles: Sequence[np.ndarray]
) -> tuple[float | None, Sequence[np.ndarray | None]]:
    """Cuts the value of a batch so that the pieces are as close to the samples' values as possible.

    Returns:
        The largest difference, as a share of the largest value, and the pieces; None and no pieces if the
        shapes fit no cut.
    """
    best: tuple[float | None, Sequence[np.ndarray | None]] = None, [None] * len(singles)
    for pieces in _cuts(whole, [s.shape for s in singles]):
        error = max(_relative_error(p, s) for p, s in zip(pieces, singles, strict=True))
        if best[0] is None or error < best[0]:
            best = error, pieces
        if error <= SAMPLE_RTOL:
            break
    return best


def _cuts(whole: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Iterator[list[np.ndarray]]:
    """Yields the ways to cut ``whole`` into pieces of ``shapes``: none, or along one axis.

    Along an axis the samples follow each other, or each of several groups has a part of every sample, as if
    (groups, samples, n) became one axis.
    """
    count = len(shapes)
    if all(shape == whole.shape for shape in shapes):
        yield [whole] * count
    if any(len(shape) != whole.ndim for shape in shapes):
        return
    for axis in range(whole.ndim):
        rest = whole.shape[:axis] + whole.shape[axis + 1 :]
        sizes = [shape[axis] for shape in shapes]
        if sum(sizes) != whole.shape[axis] or any(s[:axis] + s[axis + 1 :] != rest for s in shapes):
            continue
        yield np.split(whole, np.cumsum(sizes)[:-1], axis)
        if len(set(sizes)) > 1:
            continue
        for groups in (g for g in range(2, sizes[0] + 1) if sizes[0] % g == 0):
            split = (*whole.shape[:axis], groups, count, sizes[0] // groups, *whole.shape[axis + 1 :])
            parts = np.moveaxis(whole.reshape(split), axis + 1, 0)
            yield [part.reshape(shapes[0]) for part in parts]


def _relative_error(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the largest difference as a share of the largest value; NaN equals NaN, infinity itself."""
    if np.array_equal(x, y):
        return 0.0
    x, y = x.astype(np.float64), y.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return float("inf")
    difference = float(np.max(np.abs(x - y), where=finite, initial=0.0))
    largest = float(np.max(np.abs(y), where=finite, initial=0.0))
    return difference / largest if largest else (float("inf") if difference else 0.0)
