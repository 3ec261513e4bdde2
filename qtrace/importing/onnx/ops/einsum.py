"""Einstein sums of one or two tensors, as a matrix product between transposes and reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megengine.functional as F

from qtrace.graph.types import TensorNode
from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.sizes.folding import product
from qtrace.importing.onnx.sizes.size import Size, whole

__all__ = ["LOWERINGS"]


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


LOWERINGS: dict[str, Lowering] = {"Einsum": _einsum}
