"""Checks an ONNX file against the contract of a target, and repairs what is mechanical.

A report says what breaks a rule, what computes in float, and what that costs.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from qtrace.display import Displayed, format_bytes
from qtrace.errors import SHOWN_LINES, ExportError, shorten_list
from qtrace.extras.contracts.base import CONTRACTS, CPU, Contract, ContractRule, FloatOp, Violation
from qtrace.extras.contracts.qdq_graph import FUNCTIONS, LAYERS, QUANTIZERS, QdqGraph, label
from qtrace.onnxfile.external_data import load_model, skeleton
from qtrace.onnxfile.kernels import find_kernels
from qtrace.onnxfile.model import infer_shapes, read_names
from qtrace.plugins.options import check_arguments
from qtrace.runtimes.host import RuntimeHost, describe_side
from qtrace.storage.outputs import output_file

FLOAT = "float"
_BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4), 4),
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8), 8),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), 16),
}
_FLOAT_BYTES = np.dtype(np.float32).itemsize

Shapes = Mapping[str, tuple[int, ...]]

_FIXED = "qtrace.fixed_for"


@dataclass(frozen=True)
class RunPrice:
    """What a run of one batch asks of a device.

    Attributes:
        products: the bits of the wider operand that a layer computes, or "float" -> its multiplications.
        converted_bytes: the integers that are written where a tensor is rounded again to another width.
        copied_bytes: the floats that ops on the CPU read and write.
        unknown: the number of layers and of moved tensors whose sizes the file does not tell, left out here.
    """

    products: Mapping[str, int] = field(default_factory=dict)
    converted_bytes: int = 0
    copied_bytes: int = 0
    unknown: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the price as plain data."""
        return {
            "products": dict(self.products),
            "converted_bytes": self.converted_bytes,
            "copied_bytes": self.copied_bytes,
            "unknown": self.unknown,
        }

    def text(self) -> str:
        """Returns the price in a line."""
        total = max(sum(self.products.values()), 1)
        widths = []
        for width in sorted(self.products, key=lambda name: (name == FLOAT, len(name), name)):
            count = self.products[width]
            kind = "in float" if width == FLOAT else f"of {width} bits"
            widths.append(f"{count / 1e6:.3g} M {kind} ({count / total:.0%})")
        parts = [f"products: {', '.join(widths) if widths else 'none'}"]
        if self.converted_bytes:
            parts.append(f"{format_bytes(self.converted_bytes)} rounded again to another width")
        if self.copied_bytes:
            parts.append(f"{format_bytes(self.copied_bytes)} between the device and the CPU")
        if self.unknown:
            parts.append(f"not counted, for want of sizes in the file: {self.unknown}")
        return "a run, open batches as 1: " + "; ".join(parts)


