"""Quantizes a random network and says whether a group of its output columns was lost in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import megengine as mge
import numpy as np
import onnxruntime

import qtrace
from qtrace.errors import QtraceError
from qtrace.graph.types import TracedModule
from qtrace.inspection.twin import float_twin
from qtrace.preparation.model import QuantizedModel, read_record
from qtrace.sensitivity.diagnosis import diagnose
from tests.fuzz.mutation import one_sentence
from tests.fuzz.silent.cases import CALIBRATED, EVALUATED, Case
from tests.fuzz.silent.programs import Program

__all__ = ["Loss", "judge"]

CLEAR_DB = 12.0  # from this ratio on, a group carries information
LIKE_CONTROL_DB = 3.0
BLIND_DB = 6.0  # by which a verdict may be better than the worst group: its groups are not ours
WORTHLESS_DB = 6.0  # of a placement's own prediction
SAME_DB = 50.0  # of two engines in float
INTEGERS = ("argmax", "topk_indices", "uint8")
SUFFIXES = {"tflite": "tflite", "ncnn": "param"}

_Outputs = list[list[np.ndarray]]  # of each batch
_Ratios = dict[tuple[int, int], float]  # in dB, by output and the step whose values they are


class Loss(AssertionError):
    """A promise that was broken; the text begins with the stage."""


class NoExample(Exception):
    """The source framework cannot run the network itself."""


def judge(case: Case, folder: Path) -> str:
    """Quantizes a case.

    Returns:
        "passed", "like its control", "named: " and the losses that the verdict names, "refused: " and the
        sentence, or "no example: " and why.

    Raises:
        Loss: when a group was lost in silence, or another promise was broken.
        Exception: any error that is no `QtraceError` is a fault of its own.
    """
    try:
        return _judge(case, folder)
    except QtraceError as error:
        one_sentence(error)
        return f"refused: {error}"
    except NoExample as error:
        return f"no example: {error}"


def _judge(case: Case, folder: Path) -> str:
    run = _Run(case, folder)
    exact = run.exact(EVALUATED)
    run.load(exact)
    run.quantize()
    rounded = [_outputs(run.converted, batch) for batch in case.batches(EVALUATED)]
    losses = _lost(case.program, exact, rounded)
    answer = "passed"
    if losses:
        answer = run.explain(losses)
    run.placement()
    if case.runtime:
        run.deploy(exact, rounded)
    return answer


class _Run:
    """One case on its way through qtrace."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        path = folder / "case.py"
        path.write_text(case.source, encoding="utf-8")
        self.names: dict[str, Any] = {"__name__": "case"}
        exec(compile(case.source, str(path), "exec"), self.names)
        self.network: Any = self.names["network"]
        self.file = folder / "net.onnx"
        if case.onnx:
            self.file.write_bytes(self.network.SerializeToString())

    def exact(self, seeds: Sequence[int]) -> _Outputs:
        """What the source framework computes."""
        batches = self.case.batches(seeds)
        try:
            if self.case.onnx:
                return [run_onnx(self.file, batch) for batch in batches]
            return [_outputs(self.network, batch) for batch in batches]
        except Exception as error:
            raise NoExample(f"{type(error).__name__}: {error}") from error

    def load(self, exact: _Outputs) -> None:
        """Traces or imports the network, which computes the same in float."""
        case = self.case
        if case.onnx:
            self.traced = qtrace.from_onnx(self.file)
        else:
            self.traced = qtrace.trace(self.network, *map(mge.Tensor, case.batches(CALIBRATED)[0]))
        imported = [_outputs(self.traced, batch) for batch in case.batches(EVALUATED)]
        for group, ratio in _ratios(case.program, exact, imported).items():
            if ratio < SAME_DB:
                raise Loss(f"import: group {group} has {ratio:.1f} dB in float")

    def quantize(self) -> None:
        """Prepares, calibrates and converts."""
        batches = self.case.batches(CALIBRATED)
        self.prepared = qtrace.prepare(self.traced, self.case.recipe, samples=batches)
        qtrace.calibrate(self.prepared, batches, progress=False)
        self.converted = qtrace.convert(self.prepared)

    def explain(self, losses: _Ratios) -> str:
        """Says whether losses are those of the control, too, or named by the verdict; others are silent."""
        control = self._control()
        left = {k: v for k, v in losses.items() if v < control.get(k[1], np.inf) - LIKE_CONTROL_DB}
        if not left:
            return "like its control"
        twin = float_twin(QuantizedModel(self.prepared), self.traced)
        verdict = diagnose(self.prepared, self.case.batches(EVALUATED), twin=twin, progress=False).verdict
        listed = ", ".join(
            f"output {number}, values of step {step}: {ratio:.1f} dB ({control.get(step, np.nan):.1f})"
            for (number, step), ratio in left.items()
        )
        worst = min((v for (n, _), v in left.items() if not self.is_index(n)), default=np.inf)
        if verdict.word == "good" or verdict.sqnr_db > worst + BLIND_DB:
            raise Loss(f"silent: {self.case.program.hazards}: {listed}; {verdict.describe()}")
        return f"named: {self.case.program.hazards}: {listed}"

    def is_index(self, output: int) -> bool:
        """Whether an output has integers, whose ratio in dB says only whether most are equal."""
        return self.case.program.steps[self.case.program.outputs[output].index].op in INTEGERS

    def _control(self) -> dict[int, float]:
        """Returns the ratio of each group in the network without hazards; {} where that is refused."""
        control = replace(self.case, program=self.case.program.control(), runtime="")
        try:
            run = _Run(control, self.folder)
            exact = run.exact(EVALUATED)
            run.load(exact)
            run.quantize()
        except (QtraceError, NoExample):
            return {}
        rounded = [_outputs(run.converted, batch) for batch in control.batches(EVALUATED)]
        return {step: ratio for (_, step), ratio in _ratios(control.program, exact, rounded).items()}

    def placement(self) -> None:
        """Refuses a placement that chooses what it has measured to be worthless."""
        note = read_record(self.prepared).annotation.placement
        for row in () if note is None or note.chosen != "balanced" else note.rows:
            if row.name == note.chosen and row.sqnr is not None and row.sqnr < WORTHLESS_DB:
                raise Loss(f"placement: {row.name} delivers what it measures at {row.sqnr:.1f} dB")

    def deploy(self, exact: _Outputs, rounded: _Outputs) -> None:
        """Exports, runs the file and compares."""
        backend = read_record(self.prepared).annotation.backend
        path = self.folder / f"out.{SUFFIXES.get(backend, 'onnx')}"
        qtrace.export(self.converted, path)
        batches = self.case.batches(EVALUATED)
        if self.case.runtime == "verify" or path.suffix != ".onnx":
            report = qtrace.verify(path, self.converted, batches, optimized=False)
            if not report.passed:
                raise Loss(f"verify: {backend}: {' '.join(report.problems())}")
            return
        deployed = [run_onnx(path, batch) for batch in batches]
        self._compare(exact, rounded, deployed)
        session = onnxruntime.InferenceSession(path.read_bytes())
        if all(isinstance(value.shape[0], str) for value in session.get_inputs()):
            whole = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
            try:
                run_onnx(path, whole)
            except Exception as error:
                raise Loss(f"open batch: {error}") from error

    def _compare(self, exact: _Outputs, rounded: _Outputs, deployed: _Outputs) -> None:
        program = self.case.program
        graph, file = _ratios(program, exact, rounded), _ratios(program, exact, deployed)
        for group, ratio in file.items():
            if ratio < min(graph[group], 25.0) - LIKE_CONTROL_DB:
                raise Loss(
                    f"onnxruntime: {group}: {ratio:.1f} dB in the file, {graph[group]:.1f} dB in the graph"
                )


