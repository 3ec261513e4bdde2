"""Runs an ONNX file in OpenVINO on CPU, with all its integer tensors as outputs.

It runs in this process, unlike LiteRT and ncnn. OpenVINO raises an exception for what it cannot load or run:
none of 150 files with bytes changed at random ended the process. A child would cost 0.8 s each time.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from qtrace.errors import ExportError
from qtrace.onnxfile.external_data import onnx
from qtrace.onnxfile.model import OnnxModel
from qtrace.onnxfile.sessions import OpenvinoFile
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification.crosscheck import BFLOAT16
from qtrace.verification.runtimes.base import Runtime
from qtrace.verification.runtimes.onnx_model import ExposedSession, as_declared, with_integer_outputs

# These settings make OpenVINO compute each op as it is written. Its low-precision transformations drop the
# rounding on skip branches, dynamic quantization rounds the inputs of linear layers again, in groups, and the
# default precision on some CPUs is bfloat16. With the transformations off, a rounded tensor that is an output
# and is read by a product and a sum is computed wrong still, so that the roundings are written as arithmetic.
_PLAIN = {
    "INFERENCE_PRECISION_HINT": "f32",
    "LP_TRANSFORMS_MODE": "NO",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}


class OpenvinoSession(ExposedSession):
    """Runs an ONNX file on CPU."""

    def __init__(self, path: Path, optimize: bool, host: RuntimeHost | None = None) -> None:
        model = with_integer_outputs(path)
        super().__init__(model)
        if model.folder is not None:
            raise ExportError(f"{path} has more than 2 GB of tensors: verify it in onnxruntime.")
        self.input_names = [i.name for i in OnnxModel(onnx.load_from_string(model.data)).inputs]
        settings = {"INFERENCE_PRECISION_HINT": "f32"} if optimize else _PLAIN
        data = model.data if optimize else _spelled(model.data)
        self._open = functools.partial(OpenvinoFile, data, settings, path, host)
        self.deployed = OpenvinoFile(model.deployed or path, settings, path, host) if optimize else None
        opened = self.deployed or self.compiled
        self.side = opened.side
        self.remark = BFLOAT16 if opened.rounds_floats else ""

    @functools.cached_property
    def compiled(self) -> OpenvinoFile:
        """The file with its integers as outputs, opened for the first run that asks for them."""
        return self._open()

    def infer(self, file: OpenvinoFile, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Returns all outputs of a compiled model, which lacks an input for a tensor that nothing reads."""
        feeds = dict(zip(self.input_names, inputs, strict=True))
        names = [next(name for name in feeds if name in port["names"]) for port in file.inputs]
        types = [np.dtype(port["dtype"]).name for port in file.inputs]
        return file.run(as_declared([feeds[name] for name in names], types))


def _spelled(data: bytes) -> bytes:
    """Returns a model with its roundings as float arithmetic."""
    from qtrace.targets.openvino.spelled import spell_out_roundings

    model = onnx.load_from_string(data)
    spell_out_roundings(model)
    return bytes(model.SerializeToString())


def runtime(host: RuntimeHost | None = None) -> Runtime:
    """Returns OpenVINO in this process, or in a host's."""
    opened = functools.partial(OpenvinoSession, host=host)
    return Runtime(
        "openvino", "openvino", "openvino", (".onnx",), opened, default=False, hosted=runtime, host=host
    )


RUNTIME = runtime()
