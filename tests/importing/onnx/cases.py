"""The conformance tests that the package ``onnx`` carries, as cases: a model, inputs and expected outputs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper
from onnx.backend.test import loader
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

__all__ = ["KINDS", "LIGHT", "Case", "load_cases", "load_light_networks"]

KINDS = ("node", "pytorch-operator", "pytorch-converted", "simple")
LIGHT = Path(loader.DATA_DIR) / "light"


@dataclass(frozen=True, eq=False)
class Case:
    """A conformance test.

    Attributes:
        name: the name without ``test_``.
        kind: one of `KINDS`, or ``light``.
        op: the op that the test is about.
        model: the model.
        inputs: an array for each input of the graph without initializers; None for a sequence or text.
        outputs: the expected arrays; None for a sequence or text.
    """

    name: str
    kind: str
    op: str
    model: ModelProto
    inputs: tuple[np.ndarray | None, ...]
    outputs: tuple[np.ndarray | None, ...]

    @property
    def input_names(self) -> list[str]:
        """The names of the graph's inputs without initializers."""
        stored = {tensor.name for tensor in self.model.graph.initializer}
        return [value.name for value in self.model.graph.input if value.name not in stored]


@functools.cache
def load_cases(kind: str) -> tuple[Case, ...]:
    """Loads the cases of a kind, in the order of their names."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        tests = sorted(load_model_tests(kind=kind), key=lambda test: test.name)
        by_name = {test.name: test for test in tests}
        return tuple(
            _node_case(test, by_name) if kind == "node" else _file_case(test, kind) for test in tests
        )


def _node_case(test: Any, by_name: dict[str, Any]) -> Case:
    base = by_name.get(_base(test.name), test)
    inputs, outputs = test.data_sets[0]
    op = _op(base.name, base.model)
    return Case(test.name.removeprefix("test_"), "node", op, test.model, _arrays(inputs), _arrays(outputs))


def _base(name: str) -> str:
    """Returns the name of the test whose op a test writes as its function's body."""
    head, mark, _ = name.partition("_expanded")
    return head if mark else name


def _op(name: str, model: ModelProto) -> str:
    """Returns the op of a model whose lower-case name the name of the test begins with."""
    squeezed = name.removeprefix("test_").replace("_", "").lower()
    ops = [node.op_type for node in model.graph.node]
    named = [op for op in ops if squeezed.startswith(op.lower())]
    return max(named, key=len) if named else ops[0]


def _file_case(test: Any, kind: str) -> Case:
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    data = folder / "test_data_set_0"
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    read = [_read(data / f"input_{i}.pb", value) for i, value in enumerate(inputs)]
    expected = [_read(data / f"output_{i}.pb", value) for i, value in enumerate(model.graph.output)]
    name = test.name.removeprefix("test_")
    return Case(name, kind, model.graph.node[0].op_type, model, tuple(read), tuple(expected))


def _read(path: Path, value: onnx.ValueInfoProto) -> np.ndarray | None:
    if not value.type.HasField("tensor_type"):
        return None
    tensor = onnx.TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return _array(tensor)


def _arrays(values: Sequence[Any]) -> tuple[np.ndarray | None, ...]:
    return tuple(_array(value) for value in values)


def _array(value: Any) -> np.ndarray | None:
    if isinstance(value, onnx.TensorProto):
        value = numpy_helper.to_array(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    return None if np.asarray(value).dtype.kind in "OSU" else np.asarray(value)


def load_light_networks() -> tuple[Case, ...]:
    """Loads the nine classifiers whose weights are computed by nodes of the file, with their input."""
    cases = []
    for path in sorted(LIGHT.glob("*.onnx")):
        model = onnx.load(path)
        stored = {tensor.name for tensor in model.graph.initializer}
        values = [value for value in model.graph.input if value.name not in stored]
        inputs = tuple(Runner.generate_dummy_data(value, name=path.stem) for value in values)
        outputs = [
            _read(path.with_name(f"{path.stem}_output_{i}.pb"), value)
            for i, value in enumerate(model.graph.output)
        ]
        cases.append(Case(path.stem, "light", "light", model, inputs, tuple(outputs)))
    return tuple(cases)
