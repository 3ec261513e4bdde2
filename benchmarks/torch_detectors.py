"""Tries `qtrace.from_torch` on torchvision's detectors whole, selections included, with random weights.

    python -m benchmarks.torch_detectors fasterrcnn_mobilenet_v3_large_320_fpn   # minutes
    python -m benchmarks.torch_detectors               # SSDLite too, whose classes select one by one

A detector branches on values of the data, so torch's newer exporter refuses it: its trace is imported. Each
is compared with the trace on another image, converted by the recipe ``backend/onnxruntime``, exported and
verified. Norms have the statistics of a batch. No score is too low to be selected.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["DETECTORS", "main", "measure"]

DETECTORS = {"ssdlite320_mobilenet_v3_large": 320, "fasterrcnn_mobilenet_v3_large_320_fpn": 320}
"""Name in torchvision -> height and width of the images."""

_SELECTING = ("NonZero", "NonMaxSuppression", "RoiAlign", "TopK")


def _traced(name: str, size: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the trace of a detector with its example, and another image."""
    import torch
    import torchvision

    class Tensors(torch.nn.Module):
        def __init__(self, detector: Any) -> None:
            super().__init__()
            self.detector = detector

        def forward(self, image: Any) -> Any:
            result = self.detector([image[0]])[0]
            return result["boxes"], result["scores"], result["labels"]

    def settle(norm: Any, inputs: Any) -> None:
        """Gives a norm the statistics of what it reads: the numbers of a random network explode without."""
        norm.running_mean.copy_(inputs[0].mean((0, 2, 3)))
        norm.running_var.copy_(inputs[0].var((0, 2, 3)))

    torch.manual_seed(0)
    options = {"score_thresh": 0.0} if name.startswith("ssd") else {"box_score_thresh": 0.0}
    detector = torchvision.models.get_model(name, weights=None, weights_backbone=None, **options)
    detector.eval()
    hooks = [
        module.register_forward_pre_hook(settle)
        for module in detector.modules()
        if "running_var" in dict(module.named_buffers(recurse=False))
    ]
    with torch.no_grad():
        detector.backbone(torch.rand(4, 3, size, size))
    for hook in hooks:
        hook.remove()
    first, second = torch.rand(2, 1, 3, size, size)
    return torch.jit.trace(Tensors(detector), first), first.numpy(), second.numpy()


def measure(name: str, size: int) -> str:
    """Imports, converts and verifies a detector; returns what came of it as a row."""
    import megengine as mge
    import onnx
    import torch

    import qtrace
    from qtrace import process
    from qtrace.errors import QtraceError

    process.quiet()
    mge.config.async_level = 0
    torch.set_num_threads(1)
    start = time.perf_counter()
    script, image, other = _traced(name, size)
    try:
        traced = qtrace.from_torch(script, image, dynamic={})
        with torch.no_grad():
            expected = [tensor.numpy() for tensor in script(torch.from_numpy(other))]
        results = [tensor.numpy() for tensor in traced(mge.Tensor(other))]
        shapes = [array.shape for array in results]
        if shapes != [array.shape for array in expected]:
            return f"{name} | {shapes} rows, torch selects {[array.shape for array in expected]}"
        error = max(
            float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-9)
            for a, b in zip(results, expected, strict=True)
        )
        prepared = qtrace.prepare(traced, "backend/onnxruntime")
        qtrace.calibrate(prepared, [image], progress=False)
        converted = qtrace.convert(prepared)
        with tempfile.TemporaryDirectory() as folder:
            file = qtrace.export(converted, Path(folder) / "detector.onnx")
            kept = Counter(node.op_type for node in onnx.load(file).graph.node)
            report = qtrace.verify(file, converted, [other])
    except QtraceError as refusal:
        return f"{name} | {refusal}"
    selecting = ", ".join(f"{kept[op]} {op}" for op in _SELECTING if op in kept)
    verdict = "verified" if report.passed else str(report).splitlines()[-1]
    seconds = time.perf_counter() - start
    return f"{name} | {shapes[0][0]} boxes | off by {error:.1e} | {selecting} | {verdict} | {seconds:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="all without names")
    options = parser.parse_args(arguments)
    for name in options.names or DETECTORS:
        print(measure(name, DETECTORS[name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
