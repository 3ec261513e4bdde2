"""Sessions of onnxruntime on CPU: the one place that opens them, with its settings and its errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError, install

__all__ = ["OrtSession", "SessionError", "SessionSettings", "onnxruntime_errors", "open_session"]

_FATAL = 4  # the severity from which on messages are printed; errors are exceptions anyway


class SessionError(ExportError):
    """onnxruntime refuses a model or an input.

    Attributes:
        reason: what onnxruntime says, in one line and without a full stop.
    """

    def __init__(self, subject: str, error: Exception) -> None:
        self.reason = " ".join(str(error).split())[:300].rstrip(".")
        super().__init__(f"onnxruntime {subject}: {self.reason}.")


@dataclass(frozen=True)
class SessionSettings:
    """How onnxruntime runs a model.

    Attributes:
        optimize: whether ops are fused and laid out as in a deployment; else each computes on its own.
        threads: the number of threads of an op; None for all cores.
        fuse_integers: whether ops between roundings may run on integers, with other last bits than in float.
        as_megengine: whether denormal numbers are zero, as in MegEngine.
        spin: whether the threads wait actively between two runs, which takes the cores from others.
        profile: the beginning of the path of the profile; "" for none.
        optimized: the file to write the optimized model to, with its large tensors in a file beside it.
        tensors: the folder of the external tensors of a model that is given as bytes.
    """

    optimize: bool = True
    threads: int | None = None
    fuse_integers: bool = True
    as_megengine: bool = False
    spin: bool = True
    profile: str = ""
    optimized: Path | None = None
    tensors: Path | None = None

    def options(self) -> Any:
        """Returns the settings as onnxruntime's ``SessionOptions``."""
        import onnxruntime as ort

        options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if self.optimize else levels.ORT_DISABLE_ALL
        options.intra_op_num_threads = self.threads or 0
        options.log_severity_level = _FATAL
        entries = {
            "session.disable_quant_qdq": "" if self.fuse_integers else "1",
            "session.set_denormal_as_zero": "1" if self.as_megengine else "",
            "session.force_spinning_stop": "" if self.spin else "1",
            "session.model_external_initializers_file_folder_path": str(self.tensors or ""),
        }
        if self.profile:
            options.enable_profiling, options.profile_file_prefix = True, self.profile
        if self.optimized is not None:
            options.optimized_model_filepath = str(self.optimized)
            # A protobuf file holds 2 GB at most.
            entries["session.optimized_model_external_initializers_file_name"] = "tensors"
        for key, value in entries.items():
            if value:
                options.add_session_config_entry(key, value)
        return options


class OrtSession:
    """A model in onnxruntime.

    Args:
        model: a serialized model, or the path of a file.
        settings: how it runs.
        subject: the model in words, for messages.

    Attributes:
        inputs: its inputs, with ``name``, ``type`` and ``shape`` as onnxruntime has them.
        outputs: its outputs, likewise.

    Raises:
        SessionError: when onnxruntime cannot load the model.
        ExportError: when onnxruntime is not installed.
    """

    def __init__(self, model: bytes | str | Path, settings: SessionSettings, subject: str) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise ExportError(f"running ONNX files needs the package onnxruntime: run {install('onnx')}.")
        import onnxruntime as ort

        source = str(model) if isinstance(model, Path) else model
        self._subject = subject
        try:
            self._session = ort.InferenceSession(
                source, settings.options(), providers=["CPUExecutionProvider"]
            )
        except onnxruntime_errors() as error:
            raise SessionError(f"cannot run {subject}", error) from error
        self.inputs: Sequence[Any] = self._session.get_inputs()
        self.outputs: Sequence[Any] = self._session.get_outputs()

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the model once.

        Args:
            names: the outputs; None for all of them.
            feeds: input -> its value.

        Raises:
            SessionError: when onnxruntime refuses the inputs.
        """
        try:
            values: list[np.ndarray] = self._session.run(names, dict(feeds))
        except onnxruntime_errors() as error:
            raise SessionError("refused the input", error) from error
        return values

    def end_profile(self) -> Path:
        """Ends the profile and returns its file."""
        return Path(self._session.end_profiling())


def open_session(
    model: bytes | str | Path, settings: SessionSettings | None = None, subject: str = ""
) -> OrtSession:
    """Opens a model in onnxruntime.

    Args:
        model: a serialized model, or the path of a file.
        settings: how it runs; None for all optimizations and all cores.
        subject: the model in words, for messages; "" for its path.

    Raises:
        SessionError: when onnxruntime cannot load the model.
    """
    name = subject or ("a model" if isinstance(model, bytes) else str(model))
    return OrtSession(model, settings or SessionSettings(), name)


def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that onnxruntime raises; its own have no base class but `Exception`."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (t for t in vars(state).values() if isinstance(t, type) and issubclass(t, Exception))
    return (*own, RuntimeError, ValueError)
