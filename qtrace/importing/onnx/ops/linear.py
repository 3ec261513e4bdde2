"""Matrix products, Einsum as products between transposes and reshapes, and recurrent layers.

Recurrent layers with other activations than ONNX's defaults stay as they are in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx

from qtrace.graph import recurrent
from qtrace.graph.origin import joined, transposed_by
from qtrace.graph.recurrent import DIRECTIONS, OnnxRecurrent
from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.folding import Size, product, whole
from qtrace.importing.onnx.model import Stored

_GATES = {"LSTM": "iofc", "GRU": "zrh", "RNN": "i"}  # as ONNX names them
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
_RESULTS = ("sequence", "hidden", "cell")
_INPUTS = [end.name for end in onnx.defs.get_schema("LSTM").inputs]
_LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = map(_INPUTS.index, ("sequence_lens", "initial_h", "initial_c", "P"))


def _recurrent(call: Call) -> Any:
    op = call.node.op
    direction = _text(call.attribute("direction", "forward"))
    nonlinearity = _check_form(call, op, direction)
    reset_after = bool(call.attribute("linear_before_reset", 0)) if op == "GRU" else False
    ways, gates = len(DIRECTIONS[direction]), len(_GATES[op])
    weight, recurrence = call.stored(1), call.stored(2)
    size = int(call.attribute("hidden_size", recurrence.array.shape[-1]))
    shapes: list[tuple[int, ...]] = [(ways, gates * size, call.shape(0)[2]), (ways, gates * size, size)]
    tensors = {"weight": weight, "recurrence": recurrence}
    if call.has(3):
        tensors["bias"] = call.stored(3)
        shapes.append((ways, 2 * gates * size))
    for stored, shape in zip(tensors.values(), shapes, strict=True):
        if stored.array.shape != shape:
            call.contradict(f"reads {stored.name!r} {list(stored.array.shape)}, where {list(shape)} belongs")
    bias = shapes[2] if call.has(3) else None
    module = OnnxRecurrent(op.lower(), shapes[0], shapes[1], bias, direction, reset_after, nonlinearity)
    states = [_state(call, index) for index in (_HIDDEN, _CELL)[: 2 if op == "LSTM" else 1]]
    while states and states[-1] is None:
        states.pop()
    # A list of names, one for each result: the outputs that the file leaves out are unnamed.
    outputs = [*call.result_names, *[""] * 3][: 3 if op == "LSTM" else 2]
    names: Any = [name or f"{call.name}_{end}" for name, end in zip(outputs, _RESULTS, strict=False)]
    results = _shared(call, module, tensors, states, names)
    if results is None:
        results = call.module(module, tensors, call.tensor(0), *states, name=names)
    return tuple(results)[: len(call.node.outputs)]


def _shared(
    call: Call, module: OnnxRecurrent, tensors: dict[str, Stored], states: list[Any], names: Any
) -> Any:
    """Calls a function of the parameters of another layer if the node shares some with it; None if not."""
    parameters = {name: call.layers.parameter_of(stored) for name, stored in tensors.items()}
    if call.layers.has_module(module, tensors) or not any(node is not None for node in parameters.values()):
        return None
    nodes = [call.layers.tensor(tensors[name]) if node is None else node for name, node in parameters.items()]
    weights = [*nodes, *[None] * (3 - len(nodes))]
    states = [*states, *[None] * ((2 if module.kind == "lstm" else 1) - len(states))]
    arguments = (call.tensor(0), *weights, *states, module.direction)
    if module.kind == "lstm":
        return call.function(recurrent.lstm, *arguments, name=names)
    if module.kind == "gru":
        return call.function(recurrent.gru, *arguments, module.linear_before_reset, name=names)
    return call.function(recurrent.rnn, *arguments, module.nonlinearity, name=names)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_form(call: Call, op: str, direction: str) -> str:
    """Refuses the forms that MegEngine's graph lacks; returns the function of an RNN."""
    if direction not in DIRECTIONS:
        call.contradict(f"has the direction {direction!r}")
    ways = len(DIRECTIONS[direction])
    activations = call.attribute("activations", None)
    names = [_text(name).lower() for name in activations or _ACTIVATIONS[op] * ways]
    if op == "RNN" and names in (["relu"] * ways, ["tanh"] * ways):
        nonlinearity = names[0]
    elif names == _ACTIVATIONS[op] * ways:
        nonlinearity = "tanh"
    else:
        call.refuse(f"has the activations {', '.join(names)}")
    for name in ("activation_alpha", "activation_beta"):
        call.attribute(name, None)  # which sigmoid, tanh and relu do not read
    if call.attribute("clip", None) is not None:
        call.refuse("clips its gates")
    if call.attribute("layout", 0):
        call.refuse("has samples on its first axis, which onnxruntime does not run")
    if op == "LSTM" and call.attribute("input_forget", 0):
        call.refuse("couples its input and forget gates")
    if call.has(_PEEPHOLES):
        call.refuse("has peepholes")
    if call.has(_LENGTHS) and not _is_full(call):
        call.refuse("reads the lengths of its sequences")
    if not call.is_float(0):
        call.refuse(f"computes with {call.dtype(0).name}")
    return nonlinearity


