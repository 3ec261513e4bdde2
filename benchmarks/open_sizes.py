"""Files with open axes at sizes that were not traced: ``python -m benchmarks.open_sizes [NAMES]``.

Each network is traced with its batch, height and width open, rounded to nearest wherever the target can, and
exported; the graph and onnxruntime run the file op by op at four other sizes. ``--speed`` measures the file
at the traced size, beside one that has numbers in the place of open axes, in turns.

``--models`` is the folder of the three networks of the wheel ``rapidocr-onnxruntime``, which are left out
without it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from qtrace.benchmarking.files import Speed, compare_files
from qtrace.benchmarking.runners import RunnerSettings
from qtrace.graph.types import TracedModule
from tests.zoo.catalog import CNN
from tests.zoo.detectors.entry import trained
from tests.zoo.detectors.yolo import Yolox
from tests.zoo.transformers.vit import Vit

__all__ = ["NETWORKS", "Checked", "Network", "check", "main", "networks", "quantized"]

_CONFIG = {"backend": "onnxruntime"}
# Network -> its file, the traced size, and the others.
_OCR = {
    "PP-OCRv4 detector": (
        "ch_PP-OCRv4_det_infer.onnx",
        (160, 160),
        ((96, 224), (192, 96), (64, 320), (256, 128)),
    ),
    "PP-OCRv4 recogniser": (
        "ch_PP-OCRv4_rec_infer.onnx",
        (48, 160),
        ((48, 96), (48, 200), (48, 320), (48, 64)),
    ),
    "line orientation": (
        "ch_ppocr_mobile_v2.0_cls_infer.onnx",
        (48, 96),
        ((48, 64), (48, 192), (64, 96), (64, 160)),
    ),
}
_ZOO = (
    *(
        "unet_transposed",
        "bisenet",
        "resnet_bottleneck",
        "mobilenet_v2_relu6",
        "mobilenet_v3",
        "shufflenet_v2",
    ),
    *("regnet_y", "efficientnet_b0", "repvgg_deploy", "hrnet", "densenet", "ghostnet", "deeplab"),
)
_BATCHES = (1, 3, 5, 4)


@dataclass(frozen=True)
class Network:
    """A network, and the sizes at which its file runs.

    Attributes:
        name: its name.
        trace: traces or imports it on inputs of a shape, with open axes, or with none but the batch.
        shape: the traced shape.
        others: four other shapes.
    """

    name: str
    trace: Callable[[tuple[int, ...], bool], TracedModule]
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Checked:
    """What was found of a network.

    Attributes:
        name: its name.
        worst: the largest difference of an integer, in LSB, op by op, at the other sizes.
        equal: the share of equal integers there.
        passed: whether `qtrace.verify` passed.
        speed: the file at the traced size beside that with numbers; None if it was not measured.
        seconds: how long it took.
    """

    name: str
    worst: int
    equal: float
    passed: bool
    speed: Speed | None
    seconds: float

    def row(self) -> str:
        """Returns the line of a table."""
        speed = (
            ""
            if self.speed is None
            else f"{self.speed.ratio:.3f} ({self.speed.low:.3f} to {self.speed.high:.3f})"
        )
        word = "" if self.passed else ", not passed"
        return f"| {self.name} | {self.worst} LSB{word} | {self.equal:.4%} | {speed} |"


def _importer(path: Path) -> Callable[[tuple[int, ...], bool], TracedModule]:
    def trace(shape: tuple[int, ...], opened: bool) -> TracedModule:
        return qtrace.from_onnx(path, {"x": shape}, fixed=not opened)

    return trace


def _tracer(build: Callable[[], Any], axes: Sequence[int] = (0, 2, 3)) -> Callable[..., TracedModule]:
    def trace(shape: tuple[int, ...], opened: bool) -> TracedModule:
        names = {axis: "NCHW"[axis] for axis in axes}
        return qtrace.trace(build(), _pictures(shape, 0), dynamic={"x": names} if opened else None)

    return trace


def _of_zoo(name: str) -> Network:
    entry = next(entry for entry in CNN if entry.name == name)
    sizes = ((64, 96), (96, 64), (128, 64), (64, 160))
    shape, others = (2, *entry.input_shape), tuple(zip(_BATCHES, sizes, strict=True))
    channels = entry.input_shape[0]
    return Network(name, _tracer(entry.build), shape, tuple((n, channels, *size) for n, size in others))


def networks(models: Path | None = None) -> Iterator[Network]:
    """Yields the networks.

    Args:
        models: the folder of the networks that read text; None to leave these out.
    """
    for name, (file, size, others) in _OCR.items() if models is not None else ():
        assert models is not None
        shapes = tuple((n, 3, *other) for n, other in zip((1, 2, 1, 2), others, strict=True))
        yield Network(name, _importer(models / file), (1, 3, *size), shapes)
    boxes = ((1, 3, 96, 64), (2, 3, 64, 128), (3, 3, 128, 96), (2, 3, 160, 64))
    yield Network("yolox", _tracer(lambda: trained(Yolox())), (2, 3, 64, 64), boxes)
    # A table of positions fixes height and width.
    batches = tuple((n, 3, 32, 32) for n in _BATCHES)
    yield Network("vit", _tracer(lambda: trained(Vit()), (0,)), (2, 3, 32, 32), batches)
    yield from map(_of_zoo, _ZOO)


NETWORKS = (*_OCR, "yolox", "vit", *_ZOO)


def quantized(network: Network, folder: Path, opened: bool) -> tuple[Path, TracedModule]:
    """Writes the quantized file of a network; returns it with the converted graph."""
    traced = network.trace(network.shape, opened)
    prepared = qtrace.prepare(traced, _CONFIG)
    data = [_pictures(network.shape, seed) for seed in (1, 2)]
    converted = qtrace.convert(qtrace.calibrate(prepared, data, progress=False))
    return qtrace.export(converted, folder / f"{'open' if opened else 'fixed'}.onnx"), converted


def check(network: Network, folder: Path, seconds: float = 0.0) -> Checked:
    """Verifies the file of a network at the other sizes.

    Args:
        network: the network.
        folder: where its files are written.
        seconds: how long to measure its speed; 0 not to measure it.
    """
    start = time.perf_counter()
    path, converted = quantized(network, folder, True)
    batches = [_pictures(shape, seed) for seed, shape in enumerate(network.others, 3)]
    report = qtrace.verify(path, converted, batches)
    speed = None
    if seconds:
        fixed, _ = quantized(network, folder, False)
        (info,) = converted.graph.inputs[1:]
        settings = RunnerSettings(threads=1, shapes={info.name: network.shape})
        speed = compare_files([fixed, path], settings=settings, seconds=seconds, most=10 * seconds)[1]
    taken = time.perf_counter() - start
    return Checked(network.name, report.worst_lsb(), report.equal_share(), report.passed, speed, taken)


def _pictures(shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns 1 if an integer differs by more than one LSB."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.open_sizes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NETWORKS)}; all without")
    parser.add_argument("--models", type=Path, help="the folder of the networks that read text")
    parser.add_argument("--speed", action="store_true", help="measure the file at the traced size, too")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to measure each pair of files")
    options = parser.parse_args(arguments)
    unknown = sorted({*options.names} - {*NETWORKS})
    if unknown:
        parser.error(f"there is no network {unknown[0]!r}: choose of {', '.join(NETWORKS)}")
    warnings.simplefilter("ignore")
    failed = False
    print("| network | worst integer | equal | open, beside fixed |\n| --- | --- | --- | --- |")
    for network in networks(options.models):
        if options.names and network.name not in options.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = check(network, Path(folder), options.seconds if options.speed else 0.0)
        failed |= result.worst > 1 or not result.passed
        print(result.row(), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
