"""Which file is delivered: the quantized one, or float where that is faster and nobody asked for size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qtrace.benchmarking.latency import file_size
from qtrace.benchmarking.turns import Speed, are_clear, compare_files
from qtrace.config import QConfig, backends
from qtrace.errors import ExportError, QtraceError
from qtrace.graph.types import TracedModule
from qtrace.preparation.record import fake_quants
from qtrace.quantizing.card import TIMED, timed_settings
from qtrace.quantizing.float_file import FloatFile
from qtrace.quantizing.labellings import FLOAT
from qtrace.quantizing.structure import has_same_nodes, hash_structure
from qtrace.quantizing.times import MeasuredLabelling
from qtrace.runtimes.child import MissingPackageError
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.files import naming

__all__ = [
    "Delivery",
    "Timer",
    "choose_delivery",
    "compare_with_own",
    "fixed_timer",
    "is_float_better",
    "measure_file",
    "rounds_for_speed_by_default",
]

_CHOOSING = ("balanced", "fastest")
"""The placements that round for speed: a file that is slower than float is not what they ask for."""

_COMPOSITES = {
    *("Attention", "Einsum", "Gelu", "GroupNormalization", "HardSwish", "InstanceNormalization"),
    *("LayerNormalization", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization", "Mish"),
    *("RMSNormalization", "RotaryEmbedding", "Swish"),
}
"""Types of ops that an import or an export may write in pieces, and a runtime has one kernel for."""

Timer = Callable[..., list[Speed]]
"""Measures files in turns, as `qtrace.benchmarking.turns.compare_files` does."""


@dataclass(frozen=True)
class Delivery:
    """What was measured of a quantized file beside float, and which of both is delivered.

    Attributes:
        speed: the speed of the quantized file beside float; None if it was not measured.
        untimed: why it was not measured; "" if it was.
        in_float: whether the file that is delivered is in float.
        prepared: the graph in float that is delivered; None for the quantized one.
        float_seconds: the median time of a run of the float file.
        files: the speeds of the float file and of the quantized one, as they were measured.
        beside_own: the speed of what is delivered beside the user's own file; None if it was not measured.
        host: the interpreter or command by which the files were measured; "" for this interpreter.
        placed: what was measured of integers, where the placement found float better; "" elsewhere.
        growth: by how much the file is larger than the user's own, and why; "" if it is not.
        smaller: whether the file is smaller than the float file.
    """

    speed: Speed | None = None
    untimed: str = ""
    in_float: bool = False
    prepared: TracedModule | None = None
    float_seconds: float = 0.0
    files: tuple[Speed, ...] = ()
    beside_own: Speed | None = None
    host: str = ""
    placed: str = ""
    growth: str = ""
    smaller: bool = True

    def sentence(self) -> str:
        """Says what was measured and delivered; "" if nothing was measured."""
        own = ""
        if self.beside_own is not None and self.beside_own.slower:
            own = (
                f"; the network's own file is {1 / self.beside_own.ratio:.2f}x as fast as this one, by ops "
                "that qtrace takes apart: keep that one for speed"
            )
        if self.placed:
            place = f", by {self.host}" if self.host else ""
            return f"speed: the file is in float: {self.placed}, one thread{place}{own}"
        if self.speed is None:
            return f"speed: not measured, {self.untimed}{own}" if self.untimed else ""
        times = f"{1e3 * self.speed.seconds:.3g} ms, {1e3 * self.float_seconds:.3g} ms in float"
        text = f"speed: {self.speed.describe()}: {times}, one thread"
        text += f", by {self.host}" if self.host else ""
        if self.in_float:
            probably = "" if self.speed.slower else "probably "
            text += (
                f"; the quantized file is {probably}slower than float here, so the file is in float: "
                "`placement: small` in the recipe writes the quantized one for its size"
            )
        elif self.speed.slower:
            gain = ", and gains its size alone" if self.smaller and not self.growth else ""
            text += f"; the file is slower than float here{gain}"
        return text + own

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures, for JSON."""
        speed = None if self.speed is None else {**self.speed.to_dict(), "float_seconds": self.float_seconds}
        form = "float" if self.in_float or self.placed else "quantized"
        own = None if self.beside_own is None else self.beside_own.to_dict()
        facts = {"speed": speed, "beside_own_file": own, "not_timed": self.untimed, "delivered": form}
        return {**facts, "measured_by": self.host} if self.host else facts


