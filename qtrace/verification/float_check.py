"""Whether a runtime is at fault, not the file: it computes the float network otherwise than onnxruntime."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.comparing.sums import sqnr_db
from qtrace.data.batches import as_arguments
from qtrace.errors import ExportError, QtraceError
from qtrace.export import export
from qtrace.export.converted import is_plain
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.types import TracedModule
from qtrace.runtimes.child import RefusalError
from qtrace.verification.runs import BatchRun
from qtrace.verification.runtimes import get as get_runtime
from qtrace.verification.runtimes.base import Runtime, run_outputs
from qtrace.verification.tallies import CrossCheck, is_as_wrong

__all__ = ["FloatCheck"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CURE = "no recipe changes that: use another runtime, or write the op otherwise"


class FloatCheck:
    """Runs the float network of a wrong file in the runtime of the file, and in onnxruntime.

    It finds no fault of runtimes that read other files, which onnxruntime cannot run, and of a user's own,
    which need not run float files.

    Args:
        path: the file.
        converted: the graph, or the plain module, that it was exported from.
        runtime: the runtime of the file.
        batches: the first batch, if there is one.
    """

    def __init__(self, path: Path, converted: TracedModule, runtime: Runtime, batches: Sequence[Any]) -> None:
        self._path, self._converted, self._runtime = path, converted, runtime
        self._worst: _Arguments | None = None
        self._applies = path.suffix.lower() == ".onnx" and runtime.name != "onnxruntime" and runtime.extra
        self._first, self._lowest = batches, math.inf

    def note(self, run: BatchRun) -> None:
        """Keeps the batch whose outputs differ most from the graph's."""
        ratio = _lowest_ratio(run.graph.outputs, run.runtime.outputs) if self._applies else math.inf
        if ratio < self._lowest:
            self._lowest, self._worst = ratio, run.arguments

    def find_fault(self) -> CrossCheck | None:
        """Returns that the runtime is at fault for the batch that was kept; None if the file may be."""
        if self._worst is None:
            return None
        try:
            right, own = self._run_float(self._worst)
        except QtraceError:
            return None
        ratio = _lowest_ratio(right, own)
        if not is_as_wrong(ratio, self._lowest):
            return None
        differs = f"{self._runtime.name} differs from onnxruntime in the float network, too ({ratio:.1f} dB)"
        return CrossCheck("float", f"{differs}; {_CURE}")

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Re-raises a refusal of the file, and outputs of other shapes, as an error that names the runtime.

        Raises:
            ExportError: naming the runtime, if the float network meets the same; else the error itself.
        """
        try:
            yield
        except ExportError as error:
            if not self._applies or not self._first or not (fault := self._find_same(error)):
                raise
            raise ExportError(
                f"{self._path.name}: {self._runtime.name} is at fault, not the file: {fault}; {_CURE}."
            ) from error

    def _find_same(self, error: ExportError) -> str:
        """Returns what the runtime does to the float network as it does to the file; "" if it does not."""
        try:
            right, own = self._run_float(as_arguments(self._first[0], self._converted, 0))
        except RefusalError as refusal:
            same = isinstance(error, RefusalError)
            return f"it refuses the float network, too, with {refusal.reason!r}" if same else ""
        except QtraceError:
            return ""
        shapes = ((a.shape, b.shape) for a, b in zip(right, own, strict=False))
        sizes = next(((a, b) for a, b in shapes if a != b), None)
        if sizes is None or isinstance(error, RefusalError):
            return ""
        return f"an output of the float network has shape {sizes[1]} there, and {sizes[0]} in onnxruntime"

    def _run_float(self, arguments: _Arguments) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the float outputs of onnxruntime and of the runtime for the arguments of one call.

        Raises:
            RefusalError: when the runtime refuses the float network.
            QtraceError: when onnxruntime does, or the network lacks a float file.
        """
        _, (_, *tensors) = Interpreter(self._converted).bind(*arguments)
        inputs = [tensor.numpy() for tensor in tensors]
        with tempfile.TemporaryDirectory(prefix="qtrace-float-") as folder:
            file = self._path
            if not is_plain(self._converted):
                file = export(self._converted, Path(folder) / "float.onnx", format="onnx_float")
            runtimes = (get_runtime(file, "onnxruntime"), self._runtime)
            right, own = (run_outputs(runtime.open(file, False), inputs) for runtime in runtimes)
        return right, own


def _lowest_ratio(right: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> float:
    """Returns the ratio of the worst output in dB, of those that have the same shape."""
    pairs = zip(right, own, strict=False)
    same = ((a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape)
    return min((sqnr_db(a, b) for a, b in same), default=math.inf)
