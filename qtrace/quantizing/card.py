"""A card of a file: what it computes in, how close, how large and how fast it is, and how it was made."""

from __future__ import annotations

import datetime
import html
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qtrace.benchmarking.latency import file_size
from qtrace.benchmarking.machine import describe_machine
from qtrace.config import backends
from qtrace.config.recipe import dump_recipe
from qtrace.display import Displayed, format_bytes, format_table
from qtrace.errors import QtraceError
from qtrace.export import export
from qtrace.graph.open_axes import read_open_axes
from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import Explanation
from qtrace.metrics import finite_or_none
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.precision import count_precisions
from qtrace.quantizing.files import bench
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.storage.files import replacing
from qtrace.verification.report import VerifyReport

__all__ = ["TIMED", "Card", "FloatOps", "Timing", "make_card", "measure_speed"]

# Suffix of a file that a runtime runs here -> the runtime and its package.
TIMED = {
    ".onnx": ("onnxruntime", "onnxruntime"),
    ".tflite": ("litert", "ai-edge-litert"),
    ".param": ("ncnn", "ncnn"),
}
_PACKAGES = ("qtrace", "megengine", "numpy", "onnx", "onnxruntime", "openvino", "ai-edge-litert", "ncnn")


@dataclass(frozen=True)
class FloatOps:
    """Ops that compute in float for one reason.

    Attributes:
        kinds: kind of op -> the number of such ops.
        reason: why they are not on integers.
    """

    kinds: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class Timing:
    """The measured times of the file and of its float twin, which took turns.

    Attributes:
        float_milliseconds: the median time of a run of the float file.
        milliseconds: the median time of a run of the file.
        runtime: the runtime with its version.
        processor: the processor.
        threads: the number of threads.
    """

    float_milliseconds: float
    milliseconds: float
    runtime: str
    processor: str
    threads: int

    @property
    def speed(self) -> float:
        """How many times as fast as float the file is."""
        return self.float_milliseconds / self.milliseconds