def measure_file(
    path: Path,
    prepared: TracedModule,
    twin: FloatFile,
    *,
    keep: bool = False,
    timer: Timer | None = None,
    labellings: Sequence[MeasuredLabelling] = (),
    host: RuntimeHost | None = None,
) -> Delivery:
    """Measures a quantized file beside the float file of its network, and says which is to be delivered.

    A file that differs from a measured labelling in values alone takes as long, and is not measured again.

    Args:
        path: the quantized file.
        prepared: the graph that it was exported from, before `convert`.
        twin: the float file beside it, which is written if it is needed.
        keep: whether the quantized file is delivered, however slow it is.
        timer: measures files in turns; None for `compare_files`.
        labellings: those that were measured, the predicted choice first.
        host: the interpreter or machine that has the runtime; None for this one.

    Raises:
        MissingPackageError: when the host lacks the runtime.
    """
    config = twin.config
    backend = backends.get(config.backend)
    if not any(fake_quants(prepared)):
        placed = _describe_float(labellings)
        untimed = "" if placed else "the file is in float"
        return Delivery(untimed=untimed, placed=placed, host=_name(host) if placed else "")
    if backend.device or path.suffix not in TIMED:
        return Delivery(untimed=f"no runtime here runs it as {backend.device or 'its target'} does")
    replaceable = not keep and config.effective_float == "fp32"  # here, CPUs are measured
    if timer is None and (known := _speeds_of(path, labellings)) is not None:
        in_float = None
        if replaceable and is_float_better(known[1], config):
            in_float = twin.prepared
        return _finished(choose_delivery(*known, config, in_float), path, twin, host)
    runtime = backend.runtime or TIMED[path.suffix][0]
    try:
        settings = timed_settings(twin.traced, path.suffix, host)
        with naming(twin.path.parent):
            first, own = (timer or compare_files)(
                [twin.path, path], runtime=runtime, settings=settings, settled=are_clear
            )
    except QtraceError as error:
        if host is not None and isinstance(error, MissingPackageError):
            raise
        return Delivery(untimed=str(error).rstrip("."))
    delivery = choose_delivery(first, own, config, twin.prepared if replaceable else None)
    return _finished(delivery, path, twin, host)


def _finished(delivery: Delivery, path: Path, twin: FloatFile, host: RuntimeHost | None) -> Delivery:
    """Adds the host, and whether a file that is slower than float is smaller."""
    slower = delivery.speed is not None and delivery.speed.slower
    smaller = not slower or file_size(path) < file_size(twin.path)
    return replace(delivery, host=_name(host), smaller=smaller)


def _describe_float(labellings: Sequence[MeasuredLabelling]) -> str:
    """Says what was measured of a file with integers in the place of one in float; "" if nothing was."""
    in_float = next((labelling for labelling in labellings if labelling.name == FLOAT), None)
    others = [labelling for labelling in labellings if labelling is not in_float]
    if in_float is None or not others:
        return ""
    fastest = max(others, key=lambda labelling: labelling.speed.ratio)
    beside = fastest.speed.ratio / in_float.speed.ratio
    return (
        f"with integers it took {1e3 * fastest.speed.seconds:.3g} ms at least, {beside:.2f}x as fast as float"
    )


def _name(host: RuntimeHost | None) -> str:
    return "" if host is None else str(host)


