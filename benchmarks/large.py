"""Peak memory of each stage on a large network: ``python -m benchmarks.large [--megabytes N] [--one-call]``.

The network is a stack of MatMul, Gemm and Conv nodes whose weights lie in a file beside the ONNX file, as
protobuf demands from 2 GB on. The peak of a stage is that of the resident memory, less what the process took
before the first one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

__all__ = ["Layout", "Peaks", "load_libraries", "main", "resident", "restart_peak", "write_network"]

_MB = 1e6


@dataclass(frozen=True)
class Layout:
    """The sizes of a network.

    Attributes:
        megabytes: the least size of its weights in float32.
        width: the number of features of each layer.
    """

    megabytes: float = 3000.0
    width: int = 4096


class _Weights:
    """A file of float32 tensors that is written one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.random = np.random.default_rng(0)
        path.write_bytes(b"")

    def add(self, name: str, shape: tuple[int, ...], deviation: float) -> TensorProto:
        """Writes normal numbers and returns the tensor that refers to them."""
        values = self.random.standard_normal(shape, np.float32) * np.float32(deviation)
        with self.path.open("ab") as file:
            values.tofile(file)
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        entries = {"location": self.path.name, "offset": self.size, "length": values.nbytes}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        self.size += values.nbytes
        return tensor


def write_network(path: Path, layout: Layout) -> int:
    """Writes a network with the input ``x`` of (N, width).

    Args:
        path: the ONNX file; its weights are in ``NAME.data`` beside it.
        layout: its sizes.

    Returns:
        The bytes of its weights.
    """
    weights, width = _Weights(path.with_name(f"{path.name}.data")), layout.width
    nodes, stored, value = [], [], "x"
    deviation, number = (2 / width) ** 0.5, 0
    while weights.size < layout.megabytes * _MB:
        name = f"layer{number}"
        if number % 3 == 2:  # a convolution of one position
            stored.append(helper.make_tensor(f"{name}.map", TensorProto.INT64, [4], [0, width, 1, 1]))
            stored.append(helper.make_tensor(f"{name}.row", TensorProto.INT64, [2], [0, width]))
            stored.append(weights.add(f"{name}.weight", (width, width, 1, 1), deviation))
            nodes.append(helper.make_node("Reshape", [value, f"{name}.map"], [f"{name}.mapped"]))
            nodes.append(helper.make_node("Conv", [f"{name}.mapped", f"{name}.weight"], [f"{name}.conv"]))
            nodes.append(helper.make_node("Reshape", [f"{name}.conv", f"{name}.row"], [f"{name}.out"]))
        elif number % 3 == 1:
            stored.append(weights.add(f"{name}.weight", (width, width), deviation))
            stored.append(weights.add(f"{name}.bias", (width,), 0.01))
            inputs = [value, f"{name}.weight", f"{name}.bias"]
            nodes.append(helper.make_node("Gemm", inputs, [f"{name}.out"], transB=1))
        else:
            stored.append(weights.add(f"{name}.weight", (width, width), deviation))
            nodes.append(helper.make_node("MatMul", [value, f"{name}.weight"], [f"{name}.out"]))
        value = f"{name}.relu"
        nodes.append(helper.make_node("Relu", [f"{name}.out"], [value]))
        number += 1
    kinds = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", width]) for n in ("x", value)]
    graph = helper.make_graph(nodes, "large", kinds[:1], kinds[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return weights.size


class Peaks:
    """Measures the peak of resident memory of stages, beyond that at the beginning.

    Attributes:
        seconds: stage -> its seconds.
        peaks: stage -> the bytes of its peak.
        after: stage -> the bytes that stay.
    """

    def __init__(self) -> None:
        self._base = resident("VmRSS")
        self.peaks: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the block."""
        restart_peak()
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self.peaks[name] = resident("VmHWM") - self._base
        self.after[name] = resident("VmRSS") - self._base
        print(f"{name}: {self.peaks[name] / _MB:,.0f} MB, {self.seconds[name]:.0f} s", flush=True)

    def table(self, weights: int) -> str:
        """Returns the peaks as a table, beside the bytes of the weights."""
        lines = [
            "| stage | peak, MB | of the weights | stays, MB | seconds |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, peak in self.peaks.items():
            lines.append(
                f"| {name} | {peak / _MB:,.0f} | {peak / weights:.2f} | {self.after[name] / _MB:,.0f} "
                f"| {self.seconds[name]:.0f} |"
            )
        return "\n".join(lines)


def restart_peak() -> None:
    """Lets the peak of the resident memory of this process begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(key: str) -> int:
    """Returns a line of the kernel's account of this process's memory, in bytes.

    Args:
        key: ``VmRSS`` for the present memory, ``VmHWM`` for its peak.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=3000.0, help="the weights in float32")
    parser.add_argument("--width", type=int, default=4096, help="features of each layer")
    parser.add_argument("--samples", type=int, default=32, help="of the calibration, eight a batch")
    parser.add_argument("--one-call", action="store_true", help="qtrace.quantize, not the single stages")
    parser.add_argument("--recipe", help="a recipe; the default of onnxruntime without")
    parser.add_argument("--folder", type=Path, help="where the files are written; a temporary folder without")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="qtrace-large-", dir=options.folder) as folder:
        source = Path(folder) / "net.onnx"
        size = write_network(source, Layout(options.megabytes, options.width))
        samples = np.random.default_rng(1).standard_normal((options.samples, options.width), np.float32)
        peaks = _one_call(source, samples, options) if options.one_call else _stages(source, samples, options)
        print(f"{size / _MB:,.0f} MB of weights\n\n{peaks.table(size)}")


def load_libraries() -> Any:
    """Loads what takes memory of its own, and returns qtrace."""
    import megengine as mge
    import onnxruntime

    import qtrace

    for name in ("from_onnx", "prepare", "calibrate", "export", "verify", "quantize"):
        getattr(qtrace, name)
    mge.functional.matmul(mge.Tensor([[1.0]]), mge.Tensor([[1.0]])).numpy()
    assert onnxruntime.__version__
    return qtrace


def _one_call(source: Path, samples: np.ndarray, options: Any) -> Peaks:
    """Measures the one call, with its stages as it reports them."""
    qtrace = load_libraries()
    peaks = Peaks()
    with peaks.stage("quantize"):
        out = source.with_name("net-int8.onnx")
        result = qtrace.quantize(source, samples, out, recipe=options.recipe, progress=False)
    print(result, result.seconds, sep="\n")
    return peaks


def _stages(source: Path, samples: np.ndarray, options: Any) -> Peaks:
    """Measures the stages one by one, as a script that keeps the float network has them."""
    qtrace = load_libraries()
    batches = [samples[start : start + 8] for start in range(0, len(samples), 8)]
    out, peaks = source.with_name("net-int8.onnx"), Peaks()
    with peaks.stage("from_onnx"):
        traced = qtrace.from_onnx(source, {"x": (8, options.width)})
    with peaks.stage("prepare"):
        prepared = qtrace.prepare(traced, options.recipe, samples=batches, progress=False)
    with peaks.stage("calibrate"):
        qtrace.calibrate(prepared, batches, progress=False)
    with peaks.stage("convert"):
        converted = qtrace.convert(prepared)
    with peaks.stage("export"):
        qtrace.export(converted, out)
    with peaks.stage("verify"):
        report = qtrace.verify(out, converted, batches[:2])
    print(f"verify {'passed' if report.passed else 'failed'}")
    with peaks.stage("export the float network"):
        qtrace.export(traced, source.with_name("float.onnx"))
    return peaks


if __name__ == "__main__":
    main()
