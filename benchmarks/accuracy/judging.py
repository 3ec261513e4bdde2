"""Judges quantized networks: noise at their outputs and the metric, both on the test part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from benchmarks.accuracy.rows import Row, sqnr_db
from benchmarks.accuracy.subjects import Runner, Subject, batches

__all__ = ["Judge", "float_file", "in_onnxruntime", "quantize"]


class Judge:
    """Compares with the float network.

    Args:
        subject: the network and its data.
        run: the float network in the runtime that the others will run in.
    """

    def __init__(self, subject: Subject, run: Runner) -> None:
        self.subject = subject
        self.want = _outputs(run, subject.test)
        self.metric = subject.metric(run)

    def row(self, check: str, method: str, run: Runner, note: str = "") -> Row:
        """The figures of a quantized network, without a target."""
        metric = self.subject.metric(run)
        sqnr = sqnr_db(self.want, _outputs(run, self.subject.test))
        loss = round(self.metric - metric, 6)
        return Row(check, self.subject.name, method, sqnr, metric, loss, note=note)

    def float_row(self, check: str) -> Row:
        """The float network itself."""
        return Row(check, self.subject.name, "float", None, self.metric, 0.0, note=self.subject.unit)


def _outputs(run: Runner, inputs: np.ndarray) -> list[np.ndarray]:
    parts = [run(batch) for batch in batches(inputs, 50)]
    return [np.concatenate(output) for output in zip(*parts, strict=True)]


def in_onnxruntime(file: Path) -> Runner:
    """A file, as it is deployed: with all of onnxruntime's optimizations."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: session.run(None, {name: inputs})


def quantize(
    subject: Subject, config: Mapping[str, Any] | Path | str, traced: Any = None, *, convert: bool = True
) -> Any:
    """Traces, prepares and calibrates the network; converts it too unless it is to be trained on."""
    batch = batches(subject.calibration)
    traced = traced or qtrace.trace(subject.net, batch[0], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, config), batch, progress=False)
    return qtrace.convert(prepared) if convert else prepared


def float_file(subject: Subject, folder: Path) -> Path:
    """The float network as ONNX."""
    traced = qtrace.trace(subject.net, subject.calibration[:1], check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced), batches(subject.calibration)[:1], progress=False)
    return qtrace.export(qtrace.convert(prepared), folder / "float.onnx", format="onnx_float")