@dataclass(frozen=True, repr=False)
class Card(Displayed):
    """What somebody who takes a file should know of it.

    Attributes:
        file: the name of the file.
        network: the name of the network.
        target: the backend; what runs it where no runtime here does.
        precision: precision, such as ``w8a8``, or ``float`` -> the number of layers.
        floats: the ops in float, with the reasons.
        bytes: the size of the file.
        parameter_bytes: the size of the parameters as stored, and in float32.
        macs: the multiply-accumulates at the traced shapes, and those on integers.
        inputs: name -> shape at which the network was traced.
        verdict: how close the graph is to float, by output group; None if it could not be judged.
        data: the name of the calibration data, and the number of samples that were judged.
        verified: what the runtime computed: None if the file was not run, else the largest difference in LSB.
        timing: the measured times; None if they were not measured.
        untimed: why they were not measured; "" if they were.
        recipe: the config as a recipe.
        versions: package -> version.
        made: the day.
        stages: stage of the run that made the file -> its time in seconds.
    """

    file: str
    network: str
    target: str
    precision: Mapping[str, int]
    floats: tuple[FloatOps, ...]
    bytes: int
    parameter_bytes: tuple[int, int]
    macs: tuple[int, int]
    inputs: Mapping[str, tuple[int, ...]]
    verdict: Verdict | None
    data: str
    verified: int | None
    timing: Timing | None
    untimed: str
    recipe: str
    versions: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)

    def table(self) -> str:
        """Returns the card as text."""
        rows = [(name, value) for name, value in self._facts() if value]
        parts = [format_table((self.file, ""), rows, None)]
        if self.verdict is not None and self.verdict.groups:
            groups = [(g.name, f"{g.sqnr_db:.1f}") for g in self.verdict.groups]
            parts.append(format_table(("output", "SQNR dB"), groups, None))
        if self.floats:
            kinds = [(", ".join(f"{n} {k}" for k, n in f.kinds.items()), f.reason) for f in self.floats]
            parts.append(format_table(("in float", "why"), kinds, None))
        return "\n\n".join(parts)

    def _facts(self) -> list[tuple[str, str]]:
        layers = sum(self.precision.values())
        shares = ", ".join(f"{name} in {count} of {layers} layers" for name, count in self.precision.items())
        stored, in_float = map(format_bytes, self.parameter_bytes)
        macs, integers = self.macs
        verdict = self.verdict
        metric = "" if verdict is None or verdict.metric is None else f"{verdict.metric:.4g}"
        if metric and verdict is not None and verdict.float_metric is not None:
            metric += f", {verdict.float_metric:.4g} in float"
        return [
            ("network", self.network),
            ("inputs", ", ".join(f"{n} {'x'.join(map(str, s))}" for n, s in self.inputs.items())),
            ("target", self.target),
            ("precision", shares),
            ("size", f"{format_bytes(self.bytes)}; parameters {stored}, {in_float} in float"),
            ("MACs", f"{macs:,}, {integers / max(macs, 1):.1%} on integers"),
            ("time", self._time()),
            ("verdict", "" if verdict is None else verdict.describe()),
            ("metric", metric),
            ("data", self.data),
            ("verified", "" if self.verified is None else f"in its runtime, {self.verified} LSB at most"),
            ("versions", ", ".join(f"{name} {number}" for name, number in self.versions.items())),
            ("made", self.made),
            ("stages", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.stages.items())),
        ]

    def _time(self) -> str:
        if self.timing is None:
            return f"not measured: {self.untimed}"
        t = self.timing
        threads = f"{t.threads} thread{'s' if t.threads > 1 else ''}"
        times = f"{t.milliseconds:.3g} ms, {t.float_milliseconds:.3g} ms in float ({t.speed:.2f}x)"
        return f"{times}, {t.runtime}, {threads}, {t.processor}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the card as plain data."""
        data = {name: getattr(self, name) for name in ("file", "network", "target", "bytes", "data", "made")}
        verdict = None if self.verdict is None else asdict(self.verdict)
        if verdict is not None:
            for group in verdict["groups"]:
                group["sqnr_db"] = finite_or_none(group["sqnr_db"])
                group["variation_db"] = finite_or_none(group["variation_db"])
            verdict["sqnr_db"] = finite_or_none(verdict["sqnr_db"])
        return {
            **data,
            "precision": dict(self.precision),
            "float": [{"ops": dict(f.kinds), "reason": f.reason} for f in self.floats],
            "parameter_bytes": self.parameter_bytes[0],
            "float_parameter_bytes": self.parameter_bytes[1],
            "macs": self.macs[0],
            "integer_macs": self.macs[1],
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "verdict": verdict,
            "worst_lsb": self.verified,
            "time": None if self.timing is None else {**asdict(self.timing), "speed": self.timing.speed},
            "not_timed": self.untimed,
            "recipe": self.recipe,
            "versions": dict(self.versions),
            "stage_seconds": {name: round(seconds, 3) for name, seconds in self.stages.items()},
        }

    def html(self) -> str:
        """Returns the card as one self-contained page."""
        title, recipe = html.escape(f"{self.file}: card"), html.escape(self.recipe)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{html.escape(self.file)}</h1>"
            f"{self._body()}<h2>Recipe</h2><pre>{recipe}</pre></body></html>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Writes the card beside a file: ``NAME.card.json`` and ``NAME.card.html``.

        Args:
            path: the file that the card describes.

        Returns:
            The paths of both.

        Raises:
            QtraceError: when they cannot be written.
        """
        base = Path(path)
        data, page = (base.with_name(f"{base.name}.card.{kind}") for kind in ("json", "html"))
        try:
            with replacing(data, page) as (first, second):
                first.write((json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n").encode())
                second.write(self.html().encode())
        except OSError as error:
            raise QtraceError(f"{data} cannot be written: {error.strerror or error}.") from error
        return data, page


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em}"
    "td,th{padding:.2em .8em .2em 0;vertical-align:top}th{border-bottom:1px solid #999}"
    "table{margin:1em 0}pre{background:#f4f4f4;padding:1em;overflow:auto}"
)


def make_card(
    path: Path,
    traced: TracedModule,
    converted: TracedModule,
    explanation: Explanation,
    *,
    verdict: Verdict | None,
    verify: VerifyReport | None,
    data: str,
    seconds: float = 1.0,
    stages: Mapping[str, float] | None = None,
    host: RuntimeHost | None = None,
) -> Card:
    """Makes the card of an exported file, and measures its time beside that of float.

    Args:
        path: the file.
        traced: the float network.
        converted: the graph that was exported.
        explanation: what became of each op.
        verdict: how close the graph is to float.
        verify: the report of the file's run in its runtime.
        data: the name of the calibration data.
        seconds: how long each of both files runs, in seconds.
        stages: stage of the run that made the file -> its time in seconds.
        host: the interpreter or machine that has the runtime; None for this one.
    """
    view, figures = QuantizedModel(converted), read_figures(converted)
    timing, untimed = measure_speed(path, traced, view.config.backend, seconds, host)
    floats = explanation.to_dict()["summary"]["floats"]
    judged = "" if verdict is None else f"; judged on {verdict.samples} {verdict.measured_on}"
    return Card(
        file=path.name,
        network=str(traced.graph._qualname),
        target=view.config.backend,
        precision=count_precisions(view.annotation),
        floats=tuple(FloatOps(entry["kinds"], entry["reason"]) for entry in floats),
        bytes=file_size(path),
        parameter_bytes=(figures.bytes, figures.float_bytes),
        macs=(figures.macs, figures.integer_macs),
        inputs={name: tuple(int(n) for n in shape) for name, shape in list_inputs(traced)},
        verdict=verdict,
        data=f"{data}{judged}",
        verified=None if verify is None else verify.worst_lsb(),
        timing=timing,
        untimed=untimed,
        recipe=dump_recipe(view.config),
        versions=_versions(),
        made=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        stages=dict(stages or {}),
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return versions


def measure_speed(
    path: Path,
    traced: TracedModule,
    backend: str,
    seconds: float = 1.0,
    host: RuntimeHost | None = None,
) -> tuple[Timing | None, str]:
    """Measures a file and its float twin in turns, on one thread.

    Args:
        path: the file.
        traced: the float network.
        backend: the backend of the file.
        seconds: how long each file runs, in seconds.
        host: the interpreter or machine that has the runtime; None for this one.

    Returns:
        The times; or None, and why they were not measured.
    """
    device = backends.get(backend).device
    if device or path.suffix not in TIMED:
        return None, f"no runtime here runs it as {device or 'its target'} does"
    runtime, package = TIMED[path.suffix]
    if backends.get(backend).runtime:
        runtime = package = backends.get(backend).runtime
    record = read_open_axes(traced)
    shapes = {name: tuple(int(n) for n in shape) for name, shape in list_inputs(traced)}
    open_sizes = record is not None and not record.only_batch()
    try:
        with tempfile.TemporaryDirectory(prefix="qtrace-card-") as folder:
            twin = export(traced, Path(folder) / f"float{path.suffix}")
            report = bench(
                twin,
                path,
                runtime=runtime,
                shapes=shapes if open_sizes or path.suffix == ".param" else None,
                seconds=seconds,
                progress=False,
                runtime_host=host,
            )
    except QtraceError as error:
        return None, str(error).rstrip(".")
    side = report.files[0].side
    if not side:
        machine = describe_machine(runtime, package, report.threads)
        side = {"version": machine.version, "processor": machine.processor}
    float_seconds, own_seconds = (file.latency.median for file in report.files)
    return (
        Timing(
            1e3 * float_seconds,
            1e3 * own_seconds,
            f"{runtime} {side['version']}",
            str(side["processor"]),
            report.threads,
        ),
        "",
    )
