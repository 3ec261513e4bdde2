"""The graph and its float twin, where their values are compared, and what of it moves or is frozen."""

from __future__ import annotations

import abc
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.module import Module

from qtrace.data.batches import translate_errors
from qtrace.errors import ConfigError, TrainingError
from qtrace.extras.finetune.data import Batch, FinetuneSettings, unpack
from qtrace.extras.finetune.evaluation import Compared, Values
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import Expr, GetAttr, ModuleNode, Node, TracedModule
from qtrace.graph.walk import exprs, get_module, is_float_tensor, owner, tensor_inputs, users
from qtrace.learning import LearningEngine, LearningStep, MegEngineEngine
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.ptq.rounding.block_run import bottlenecks


def block_outputs(
    prepared: QuantizedModel, patterns: Sequence[str] | None, max_blocks: int, known: Set[str]
) -> tuple[str, ...]:
    """Returns the names of the block outputs, in graph order.

    Without patterns the structure decides. Block outputs are then the bottleneck tensors: ends of residual
    blocks and stages, and layers of a chain. Sums of two branches, as in the neck of a detector, are among
    them. The float graph must have them, too. The backend may have written an activation in pieces. More than
    ``max_blocks`` of them are thinned out evenly.

    Args:
        prepared: a prepared graph.
        patterns: names or glob patterns of nodes; None to choose by structure.
        max_blocks: the most nodes to choose by structure.
        known: the names of the nodes of the float graph.

    Raises:
        ConfigError: when a name or pattern matches no float node.
        TrainingError: when the float graph lacks the nodes.
    """
    model = prepared.module
    computed = [e for e in exprs(model) if not isinstance(e, GetAttr)]
    computed = [e for e in computed if not isinstance(owner(e), (FakeQuant, BiasQuant, DynamicQuant))]
    nodes = [n.name for e in computed for n in e.outputs if is_float_tensor(n)]
    if patterns is not None:
        matched: set[str] = set()
        for pattern in patterns:
            names = fnmatch.filter(nodes, pattern)
            if not names:
                raise ConfigError(
                    f"finetune: no float node of the graph fits blocks: {pattern!r}; see `qtrace explain`."
                )
            matched.update(names)
        names = [name for name in nodes if name in matched]
        _refuse_unknown([name for name in names if name not in known])
        return tuple(names)
    outputs = {n.name for n in model.graph.outputs}
    outputs.update(
        n.name for end in model.graph.outputs for n in tensor_inputs(end.expr) if _rounds(end.expr)
    )
    chosen = {n.name for n in bottlenecks(model)} | _sums(prepared)
    names = [name for name in nodes if name in chosen and name not in outputs]
    if names and known.isdisjoint(names):
        _refuse_unknown(names)
    names = [name for name in names if name in known]
    if len(names) <= max_blocks:
        return tuple(names)
    last = len(names) - 1
    return tuple(names[round(last * i / max(max_blocks - 1, 1))] for i in range(max_blocks))


def _refuse_unknown(names: Sequence[str]) -> None:
    if names:
        raise TrainingError(
            f"the teacher lacks node {names[0]}: give the float network that was prepared, not another."
        )


def _rounds(expr: Expr) -> bool:
    return isinstance(owner(expr), FakeQuant)


def _sums(prepared: QuantizedModel) -> set[str]:
    """Returns the rounded nodes that hold a sum of two tensors, or the activation of such a sum."""
    kinds = {gives: note.kind for note in prepared.annotation.notes for gives in note.gives}
    sums = set()
    for expr in exprs(prepared.module):
        for node in expr.outputs:
            consumers = list(users(node))
            if not consumers or not all(_rounds(consumer) for consumer in consumers):
                continue
            inputs = tensor_inputs(expr)
            sources = [node.name, *(n.name for n in inputs if len(inputs) == 1)]
            if any(kinds.get(name) == "add" for name in sources):
                sums.add(node.name)
    return sums


_SMALLEST = 0.01  # the size of a parameter whose values are all 0


