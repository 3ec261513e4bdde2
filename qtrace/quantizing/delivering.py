"""Which file is delivered: the chosen one, or another if it is slower than what the user has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.benchmarking.runners.base import RunnerSettings
from qtrace.benchmarking.turns import Speed, are_clear, compare_files
from qtrace.config import QConfig, backends
from qtrace.errors import QtraceError
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.preparation.placement.frontier import LEAST_GAIN
from qtrace.preparation.record import fake_quants
from qtrace.quantizing.card import TIMED
from qtrace.quantizing.float_file import FloatFile
from qtrace.runtimes.child import MissingPackageError
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.files import naming

__all__ = ["Delivery", "Timer", "is_too_slow", "measure_file", "rounds_for_speed", "timed_settings"]

Timer = Callable[..., list[Speed]]
"""Measures files in turns, as `qtrace.benchmarking.turns.compare_files` does."""


@dataclass(frozen=True)
class Delivery:
    """What was measured of a file next to another one, and which is delivered.

    Attributes:
        speed: the speed of the file; None if it was not measured.
        untimed: why it was not measured; "" if it was.
        prepared: the graph in float that is delivered instead; None for the file that was measured.
        reference: what the speed is measured against: "your file" or "float".
        reference_seconds: the median time of a run of the reference.
        host: the interpreter or command by which the files were measured; "" for this interpreter.
        slow_row: the row whose file was too slow, so that the file is that of fastest; "" for none.
        growth: by how much the file is larger than the user's own, and why; "" if it is not.
    """

    speed: Speed | None = None
    untimed: str = ""
    prepared: TracedModule | None = None
    reference: str = "float"
    reference_seconds: float = 0.0
    host: str = ""
    slow_row: str = ""
    growth: str = ""

    @property
    def in_float(self) -> bool:
        """Whether the quantized file was measured to be too slow, and float is delivered."""
        return self.prepared is not None

    def sentence(self) -> str:
        """Says what was measured and delivered; "" if nothing was measured."""
        if self.speed is None:
            return f"speed: not measured, {self.untimed}" if self.untimed else ""
        times = f"{1e3 * self.speed.seconds:.3g} ms, {1e3 * self.reference_seconds:.3g} ms"
        text = f"speed: {self.speed.describe()}: {times} by {self.reference}, one thread"
        text += f", by {self.host}" if self.host else ""
        if self.in_float:
            text += (
                f"; the quantized file is slower than {self.reference} here, so the file is in float: "
                "`placement: small` in the recipe writes the quantized one for its size"
            )
        elif self.slow_row:
            text += f"; {self.slow_row} is slower than {self.reference} here, so the file is that of fastest"
        elif self.speed.slower:
            text += f"; the file is slower than {self.reference} here"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures, for JSON."""
        facts: dict[str, Any] = {"speed": None, "not_timed": self.untimed}
        if self.speed is not None:
            seconds = {"reference_seconds": self.reference_seconds, "reference": self.reference}
            facts["speed"] = {**self.speed.to_dict(), **seconds}
        facts["delivered"] = "float" if self.in_float else "quantized"
        return {**facts, "measured_by": self.host} if self.host else facts


def timed_settings(
    traced: TracedModule, suffix: str = ".onnx", host: RuntimeHost | None = None
) -> RunnerSettings:
    """Returns how a file of a network is run to be timed: one thread, and the traced sizes for open axes.

    Args:
        traced: the network.
        suffix: the suffix of the file. A ``.param`` does not name shapes, and a ``.tflite`` is fixed to the
            traced ones, in another order of axes.
        host: the interpreter or machine that has the runtime; None for this one.
    """
    record = read_open_axes(traced)
    is_open = suffix == ".onnx" and record is not None and not record.only_batch()
    shapes = {name: tuple(int(n) for n in shape) for name, shape in list_inputs(traced)}
    return RunnerSettings(1, 1, shapes if is_open or suffix == ".param" else {}, host)


def measure_file(
    path: Path,
    prepared: TracedModule,
    twin: FloatFile,
    *,
    own: Path | None = None,
    keep: bool = False,
    timer: Timer | None = None,
    host: RuntimeHost | None = None,
) -> Delivery:
    """Measures a file next to the user's own one, or else next to float, and says what is to be delivered.

    Args:
        path: the file.
        prepared: the graph that it was exported from, before `convert`.
        twin: the float file of the network, which is written if it is needed.
        own: the user's own file; None if the network was no file.
        keep: whether the quantized file is delivered, however slow it is.
        timer: measures files in turns; None for `compare_files`.
        host: the interpreter or machine that has the runtime; None for this one.

    Raises:
        MissingPackageError: when the host lacks the runtime.
    """
    config = twin.config
    backend = backends.get(config.backend)
    quantized = any(fake_quants(prepared))
    is_own = own is not None and own.suffix == path.suffix
    if not quantized and not is_own:
        return Delivery(untimed="the file is in float")
    if backend.device or path.suffix not in TIMED:
        return Delivery(untimed=f"no runtime here runs it as {backend.device or 'its target'} does")
    runtime, name = backend.runtime or TIMED[path.suffix][0], "" if host is None else str(host)
    try:
        settings = timed_settings(twin.traced, path.suffix, host)
        reference = own if is_own and own is not None else twin.path
        with naming(twin.path.parent):
            first, speed = (timer or compare_files)(
                [reference, path], runtime=runtime, settings=settings, settled=are_clear
            )
    except QtraceError as error:
        if host is not None and isinstance(error, MissingPackageError):
            raise
        return Delivery(untimed=str(error).rstrip("."))
    # Here, CPUs are measured: a file in float16 is for other processors.
    replaceable = quantized and not keep and config.effective_float == "fp32" and rounds_for_speed(config)
    instead = twin.prepared if replaceable and is_too_slow(speed) else None
    return Delivery(speed, "", instead, "your file" if is_own else "float", first.seconds, name)


def is_too_slow(speed: Speed) -> bool:
    """Returns whether a file is slower by more than 5 % beyond doubt, which a busy machine adds to."""
    return speed.high * LEAST_GAIN < 1


def rounds_for_speed(config: QConfig) -> bool:
    """Returns whether a config asks for integers only where they are faster, not for their size.

    Some packaged recipes of targets round everything, as that is fastest there.
    """
    backend = backends.get(config.backend)
    stem = config.place("placement").rpartition(".yaml")[0]
    by_default = backend.rounds_for_speed and stem.endswith(f"recipes/backend/{backend.name}")
    return config.effective_placement in ("balanced", "fastest") or by_default
