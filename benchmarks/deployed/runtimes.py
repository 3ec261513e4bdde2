"""Measures networks in OpenVINO and LiteRT: ``python -m benchmarks.deployed.runtimes``.

Each network becomes int8 by qtrace's placements for the runtime, and by NNCF for OpenVINO. Speed is the time
of the float file / that of the file, in turns; noise compares the outputs with float's in the same runtime.
``--net``, ``--runtime`` and ``--only`` measure a part, whose rows replace the stored ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import qtrace

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from benchmarks import machine  # noqa: E402
from benchmarks.accuracy.peers import quantize_by_nncf  # noqa: E402
from benchmarks.deployed import networks  # noqa: E402
from benchmarks.timing import run_interleaved  # noqa: E402
from qtrace.comparing.sums import ErrorSums  # noqa: E402
from qtrace.display import format_table  # noqa: E402
from qtrace.onnxfile.kernels import products_saturate  # noqa: E402
from qtrace.preparation.model import QuantizedModel  # noqa: E402

__all__ = ["NETS", "RESULTS", "RUNTIMES", "RuntimeRow", "merged", "read", "table"]

RESULTS = Path(__file__).parent.parent / "results" / "runtimes.json"
NETS = ("recogniser", "detector", "classifier", "ResNet-18 96", "MobileNetV2 96")
RUNTIMES = {"openvino": ("openvino", ".onnx"), "litert": ("tflite", ".tflite")}
"""Runtime -> backend and suffix."""
NNCF = {"NNCF, fast bias correction": "fast", "NNCF, full bias correction": "full"}
PLACEMENTS = ("balanced", "fastest", "everything")
VARIANTS = (*PLACEMENTS, *NNCF)
_ROUNDS, _WARM_UP, _TESTED, _CALIBRATED, _VERIFIED = 15, 3, 24, 32, 2
_NNCF_BATCH = 4


@dataclass(frozen=True)
class RuntimeRow:
    """One file in one runtime.

    Attributes:
        net: the network.
        runtime: the runtime.
        variant: how it was quantized.
        sqnr: ratio of the float outputs to their error, in dB; None without a file.
        speed: time of float / time of the file on one thread: median, smallest and largest.
        milliseconds: median time of a run.
        float_milliseconds: median time of a run in float.
        worst_lsb: largest difference of an integer between graph and file, op by op; None for NNCF.
        equal: share of equal integers, op by op.
        mode: the placement that was chosen.
        reason: why there is no file; "" if there is one.
        load: the load average of the machine before this row.
    """

    net: str
    runtime: str
    variant: str
    sqnr: float | None = None
    speed: Sequence[float] = field(default_factory=tuple)
    milliseconds: float | None = None
    float_milliseconds: float | None = None
    worst_lsb: int | None = None
    equal: float | None = None
    mode: str = ""
    reason: str = ""
    load: float | None = None


class _File(Protocol):
    def set(self, batch: np.ndarray) -> None:
        """Sets the input."""

    def invoke(self) -> None:
        """Runs the file."""

    def outputs(self) -> list[np.ndarray]:
        """Returns the outputs as floats."""


class _Openvino:
    def __init__(self, path: Path, shape: Sequence[int]) -> None:
        import openvino

        core = openvino.Core()
        model = core.read_model(str(path))
        model.reshape({model.inputs[0].get_any_name(): list(shape)})
        options = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": "1",
        }
        self._request = core.compile_model(model, "CPU", options).create_infer_request()
        self._openvino = openvino

    def set(self, batch: np.ndarray) -> None:
        self._request.set_input_tensor(self._openvino.Tensor(np.ascontiguousarray(batch)))

    def invoke(self) -> None:
        self._request.infer()

    def outputs(self) -> list[np.ndarray]:
        return [np.array(tensor.data) for tensor in self._request.output_tensors]


class _Litert:
    def __init__(self, path: Path, shape: Sequence[int]) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._loaded = Interpreter(str(path), num_threads=1)
        self._loaded.allocate_tensors()
        (self._input,) = self._loaded.get_input_details()

    def set(self, batch: np.ndarray) -> None:
        if tuple(self._input["shape"]) != batch.shape:
            batch = np.ascontiguousarray(batch.transpose(0, 2, 3, 1))
        self._loaded.set_tensor(self._input["index"], batch)

    def invoke(self) -> None:
        self._loaded.invoke()

    def outputs(self) -> list[np.ndarray]:
        return [self._loaded.get_tensor(d["index"]).copy() for d in self._loaded.get_output_details()]


_FILES = {"openvino": _Openvino, "litert": _Litert}


def measure(name: str, runtime: str, variants: Sequence[str], nncf: str | None) -> Iterable[RuntimeRow]:
    """Yields the rows of a network in a runtime.

    Args:
        name: the network.
        runtime: the runtime.
        variants: the variants to measure.
        nncf: an interpreter that has NNCF; None for none.
    """
    network = networks.load(name)
    backend, suffix = RUNTIMES[runtime]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            exact = _open(runtime, qtrace.export(network.traced, folder / f"float{suffix}"), network)
        except qtrace.QtraceError as error:
            yield from (RuntimeRow(name, runtime, v, reason=f"no float file: {error}") for v in variants)
            return
        for variant in variants:
            print(f"{name}: {runtime}, {variant}", file=sys.stderr, flush=True)
            row = RuntimeRow(name, runtime, variant, load=machine.load())
            try:
                if variant in NNCF:
                    if runtime != "openvino" or nncf is None:
                        continue
                    file = _quantize_by_nncf(network, variant, folder, nncf)
                else:
                    file = folder / f"{variant}{suffix}"
                    row = _quantize(row, network, backend, file)
            except qtrace.QtraceError as error:
                yield dataclasses.replace(row, reason=" ".join(str(error).split())[:200])
                continue
            yield _judge(row, exact, _open(runtime, file, network), network.test[:_TESTED])


def _open(runtime: str, path: Path, network: networks.Network) -> _File:
    return _FILES[runtime](path, network.test[:1].shape)


def _quantize(row: RuntimeRow, network: networks.Network, backend: str, file: Path) -> RuntimeRow:
    """Writes a file of qtrace and adds its parity to a row."""
    config: dict[str, Any] = qtrace.load_recipe("int8").to_dict()
    if not network.trained:
        config = {"observers": {"activation": "minmax", "weight": "minmax"}}
    if backend == "tflite":  # its kernels write no floats
        config["rules"] = [rule for rule in config.get("rules", ()) if "quantize_output" not in rule]
    if backend == "openvino" and products_saturate():
        target = qtrace.load_recipe("backend/openvino_avx2").to_dict()
        config["weight"] = target["weight"]
        config["rules"] = [*config.get("rules", ()), *target["rules"]]
    config.update(backend=backend, placement=row.variant)
    batches = [network.calibration[i : i + 1] for i in range(min(_CALIBRATED, len(network.calibration)))]
    prepared = qtrace.prepare(network.traced, config, samples=batches)
    qtrace.calibrate(prepared, batches, progress=False)
    converted = qtrace.convert(prepared)
    qtrace.export(converted, file)
    report = qtrace.verify(
        file,
        converted,
        [network.test[i : i + 1] for i in range(_VERIFIED)],
        runtime=row.runtime,
        optimized=False,
    )
    tallies = report.sites["op_by_op"].values()
    values = sum(tally.values for tally in tallies)
    note = QuantizedModel(prepared, "prepared").annotation.placement
    return dataclasses.replace(
        row,
        worst_lsb=max((tally.worst for tally in tallies), default=0),
        equal=sum(tally.equal for tally in tallies) / values if values else 1.0,
        mode=note.mode if note else "everything",
    )


def _quantize_by_nncf(network: networks.Network, variant: str, folder: Path, nncf: str) -> Path:
    model = qtrace.export(network.traced, folder / "float.onnx")
    (peer,) = quantize_by_nncf(
        model, network.calibration[:_CALIBRATED], folder, nncf, kinds=(NNCF[variant],), batch=_NNCF_BATCH
    )
    if peer.file is None:
        raise qtrace.ExportError(peer.reason)
    return peer.file


def _judge(row: RuntimeRow, exact: _File, file: _File, test: np.ndarray) -> RuntimeRow:
    """Adds noise and speed to a row."""
    sums = ErrorSums()
    for index in range(len(test)):
        for each in (exact, file):
            each.set(test[index : index + 1])
            each.invoke()
        for reference, output in zip(exact.outputs(), file.outputs(), strict=True):
            sums.add(reference, output)
    samples = run_interleaved({"float": exact.invoke, "file": file.invoke}, _ROUNDS, warm_up=_WARM_UP)
    ratio = samples.ratio("float", "file")
    return dataclasses.replace(
        row,
        sqnr=float(sums.sqnr_db),
        speed=(ratio.median, ratio.low, ratio.high),
        milliseconds=samples.seconds("file", 1e-3).median,
        float_milliseconds=samples.seconds("float", 1e-3).median,
    )


def merged(stored: Iterable[RuntimeRow], new: Iterable[RuntimeRow]) -> list[RuntimeRow]:
    """Returns the stored rows with the new ones in the place of those of the same network and variant."""
    rows = {(row.net, row.runtime, row.variant): row for row in (*stored, *new)}
    order = [(net, runtime, variant) for runtime in RUNTIMES for net in NETS for variant in VARIANTS]
    return [rows[key] for key in order if key in rows]


def read(file: Path) -> list[RuntimeRow]:
    """Reads the stored rows; none if there is no file."""
    if not file.exists():
        return []
    return [RuntimeRow(**row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


HEADERS = ("network", "runtime", "variant", "SQNR, dB", "speed against float", "ms", "worst LSB", "equal")


def table(rows: Iterable[RuntimeRow]) -> str:
    """Returns the rows as text."""
    return format_table(HEADERS, [cells(row) for row in rows], max_width=None)


def cells(row: RuntimeRow) -> tuple[str, ...]:
    """Returns the cells of a row of the table."""
    if row.reason:
        reason = f"no file: {row.reason[:60]}"
        return (row.net, row.runtime, row.variant, reason, *[""] * (len(HEADERS) - 4))
    return (
        row.net,
        row.runtime,
        row.variant,
        "" if row.sqnr is None else f"{row.sqnr:.1f}",
        "{:.2f}x ({:.2f}..{:.2f})".format(*row.speed) if row.speed else "",
        "" if row.milliseconds is None else f"{row.milliseconds:.2f}",
        "" if row.worst_lsb is None else str(row.worst_lsb),
        "" if row.equal is None else f"{row.equal:.4%}",
    )


def main(arguments: list[str] | None = None) -> int:
    """Measures, stores and prints rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployed.runtimes", description=__doc__)
    parser.add_argument("--net", action="append", choices=NETS, help="one network; may be repeated")
    parser.add_argument("--runtime", action="append", choices=tuple(RUNTIMES), help="one runtime")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="one variant; may be repeated")
    parser.add_argument("--nncf", metavar="PYTHON", help="an interpreter that has NNCF")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are kept")
    parser.add_argument("--table", action="store_true", help="only print the stored rows")
    options = parser.parse_args(arguments)
    if not options.table:
        for runtime in options.runtime or RUNTIMES:
            for net in options.net or NETS:
                for row in measure(net, runtime, options.only or VARIANTS, options.nncf):
                    rows = merged(read(options.json), [row])
                    document = {"machine": machine.facts(), "rows": [asdict(each) for each in rows]}
                    options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(table(read(options.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