class Units:
    """The units of the parameters of a prepared graph.

    Biases, norms and weights that stay in float lack a quantization step. They move by the same share of
    their size as the median quantized weight of the network.

    Args:
        model: the prepared, calibrated graph.
    """

    def __init__(self, model: QuantizedModel) -> None:
        fakes = list(model.fake_quants.values())
        self._ranges = {
            id(parameter): range_unit(fake, parameter)
            for fake in fakes
            for parameter in fake.parameters(recursive=False)
        }
        self._weights = _weight_scales(model)
        shares = [_relative_step(*pair) for pair in self._weights.values()]
        self._share = float(np.median(shares)) if shares else _SMALLEST

    def of(self, parameter: Parameter) -> np.ndarray:
        """Returns the unit of a parameter, float32, broadcastable to its value."""
        if id(parameter) in self._ranges:
            return self._ranges[id(parameter)]
        if id(parameter) in self._weights:
            return self._weights[id(parameter)][1]
        return size_of(parameter.numpy()) * np.float32(self._share)


def range_unit(fake: FakeQuant, parameter: Parameter) -> np.ndarray:
    """Returns the change of a range's parameter that moves the end of the range by one quantization step.

    The logarithm of a power of two has unit 1, since smaller changes mostly leave the scale as it is.

    Args:
        fake: the fake quant that learns the range.
        parameter: a parameter of ``fake``.
    """
    value = parameter.numpy()
    if fake.scheme.power_of_two:
        return np.ones_like(value)
    scale = np.broadcast_to(fake.effective_scale().numpy(), value.shape)
    steps = np.broadcast_to(_steps_to_end(fake), value.shape)
    if parameter is fake.scale:
        return (scale / steps).astype(np.float32)
    return np.maximum(np.abs(value) / steps, scale).astype(np.float32)


def _steps_to_end(fake: FakeQuant) -> np.ndarray:
    """Returns the quantization steps between 0 and the end of the range that is farther from 0."""
    zero_point = fake.effective_zero_point().numpy()
    return np.maximum(fake.scheme.qmax - zero_point, zero_point - fake.scheme.qmin)