def compare_with_own(
    delivery: Delivery,
    path: Path,
    own: Path,
    traced: TracedModule,
    config: QConfig,
    host: RuntimeHost | None = None,
) -> Delivery:
    """Measures the file that is delivered beside the ONNX file of the user, where that may be faster.

    It may be where it has ops that the export has not: an import or an export takes some apart that a runtime
    has one kernel for.

    Args:
        delivery: what was measured so far; without a speed nothing more is.
        path: the file that is delivered.
        own: the user's file.
        traced: the float network.
        config: the config.
        host: the interpreter or machine that has the runtime; None for this one.
    """
    if config.backend != "onnxruntime" or path.suffix != ".onnx" or not _has_composites(own, path):
        return delivery
    try:
        settings = timed_settings(traced, path.suffix, host)
        speeds = compare_files([own, path], settings=settings, settled=are_clear)
    except QtraceError:  # such as a file that onnxruntime runs on other processors alone
        return delivery
    return replace(delivery, beside_own=speeds[1])


def _has_composites(own: Path, path: Path) -> bool:
    """Returns whether a file has composite ops, or ops of other domains, that another one lacks."""
    from qtrace.onnxfile.reading import read_model

    kinds = [{(n.domain, n.op_type) for n in read_model(file).graph.node} for file in (own, path)]
    return any(domain or kind in _COMPOSITES for domain, kind in kinds[0] - kinds[1])


def choose_delivery(in_float: Speed, own: Speed, config: QConfig, prepared: TracedModule | None) -> Delivery:
    """Chooses float if the quantized file is slower beyond the spread, and the config rounds for speed.

    Args:
        in_float: the speed of the float file.
        own: the speed of the quantized file beside it.
        config: the config.
        prepared: the graph in float; None if no file is made of it.
    """
    chosen = prepared is not None and is_float_better(own, config)
    files = (in_float, own)
    return Delivery(own, "", chosen, prepared if chosen else None, in_float.seconds, files)


def is_float_better(own: Speed, config: QConfig) -> bool:
    """Returns whether a file is slower than float beyond the spread, and the config rounds for speed."""
    return own.probably_slower and _rounds_for_speed(config)


def _speeds_of(path: Path, labellings: Sequence[MeasuredLabelling]) -> tuple[Speed, Speed] | None:
    """Returns the speeds of the float file and of ``path`` beside it; None if no labelling tells them.

    Only the predicted choice was measured in turns with float itself. Where other scales are equal than in
    its file, a few roundings are more or less work, which changes nothing where it is faster than float.
    """
    whole = next((labelling for labelling in labellings if labelling.name == FLOAT), None)
    if whole is None or not whole.structure or path.suffix != ".onnx":
        return None
    structure, first, other = hash_structure(path), labellings[0], whole.speed
    own = Speed(first.speed.seconds, 1 / other.ratio, 1 / other.high, 1 / other.low, other.turns, other.busy)
    if first.structure != structure and not (has_same_nodes(first.structure, structure) and own.faster):
        return None
    return Speed(other.seconds, 1.0, 1.0, 1.0, other.turns), own


def _rounds_for_speed(config: QConfig) -> bool:
    """Returns whether a config asks for integers only where they are faster, not for their size."""
    return config.effective_placement in _CHOOSING or rounds_for_speed_by_default(config)


def rounds_for_speed_by_default(config: QConfig) -> bool:
    """Returns whether the packaged recipe of the target says so that a config rounds everything for speed."""
    backend = backends.get(config.backend)
    stem = config.place("placement").rpartition(".yaml")[0]
    return backend.rounds_for_speed and stem.endswith(f"recipes/backend/{backend.name}")


def fixed_timer(speeds: Sequence[Speed]) -> Timer:
    """Returns what gives times that were measured before.

    Args:
        speeds: the speeds of the files.
    """

    def give(*args: Any, **options: Any) -> list[Speed]:
        if not speeds:
            raise ExportError("the given times have none of the files")
        return list(speeds)

    return give
