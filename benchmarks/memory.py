"""Peak memory of a calibration beside that of float forwards, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.rows import Row, Size
from benchmarks.timing import Sample, Spread

__all__ = ["run"]

_TARGET = 1.15

# Arguments: what to do, width, shape of a batch.
_PROGRAM = """
import ast, sys, warnings

warnings.filterwarnings("ignore")
work, width, shape = sys.argv[1], int(sys.argv[2]), ast.literal_eval(sys.argv[3])

import qtrace
from benchmarks.nets import ResNet18, image_batches, settle

batches = image_batches(3, shape)
net = settle(ResNet18(width), image_batches(1, (2, *shape[1:]))[0])
traced = qtrace.trace(net, batches[0][:1], check=False)
if work == "forward":
    for batch in batches:
        net(batch).numpy()
else:
    kind, observer = work.split()
    prepared = qtrace.prepare(traced, {"observers": {"activation": observer}})
    qtrace.calibrate(prepared, batches, progress=False, engine=kind)
# Not ru_maxrss, which begins with that of the process that started this one.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def run(size: Size) -> Iterator[Row]:
    """Measures both engines and two observers on large batches, so that activations outweigh libraries."""
    shape = (32, 3, 224, 224) if size.width == 64 else size.image
    forward = _peak("forward", size, shape)
    name = f"ResNet-18 {'x'.join(map(str, shape))}"
    yield Row(f"{name}: peak memory of float forwards", _spread_of(forward / 1024), "MB")
    for engine in ("megengine", "onnxruntime"):
        for observer in ("minmax", "mse"):
            ratio = _peak(f"{engine} {observer}", size, shape) / forward
            title = f"{name}: peak memory, calibrate / float forward, {observer}, {engine}"
            yield Row(title, _spread_of(ratio), "x", _TARGET)


def _peak(work: str, size: Size, shape: tuple[int, ...]) -> float:
    """Returns the peak memory of a process, in kilobytes.

    Args:
        work: "forward", or an engine and an observer.
        size: the width of the network.
        shape: the shape of a batch.
    """
    command = [sys.executable, "-c", _PROGRAM, work, str(size.width), str(shape)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(process.stdout.split()[-1])


def _spread_of(value: float) -> Spread:
    return Spread.of([Sample.of(value)])
