"""The TFLite and ncnn files of labellings in their runtime, where their noise is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.onnxfile.local_session import SessionValue
from qtrace.preparation.model import QuantizedModel
from qtrace.runtimes.host import RuntimeHost
from qtrace.verification import runtimes
from qtrace.verification.other_sizes import by_sample
from qtrace.verification.runtimes.base import run_outputs

__all__ = ["LabellingRuns"]


class LabellingRuns:
    """A TFLite file or ncnn net in its runtime, with the inputs and the `run` of an `OrtSession`.

    Args:
        path: the file.
        converted: the graph that it was exported from.
        host: the interpreter or machine that has the runtime; None for this one.

    Attributes:
        inputs: the inputs of the graph; their first size is None where the file takes any number of samples.

    Raises:
        ExportError: when the runtime cannot load the file.
    """

    def __init__(self, path: Path, converted: TracedModule, host: RuntimeHost | None = None) -> None:
        session = runtimes.get(path, None, host).open(path, True)
        self._session = by_sample(session, QuantizedModel(converted))
        facts = getattr(session, "facts", None)
        is_open = self._session is session and (facts is None or bool(facts["free_batch"]))
        self.inputs = [
            SessionValue(name, "", [None if is_open else shape[0], *shape[1:]] if shape else [])
            for name, shape in list_inputs(converted)
        ]

    def run(self, names: None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the file once and returns all of its outputs.

        Args:
            names: None, for all outputs.
            feeds: input -> its value.

        Raises:
            ExportError: when the runtime refuses the inputs.
        """
        return run_outputs(self._session, [feeds[value.name] for value in self.inputs])
