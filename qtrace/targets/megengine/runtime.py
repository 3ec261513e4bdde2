"""Runs a MegEngine dump in MegEngine's graph inference, with all its integer tensors as outputs."""

from __future__ import annotations

import io
import json
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import ExportError
from qtrace.verification.runtimes.base import Runtime, RuntimeRun

_PICKLE = b"\x80"


class MegengineSession:
    """Runs a MegEngine dump on CPU."""

    first_of_equals = False

    def __init__(self, path: Path, optimize: bool) -> None:
        from megengine.core.tensor.megbrain_graph import load_graph
        from megengine.utils.comp_graph_tools import get_dep_vars

        data = _read(path)
        try:
            loaded = load_graph(io.BytesIO(data))
        except RuntimeError as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise ExportError(f"{path} is not a MegEngine dump: {line}.") from error
        self.input_names, self.tensors = _read_metadata(path, loaded.metadata)
        self.integer_names = list(self.tensors)
        self.output_names = [v.name for v in loaded.output_vars_list]
        self.read = {v.name for v in get_dep_vars(loaded.output_vars_list, "Host2DeviceCopy")}
        self.graph = _inference(data, [*self.output_names, *dict.fromkeys(self.tensors.values())])
        # The deployed model computes its outputs only, and may fuse across the integers that are read here.
        self.deployed = _inference(data, None) if optimize else None

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Runs the model; see `Session`."""
        if len(inputs) != len(self.input_names):
            raise ExportError(f"the model takes {len(self.input_names)} inputs, not {len(inputs)}.")
        # A dump lacks inputs that its outputs do not depend on.
        feeds = {n: x for n, x in zip(self.input_names, inputs, strict=True) if n in self.read}
        try:
            values = self.graph.run(inp_dict=feeds)
            outputs = values if self.deployed is None else self.deployed.run(inp_dict=feeds)
        except RuntimeError as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise ExportError(f"MegEngine refused the input: {line}") from error
        integers = {name: np.asarray(values[t]).astype(np.int32) for name, t in self.tensors.items()}
        return RuntimeRun([outputs[name] for name in self.output_names], integers)


def _inference(data: bytes, outputs: list[str] | None) -> Any:
    from megengine.utils.comp_graph_tools import GraphInference

    return GraphInference(io.BytesIO(data), outputs=outputs)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}): export the module first.") from error
    if data.startswith(_PICKLE):
        raise ExportError(
            f"{path} is a model that qtrace.save or megengine.save wrote, not a dump for MegEngine's "
            "runtime: write one with qtrace.export(..., format='megengine')."
        )
    return data


def _read_metadata(path: Path, metadata: Any) -> tuple[list[str], dict[str, str]]:
    """Reads the inputs in order, and the tensor of the file that holds each integer value.

    The file stores them as a pickled JSON text, which is read without unpickling: a pickle can run code.
    """
    try:
        strings = [arg for _, arg, _ in pickletools.genops(metadata.user_info) if isinstance(arg, str)]
        facts = json.loads(strings[0])
        merged = dict(facts.get("merged", {}))  # a file of an earlier version lacks it
        return list(facts["inputs"]), {n: f"{merged.get(n, n)}_int" for n in facts["integers"]}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ExportError(
            f"{path} was not written by qtrace.export: it does not name its integers."
        ) from error


RUNTIME = Runtime("megengine", "megengine", "", (".mge",), MegengineSession)
