"""Names of modules and nodes, from the names in the file and from what PyTorch's exporters keep.

The exporter of `torch.export` writes the path of the module and the line of its code as metadata of each
node. The older one writes them as the node's name, in which the name of a list stands twice:
``/layer4/layer4.1/conv1/Conv``.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence

import onnx

from qtrace.graph.types import TracedModule
from qtrace.importing.onnx.model import Graph, OnnxNode

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\w+)')
_MAX_TEXT = 4000  # characters of one name or trace; more is not of an exporter
_COUNTER = re.compile(r"_\d+$")


def name_by_scopes(graph: Graph) -> Graph:
    """Returns the graph whose nodes are titled by the path of their module in the source.

    A module that calls one op gives its own path, ``layer1.0.conv1``. One that calls several gives the path
    and the op, ``layer1.0.add``.

    Args:
        graph: the graph; nodes without such a path get no title.
    """
    scopes = [_scope(node) for node in graph.nodes]
    calls: dict[str, set[str]] = defaultdict(set)
    last: dict[tuple[str, str], int] = {}
    for index, scope in enumerate(scopes):
        if scope is not None:
            calls[scope[0]].add(scope[1])
            last[scope] = index
    nodes = []
    for index, (node, scope) in enumerate(zip(graph.nodes, scopes, strict=True)):
        if scope is not None:
            path, call = scope
            kind = _COUNTER.sub("", call).strip("_") or node.op.lower()
            title = path if path and len(calls[path]) == 1 else f"{path}.{kind}" if path else kind
            if last[scope] != index:  # a part of what the source calls
                title = f"{title}.{node.op.lower()}"
            node = dataclasses.replace(node, title=title)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def source_line(proto: onnx.NodeProto) -> str:
    """Returns ``FILE:LINE`` of the call in the source; "" if the file does not say it.

    Frames of torch's own modules are left out, unless there are no others.
    """
    text = next((item.value for item in proto.metadata_props if item.key == _STACK), "")
    frames = _FRAME.findall(text[-_MAX_TEXT:])
    own = [frame for frame in frames if "/torch/nn/" not in frame[0].replace("\\", "/")] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def undoubled(name: str) -> str:
    """Returns a name of the older exporter, in which each list stands once: ``/layer4.1/conv1/Conv``."""
    parts = name.split("/")
    single = [
        part
        for part, following in zip(parts, [*parts[1:], ""], strict=True)
        if not part or not following.startswith(f"{part}.")
    ]
    return "/".join(single)


def _scope(node: OnnxNode) -> tuple[str, str] | None:
    """Returns the path of the module that calls the op, and the name of the call."""
    text = next((item.value for item in node.proto.metadata_props if item.key == _SCOPES), "")
    if text and len(text) <= _MAX_TEXT:
        try:
            scopes = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        if isinstance(scopes, list) and len(scopes) > 1 and all(isinstance(s, str) for s in scopes):
            return scopes[-2], scopes[-1]
        return None
    if node.proto.name.startswith("/") and "/" in node.proto.name[1:] and not node.domain:
        path, _, call = undoubled(node.proto.name).rpartition("/")
        return path.strip("/").replace("/", "."), call
    return None


# The last part of an initializer's name that names a tensor of a layer, not the layer.
_TENSORS = (
    *("weight", "bias", "kernel", "gamma", "beta", "w", "b", "scale", "slope", "running_mean", "running_var"),
    *("mean", "variance", "moving_mean", "moving_variance", "weights", "biases", "filter", "alpha"),
)
# An initializer that no one named: a number, or the counter of an exporter.
_ANONYMOUS = re.compile(
    r"^(onnx::.*|p2o\..*|const.*|\d+|.*__\d+|_?v_\d+|helper\..*|.*_output_\d+)$", re.IGNORECASE
)
# Words that an exporter puts into the paths of a TensorFlow graph.
_DROPPED = {"ReadVariableOp", "BiasAdd", "StatefulPartitionedCall", "Conv2D", "MatMul", "FusedBatchNormV3"}


class LayerPaths:
    """Gives each layer of a file a path in a tree of modules; a path is never given twice."""

    def __init__(self) -> None:
        self._used: set[str] = set()  # modules and tensors
        self._containers: set[str] = set()
        self._counts: dict[str, int] = {}

    def layer(self, node: OnnxNode, tensors: Sequence[str]) -> str:
        """Returns a path for a layer.

        Args:
            node: the layer's node.
            tensors: the names of its stored tensors; the first that names a layer counts.
        """
        for tensor in tensors:
            parts = _parts(tensor)
            if is_anonymous(tensor) or len(parts) < 1:
                continue
            stem, last = (parts[:-1], parts[-1]) if len(parts) > 1 else (_split(parts[0]), "")
            if stem and (last.lower() in _TENSORS or not last):
                return self._claim(stem)
        parts = _parts(undoubled(node.name)) if node.name not in node.outputs else []
        while len(parts) > 1 and (parts[-1] == node.op or re.fullmatch(rf"{node.op}_\d+", parts[-1])):
            parts.pop()
        if node.title:
            parts = _parts(node.title)
        return self._claim(parts or [node.op.lower()])

    def tensor(self, name: str) -> str:
        """Returns a path for a stored tensor that is not part of a layer."""
        return self._claim(_parts(name) or ["constant"])

    def _claim(self, parts: Sequence[str]) -> str:
        """Returns the path, with a suffix if it is taken; its parents become containers."""
        safe = [_free_name(_identifier(part)) for part in parts]
        for depth in range(1, len(safe)):
            if ".".join(safe[:depth]) in self._used:  # a layer, which is without children
                safe = [*safe[: depth - 1], "_".join(safe[depth - 1 :])]
                break
        base = path = ".".join(safe)
        while path in self._used or path in self._containers:
            self._counts[base] = self._counts.get(base, 0) + 1
            path = f"{base}_{self._counts[base]}"
        self._used.add(path)
        parents = path.split(".")[:-1]
        self._containers.update(".".join(parents[:n]) for n in range(1, len(parents) + 1))
        return path


def names_tensor(name: str) -> bool:
    """Returns whether a name ends like the name of a layer's tensor: ``head.scales.0.scale``."""
    parts = _parts(name)
    return len(parts) > 1 and parts[-1].lower() in _TENSORS and not is_anonymous(name)


