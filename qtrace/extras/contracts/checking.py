"""Applies the rules of a contract to a model, and repairs it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx

from qtrace.errors import ExportError
from qtrace.extras.contracts.base import Contract, ContractRule, FloatOp, Violation
from qtrace.extras.contracts.prediction import conversions, predict_floats
from qtrace.extras.contracts.price import price_run
from qtrace.extras.contracts.qdq_graph import FUNCTIONS, QUANTIZERS, QdqGraph, label
from qtrace.extras.contracts.report import ContractReport, Finding
from qtrace.onnxfile.bodies import read_names
from qtrace.onnxfile.kernels import find_kernels
from qtrace.runtimes.host import RuntimeHost, describe_side

__all__ = ["check_model", "fix_model"]

# A repair may reveal what a rule of before it forbids; none reveals more than a few.
_PASSES = 10

# Op -> the number of its inputs that rules read.
_INPUTS = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div"), 2),
    **dict.fromkeys((*QUANTIZERS, "LayerNormalization"), 2),
    **dict.fromkeys((*FUNCTIONS, "BatchNormalization", "Concat"), 1),
}


def check_model(
    model: Any, contract: Contract, path: Path, fixed: tuple[str, ...] = (), host: RuntimeHost | None = None
) -> ContractReport:
    """Checks a model with its tensors loaded.

    Args:
        model: the model.
        contract: the contract.
        path: the file of the model, for messages.
        fixed: what was repaired in it.
        host: the interpreter or machine whose onnxruntime is asked for its kernels; None for this one.

    Raises:
        ExportError: when nothing in it is quantized.
    """
    graph = QdqGraph(model)
    _check_form(graph, path)
    if not any(True for _ in graph.quantizers()) and not any(
        n.op_type.startswith("QLinear") for n in graph.nodes()
    ):
        raise ExportError(f"{path} lacks QuantizeLinear and DequantizeLinear: name a quantized file.")
    findings: list[Finding] = []
    broken: dict[str, str] = {}
    for rule, violation in _violations(graph, contract):
        node = violation.node
        if node is not None and node.output:
            broken.setdefault(node.output[0], f"it breaks the rule {rule.name}")
        findings.append(
            Finding(
                rule.name,
                rule.source,
                "" if node is None else node.name or next(iter(node.output), ""),
                violation.describe(),
                violation.repair is not None,
            )
        )
    measured, floats = "", predict_floats(graph, contract, broken)
    if contract.measured and not findings:
        measured, floats = _measure_floats(model, path, host)
    return ContractReport(
        contract.name,
        contract.title,
        tuple(findings),
        tuple(floats),
        measured,
        fixed,
        0 if contract.measured else len(conversions(graph)),
        None if contract.measured else price_run(graph, floats, path),
    )


def _check_form(graph: QdqGraph, path: Path) -> None:
    """Refuses a graph whose nodes are not whole or not in order, as rules and ONNX expect them.

    Raises:
        ExportError: naming the node.
    """
    ready: set[str] = set()
    for node in graph.nodes():
        if not isinstance(node.op_type, str):
            raise ExportError(f"{path} has a node whose type is no text: the file is damaged.")
        count = _INPUTS.get(node.op_type, 0)
        if len(node.input) < count or not all(node.input[:count]) or not any(node.output):
            raise ExportError(f"{path}: {label(node)} lacks an input or an output: the file is damaged.")
        for name in read_names(node):
            if name in graph.producers and name not in ready:
                raise ExportError(
                    f"{path}: {label(node)} reads {name} before it is computed: sort the nodes of the file."
                )
        ready.update(node.output)


def _violations(graph: QdqGraph, contract: Contract) -> list[tuple[ContractRule, Violation]]:
    return [(rule, violation) for rule in contract.rules for violation in rule.find(graph)]


def _measure_floats(model: Any, path: Path, host: RuntimeHost | None) -> tuple[str, list[FloatOp]]:
    """Loads a model in onnxruntime; says what that was, and lists the ops that it computes in float."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        onnx.save(model, str(file))
        kernels = find_kernels(file, host)
    measured = describe_side(kernels.side) if kernels.side else "onnxruntime"
    return measured, [FloatOp(name, op, reason) for name, op, reason in kernels.floats]


def fix_model(model: Any, contract: Contract, path: Path) -> tuple[str, ...]:
    """Repairs a model in place and returns a sentence for each repair.

    Raises:
        ExportError: when the result is no valid ONNX, because the file was not.
    """
    graph = QdqGraph(model)
    _check_form(graph, path)
    fixed: dict[str, None] = {}
    for _ in range(_PASSES):
        count = len(fixed)
        for rule in contract.rules:
            for violation in list(rule.find(graph)):
                if violation.repair is not None:
                    violation.repair()
                    graph.refresh()
                    fixed[violation.describe()] = None
        if len(fixed) == count:
            break
    graph.finish()
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        line = next(iter(str(error).strip().splitlines()), "its form")
        raise ExportError(f"{path} makes no valid ONNX model when it is repaired: {line}") from error
    return tuple(fixed)