def _is_full(call: Call) -> bool:
    """Returns whether stored lengths say that every sequence has all steps of the input."""
    lengths = call.values[_LENGTHS]
    fixed = len({shape[:2] for shape in call.shapes(0)}) == 1
    return isinstance(lengths, Stored) and fixed and bool((lengths.array == call.shape(0)[0]).all())


def _state(call: Call, index: int) -> TensorNode | None:
    """Returns a first state; None for one that is left out, or is stored as zeros."""
    if not call.has(index):
        return None
    value = call.values[index]
    if isinstance(value, Stored) and not value.array.any():
        return None
    return call.tensor(index)


def _einsum(call: Call) -> Any:
    terms, result = _parse(call)
    sizes: dict[str, int | Size] = {}
    nodes = []
    for index, term in enumerate(terms):
        for axis, label in enumerate(term):
            sizes.setdefault(label, call.size(index, axis))
        others = {*result, *(label for other in terms if other is not term for label in other)}
        nodes.append(_summed(call, index, term, others))
    terms = [[label for label in term if _is_read(label, terms, result, i)] for i, term in enumerate(terms)]
    if len(terms) == 1:
        return _ordered(call, nodes[0], terms[0], result)
    left, right = terms
    shared = [label for label in left if label in right]
    batch = [label for label in shared if label in result]
    summed = [label for label in shared if label not in result]
    rows = [label for label in left if label not in shared]
    columns = [label for label in right if label not in shared]
    first = _grouped(call, nodes[0], left, (batch, rows, summed), sizes)
    second = _grouped(call, nodes[1], right, (batch, summed, columns), sizes)
    product_node = call.function(F.matmul, first, second, name=f"{call.name}_product")
    whole_shape = [*batch, *rows, *columns]
    arguments = tuple(call.layers.size(sizes[label]) for label in whole_shape)
    if len(rows) != 1 or len(columns) != 1:
        product_node = call.function(F.reshape, product_node, arguments or (1,), name=f"{call.name}_split")
    return _ordered(call, product_node, whole_shape, result)


def _check_ranks(call: Call, equation: str, inputs: str, output: str) -> None:
    """Refuses an equation that does not fit its inputs, at which onnxruntime 1.23 crashes."""
    terms = inputs.split(",")
    fits = len(terms) == len(call.values) and set(output) <= {*inputs, "."}
    for index, term in enumerate(terms if fits else ()):
        named, rank = len(term.replace("...", "")), call.rank(index)
        fits = fits and (named <= rank if "..." in term else named == rank)
    if not fits:
        call.contradict(f"has the equation {equation!r}, which does not fit its inputs")


def _parse(call: Call) -> tuple[list[list[str]], list[str]]:
    """Returns the labels of the inputs and of the result."""
    equation = "".join(str(call.attribute("equation")).split())
    inputs, arrow, output = equation.partition("->")
    terms = [list(term) for term in inputs.split(",")]
    _check_ranks(call, equation, inputs, output)
    if "." in equation:
        call.refuse(f"has the equation {equation!r}, whose dots stand for any axes: name them")
    if len(terms) > 2 or len(terms) != len(call.values):
        call.refuse(f"has the equation {equation!r}; MegEngine multiplies two matrices at a time")
    if not all(call.is_float(i) for i in range(len(terms))):
        call.refuse("sums products of integers; MegEngine multiplies matrices of float32")
    labels = [label for term in terms for label in term]
    result = list(output) if arrow else sorted(label for label in set(labels) if labels.count(label) == 1)
    fits = all(len(term) == call.rank(i) for i, term in enumerate(terms)) and set(result) <= set(labels)
    if not fits or any(len(set(term)) < len(term) for term in (*terms, result)):
        call.refuse(f"has the equation {equation!r}, in which a tensor names an axis twice or lacks one")
    if not result:
        call.refuse(f"has the equation {equation!r}, which gives a number without axes")
    for label in set(labels):
        pairs = [(i, term.index(label)) for i, term in enumerate(terms) if label in term]
        numbers = [tuple(shape[axis] for shape in call.shapes(i)) for i, axis in pairs]
        if len({own if len(set(own)) > 1 else own[:1] for own in numbers}) > 1:
            call.refuse(f"has the equation {equation!r}, in which {label!r} broadcasts")
    return terms, result


def _is_read(label: str, terms: Sequence[Sequence[str]], result: Sequence[str], own: int) -> bool:
    return label in result or any(label in term for i, term in enumerate(terms) if i != own)


def _summed(call: Call, index: int, term: Sequence[str], others: set[str]) -> TensorNode:
    """Returns an input, summed over the axes that only it has and that the result lacks."""
    axes = [axis for axis, label in enumerate(term) if label not in others]
    node = call.tensor(index)
    for axis in reversed(axes):
        node = call.function(F.sum, node, axis, name=f"{call.name}_sum")
    return node