def price_run(graph: QdqGraph, floats: Iterable[FloatOp], path: Path) -> RunPrice:
    """Counts what a run of a file asks of a device.

    Args:
        graph: the graph.
        floats: its ops in float, of which those that leave the device count.
        path: the file, for messages.
    """
    shapes, unknown = _shapes(graph, path), 0
    products: Counter[str] = Counter()
    for node in graph.nodes(*LAYERS):
        count = _count_products(graph, node, shapes)
        if count is None:
            unknown += 1
        else:
            products[_width(graph, node)] += count
    rounded = conversions(graph)
    sizes = [_numel(shapes, node.output[0]) for node in rounded]
    widths = [_BITS.get(graph.type_of(node.output[0]), 8) // 8 for node in rounded]
    leaving = {op.node for op in floats if op.falls_back}
    moved = [
        _numel(shapes, name)
        for node in graph.nodes()
        if node.output and (node.name or node.output[0]) in leaving
        for name in (*(n for n in read_names(node) if n not in graph.stored), *filter(None, node.output))
    ]
    unknown += sizes.count(None) + moved.count(None)
    converted = sum((size or 0) * width for size, width in zip(sizes, widths, strict=True))
    copied = sum(filter(None, moved)) * _FLOAT_BYTES
    return RunPrice(dict(products), converted, copied, unknown)


def _shapes(graph: QdqGraph, path: Path) -> Shapes:
    """Returns the shapes that follow from the input shapes; {} if more than their first axis is open."""
    try:
        return infer_shapes(skeleton(graph.model), {}, path).shapes()
    except ExportError:  # what it says of the file, the rules of the contract do not need
        return {}


def _width(graph: QdqGraph, node: NodeProto) -> str:
    """Returns the bits of the wider integers that a layer reads; "float" if it reads floats."""
    widths = []
    for index in (0, 1):
        operand = graph.operand(node, index)
        if operand is None or operand.dequantize is None:
            return FLOAT
        widths.append(_BITS.get(operand.dequantize.type, 8))
    return str(max(widths))


def _count_products(graph: QdqGraph, node: NodeProto, shapes: Shapes) -> int | None:
    """Returns the multiplications of a layer for one batch; None where a size is not known."""
    data, weight = (_shape(graph, name, shapes) for name in node.input[:2])
    result = _shape(graph, node.output[0], shapes)
    if not data or not weight or result is None:
        return None
    if node.op_type == "Conv":
        return math.prod(result) * math.prod(weight[1:])
    if node.op_type == "ConvTranspose":
        return math.prod(data) * math.prod(weight[1:])
    transposed = node.op_type == "Gemm" and any(a.name == "transA" and a.i for a in node.attribute)
    return math.prod(result) * data[0 if transposed else -1]


def _shape(graph: QdqGraph, name: str, shapes: Shapes) -> tuple[int, ...] | None:
    stored = graph.stored.get(name)
    return shapes.get(name) if stored is None else tuple(stored.dims)


def _numel(shapes: Shapes, name: str) -> int | None:
    """Returns the number of values of a tensor; None if its shape is not known."""
    return math.prod(shapes[name]) if name in shapes else None


@dataclass(frozen=True)
class Finding:
    """A violation, as plain data.

    Attributes:
        rule: the name of the rule.
        source: the document that states the rule.
        node: the name of the node, or its first output; "" for the file as a whole.
        text: the violation and its cure as a sentence.
        fixable: whether a repair is mechanical.
    """

    rule: str
    source: str
    node: str
    text: str
    fixable: bool


@dataclass(frozen=True, repr=False)
class ContractReport(Displayed):
    """The result of a check of one file.

    Attributes:
        target: the name of the target.
        title: the target in words.
        findings: the violations, rule by rule.
        floats: the ops that compute in float.
        measured: the runtime that told `floats`; "" if they are predicted.
        fixed: the sentences of the violations that were repaired before.
        conversions: the number of tensors that are rounded again to integers of another width.
        price: what a run asks of the device; None for a runtime that is here, where times are measured.
    """

    target: str
    title: str
    findings: tuple[Finding, ...]
    floats: tuple[FloatOp, ...]
    measured: str = ""
    fixed: tuple[str, ...] = field(default=())
    conversions: int = 0
    price: RunPrice | None = None

    def _text(self, max_width: int | None) -> str:
        return self.text()

    @property
    def passed(self) -> bool:
        """Whether the file keeps the contract."""
        return not self.findings

    @property
    def fallback(self) -> dict[str, int]:
        """Type of an op -> the number of such ops that leave the device for the CPU, the most first."""
        return dict(Counter(op.op for op in self.floats if op.falls_back).most_common())

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {
            "target": self.target,
            "passed": self.passed,
            "violations": [vars(finding) for finding in self.findings],
            "float": [op.to_dict() for op in self.floats],
            "float_by": self.measured or "prediction",
            "fallback": self.fallback,
            "conversions": self.conversions,
            "price": None if self.price is None else self.price.to_dict(),
            "fixed": list(self.fixed),
            "device": "" if self.measured else "not run on the device",
        }

    def text(self) -> str:
        """Returns the report in lines."""
        lines = [f"fixed: {sentence}" for sentence in self.fixed]
        rules = dict.fromkeys((finding.rule, finding.source) for finding in self.findings)
        for rule, source in rules:
            findings = [finding for finding in self.findings if finding.rule == rule]
            lines.append(f"{rule} ({source}):")
            texts = (f"{f.text}{' [--fix]' if f.fixable else ''}" for f in findings)
            lines.append("  " + shorten_list(texts, "\n  ", SHOWN_LINES))
        how = f"in float, as {self.measured} loads the file" if self.measured else "in float, predicted"
        if self.floats:
            lines.append(f"{how}:")
            lines.append("  " + shorten_list(map(_describe, self.floats), "\n  ", SHOWN_LINES))
        else:
            lines.append(f"{how}: no op")
        if self.fallback:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.fallback.items())
            number = sum(self.fallback.values())
            leave = "op leaves" if number == 1 else "ops leave"
            lines.append(
                f"fallback: {number} {leave} the device for the CPU ({kinds}), and their tensors are copied "
                "there and back"
            )
        if self.conversions:
            are = "tensor is" if self.conversions == 1 else "tensors are"
            lines.append(
                f"conversions: {self.conversions} {are} rounded again to integers of another width, each by "
                "an op of its own"
            )
        if self.price is not None:
            lines.append(self.price.text())
        count = len(self.findings)
        verdict = "keeps" if not count else f"breaks at {count} {'places' if count > 1 else 'place'}"
        where = f"run in {self.measured}" if self.measured else "not run on the device"
        lines.append(f"{verdict} the contract of {self.target} ({self.title}); {where}")
        return "\n".join(lines)


