"""Files of torch's networks beside those of onnxruntime.quantization: their time in turns, and their noise.

    python -m benchmarks.torch_files googlenet mobilevitv2_050     # some networks; all without names

Needs torch, torchvision and timm. Weights and samples are random, and norms have seen such samples: the noise
tells files of one network apart and says nothing of its task. torch exports a network; the default
recipe, ``placement: fastest`` and onnxruntime.quantization (MinMax, int8 by channel) quantize that file. All
files run in onnxruntime on one thread, in turns: a speed is the processor time of float / that of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qtrace

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from benchmarks.accuracy.peers import quantize_by_onnxruntime  # noqa: E402
from benchmarks.deployed.judging import File  # noqa: E402
from benchmarks.timing import run_interleaved  # noqa: E402
from benchmarks.torch_families import TorchNetwork  # noqa: E402
from qtrace.benchmarking.prediction import predict, read_graph  # noqa: E402
from qtrace.benchmarking.runners import describe_machine  # noqa: E402
from qtrace.comparing.sums import ErrorSums  # noqa: E402
from qtrace.costs import CostTable  # noqa: E402

__all__ = ["FileRow", "main", "measure", "read", "table"]

RESULTS = Path(__file__).parent / "results" / "torch_files.json"
SPEECH = "speech"
_IMAGE_NETS = (
    "googlenet mobilevitv2_050 tf_efficientnet_lite0 mobilenetv4_conv_small pvt_v2_b0 mobilevit_xxs "
    "convnext_atto edgenext_xx_small resnet18 squeezenet1_1 mobilenet_v2 mobilenet_v3_small mnasnet0_5 "
    "shufflenet_v2_x0_5 regnet_x_400mf regnet_y_400mf densenet121 efficientnet_b0 seresnet18 lcnet_035 "
    "ghostnet_050 repvgg_a0 vit_tiny_patch16_224 starnet_s1 poolformer_s12"
)
NETS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_IMAGE_NETS.split(), (3, 64, 64)),
    SPEECH: (1, 300, 120),
}
"""Network -> the shape of a sample."""
FLOAT, PEER = "float", "onnxruntime.quantization"
_PLACEMENTS = ("balanced", "fastest")
_CALIBRATED, _TESTED, _ROUNDS, _TURN_SECONDS = 16, 8, 15, 0.02


@dataclass(frozen=True)
class FileRow:
    """One file of a network.

    Attributes:
        net: the network.
        file: who quantized it, and how.
        speed: time of float / time of the file.
        predicted: the same by the table of costs that is fitted to the processor.
        db: the SQNR of the outputs.
        processor: the processor.
    """

    net: str
    file: str
    speed: float
    predicted: float
    db: float
    processor: str


def measure(name: str, folder: Path) -> list[FileRow]:
    """Quantizes a network and measures its files, which are left in ``folder``."""
    shape = NETS[name]
    exact = _export(name, folder / "float.onnx")
    samples = np.random.default_rng(0).standard_normal((_CALIBRATED + _TESTED, 1, *shape), np.float32)
    calibration, test = samples[:_CALIBRATED], samples[_CALIBRATED:]
    files = {}
    for placement in _PLACEMENTS:
        recipe = {**qtrace.load_recipe("int8").to_dict(), "placement": placement}
        files[placement] = folder / f"{placement}.onnx"
        options: dict[str, Any] = {"recipe": recipe, "verify": False, "allow_broken": True, "force": True}
        qtrace.quantize(exact, list(calibration), files[placement], progress=False, **options)
    peer = quantize_by_onnxruntime(exact, calibration[:, 0], "MinMax", folder)
    if peer.file is not None:
        files[PEER] = peer.file
    return list(_measure_files(name, exact, files, test))


def _export(name: str, path: Path) -> Path:
    """Writes the float file, for samples one by one."""
    import torch

    shape = NETS[name]
    module = _settle(_build(name, shape[-1]), shape)
    with torch.no_grad():
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "input_names": ["x"]}
        torch.onnx.export(module, (torch.zeros(1, *shape),), str(path), **options)
    return path


def _build(name: str, size: int) -> Any:
    import torchvision

    if name == SPEECH:
        return _speech()
    package = "torchvision" if name in torchvision.models.list_models() else "timm"
    return TorchNetwork(name, package, size).build()


def _speech() -> Any:
    """Makes a judge of speech of the shape of DNSMOS: convolutions and max poolings over a spectrogram."""
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs, pools in ((1, 128, False), (128, 64, True), (64, 64, True), (64, 32, True)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pools else []
    head = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def _settle(module: Any, shape: Sequence[int]) -> Any:
    """Draws weights of layers anew, and lets norms see samples, so that values neither vanish nor grow."""
    import torch

    torch.manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    module.eval()
    for norm in module.modules():
        if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm):
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all batches
            norm.train()
    with torch.no_grad():
        for _ in range(2):
            module(torch.randn(8, *shape))
    return module.eval()


def _measure_files(net: str, exact: Path, paths: dict[str, Path], test: np.ndarray) -> Iterator[FileRow]:
    files = {name: File(path) for name, path in {FLOAT: exact, **paths}.items()}
    runs = max(1, math.ceil(_TURN_SECONDS / _seconds(files[FLOAT], test[0])))
    samples = run_interleaved({n: _turn(f, test[0], runs) for n, f in files.items()}, _ROUNDS, warm_up=3)
    machine = describe_machine("onnxruntime", "onnxruntime", 1)
    costs, processor = CostTable.for_machine(machine), machine.processor
    # The float file as onnxruntime's tool has prepared it: constants are folded, so that shapes are known.
    prepared = paths[PEER].with_suffix(".prepared.onnx") if PEER in paths else exact
    shapes = {"x": test[0].shape}
    in_float = predict(read_graph(prepared, shapes), costs).seconds
    for name, path in paths.items():
        predicted = in_float / predict(read_graph(path, shapes), costs).seconds
        speed, db = samples.ratio(FLOAT, name).cpu, _noise(files[FLOAT], files[name], test)
        yield FileRow(net, name, round(speed, 3), round(predicted, 3), round(db, 1), processor)


def _noise(exact: File, file: File, test: np.ndarray) -> float:
    sums = ErrorSums()
    for sample in test:
        for reference, output in zip(exact.run(sample), file.run(sample), strict=True):
            sums.add(reference, output)
    return float(sums.sqnr_db)


def _seconds(file: File, sample: np.ndarray) -> float:
    file.run(sample)
    start = time.process_time()
    file.run(sample)
    return max(time.process_time() - start, 1e-5)


def _turn(file: File, sample: np.ndarray, runs: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(runs):
            file.run(sample)

    return run


def table(rows: Sequence[FileRow]) -> str:
    """Returns the rows as a table of Markdown."""
    lines = [
        "| network | file | measured | predicted | SQNR dB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shape = "x".join(str(n) for n in NETS[row.net])
        cells = f"{row.speed:.2f}x | {row.predicted:.2f}x | {row.db:.1f}"
        lines.append(f"| {row.net} {shape} | {row.file} | {cells} |")
    return "\n".join(lines)


def read(path: Path = RESULTS) -> list[FileRow]:
    """Reads the stored rows; none if there is no file."""
    if not path.exists():
        return []
    return [FileRow(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures networks, stores their rows, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NETS)}; all without")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the files there")
    options = parser.parse_args(arguments)
    for name in options.names or NETS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / name
            folder.mkdir(parents=True, exist_ok=True)
            own = measure(name, folder)
        rows = sorted([r for r in read() if r.net != name] + own, key=lambda r: list(NETS).index(r.net))
        RESULTS.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")
        print(table(own), flush=True)


if __name__ == "__main__":
    main()
