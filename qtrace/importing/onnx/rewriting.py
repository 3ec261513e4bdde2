"""Rewrites the graph of a file before it is imported: cuts it at tensors, ties and joins nodes.

PyTorch's exporter stores equal parameters once: ``Identity(l0.bias) -> l1.bias``. Vectors may be equal by
chance, as biases of zeros are. Each is a stored tensor of its own again, so that layers find their biases and
scales, and can learn apart. Equal matrices are tied, and stay one.

Exporters write a linear layer on more than two axes as MatMul and Add, since Gemm takes matrices. Files for
OpenVINO have a convolution and the sum with its rounded bias (`qtrace.export.onnx.cures`).

A stored number becomes a constant argument of an op, as in ``x * 0.1666 + 0.5``. In a scale and shift it was
learned (PP-LCNetV3's LearnableAffineBlock), and so was an initializer with the name of a layer's tensor (the
scales of FCOS' heads). It stays a parameter under the name of the file.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx

from qtrace.errors import ImportingError
from qtrace.graph.flatten import delete_attribute
from qtrace.graph.types import GetAttr, TracedModule
from qtrace.graph.walk import exprs
from qtrace.importing.onnx.model import Graph, OnnxNode, count_readers, is_float
from qtrace.importing.onnx.naming import is_anonymous, names_tensor
from qtrace.onnxfile.model import read_names, rename_tensors


def cut(graph: Graph, outputs: Sequence[str]) -> Graph:
    """Returns the part of a graph that computes some tensors, which are its outputs.

    Args:
        graph: the graph of a file.
        outputs: names of tensors in the file. Inputs that none of them needs are left out.

    Raises:
        ImportingError: when the list is empty, names a tensor twice, or one that the file does not have.
    """
    if not isinstance(outputs, (list, tuple)) or not outputs or not all(isinstance(n, str) for n in outputs):
        raise ImportingError(f"outputs={outputs!r} is no list of tensors: write outputs=['name'].")
    computed = {name for node in graph.nodes for name in node.outputs if name}
    known = computed | {value.name for value in graph.inputs} | set(graph.stored)
    for name in outputs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f"names like it are {', '.join(map(repr, near))}" if near else "see its names in a viewer"
            raise ImportingError(f"outputs: the file holds no tensor {name!r}; {hint}.")
    if len(set(outputs)) < len(outputs):
        raise ImportingError(f"outputs={list(outputs)} names a tensor twice.")
    needed = set(outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(read_names(node.proto))
    dtypes = dict(zip(graph.outputs, graph.output_dtypes, strict=True))
    return dataclasses.replace(
        graph,
        nodes=tuple(reversed(nodes)),
        inputs=tuple(value for value in graph.inputs if value.name in needed),
        outputs=tuple(outputs),
        output_dtypes=tuple(dtypes.get(name) for name in outputs),
    )


def without_strings(graph: Graph, strings: Collection[str]) -> Graph:
    """Returns a graph without nodes that read stored strings, as the names of classes after a classifier.

    Args:
        graph: the graph.
        strings: the initializers of its file that hold strings.

    Raises:
        ImportingError: when outputs need these nodes, with the tensors up to which the file can be read.
    """
    of_strings, last, first = set(strings), list[str](), ""
    results = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        read = set(read_names(node.proto))
        if of_strings.isdisjoint(read):
            continue
        first = first or min(read & of_strings)
        of_strings.update(filter(None, node.outputs))
        last += sorted(read - of_strings - set(graph.stored))
    lost = [name for name in graph.outputs if name in of_strings]
    if not lost:
        nodes = tuple(node for node in graph.nodes if of_strings.isdisjoint(read_names(node.proto)))
        return dataclasses.replace(graph, nodes=nodes)
    outputs = [name for name in graph.outputs if name not in of_strings]
    # A ZipMap makes dictionaries of a tensor, which MegEngine lacks, too.
    outputs = [results[n].inputs[0] if n in results and results[n].op == "ZipMap" else n for n in outputs]
    names = list(dict.fromkeys([*outputs, *last]))
    cure = f"read the file by from_onnx(outputs={names}) (--outputs), and make the strings of what that gives"
    raise ImportingError(
        f"{first or lost[0]!r} holds strings, which MegEngine lacks, and output {lost[0]!r} is made of "
        f"them: {cure if names else 'write the file without it'}."
    )


def store_copies(graph: Graph) -> Graph:
    """Returns the graph with a copy of the tensor in place of each Identity of a stored one.

    Args:
        graph: the graph; stored integers that a DequantizeLinear reads count as stored, too.
    """
    stored = dict(graph.stored)
    dequantized: dict[str, OnnxNode] = {}
    nodes: list[OnnxNode] = []
    tied: dict[str, str] = {}
    for node in graph.nodes:
        if not tied.keys().isdisjoint(node.inputs):
            proto = onnx.NodeProto()
            proto.CopyFrom(node.proto)
            rename_tensors(proto, tied)
            node = dataclasses.replace(node, inputs=tuple(proto.input), proto=proto)
        if node.op == "Identity" and not node.domain:
            (source,), (copy,) = node.inputs, node.outputs
            if source in stored:
                stored[copy] = stored[source]
                if stored[source].ndim > 1:
                    tied[copy] = source
                continue
            if source in dequantized:
                node = dataclasses.replace(dequantized[source], name=node.name, outputs=(copy,))
        if node.op == "DequantizeLinear" and node.inputs[0] in stored:
            dequantized[node.outputs[0]] = node
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes), stored=stored)


LINEAR = ("qtrace", "Linear")
"""Domain and kind of the joined node: inputs x, weight (inputs x outputs) and bias."""


def join_biases(graph: Graph) -> Graph:
    """Returns the graph with each product and sum as one linear layer, in the place of the sum.

    Args:
        graph: the graph; pairs whose product is read elsewhere stay.
    """
    readers = count_readers(graph)
    shapes = _stored_shapes(graph)
    products = {node.outputs[0]: node for node in graph.nodes if _is_product(node, shapes)}
    joined: dict[str, OnnxNode] = {}  # by the name of the sum
    dropped: set[str] = set()  # names of products
    for node in graph.nodes:
        if node.op != "Add" or node.domain or len(node.inputs) != 2:
            continue
        for product, bias in (node.inputs, node.inputs[::-1]):
            layer = products.get(product)
            if layer is None or readers[product] != 1 or product in dropped:
                continue
            if shapes.get(bias) == shapes[layer.inputs[1]][1:]:
                joined[node.outputs[0]] = dataclasses.replace(
                    layer,
                    domain=LINEAR[0],
                    op=LINEAR[1],
                    inputs=(*layer.inputs, bias),
                    outputs=node.outputs,
                    title=node.title,
                )
                dropped.add(product)
                break
    nodes = [node for node in graph.nodes if not dropped.intersection(node.outputs)]
    return dataclasses.replace(graph, nodes=tuple(joined.get(node.outputs[0], node) for node in nodes))


def _stored_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of stored floats, transposed ones, and those that DequantizeLinear makes."""
    shapes = {name: array.shape for name, array in graph.stored.items() if is_float(array.dtype)}
    for node in graph.nodes:
        if node.op == "Transpose" and not node.domain and len(shapes.get(node.inputs[0], ())) == 2:
            rows, columns = shapes[node.inputs[0]]
            turned = list(node.attributes.get("perm", (1, 0))) == [1, 0]
            shapes[node.outputs[0]] = (columns, rows) if turned else (rows, columns)
        if node.op == "DequantizeLinear" and node.inputs[0] in graph.stored:
            shapes[node.outputs[0]] = graph.stored[node.inputs[0]].shape
    return shapes


