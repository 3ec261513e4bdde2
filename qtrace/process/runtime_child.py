"""Runs files in a runtime for another process; see `child.py`. It is a script of its own.

It imports numpy and the runtime alone, and runs in Python 3.8 and later. Requests:

- ``open`` names the runtime and how it loads the file, and takes the content of the file as an array of bytes
  where the runtime reads it from memory. It gives the number of the loaded file and facts about it.
- ``run`` takes that number and an array for each input, and gives an array for each output.
- ``time`` runs the file again on the same inputs and gives the seconds; ``memory`` gives the bytes that
  loading and running it added to this process at most.

``refusal`` of a request begins the sentence of an error that the runtime raises.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from typing import IO, Any

import numpy as np


class Litert:
    """A TFLite file; ``fuse`` says whether its kernels are fused, ``threads`` how many run."""

    def __init__(self, request: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self.before = _kilobytes("VmRSS")
        self.loaded = Interpreter(
            model_content=arrays[0].tobytes(),
            experimental_disable_delegate_node_fusion=not request["fuse"],
            num_threads=request.get("threads"),
        )
        self.loaded.allocate_tensors()
        ends = {"inputs": self.loaded.get_input_details(), "outputs": self.loaded.get_output_details()}
        self.facts = {end: [_litert_facts(detail) for detail in details] for end, details in ends.items()}

    def time(self) -> float:
        """Runs the file again on its inputs and returns the seconds."""
        start = time.perf_counter()
        self.loaded.invoke()
        return time.perf_counter() - start

    def memory(self) -> int:
        """Returns the bytes that loading and running the file added to this process at most."""
        return (_kilobytes("VmHWM") - self.before) * 1024

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the file and returns its outputs."""
        details = self.loaded.get_input_details()
        for number, detail in enumerate(details):
            if tuple(detail["shape"]) != arrays[number].shape:
                self.loaded.resize_tensor_input(detail["index"], arrays[number].shape)
        self.loaded.allocate_tensors()
        for number, detail in enumerate(details):
            self.loaded.set_tensor(detail["index"], arrays[number])
        self.loaded.invoke()
        return [self.loaded.get_tensor(detail["index"]) for detail in self.loaded.get_output_details()]


def _litert_facts(detail: dict[str, Any]) -> dict[str, Any]:
    scale, zero = detail["quantization"]
    return {
        "name": detail["name"],
        "shape": [int(n) for n in detail["shape"]],
        "signature": [int(n) for n in detail["shape_signature"]],
        "dtype": np.dtype(detail["dtype"]).str,
        "quantization": [float(scale), int(zero)],
    }


class Ncnn:
    """An ncnn net: the paths ``param`` and ``bin``, and the names of its ``inputs`` and ``outputs``."""

    def __init__(self, request: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        import ncnn

        self.facts: dict[str, Any] = {}
        self.request, self.package, self.net = request, ncnn, ncnn.Net()
        options = self.net.opt
        options.lightmode = False  # keeps the blobs readable
        if not request["optimize"]:
            for name in dir(options):
                if name.startswith(("use_fp16", "use_bf16", "use_winograd", "use_sgemm", "use_packing")):
                    setattr(options, name, False)
        if self.net.load_param(request["param"]) or self.net.load_model(request["bin"]):
            raise ValueError("its two files are incomplete or of two nets.")

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs the net on each sample, and returns the values of each output for all samples."""
        samples = [self._run_sample([array[i] for array in arrays]) for i in range(len(arrays[0]))]
        return [np.stack([sample[n] for sample in samples]) for n in range(len(self.request["outputs"]))]

    def _run_sample(self, values: list[np.ndarray]) -> list[np.ndarray]:
        extractor = self.net.create_extractor()
        extractor.set_light_mode(False)
        # Each Mat shares the memory of its array, which must outlive it.
        arrays = [np.ascontiguousarray(value, np.float32) for value in values]
        for number, name in enumerate(self.request["inputs"]):
            if extractor.input(name, self.package.Mat(arrays[number])):
                raise ValueError(f"the net has no input {name!r}.")
        results = []
        for name in self.request["outputs"]:
            code, blob = extractor.extract(name)
            if code:
                raise ValueError(f"it cannot compute {name!r} (code {code}): check the shapes of the inputs.")
            results.append(np.array(blob))
        return results


_RUNTIMES = {"litert": Litert, "ncnn": Ncnn}


def main() -> None:
    """Answers requests until stdin ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a runtime prints is no answer
    files: list[Any] = []
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        arrays = [_read(requests, dtype, shape) for dtype, shape in request["arrays"]]
        value: Any = None
        results: list[np.ndarray] = []
        try:
            if request["command"] == "open":
                files.append(_RUNTIMES[request["runtime"]](request, arrays))
                value = {"number": len(files) - 1, **files[-1].facts}
            elif request["command"] in ("time", "memory"):
                value = getattr(files[request["number"]], request["command"])()
            else:
                results = files[request["number"]].run(arrays)
            header: dict[str, Any] = {"value": value}
        except Exception as error:  # the caller has no other way to see it
            header = {"error": f"{request['refusal']}: {_first_line(error)}"}
        results = [np.asarray(result, order="C") for result in results]
        header["arrays"] = [(result.dtype.str, result.shape) for result in results]
        answers.write(json.dumps(header).encode() + b"\n")
        for result in results:
            answers.write(result.tobytes())
        answers.flush()


def _read(stream: IO[bytes], dtype: str, shape: Sequence[int]) -> np.ndarray:
    kind = np.dtype(dtype)
    count = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(stream.read(count), kind).reshape(shape)


def _kilobytes(name: str) -> int:
    """Returns a line of this process's status, the memory in use or its peak; 0 if the system has none."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return int(re.findall(rf"^{name}:\s*(\d+) kB", status.read(), re.MULTILINE)[0])
    except (OSError, IndexError):
        return 0


def _first_line(error: Exception) -> str:
    """Returns the first line of a runtime's message; that of another error with its type."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if isinstance(error, (RuntimeError, ValueError)) else f"{type(error).__name__}: {line}"


if __name__ == "__main__":
    main()