def _describe(op: FloatOp) -> str:
    """Returns the line of an op in float."""
    place = f" [runs on {op.runs_on}]" if op.runs_on else ""
    return f"{op.op} {op.node}: {op.reason}{place}"


# Ops that move values or compute shapes: they run on what they get.
_MOVES = (
    "Reshape Transpose Flatten Squeeze Unsqueeze Slice Split Gather GatherElements GatherND Pad Expand Tile "
    "Identity Cast Shape Constant ConstantOfShape Range Concat Where Equal Less Greater Not And Or NonZero "
    "MaxPool DepthToSpace SpaceToDepth Size Dropout ScatterElements ScatterND Compress OneHot Floor"
)


def predict_floats(graph: QdqGraph, contract: Contract, broken: Mapping[str, str]) -> list[FloatOp]:
    """Lists the ops that compute in float, in the order of the graph.

    Args:
        graph: the graph.
        contract: the contract of the target.
        broken: first output of a node that breaks a rule -> the name of the rule.
    """
    floats = []
    for node in graph.nodes():
        if node.op_type in QUANTIZERS or not node.output:
            continue
        if not any(name not in graph.stored for name in read_names(node)):
            continue  # it is computed from constants
        place = contract.place_of_floats(node.op_type)
        if node.op_type in _MOVES.split():
            # What moves values runs on what it gets, unless the device lacks the op.
            reason = "" if contract.device_ops is None or place != CPU else f"{contract.title} has no such op"
        else:
            reason = broken.get(node.output[0]) or _reason(graph, contract, node)
        if reason:
            floats.append(FloatOp(node.name or node.output[0], node.op_type, reason, place))
    return floats


def _reason(graph: QdqGraph, contract: Contract, node: NodeProto) -> str:
    """Explains why a node computes in float; "" if it does not, or is part of the kernel before it."""
    if node.op_type in contract.fused and _reads_kernel(graph, contract, node):
        return ""
    if node.op_type not in contract.ops:
        return f"{contract.title} computes {node.op_type} in float"
    count = (
        2 if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Sub", "Mul", "Div") else 1
    )
    operands = [graph.operand(node, index) for index in range(count)]
    floats = [o.name for o in operands if o is not None and o.dequantize is None]
    if floats:
        return f"it reads {floats[0]} in float"
    if node.op_type in contract.rounds_results and not _is_rounded(graph, contract, node):
        return "its result is not rounded"
    return ""


def _reads_kernel(graph: QdqGraph, contract: Contract, node: NodeProto) -> bool:
    """Whether a node directly follows an op on integers, or another one in the kernel of such an op."""
    for name in node.input:
        producer = graph.producers.get(name)
        if producer is None or producer.op_type in QUANTIZERS:
            continue
        first = graph.operand(producer, 0)
        if producer.op_type in contract.ops and first is not None and first.dequantize is not None:
            return True
        if producer.op_type in contract.fused and _reads_kernel(graph, contract, producer):
            return True
    return False