def _weight_scales(model: QuantizedModel) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Maps the id of each quantized weight to its value and scale; the smallest scale of a shared weight."""
    weights: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for site in model.sites:
        expr = site.node.expr
        if site.sort != "weight" or not isinstance(expr, GetAttr):
            continue
        parameter = get_module(model.module, expr.name)
        if not isinstance(parameter, Parameter):
            continue
        scale, _ = site.fake_quant.grid_of(parameter.numpy().shape)
        if id(parameter) in weights:
            scale = np.minimum(scale, weights[id(parameter)][1])
        weights[id(parameter)] = parameter.numpy(), scale.astype(np.float32)
    return weights


def _relative_step(value: np.ndarray, scale: np.ndarray) -> float:
    """Returns the step of a weight relative to its root mean square, as the median over its channels."""
    return float(np.median(scale / size_of(value)))


def size_of(value: np.ndarray) -> np.ndarray:
    """Returns the root mean square of a parameter, of a weight by output channel.

    Args:
        value: a weight, output channels first (linear, convolution; with groups: after the groups), or a
            bias or the parameter of a norm; not empty.

    Returns:
        An array that broadcasts to ``value``; a channel that is next to 0 counts as a hundredth of the whole.
    """
    whole = float(np.sqrt(np.mean(np.square(value, dtype=np.float64))))
    axes = tuple(range(1 if value.ndim < 5 else 2, value.ndim))
    if not axes:
        return np.full(value.shape, whole or _SMALLEST, np.float32)
    each = np.sqrt(np.mean(np.square(value, dtype=np.float64), axis=axes, keepdims=True))
    return np.maximum(each, 0.01 * whole if whole else _SMALLEST).astype(np.float32)


PARTS = ("outputs", "classes", "blocks")
"""The terms of the loss: error of outputs, divergence of class probabilities, error of block outputs."""


@dataclass(frozen=True)
class Arithmetic:
    """The functions of the loss in one library.

    Attributes:
        tensor: makes a tensor of an array.
        error: the mean squared error of a tensor and its reference.
        log_softmax: the logarithms of class probabilities, from logits and the axis of classes.
        exp: the exponential.
    """

    tensor: Callable[[np.ndarray], Any]
    error: Callable[[Any, Any], Any]
    log_softmax: Callable[[Any, int], Any]
    exp: Callable[[Any], Any]

    def weighted_error(self, value: Any, reference: Any, weights: np.ndarray) -> Any:
        """Computes the mean of the squared errors times ``weights``."""
        return ((value - reference.detach()) ** 2 * self.tensor(weights)).mean()

    def divergence(self, logits: Any, reference: Any, temperature: float) -> Any:
        """Kullback-Leibler divergence of softened classes, times T**2 (Hinton et al. 2015, section 2.1)."""
        log_q, log_p = (self.log_softmax(v / temperature, 1) for v in (logits, reference.detach()))
        return (self.exp(log_p) * (log_p - log_q)).sum(1).mean() * temperature**2


class Twins(abc.ABC):
    """Abstract base: the quantized graph and its float twin in one engine.

    Args:
        student: the prepared graph, in the phase ``train``.
        teacher: a copy of it with the float weights, in the phase ``float`` and in eval mode.
        form: the arguments of a call, with the index of a leaf in place of each array.
        engine: computes the gradients.
        arithmetic: the functions of the loss.
    """

    def __init__(
        self,
        student: TracedModule,
        teacher: TracedModule,
        form: Any,
        engine: LearningEngine,
        arithmetic: Arithmetic,
    ) -> None:
        self.student, self.teacher, self.form = student, teacher, form
        self.engine, self._arithmetic = engine, arithmetic

    @abc.abstractmethod
    def call(self, student: bool, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Returns the outputs of one graph and its block outputs, as tensors of the engine.

        Args:
            student: whether to run the quantized graph; else the float graph.
            args: positional arguments of forward, with Tensors of MegEngine.
            kwargs: keyword arguments of forward.
        """

    def _run(self, student: bool, batch: Batch) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = arguments = unpack(self.form, list(batch.tensors().leaves))
        with translate_errors(self.student if student else self.teacher, arguments, batch.number):
            return self.call(student, args, kwargs)

    def run_teacher(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the float graph."""
        return _arrays(*self._run(False, batch))

    def run_student(self, batch: Batch) -> Values:
        """Returns the outputs and block outputs of the quantized graph, in its current phase."""
        return _arrays(*self._run(True, batch))

    def losses(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> list[Any]:
        """Computes the loss of a batch and its parts, each a scalar, in the order of `PARTS`."""
        maths = self._arithmetic
        references, reference_blocks = self._run(False, batch)
        values, value_blocks = self._run(True, batch)
        errors = [
            maths.weighted_error(values[i], references[i], compared.weights[i])
            if i in compared.weights
            else maths.error(values[i], references[i]) / power
            for i, power in compared.outputs.items()
        ]
        divergences = [
            maths.divergence(values[i], references[i], settings.temperature) for i in compared.classes
        ]
        blocks = [
            maths.error(value_blocks[n], reference_blocks[n]) / power for n, power in compared.blocks.items()
        ]
        zero = maths.tensor(np.zeros((), np.float32))
        parts = [sum(part, zero) / max(len(part), 1) for part in (errors, divergences, blocks)]
        total = parts[0] + settings.kl_weight * parts[1] + settings.block_weight * parts[2]
        return [total, *parts]

    def loss(self, batch: Batch, compared: Compared, settings: FinetuneSettings) -> float:
        """Computes the loss of a batch."""
        return float(self.losses(batch, compared, settings)[0].item())

    def gradients(
        self,
        batch: Batch,
        compared: Compared,
        settings: FinetuneSettings,
        parameters: Sequence[Parameter],
        values: Mapping[int, np.ndarray],
    ) -> list[np.ndarray | None]:
        """Computes the loss, its parts and the gradients; see `LearningEngine.gradients`.

        Args:
            batch: the samples.
            compared: the outputs and blocks that the loss compares.
            settings: the weights of the loss.
            parameters: the parameters, with the values of the moment.
            values: id of a parameter -> its value, where the module's is older.
        """

        def losses(*inputs: Any) -> list[Any]:
            return self.losses(Batch(batch.number, inputs), compared, settings)

        return self.engine.gradients(LearningStep(losses, parameters, batch.leaves, values))


class _NodeRecorder(Interpreter):
    """Runs a graph and records the values of the named nodes."""

    def __init__(self, traced: TracedModule, names: Sequence[str]) -> None:
        super().__init__(traced)
        self.names, self.values = frozenset(names), dict[str, Any]()

    def on_node(self, node: Node, value: Any) -> Any:
        if node.name in self.names:
            self.values[node.name] = value
        return value


class MegEngineTwins(Twins):
    """Both graphs in MegEngine.

    Args:
        student, teacher, form: as for `Twins`.
        blocks: names of the nodes whose values are compared.
        jit: whether steps run under ``jit.trace``.
    """

    def __init__(
        self, student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str], jit: bool
    ) -> None:
        arithmetic = Arithmetic(Tensor, _error, F.logsoftmax, F.exp)
        super().__init__(student, teacher, form, MegEngineEngine(jit), arithmetic)
        self._graphs = [_NodeRecorder(graph, blocks) for graph in (teacher, student)]

    def call(self, student: bool, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Runs one graph; see `Twins`."""
        graph = self._graphs[student]
        graph.values = {}
        return graph.run_flat(*args, **kwargs), graph.values


def _error(value: Tensor, reference: Tensor) -> Tensor:
    return ((value - reference.detach()) ** 2).mean()


def _arrays(outputs: Sequence[Any], blocks: dict[str, Any]) -> Values:
    return [value.numpy() for value in outputs], {name: value.numpy() for name, value in blocks.items()}


@dataclass(frozen=True)
class Frozen:
    """A range or the statistics of a BatchNorm that were frozen.

    Attributes:
        name: the site of a range, or the path of a BatchNorm.
        sort: ``range`` or ``statistics``.
        step: number of steps before it was frozen.
        drift: the change of its average in the last steps, per step, as a share of its unit.
    """

    name: str
    sort: str
    step: int
    drift: float


@dataclass
class MovingTensors:
    """The parameters of a range, or the statistics of a BatchNorm.

    Attributes:
        name: the site of a range, or the path of a BatchNorm.
        sort: ``range`` or ``statistics``.
        tensors: the parameters or statistics.
        units: for each tensor, the size of a change of 1; of the tensor's shape.
        limit: the change in a step, in ``units``, below which the tensors are frozen; 0 for never.
        norm: the BatchNorm of statistics; None for a range.
        average: the moving average of each tensor.
        before: the averages at the last check; empty before the first.
        frozen: when and how the tensors were frozen; None while they move.
    """

    name: str
    sort: str
    tensors: list[Tensor]
    units: list[np.ndarray]
    limit: float
    norm: Module | None = None
    average: list[np.ndarray] = field(default_factory=list)
    before: list[np.ndarray] = field(default_factory=list)
    frozen: Frozen | None = None

    def __post_init__(self) -> None:
        self.average = [t.numpy().copy() for t in self.tensors]

    def move(self, decay: float) -> None:
        """Adds the current values to the average, which keeps the share ``decay`` of itself."""
        if self.frozen is None:
            share = np.float32(1.0 - decay)
            self.average = [
                a + share * (t.numpy() - a) for a, t in zip(self.average, self.tensors, strict=True)
            ]

    def check(self, step: int, steps: int) -> bool:
        """Freezes the tensors if their average moved little in the last ``steps`` steps; returns whether."""
        if self.frozen is not None or not self.limit:
            return False
        before, self.before = self.before, [a.copy() for a in self.average]
        if not before:
            return False
        changes = zip(self.average, before, self.units, strict=True)
        drift = max(float(np.mean(np.abs(a - b) / unit)) for a, b, unit in changes) / steps
        if drift >= self.limit:
            return False
        self.frozen = Frozen(self.name, self.sort, step, drift)
        self.settle()
        return True

    def settle(self) -> None:
        """Gives the tensors their averages, and ends the training of the BatchNorm."""
        for tensor, average in zip(self.tensors, self.average, strict=True):
            tensor._reset(type(tensor)(average))
        if self.norm is not None:
            self.norm.training = False


class Watch:
    """Averages and freezes all ranges that learn and all BatchNorms that train.

    Args:
        model: the prepared graph.
        settings: the decay of the averages, and the changes below which tensors are frozen.
    """

    def __init__(self, model: TracedModule, settings: FinetuneSettings) -> None:
        self.settings = settings
        self.all = [*_ranges(model, settings.freeze_below), *_norms(model, settings.freeze_bn_below)]
        self.every = max(settings.steps // 20, 1)
        # The averages lag the values: before that they hardly move in any case.
        lag = math.ceil(1.0 / (1.0 - settings.range_average))
        self.begin = math.ceil(settings.warmup * settings.steps) + lag

    def start(self) -> None:
        """Lets the BatchNorms that are not frozen use the statistics of batches."""
        for watched in self.all:
            if watched.norm is not None:
                watched.norm.training = watched.frozen is None

    def update(self, step: int) -> list[Frozen]:
        """Updates the averages after the ``step``-th step; returns what this freezes."""
        for watched in self.all:
            watched.move(self.settings.range_average)
        if step < self.begin or step % self.every:
            return []
        return [w.frozen for w in self.all if w.check(step, self.every) and w.frozen is not None]

    def stop(self) -> None:
        """Lets all BatchNorms use their own statistics and not change them."""
        for watched in self.all:
            if watched.norm is not None:
                watched.norm.training = False

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Gives moving tensors their averages within the block, as the end of the run would."""
        moving = [w for w in self.all if w.frozen is None]
        before = [[t.numpy().copy() for t in w.tensors] for w in moving]
        for watched in moving:
            watched.settle()
        try:
            yield
        finally:
            for watched, values in zip(moving, before, strict=True):
                for tensor, value in zip(watched.tensors, values, strict=True):
                    tensor._reset(type(tensor)(value))
            self.start()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores the statistics of BatchNorms after the block."""
        before = [(t, t.numpy().copy()) for w in self.all if w.norm is not None for t in w.tensors]
        try:
            yield
        finally:
            for tensor, value in before:
                tensor._reset(Tensor(value))

    def rewind(self, step: int) -> bool:
        """Restarts the averages from the values after ``step``; tensors that were frozen later move again.

        Returns:
            Whether a BatchNorm's statistics move again.
        """
        thawed = [w for w in self.all if w.frozen is not None and w.frozen.step > step]
        for watched in thawed:
            watched.frozen = None
        for watched in self.all:
            if watched.frozen is None:
                watched.average, watched.before = [t.numpy().copy() for t in watched.tensors], []
        self.start()
        return any(watched.norm is not None for watched in thawed)

    @property
    def fixed(self) -> set[int]:
        """The ids of the tensors that are frozen."""
        return {id(t) for w in self.all if w.frozen is not None for t in w.tensors}

    @property
    def frozen(self) -> list[Frozen]:
        """The frozen ranges and statistics, the earliest first."""
        return sorted((w.frozen for w in self.all if w.frozen is not None), key=lambda f: f.step)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the averages and the frozen steps and drifts as arrays."""
        state: dict[str, np.ndarray] = {}
        for index, watched in enumerate(self.all):
            for kind in ("average", "before"):
                arrays: Sequence[np.ndarray] = getattr(watched, kind)
                state.update({f"{index}/{kind}/{i}": a for i, a in enumerate(arrays)})
            if watched.frozen is not None:
                state[f"{index}/frozen"] = np.array([watched.frozen.step, watched.frozen.drift])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        for index, watched in enumerate(self.all):
            for kind in ("average", "before"):
                keys = [f"{index}/{kind}/{i}" for i in range(len(watched.tensors))]
                setattr(watched, kind, [np.array(state[key]) for key in keys if key in state])
            if f"{index}/frozen" in state:
                step, drift = state[f"{index}/frozen"]
                watched.frozen = Frozen(watched.name, watched.sort, int(step), float(drift))


def _ranges(model: TracedModule, limit: float) -> list[MovingTensors]:
    ranges = []
    for fake in fake_quants(model):
        parameters = list(fake.parameters(recursive=False))
        if parameters:
            units = [range_unit(fake, p) for p in parameters]
            ranges.append(MovingTensors(fake.site, "range", parameters, units, limit))
    return ranges


def _norms(model: TracedModule, limit: float) -> list[MovingTensors]:
    """The statistics of BatchNorms that were kept for training; layers in float never move theirs."""
    from megengine.module.batchnorm import _BatchNorm

    folds = [expr for expr in exprs(model) if isinstance(owner(expr), BnFold)]
    called = {node.owner for expr in folds for node in expr.inputs if isinstance(node, ModuleNode)}
    statistics = []
    for name, norm in model.named_modules():
        if isinstance(norm, _BatchNorm) and norm in called and norm.track_running_stats:
            variance = np.maximum(norm.running_var.numpy(), np.float32(norm.eps))
            tensors = [norm.running_mean, norm.running_var]
            units = [np.sqrt(variance), variance]
            statistics.append(MovingTensors(name, "statistics", tensors, units, limit, norm))
    return statistics
