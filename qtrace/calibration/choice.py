"""The choice of the engine that runs a graph: the requested one, or the fastest that applies."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qtrace.calibration.base import Arguments, Engine, EngineError, Observe, Watched
from qtrace.calibration.engines import MegEngine, OnnxRuntime, OnnxSegments
from qtrace.data.batches import count_samples, first_samples
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.differences import SAMPLE_RTOL
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.stepping import SegmentEngine
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.preparation.faithfulness import cut_images
from qtrace.preparation.model import QuantizedModel
from qtrace.runtimes.host import RuntimeHost

ENGINES = ("auto", "megengine", "onnxruntime")

# Samples of a batch on which both engines are compared, if the batch can be divided.
COMPARED_SAMPLES = 2
# MACs below which it takes longer to write the ONNX model than to run MegEngine.
_MIN_MACS_FOR_EXPORT = 10**9

Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Chosen:
    """The choice of an engine.

    Attributes:
        name: the name of the engine.
        reason: why this engine was chosen, as a clause.
        verified: the shapes of inputs at which the engine agreed with MegEngine, on a part of a batch.
        compared: whether the engine is compared with MegEngine at other shapes.
        everywhere: whether the engine ran all batches.
    """

    name: str
    reason: str
    verified: tuple[Signature, ...] = ()
    compared: bool = True
    everywhere: bool = True

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Chosen:
        """Reverses ``dataclasses.asdict``, also after JSON."""
        verified = tuple(tuple(tuple(shape) for shape in shapes) for shapes in data["verified"])
        return cls(data["name"], data["reason"], verified, data["compared"], data.get("everywhere", True))


def choose_engine(
    prepared: QuantizedModel,
    watched: Watched,
    requested: str | Chosen,
    batches: int | None = None,
    threads: int | None = None,
    first: Arguments | None = None,
    host: RuntimeHost | None = None,
) -> ExplainedEngine:
    """Chooses an engine for a prepared graph.

    ``auto`` depends on the graph, the number of batches and the shapes of the first one, never on a clock. So
    every run of the same calibration, in any number of processes, uses the same engine.

    Args:
        prepared: a module made by ``qtrace.prepare``.
        watched: the nodes and parameters that are observed.
        requested: one of `ENGINES`; or an earlier choice for the same graph, which is not compared again.
        batches: number of batches; None if unknown.
        threads: number of threads, if the engine lets one set it; None for all cores.
        first: the arguments of the first batch; None to assume the shapes of the trace.
        host: the interpreter or machine whose onnxruntime computes; None for this process.

    Raises:
        ConfigError: for an unknown engine.
        CalibrationError: when the requested engine cannot run the graph.
        ExportError: when the host cannot be reached, or does not survive the graph.
    """
    megengine = MegEngine(prepared.module, watched.nodes)
    chosen = requested if isinstance(requested, Chosen) else None
    name = requested.name if isinstance(requested, Chosen) else requested
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: choose one of {', '.join(ENGINES)}.")
    if name == "megengine":
        return _FixedEngine(megengine, chosen or Chosen(name, "as asked"))
    if name == "auto" and (reason := reason_against_export(prepared, batches, first)):
        return _FixedEngine(megengine, Chosen("megengine", reason))
    try:
        fast = OnnxRuntime(prepared.module, tuple(watched.nodes), threads, host=host)
    except EngineError as error:
        if name == "auto":
            return _FixedEngine(megengine, Chosen("megengine", f"onnxruntime does not apply: {error}"))
        raise CalibrationError(
            f"engine onnxruntime does not apply: {error}. Use engine megengine, or auto."
        ) from error
    if chosen is None and name == "onnxruntime":
        chosen = Chosen(name, "as asked; not compared with MegEngine", compared=False)
    if chosen is not None and not chosen.compared:
        return _FixedEngine(fast, chosen)
    return _ComparedEngine(prepared.module, megengine, fast, chosen, watched.unobserved)


def choose_segments(
    prepared: QuantizedModel,
    chosen: str | Chosen,
    batches: int | None = None,
    threads: int | None = None,
    first: Arguments | None = None,
) -> SegmentEngine | None:
    """Chooses the engine of algorithms that change a graph layer by layer.

    Args:
        prepared: the view of a prepared module.
        chosen: the engine that collected the statistics, or one of `ENGINES` if none did.
        batches: number of batches; None if unknown.
        threads: number of threads of onnxruntime; None for all cores.
        first: the arguments of the first batch; None to assume the shapes of the trace.

    Returns:
        onnxruntime, which leaves to MegEngine what it cannot compute; None where MegEngine computes all.

    Raises:
        ConfigError: for an unknown engine.
    """
    name = chosen.name if isinstance(chosen, Chosen) else chosen
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: choose one of {', '.join(ENGINES)}.")
    if name == "auto" and not reason_against_export(prepared, batches, first):
        name = "onnxruntime"
    everywhere = not isinstance(chosen, Chosen) or chosen.everywhere
    if name != "onnxruntime" or not everywhere or importlib.util.find_spec("onnxruntime") is None:
        return None
    return OnnxSegments(prepared, threads)


class ExplainedEngine(Engine):
    """An engine that gives the reason for its choice."""

    @property
    def chosen(self) -> Chosen:
        """The engine that runs, as far as past batches show."""
        raise NotImplementedError


class _FixedEngine(ExplainedEngine):
    def __init__(self, engine: Engine, chosen: Chosen) -> None:
        self._engine, self._chosen = engine, chosen

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def chosen(self) -> Chosen:
        return self._chosen

    @property
    def prefetched(self) -> int:
        return self._engine.prefetched

    def begin(self, arguments: Arguments) -> None:
        self._engine.begin(arguments)

    def drop(self, arguments: Arguments) -> None:
        self._engine.drop(arguments)

    def close(self) -> None:
        self._engine.close()

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        try:
            self._engine.run(arguments, index, observe)
        except EngineError as error:
            raise CalibrationError(
                f"batch {index}: {error}. Give batches of the shape of the trace, or use engine megengine."
            ) from error


class _ComparedEngine(ExplainedEngine):
    """Compares the fast engine with MegEngine at each new shape of inputs, and runs it where they agree."""

    def __init__(
        self,
        prepared: TracedModule,
        megengine: Engine,
        fast: Engine,
        earlier: Chosen | None,
        unobserved: frozenset[str],
    ) -> None:
        self._prepared, self._megengine, self._fast = prepared, megengine, fast
        self._unobserved = unobserved
        # Shapes of inputs -> why MegEngine must run batches of these shapes; "" if it need not.
        self._reasons: dict[Signature, str] = dict.fromkeys(earlier.verified if earlier else (), "")
        self._earlier = earlier

    @property
    def name(self) -> str:
        return self.chosen.name

    @property
    def chosen(self) -> Chosen:
        verified = tuple(shapes for shapes, reason in self._reasons.items() if not reason)
        if self._earlier is not None:
            return Chosen(self._earlier.name, self._earlier.reason, verified)
        if not self._reasons:
            return Chosen(self._fast.name, "no batch has run yet")
        if self._refusal:
            return Chosen(self._megengine.name, f"{self._fast.name} does not apply: {self._refusal}")
        # Not by how much: another number of workers compares other batches, and writes the same report.
        reason = f"it agrees with MegEngine to {SAMPLE_RTOL:g} of the range where they were compared"
        others = sorted({reason for reason in self._reasons.values() if reason})
        if others:
            reason += f"; MegEngine runs batches of some other shapes: {others[0]}"
        return Chosen(self._fast.name, reason, verified, everywhere=not others)

    @property
    def _refusal(self) -> str:
        """Why MegEngine runs all batches here, in workers and in later runs; "" if it does not."""
        return "" if self._earlier is not None else next(iter(self._reasons.values()), "")

    @property
    def prefetched(self) -> int:
        return 0 if self._refusal else self._fast.prefetched

    def begin(self, arguments: Arguments) -> None:
        """Begins a batch in the fast engine, also where that is yet to be compared at its shapes."""
        if not self._refusal and not self._reasons.get(self._shapes(arguments)):
            self._fast.begin(arguments)

    def drop(self, arguments: Arguments) -> None:
        self._fast.drop(arguments)

    def close(self) -> None:
        self._fast.close()

    def run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        try:
            self._run(arguments, index, observe)
        finally:
            self._fast.drop(arguments)

    def _run(self, arguments: Arguments, index: int, observe: Observe) -> None:
        if self._refusal:
            self._megengine.run(arguments, index, observe)
            return
        shapes = self._shapes(arguments)
        if shapes not in self._reasons:
            self._run_new_shapes(arguments, index, shapes, observe)
            return
        engine = self._megengine if self._reasons[shapes] else self._fast
        try:
            engine.run(arguments, index, observe)
        except EngineError as error:
            raise CalibrationError(f"batch {index}: {error}. Use engine megengine.") from error

    def _shapes(self, arguments: Arguments) -> Signature:
        _, (_, *tensors) = Interpreter(self._prepared).bind(*arguments)
        return tuple(tuple(int(n) for n in t.shape) for t in tensors)

    def _run_new_shapes(self, arguments: Arguments, index: int, shapes: Signature, observe: Observe) -> None:
        """Compares both engines on a batch, and observes the values of the fast one if they agree."""
        values, observed = dict[str, np.ndarray](), set[str]()
        agreed = self._agree_on_part(arguments, index)

        def observe_once(node: str, value: np.ndarray) -> None:
            if node not in observed:  # before the fast engine refused another part of the graph
                observed.add(node)
                observe(node, value)

        try:
            self._fast.run(arguments, index, observe_once if agreed else values.__setitem__)
        except EngineError as error:
            reason = str(error)
        else:
            reason = "" if agreed else self._compare(arguments, index, values)
        self._reasons[shapes] = reason
        if reason:
            self._megengine.run(arguments, index, observe_once)
            return
        for name in list(values):
            observe(name, values.pop(name))

    def _agree_on_part(self, arguments: Arguments, index: int) -> bool:
        """Whether both engines agree on a part of a batch; if not, they may on the whole batch."""
        samples = first_samples(arguments, _compared_samples(self._prepared)) or arguments
        (part,) = cut_images([samples], self._prepared)
        if part is arguments:
            return False
        values: dict[str, np.ndarray] = {}
        try:
            self._fast.run(part, index, values.__setitem__)
            # A comparison of empty values or of zeros proves nothing.
            observed = (value for node, value in values.items() if node not in self._unobserved)
            return all(value.any() for value in observed) and not self._compare(part, index, values)
        except (EngineError, CalibrationError):  # the graph takes no other number of samples
            return False

    def _compare(self, arguments: Arguments, index: int, values: Mapping[str, np.ndarray]) -> str:
        """Compares ``values`` of the fast engine with MegEngine's; returns why it must not run, or ""."""
        differences: dict[str, float] = {}

        def compare(node: str, value: np.ndarray) -> None:
            if node in self._unobserved:  # it may be a selection, of other values in each engine
                only_here = np.isfinite(values[node]).all() and not np.isfinite(value).all()
                differences[node] = np.inf if only_here else 0.0
            else:
                differences[node] = _difference(values[node], value)

        self._megengine.run(arguments, index, compare)
        node = max(differences, key=differences.__getitem__, default="")
        if differences and not differences[node] <= SAMPLE_RTOL:
            return f"{node} differs by {differences[node]:.1e} of its range"
        return ""


