"""Files with what stays float in float16, beside float32: ``python -m benchmarks.float16 [NAMES]``.

Each network is calibrated twice with ``float: fp16``: with everything in float, and with layers on integers
where backend tensorrt has them. Both are exported in float16 and in float32, verified in onnxruntime, and
compared there on images that the calibration did not see. ``--write`` stores the rows; ``--every`` takes all
networks of `benchmarks.families`, and prints what stays float32.

``--models`` is the folder of the three networks of the wheel ``rapidocr-onnxruntime``, which are left out
without it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

import qtrace
from benchmarks.families import NETWORKS
from qtrace.comparing.sums import sqnr_db
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.local_session import SessionSettings
from qtrace.onnxfile.sessions import open_session
from qtrace.preparation.float16 import choose_float16, describe_float16
from qtrace.preparation.model import QuantizedModel
from scripts.stored import Float16Row, store, today

__all__ = ["Network", "main", "measure", "networks"]

_IN_FLOAT = {"match": {"name": "*"}, "quantize": False}
_MODES: dict[str, dict[str, Any]] = {
    "float": {"rules": [_IN_FLOAT], "backend": "tensorrt"},
    "int8": {"backend": "tensorrt"},
}
_STORED = (
    "MobileNetV3, 16 wide",
    "ViT, 64 wide",
    "ConvNeXt, 32 wide",
    "U-Net, 16 wide",
    "YOLOX, decoded, 8 wide",
)
_OCR = {
    "PP-OCRv4 detector": ("ch_PP-OCRv4_det_infer.onnx", (2, 3, 160, 160)),
    "PP-OCRv4 recogniser": ("ch_PP-OCRv4_rec_infer.onnx", (2, 3, 48, 160)),
    "line orientation": ("ch_ppocr_mobile_v2.0_cls_infer.onnx", (2, 3, 48, 192)),
}
_SAMPLES = 4


@dataclass(frozen=True)
class Network:
    """A network with its data.

    Attributes:
        name: its name.
        trace: traces or imports it, on the images for the calibration.
        images: returns images by the number of their seed.
    """

    name: str
    trace: Callable[[np.ndarray], TracedModule]
    images: Callable[[int], np.ndarray]


def networks(models: Path | None = None, every: bool = False) -> Iterator[Network]:
    """Yields the networks.

    Args:
        models: the folder of the trained networks; None to leave them out.
        every: whether to yield those that are not stored, too.
    """
    for net in NETWORKS:
        if every or net.name in _STORED:
            yield Network(
                net.name, lambda x, net=net: qtrace.trace(net.module(0), x[:2], check=False), net.images
            )
    for name, (file, shape) in _OCR.items() if models is not None else ():
        path = models / file  # type: ignore[operator]
        yield Network(
            name,
            lambda x, path=path: qtrace.from_onnx(path, {"x": x[:2].shape}),
            lambda seed, shape=shape: _draw_text(seed, *shape[2:]),
        )


def _draw_text(seed: int, height: int, width: int) -> np.ndarray:
    """Returns images with a few words, as the networks that read text take them."""
    rng = np.random.default_rng(seed)
    images = np.full((_SAMPLES, height, width, 3), 235, np.uint8)
    for image in images:
        for line in range(max(1, height // 48)):
            text = "".join(chr(code) for code in rng.integers(65, 91, 8))
            place, grey = (int(rng.integers(2, 12)), 34 + 48 * line), int(rng.integers(0, 90))
            cv2.putText(image, text, place, cv2.FONT_HERSHEY_SIMPLEX, 0.9, (grey, grey, grey), 2)
    return np.ascontiguousarray((images.transpose(0, 3, 1, 2) / 127.5 - 1.0).astype(np.float32))


def measure(network: Network, mode: str, every: bool = False) -> Float16Row:
    """Measures one network in one mode.

    Args:
        network: the network.
        mode: ``float``, or ``int8`` for layers on integers.
        every: whether to print what stays float32, and why.
    """
    x, others = network.images(10)[:_SAMPLES], network.images(20)[:_SAMPLES]
    prepared = qtrace.prepare(network.trace(x), {"float": "fp16", **_MODES[mode]})
    converted = qtrace.convert(qtrace.calibrate(prepared, [x[:2], x[2:]], progress=False))
    choices = choose_float16(QuantizedModel(converted))
    if every:
        print("\n".join(describe_float16(choices)))
    with tempfile.TemporaryDirectory() as folder:
        files = [
            qtrace.export(converted, Path(folder) / f"{kind}.onnx", float=kind) for kind in ("fp32", "fp16")
        ]
        outputs = [_run(file, others[:2]) for file in files]
        report = qtrace.verify(files[1], converted, [others[:2]], runtime="onnxruntime")
        if not report.passed:
            print(report.table())
        sizes = [file.stat().st_size for file in files]
    pairs = [(a, b) for a, b in zip(*outputs, strict=True) if a.dtype.kind == "f"]
    return Float16Row(
        f"{network.name}, {mode}",
        sum(not choice.reason for choice in choices),
        len(choices),
        sizes[0],
        sizes[1],
        min((sqnr_db(a, b) for a, b in pairs), default=float("inf")),
        report.passed,
        today(),
    )


def _run(file: Path, x: np.ndarray) -> list[np.ndarray]:
    session = open_session(file, SessionSettings(False), str(file))
    names = [end.name for end in session.inputs]
    return session.run([end.name for end in session.outputs], {names[0]: x})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the networks that the command line names and prints their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="beginnings of names of networks")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    rows = []
    for network in networks(chosen.models, chosen.every):
        if chosen.names and not network.name.startswith(tuple(chosen.names)):
            continue
        for mode in _MODES:
            began = time.perf_counter()
            rows.append(measure(network, mode, chosen.every))
            print(" | ".join(rows[-1].cells()), f"| {time.perf_counter() - began:.0f} s", flush=True)
    if chosen.write:
        store(rows, Float16Row)


if __name__ == "__main__":
    main()