def run_onnx(path: Path, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it folds wrongly
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options)
    kinds = {"tensor(float)": np.float32, "tensor(bool)": bool}
    feed = {
        value.name: array.astype(kinds.get(value.type, array.dtype))
        for value, array in zip(session.get_inputs(), batch, strict=True)
    }
    return [np.asarray(value) for value in session.run(None, feed)]


def _outputs(model: TracedModule | Any, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
    result = model(*map(mge.Tensor, batch))
    values = result if isinstance(result, (tuple, list)) else [result]
    return [np.asarray(value.numpy()) for value in values]


def _lost(program: Program, exact: _Outputs, rounded: _Outputs) -> _Ratios:
    return {group: ratio for group, ratio in _ratios(program, exact, rounded).items() if ratio < CLEAR_DB}


def _ratios(program: Program, exact: _Outputs, other: _Outputs) -> _Ratios:
    """The ratio of signal to noise of each group of columns, in dB, by numpy in float64.

    An index has the share of equal ones in its place, which is told by +inf from half of them on.
    """
    ratios = {}
    for number, step in program.groups:
        place = program.outputs[number].groups == step
        signal = noise = same = count = 0.0
        for wanted, got in zip(exact, other, strict=True):
            if wanted[number].shape != got[number].shape:
                raise Loss(f"shape: output {number} has {got[number].shape}, not {wanted[number].shape}")
            w, g = wanted[number].astype(np.float64), got[number].astype(np.float64)
            w, g = (
                w[place] if w.shape == place.shape else w.ravel(),
                g[place] if g.shape == place.shape else g.ravel(),
            )
            if wanted[number].dtype.kind in "iu":
                same, count = same + np.sum(w == g), count + w.size
                continue
            both = np.isinf(w) & (w == g)
            w, g = w[~both], g[~both]
            signal, noise = signal + np.sum(w**2), noise + np.sum((w - g) ** 2)
        if count:
            ratios[number, step] = np.inf if same >= count / 2 else 0.0
        elif signal > 1e-20:
            ratios[number, step] = 10 * np.log10(signal / noise) if noise > 0 else np.inf
            if not np.isfinite(noise):
                ratios[number, step] = -np.inf
    return ratios