def _grouped(
    call: Call,
    node: TensorNode,
    term: Sequence[str],
    groups: tuple[list[str], list[str], list[str]],
    sizes: dict[str, int | Size],
) -> TensorNode:
    """Returns an operand of the product, whose last two groups of axes are one axis each."""
    batch, rows, columns = groups
    node = _ordered(call, node, term, [*batch, *rows, *columns], name=f"{call.name}_turned")
    if len(rows) == 1 and len(columns) == 1:
        return node
    joined = [whole(product([sizes[label] for label in group])) for group in (rows, columns)]
    target = [*(sizes[label] for label in batch), *joined]
    return call.function(
        F.reshape, node, tuple(call.layers.size(n) for n in target), name=f"{call.name}_joined"
    )


def _ordered(
    call: Call, node: TensorNode, term: Sequence[str], wanted: Sequence[str], name: str | None = None
) -> TensorNode:
    order = tuple(list(term).index(label) for label in wanted)
    return node if order == tuple(range(len(order))) else call.function(F.transpose, node, order, name=name)


def _gemm(call: Call) -> Any:
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    left, right = bool(call.attribute("transA", 0)), bool(call.attribute("transB", 0))
    call.attribute("broadcast", 0)  # before opset 7; matrices broadcast as they do since then
    if not call.is_float(0):
        call.refuse(f"multiplies {call.dtype(0).name}; MegEngine multiplies matrices of float32")
    weight, bias = call.values[1], call.values[2] if call.has(2) else None
    if isinstance(weight, Stored) and alpha == 1 and not left and not isinstance(call.values[0], Stored):
        if bias is None:
            return _linear(call, _laid_out(weight, right), None)
        columns = weight.array.shape[0 if right else 1]
        if isinstance(bias, Stored) and beta == 1 and bias.array.size == columns and _is_row(bias.array):
            return _linear(call, _laid_out(weight, right), bias)
    product = call.function(
        F.matmul,
        call.tensor(0),
        call.tensor(1),
        transpose_a=left,
        transpose_b=right,
        name=f"{call.name}_product",
    )
    if alpha != 1:
        product = call.function(F.mul, product, alpha)
    if bias is None or beta == 0:
        return product
    added = call.operand(2)
    if beta != 1:
        added = added * beta if isinstance(added, float) else call.function(F.mul, added, beta)
    return call.function(F.add, product, added)


def _is_row(array: np.ndarray) -> bool:
    return array.ndim <= 2 and array.size == array.shape[-1] if array.ndim else False


def _laid_out(weight: Stored, transposed: bool) -> Stored:
    """Returns the weight as MegEngine's Linear stores it: outputs x inputs."""
    if transposed:
        return weight
    return replace(weight, array=weight.array.T, moves=joined(weight.moves, transposed_by((1, 0))))


def _linear(call: Call, weight: Stored, bias: Stored | None) -> Any:
    outputs, inputs = weight.array.shape
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    module = M.Linear(inputs, outputs, bias=bias is not None)
    if call.layers.owns(module, tensors):
        return call.module(module, tensors, call.tensor(0))
    parts = [call.layers.tensor(part) for part in tensors.values()]
    return call.function(F.linear, call.tensor(0), *parts)


def lower_linear(call: Call) -> Any:
    """Lowers the layer that `join_biases` makes of a MatMul and an Add."""
    if call.rank(0) < 2:
        product = call.function(F.matmul, call.tensor(0), call.tensor(1), name=f"{call.name}_product")
        return call.function(F.add, product, call.tensor(2))
    return _linear(call, _laid_out(call.stored(1), False), call.stored(2))


def _matmul(call: Call) -> Any:
    if not call.is_float(0):
        call.refuse(f"multiplies {call.dtype(0).name}; MegEngine multiplies matrices of float32")
    weight = call.values[1]
    if isinstance(weight, Stored) and weight.array.ndim == 2 and call.rank(0) >= 2:
        return _linear(call, _laid_out(weight, False), None)
    left, right = call.tensor(0), call.tensor(1)
    ranks = call.rank(0), call.rank(1)
    if min(ranks) > 2 or (max(ranks) > 2 and min(ranks) == 2 and ranks[0] == 2):
        left, right = _same_batch(call, left, right)
    return call.function(F.matmul, left, right)


def _same_batch(call: Call, left: Any, right: Any) -> tuple[Any, Any]:
    """Broadcasts the leading axes, which MegEngine's matmul does not."""
    sizes, batches = call.common_sizes(left, right, but=2)
    expanded = []
    for node in (left, right):
        own = call.builder.shapes(node)
        rank = len(own[0])
        ends = [call.layers.axis(node, axis) for axis in (rank - 2, rank - 1)]
        shapes = [(*batch, *own[min(p, len(own) - 1)][-2:]) for p, batch in enumerate(batches)]
        expanded.append(call.expanded(node, [*sizes, *ends], shapes))
    return expanded[0], expanded[1]


LOWERINGS: dict[str, Lowering] = {
    **dict.fromkeys(_GATES, _recurrent),
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _matmul,
}