def is_anonymous(name: str) -> bool:
    """Returns whether an exporter made up the name of a stored tensor."""
    return _ANONYMOUS.match(name) is not None


def node_name(name: str) -> str:
    """Returns the name of a value as an identifier."""
    return _identifier(name)


def _parts(name: str) -> list[str]:
    parts = [part for part in re.split(r"[./:]+", name) if part]
    if len(parts) > 1 and parts[-1] == "0" and ":" in name:  # TensorFlow's `name:0`
        parts.pop()
    return [part for part in parts if part not in _DROPPED] or parts


def _split(name: str) -> list[str]:
    """Splits `conv1_weight` into the layer's name; empty if it does not end like a layer's tensor."""
    stem, _, last = name.rpartition("_")
    if re.fullmatch(r"\d+", last):  # Paddle's conv2d_3.w_0
        stem, _, last = stem.rpartition("_")
    return [stem] if stem and last.lower() in _TENSORS else []


def _identifier(part: str) -> str:
    safe = re.sub(r"\W", "_", part, flags=re.ASCII) or "_"
    return safe if not safe.startswith("__") else f"t{safe}"


def _free_name(name: str) -> str:
    """Returns ``name``, with an underscore if every module has an attribute of this name."""
    return f"{name}_" if hasattr(TracedModule, name) or name in _INSTANCE or name == "qsites" else name


_INSTANCE = {
    *("training", "name", "quantize_disabled", "argdef_graph_map", "argdef_outdef_map", "watch_points"),
    *("watch_node_value", "end_points", "is_qat", "argspec", "onnx_interface", "onnx_origin", "open_axes"),
    "qtrace_record",
    *("_modules", "_forward_hooks", "_forward_pre_hooks", "_name", "_short_name", "_is_top"),
}
