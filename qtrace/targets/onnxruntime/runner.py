"""Times ONNX files in onnxruntime on CPU."""

from __future__ import annotations

from pathlib import Path

from qtrace.benchmarking.profile import NodeRun, ProfiledSession
from qtrace.benchmarking.runners import Load, RunnerSettings, fixed_shape, random_values
from qtrace.errors import ExportError
from qtrace.onnxfile.local_session import SessionError, SessionSettings, dtype_of
from qtrace.onnxfile.sessions import open_session


class OnnxRunner:
    """A session with inputs.

    Attributes:
        in_thread: whether a run computes only in the calling thread.
        samples: the number of samples of a run.
        shapes: input -> shape.
    """

    def __init__(self, path: Path, settings: RunnerSettings) -> None:
        self._path, self._threads, self._host = path, settings.threads, settings.host
        self._session = open_session(path, SessionSettings(threads=settings.threads, host=settings.host))
        self.side = self._session.side
        self.in_thread = settings.threads == 1 and settings.host is None
        self._feeds = {}
        for info in self._session.inputs:
            kind = dtype_of(info.type)
            if kind is None:
                raise ExportError(
                    f"input {info.name!r} of {path} has type {info.type}: only tensors of numbers "
                    "can be filled."
                )
            self._feeds[info.name] = random_values(fixed_shape(info.name, info.shape, settings), kind)
        self.shapes = {name: value.shape for name, value in self._feeds.items()}
        self.samples = next((shape[0] for shape in self.shapes.values() if shape), 1)
        self._run_first()

    def run(self) -> float:
        """Runs the file once and returns the seconds that it took."""
        return self._session.time(self._feeds)

    def memory(self) -> int | None:
        """Returns the bytes that the file added to the process of a host; None where it runs in this one."""
        return self._session.memory()

    def profile(self, runs: int) -> list[list[NodeRun]]:
        """Returns the nodes of some runs in a session of its own, by onnxruntime's profile."""
        profiled = ProfiledSession(str(self._path), self._threads, self._host)
        for _ in range(runs + 1):
            profiled.run(self._feeds)
        return profiled.finish()[1:]

    def _run_first(self) -> None:
        """Runs the file for the first time.

        Raises:
            ExportError: when onnxruntime refuses the shapes.
        """
        try:
            self._session.run(None, self._feeds)
        except SessionError as error:
            raise ExportError(
                f"onnxruntime cannot run {self._path} on {self.shapes}: {error.reason}"
            ) from error


LOAD = Load("onnxruntime", "onnxruntime", "onnx", (".onnx",), OnnxRunner)
