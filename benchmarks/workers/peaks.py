"""Quantizes a file by one call, and prints the peaks of its memory: ``peaks.py FILE SAMPLES KIND OUT``.

It prints one JSON object: the bytes of the libraries, then stage -> the most bytes of resident memory beyond
them, stage -> its processor time, and the seconds of all. KIND is "default", or "forward" for the float file
in onnxruntime, one sample.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.large import load_libraries, resident, restart_peak


class StagePeaks(logging.Handler):
    """Reads the peak of each stage when the logger ``qtrace`` says that it has ended.

    Attributes:
        peaks: stage -> the most bytes of resident memory.
        processor: stage -> its processor time in seconds.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.peaks: dict[str, int] = {}
        self.processor: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the peak of a stage, and begins with the next one."""
        if record.msg.startswith("%s took ") and len(record.args) == 3:
            self.note(str(record.args[0]), float(record.args[2]))

    def note(self, stage: str, processor: float) -> None:
        """Keeps the peak since the last call, and a processor time, under the name of ``stage``."""
        self.processor[stage] = self.processor.get(stage, 0.0) + processor
        self.peaks[stage] = max(self.peaks.get(stage, 0), resident("VmHWM"))
        restart_peak()


def main(file: str, samples: str, kind: str, out: str) -> None:
    """Runs the call.

    Args:
        file: an ONNX file of one input.
        samples: an .npy file of inputs.
        kind: "default" or "forward".
        out: the file to write.
    """
    qtrace = load_libraries()
    handler, log = StagePeaks(), logging.getLogger("qtrace")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    base, start = resident("VmRSS"), time.perf_counter()
    restart_peak()
    if kind == "forward":
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        sample = np.load(samples, mmap_mode="r")[:1]
        inputs = {session.get_inputs()[0].name: np.array(sample)}
        session.run(None, inputs)
        busy = time.process_time()
        session.run(None, inputs)
        handler.note("end", time.process_time() - busy)
    else:
        qtrace.quantize(Path(file), Path(samples), out, progress=False, force=True, allow_broken=True)
        handler.note("end", 0.0)
    seconds = time.perf_counter() - start
    peaks = {stage: peak - base for stage, peak in handler.peaks.items()}
    print(json.dumps({"libraries": base, "peaks": peaks, "processor": handler.processor, "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