def _compared_samples(prepared: TracedModule) -> int:
    """The number of compared samples: another than the traced one, which the ONNX model may have fixed."""
    return COMPARED_SAMPLES + (COMPARED_SAMPLES in _traced_samples(prepared))


def _traced_samples(prepared: TracedModule) -> set[int]:
    """Returns the lengths of the first axes of the traced inputs."""
    return {node.shape[0] for node in prepared.graph.inputs if isinstance(node, TensorNode) and node.shape}


def _growth(prepared: TracedModule, arguments: Arguments) -> float:
    """Returns the size of a batch as a multiple of the traced one; the work is assumed to grow with it."""
    _, (_, *tensors) = Interpreter(prepared).bind(*arguments)
    traced = (math.prod(node.shape or ()) for node in prepared.graph.inputs if isinstance(node, TensorNode))
    return sum(math.prod(tensor.shape) for tensor in tensors) / max(1, sum(traced))


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the largest difference relative to the largest magnitude; inf if they cannot be compared."""
    if first.shape != second.shape:
        return float("inf")
    if not first.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        magnitude = max(float(np.abs(first).max()), float(np.abs(second).max()))
        difference = float(np.abs(first - second).max())
    if not np.isfinite(magnitude) or not np.isfinite(difference):
        return float("inf")
    return difference / magnitude if magnitude else 0.0


def reason_against_export(prepared: QuantizedModel, batches: int | None, first: Arguments | None) -> str:
    """Returns why an export would take longer than it saves, or ""."""
    if first is None:
        samples, growth = min(_traced_samples(prepared.module), default=0), 1.0
    else:
        samples, growth = count_samples(first), _growth(prepared.module, first)
    if batches == 1 and samples <= _compared_samples(prepared.module):
        return "there is one batch, on all of which the engines would be compared"
    macs = sum(note.macs for note in prepared.annotation.notes)
    if macs * growth * (1 if batches is None else batches) < _MIN_MACS_FOR_EXPORT:
        return "there is so little to compute that an export would take longer"
    return ""
