"""Which engine runs a graph: the one that was asked for, or the fastest that applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.calibration.base import Arguments, Engine, EngineError, Observe, Watched
from qtrace.calibration.megengine import MegEngine
from qtrace.calibration.onnxruntime import OnnxRuntime
from qtrace.data.batches import first_samples
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.preparation.model import QuantizedModel

__all__ = ["ENGINES", "Chosen", "choose"]

ENGINES = ("auto", "megengine", "onnxruntime")

# Two engines agree when no value differs by more than this share of the node's largest: 1/40 of a step of 8
# bits. What float32 does to the order of sums stays below a tenth of it.
_TOLERANCE = 1e-4
# Samples of a batch on which they are compared, where it can be divided.
_FEW = 2
# Multiplications and additions below which it takes longer to write the ONNX model than to run MegEngine.
_LITTLE = 10**9
# What an iterable without a length is taken for.
_MANY = 32

Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Chosen:
    """An engine that was chosen.

    Attributes:
        name: of the engine.
        reason: why this one and not the other, as a clause.
        verified: the shapes of inputs at which it was found to agree with MegEngine.
        compared: whether it is compared with MegEngine at other shapes.
    """

    name: str
    reason: str
    verified: tuple[Signature, ...] = ()
    compared: bool = True

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Chosen:
        """The inverse of ``dataclasses.asdict``, also after JSON."""
        verified = tuple(tuple(tuple(shape) for shape in shapes) for shapes in data["verified"])
        return cls(data["name"], data["reason"], verified, data["compared"])


def choose(
    prepared: QuantizedModel,
    watched: Watched,
    wanted: str | Chosen,
    batches: int | None = None,
    threads: int | None = None,
) -> _Explained:
    """An engine for a prepared graph.

    ``auto`` is decided by the graph and the number of batches alone, never by a clock, so that every run of
    the same calibration, in any number of processes, takes the same engine.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        watched: what is observed.
        wanted: one of `ENGINES`; or what was chosen before for the same graph, so that it is not tried again.
        batches: how many batches there will be; None when that is not known.
        threads: how many threads compute, where the engine lets us say; None for all cores.

    Raises:
        ConfigError: for an unknown engine.
        CalibrationError: when the engine that was asked for cannot run the graph.
    """
    own = MegEngine(prepared.module, watched.nodes)
    chosen = wanted if isinstance(wanted, Chosen) else None
    name = wanted.name if isinstance(wanted, Chosen) else wanted
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: choose one of {', '.join(ENGINES)}.")
    if name == "megengine":
        return _Fixed(own, chosen or Chosen(name, "as asked"))
    if name == "auto" and (reason := _not_worth_it(prepared, batches)):
        return _Fixed(own, Chosen("megengine", reason))
    try:
        fast = OnnxRuntime(prepared.module, tuple(watched.nodes), threads)
    except EngineError as error:
        if name == "auto":
            return _Fixed(own, Chosen("megengine", f"onnxruntime does not apply: {error}"))
        raise CalibrationError(
            f"engine onnxruntime does not apply: {error}. Use engine megengine, or auto."
        ) from error
    if chosen is None and name == "onnxruntime":
        chosen = Chosen(name, "as asked; not compared with MegEngine", compared=False)
    if chosen is not None and not chosen.compared:
        return _Fixed(fast, chosen)
    return _Checked(prepared.module, own, fast, chosen, watched.unobserved)


class _Explained(Engine):
    """An engine that tells why it was chosen."""

    @property
    def chosen(self) -> Chosen:
        """What runs, as far as batches have shown."""
        raise NotImplementedError


class _Fixed(_Explained):
    def __init__(self, engine: Engine, chosen: Chosen) -> None:
        self._engine, self._chosen = engine, chosen

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def chosen(self) -> Chosen:
        return self._chosen

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        try:
            self._engine.run(arguments, index, observe)
        except EngineError as error:
            raise CalibrationError(
                f"batch {index}: {error}. Give batches of the shape of the trace, or use engine megengine."
            ) from error


class _Checked(_Explained):
    """Runs the fast engine where it agrees with MegEngine, which runs samples of each new shape, too."""

    def __init__(
        self,
        prepared: TracedModule,
        own: Engine,
        fast: Engine,
        known: Chosen | None,
        unobserved: frozenset[str],
    ) -> None:
        self._prepared, self._own, self._fast = prepared, own, fast
        self._unobserved = unobserved
        self._reasons: dict[Signature, str] = dict.fromkeys(known.verified if known else (), "")
        self._known = known
        self._worst = 0.0

    @property
    def name(self) -> str:
        return self.chosen.name

    @property
    def chosen(self) -> Chosen:
        verified = tuple(shapes for shapes, reason in self._reasons.items() if not reason)
        if self._known is not None:
            return Chosen(self._known.name, self._known.reason, verified)
        if not self._reasons:
            return Chosen(self._fast.name, "no batch has run yet")
        if self._refused:
            return Chosen(self._own.name, f"{self._fast.name} does not apply: {self._refused}")
        reason = f"it agrees with MegEngine to {self._worst:.1e} of the range where they were compared"
        others = sorted({reason for reason in self._reasons.values() if reason})
        if others:
            reason += f"; MegEngine runs batches of some other shapes: {others[0]}"
        return Chosen(self._fast.name, reason, verified)

    @property
    def _refused(self) -> str:
        """Why all batches run in MegEngine, as in workers and later runs, which are told so; or ""."""
        return "" if self._known is not None else next(iter(self._reasons.values()), "")

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        if self._refused:
            self._own.run(arguments, index, observe)
            return
        shapes = self._shapes(arguments)
        if shapes not in self._reasons:
            self._begin(arguments, index, shapes, observe)
            return
        engine = self._own if self._reasons[shapes] else self._fast
        try:
            engine.run(arguments, index, observe)
        except EngineError as error:
            raise CalibrationError(f"batch {index}: {error}. Use engine megengine.") from error

    def _shapes(self, arguments: Arguments) -> Signature:
        args, kwargs = arguments
        _, (_, *tensors) = Interpreter(self._prepared).bind(args, kwargs)
        return tuple(tuple(int(n) for n in t.shape) for t in tensors)

    def _begin(self, arguments: Arguments, index: int, shapes: Signature, observe: Observe) -> None:
        """Compares both engines, and shows the values of the fast one if they agree."""
        agreed = self._agree_on_few(arguments, index)
        found: dict[str, np.ndarray] = {}
        try:
            self._fast.run(arguments, index, found.__setitem__)
        except EngineError as error:
            reason = str(error)
        else:
            reason = "" if agreed else self._compare(arguments, index, found)
        self._reasons[shapes] = reason
        if reason:
            self._own.run(arguments, index, observe)
            return
        for name in list(found):
            observe(name, found.pop(name))

    def _agree_on_few(self, arguments: Arguments, index: int) -> bool:
        """Whether the first samples of a batch say that the engines agree; what they deny, the batch may."""
        few = first_samples(arguments, _few(self._prepared))
        if few is None:
            return False
        found: dict[str, np.ndarray] = {}
        try:
            self._fast.run(few, index, found.__setitem__)
            # Values that are nothing, or nothing but zeros, say nothing.
            observed = (value for node, value in found.items() if node not in self._unobserved)
            return all(value.any() for value in observed) and not self._compare(few, index, found)
        except (EngineError, CalibrationError):  # the graph takes no other number of samples
            return False

    def _compare(self, arguments: Arguments, index: int, found: Mapping[str, np.ndarray]) -> str:
        """Why MegEngine must run such batches, by the values that the fast engine found; or ""."""
        worst: dict[str, float] = {}

        def compare(node: str, value: np.ndarray) -> None:
            if node in self._unobserved:  # it may be a selection, of other values in each engine
                only_here = np.isfinite(found[node]).all() and not np.isfinite(value).all()
                worst[node] = np.inf if only_here else 0.0
            else:
                worst[node] = _difference(found[node], value)

        self._own.run(arguments, index, compare)
        node = max(worst, key=worst.__getitem__, default="")
        if worst and not worst[node] <= _TOLERANCE:
            return f"{node} differs by {worst[node]:.1e} of its range"
        self._worst = max(self._worst, worst.get(node, 0.0))
        return ""


def _few(prepared: TracedModule) -> int:
    """How many samples are compared: not as many as were traced, which the ONNX model may have fixed."""
    return _FEW if _FEW not in _traced_samples(prepared) else _FEW + 1


def _traced_samples(prepared: TracedModule) -> set[int]:
    """The lengths of the first axes of the inputs that were traced."""
    return {node.shape[0] for node in prepared.graph.inputs if isinstance(node, TensorNode) and node.shape}


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    """The largest difference as a share of the largest magnitude; infinite where they cannot be compared."""
    if first.shape != second.shape:
        return float("inf")
    if not first.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        size = max(float(np.abs(first).max()), float(np.abs(second).max()))
        apart = float(np.abs(first - second).max())
    if not np.isfinite(size) or not np.isfinite(apart):
        return float("inf")
    return apart / size if size else 0.0


def _not_worth_it(prepared: QuantizedModel, batches: int | None) -> str:
    """Why an export would take longer than it saves, or ""."""
    if batches == 1 and min(_traced_samples(prepared.module), default=0) <= _few(prepared.module):
        return "there is one batch, on all of which the engines would be compared"
    work = sum(note.macs for note in prepared.annotation.notes)
    if work * (_MANY if batches is None else batches) < _LITTLE:
        return "there is so little to compute that an export would take longer"
    return ""