def _is_rounded(graph: QdqGraph, contract: Contract, node: NodeProto) -> bool:
    """Whether all that reads the result, after the functions of its kernel, are QuantizeLinear nodes."""
    name = node.output[0]
    readers = graph.readers.get(name, [])
    if not readers or name in graph.output_names:
        return False
    if len(readers) == 1 and readers[0].op_type in contract.fused:
        return _is_rounded(graph, contract, readers[0])
    return all(reader.op_type == "QuantizeLinear" for reader in readers)


def conversions(graph: QdqGraph) -> list[NodeProto]:
    """Returns where a tensor is rounded again to integers of another width, such as 16 bits to 8.

    A device computes each of these QuantizeLinear as an op of its own.
    """
    sources = ((node, graph.producers.get(node.input[0])) for node in graph.nodes("QuantizeLinear"))
    return [
        node
        for node, source in sources
        if source is not None
        and source.op_type == "DequantizeLinear"
        and graph.type_of(source.input[0]) != graph.type_of(node.output[0])
    ]


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


def check_contract(path: Path, target: str, host: RuntimeHost | None = None) -> ContractReport:
    """Checks an ONNX file against the contract of a target.

    Args:
        path: the file.
        target: the name of the target, such as ``tensorrt``.
        host: the interpreter or machine whose onnxruntime is asked for its kernels; None for this one.

    Raises:
        ExportError: when the file cannot be read, lacks quantized ops, or the target lacks a contract.
    """
    return _checked(path, target, host)[0]


def fix_contract(path: Path, target: str, host: RuntimeHost | None = None) -> tuple[bytes, ContractReport]:
    """Repairs what is mechanical in an ONNX file, and checks the result.

    Args:
        path: the file, which is only read.
        target: the name of the target.
        host: see `check_contract`.

    Returns:
        The repaired file, and the report on it, which has what was repaired.

    Raises:
        ExportError: for what `check_contract` refuses, or when the result is no valid ONNX.
    """
    report, data = _checked(path, target, host, fixing=True)
    return data, report


@check_arguments
def check_file_for(
    file: str | os.PathLike[str],
    target: str,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    runtime_host: RuntimeHost | None = None,
) -> ContractReport:
    """Checks whether a quantized ONNX file keeps the contract of a target, as ``qtrace check`` does.

    Args:
        file: an ONNX file with QuantizeLinear and DequantizeLinear nodes, of any tool.
        target: ``onnxruntime``, ``qnn``, ``ryzenai``, ``ryzenai_xint8`` or ``tensorrt``.
        out: where to write a copy in which all that is mechanical is repaired; None for no copy.
        force: whether ``out`` may replace a file of another tool.
        runtime_host: the interpreter or machine whose onnxruntime says which ops compute in float, for the
            target ``onnxruntime``; None for this one.

    Returns:
        The violations with their rules and cures, and the ops that compute in float.

    Raises:
        ExportError: for a file that cannot be read or is not quantized, or an unknown target.
        QtraceError: when ``out`` cannot be written.
    """
    if out is None:
        return check_contract(Path(file), target, runtime_host)
    data, report = fix_contract(Path(file), target, runtime_host)
    with output_file(Path(out), force=force) as partial:
        Path(partial).write_bytes(data)
    return report


def _checked(
    path: Path, target: str, host: RuntimeHost | None, fixing: bool = False
) -> tuple[ContractReport, bytes]:
    """Reads a file, repairs it if asked to, and reports on what is left."""
    if path.suffix.lower() != ".onnx":
        raise ExportError(f"{path} is not an ONNX file by its name: contracts are for files like model.onnx.")
    model, folder = load_model(path)
    if folder is not None:
        raise ExportError(
            f"{path} has more than 2 GiB of tensors, which a check cannot load: check a part of it."
        )
    contract = CONTRACTS.get(target)
    fixed = fix_model(model, contract, path) if fixing else ()
    if fixing:
        _mark(model, target)
    return check_model(model, contract, path, fixed, host), model.SerializeToString() if fixing else b""


def _mark(model: Any, target: str) -> None:
    """Writes down that qtrace repaired the file, by which a later repair may replace it."""
    entries = [entry for entry in model.metadata_props if entry.key == _FIXED]
    entry = entries[0] if entries else model.metadata_props.add(key=_FIXED)
    entry.value = target
