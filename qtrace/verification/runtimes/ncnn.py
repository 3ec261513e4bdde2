"""Runs an ncnn net, ``.param`` and ``.bin``, in ncnn's Python package, with the integers of all roundings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.runtimes.base import Runtime, RuntimeRun

__all__ = ["RUNTIME"]

# The layers that give integers: Quantize, and a convolution whose scales (8=) include that of its result.
_ROUNDING, _INTEGER = "Quantize", ("8=101", "8=102")


class NcnnSession:
    """Runs a net on CPU, sample by sample."""

    def __init__(self, path: Path, optimize: bool) -> None:
        import ncnn

        weights = path.with_suffix(".bin")
        for file in (path, weights):
            if not file.is_file():
                raise ExportError(f"{file} does not exist: export the module first.")
        self.input_names, self.output_names, self.blobs = _read_blobs(path)
        self.integer_names = [name.removesuffix("_int") for name in self.blobs]
        self.net = ncnn.Net()
        options = self.net.opt
        options.lightmode = False  # keeps the blobs readable
        if not optimize:
            for name in dir(options):
                if name.startswith(("use_fp16", "use_bf16", "use_winograd", "use_sgemm", "use_packing")):
                    setattr(options, name, False)
        if self.net.load_param(str(path)) or self.net.load_model(str(weights)):
            raise ExportError(
                f"ncnn cannot load {path} and {weights.name}: they are incomplete or of two nets."
            )

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        count = len(inputs[0])
        samples = [self._run_sample([x[i] for x in inputs]) for i in range(count)]
        values = {name: np.stack([s[name] for s in samples]) for name in samples[0]}
        integers = {
            n: values[b].astype(np.int32) for n, b in zip(self.integer_names, self.blobs, strict=True)
        }
        return RuntimeRun([values[n] for n in self.output_names], integers)

    def _run_sample(self, values: list[np.ndarray]) -> dict[str, np.ndarray]:
        import ncnn

        extractor = self.net.create_extractor()
        extractor.set_light_mode(False)
        # Each Mat shares the memory of its array, which must outlive it.
        arrays = [np.ascontiguousarray(v, np.float32) for v in values]
        for name, value in zip(self.input_names, arrays, strict=True):
            if extractor.input(name, ncnn.Mat(value)):
                raise ExportError(f"ncnn has no input {name!r}.")
        return {name: _extract(extractor, name) for name in (*self.output_names, *self.blobs)}


def _extract(extractor: Any, name: str) -> np.ndarray:
    code, blob = extractor.extract(name)
    if code:
        raise ExportError(f"ncnn cannot compute {name!r} (code {code}): check the shapes of the inputs.")
    return np.array(blob)


def _read_blobs(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Reads the names of the inputs, of the outputs and of the integer blobs, in the order of the file."""
    try:
        magic, _, *lines = path.read_text(encoding="utf-8").splitlines()
    except (UnicodeDecodeError, ValueError) as error:
        raise ExportError(f"{path} is not an ncnn net: {error}.") from error
    if magic.strip() != "7767517":
        raise ExportError(f"{path} is not an ncnn net: it does not begin with 7767517.")
    inputs, tops, integers, read = [], [], [], set()
    for line in lines:
        kind, _, bottoms, count, *words = line.split()
        first = int(bottoms)
        read.update(words[:first])
        outputs = words[first : first + int(count)]
        tops += outputs
        if kind == "Input":
            inputs += outputs
        elif kind == _ROUNDING or any(word in _INTEGER for word in words):
            integers += outputs
    return inputs, [t for t in tops if t not in read and t not in integers], integers


RUNTIME = Runtime("ncnn", "ncnn", "ncnn", (".param",), NcnnSession, companions=(".bin",))