def _is_product(node: OnnxNode, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    weight = shapes.get(node.inputs[1]) if len(node.inputs) == 2 else None
    known = weight is not None and len(weight) == 2 and node.inputs[0] not in shapes
    return known and node.op == "MatMul" and not node.domain


def join_channel_biases(graph: Graph) -> Graph:
    """Returns the graph with each convolution and rounded bias as one, in the place of the sum.

    Args:
        graph: the graph; pairs whose convolution is read elsewhere stay.
    """
    readers = count_readers(graph)
    layers = {
        node.outputs[0]: node
        for node in graph.nodes
        if node.op == "Conv" and not node.domain and len(node.inputs) == 2 and readers[node.outputs[0]] == 1
    }
    biases = {node.outputs[0]: node for node in graph.nodes if _is_bias(node, graph, readers)}
    joined: dict[str, OnnxNode] = {}  # by the name of the sum
    for node in graph.nodes:
        if node.op == "Add" and not node.domain and len(node.inputs) == 2:
            layer, bias = layers.get(node.inputs[0]), node.inputs[1]
            if layer is not None and bias in biases:
                joined[node.outputs[0]] = dataclasses.replace(
                    layer, inputs=(*layer.inputs, bias), outputs=node.outputs
                )
    added = Counter(node.inputs[2] for node in joined.values())
    whole = {bias for bias, count in added.items() if count == readers[bias]}
    joined = {name: node for name, node in joined.items() if node.inputs[2] in whole}
    if not joined:
        return graph
    vectors = {node.inputs[0]: node for name, node in biases.items() if name in whole}
    stored = {name: np.reshape(a, -1) if name in vectors else a for name, a in graph.stored.items()}
    axes = {
        bias: dataclasses.replace(biases[bias], attributes={**biases[bias].attributes, "axis": 0})
        for bias in whole
    }
    dropped = {name for name, layer in layers.items() if any(n.name == layer.name for n in joined.values())}
    nodes = [node for node in graph.nodes if not dropped.intersection(node.outputs)]
    nodes = [joined.get(n.outputs[0], axes.get(n.outputs[0], n)) for n in nodes]
    return dataclasses.replace(graph, nodes=tuple(nodes), stored=stored)


def _is_bias(node: OnnxNode, graph: Graph, readers: Counter[str]) -> bool:
    """Whether a node dequantizes stored integers of 32 bits, one for each channel of a result."""
    if node.op != "DequantizeLinear" or node.domain or node.inputs[0] not in graph.stored:
        return False
    values = graph.stored[node.inputs[0]]
    channels = values.ndim > 2 and values.size == values.shape[1]
    return values.dtype == np.int32 and channels and readers[node.inputs[0]] == 1


def find_scales_and_shifts(graph: Graph) -> frozenset[str]:
    """Returns the names of single floats that were learned.

    These are the numbers of each product with a sum after it that both have names. Factors and summands that
    are initializers with the name of a layer's tensor count, too.

    Args:
        graph: the graph; a product that is read elsewhere is no scale and shift.
    """
    readers = count_readers(graph)
    numbers = {name for name, array in graph.stored.items() if _is_number(array.dtype, array.size)}
    numbers.update(node.outputs[0] for node in graph.nodes if _is_constant_number(node))
    numbers = {name for name in numbers if not is_anonymous(name)}
    scales: dict[str, str] = {}  # product -> the name of its scale
    names: set[str] = set()
    for node in graph.nodes:
        for value, number in _operands(node, numbers):
            if number in graph.stored and names_tensor(number):
                names.add(number)
            if node.op == "Mul" and readers[node.outputs[0]] == 1:
                scales[node.outputs[0]] = number
            elif node.op == "Add" and value in scales:
                names |= {scales[value], number}
    return frozenset(names)


def _operands(node: OnnxNode, numbers: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the computed operand of a product or sum, and its number."""
    if node.op in ("Mul", "Add") and not node.domain and len(node.inputs) == 2:
        for value, number in (node.inputs, node.inputs[::-1]):
            if number in numbers and value not in numbers:
                yield value, number


def _is_constant_number(node: OnnxNode) -> bool:
    tensor = node.attributes.get("value") if node.op == "Constant" and not node.domain else None
    if not isinstance(tensor, onnx.TensorProto) or tensor.data_type != onnx.TensorProto.FLOAT:
        return False
    return _is_number(np.dtype(np.float32), int(np.prod(tensor.dims, dtype=object)))


def _is_number(dtype: np.dtype, size: int) -> bool:
    return dtype == np.float32 and size == 1


def drop_unread(traced: TracedModule, paths: Collection[str]) -> None:
    """Deletes the tensors at ``paths`` that no op reads, since a composite took them as its numbers.

    The tensor of a path may be gone: nothing read it if its op was refused and kept as in the file.
    """
    read = {expr.name for expr in exprs(traced) if isinstance(expr, GetAttr)}
    present = {path for path, _ in traced.named_tensors()}
    for path in paths:
        if path in present and path not in read:
            delete_attribute(traced, path)
