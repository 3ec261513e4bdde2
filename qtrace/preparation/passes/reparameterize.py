"""Merges parallel convolutions of one tensor whose results are added, as in RepVGG's training form.

A convolution is linear in its weight, so ``conv(x; w1) + conv(x; w2) = conv(x; w1 + w2)`` once the smaller
kernel is padded with zeros to its place in the larger one. A BatchNorm of ``x`` itself is a 1x1 convolution
with a diagonal weight (Ding et al. 2021, "RepVGG: Making VGG-style ConvNets Great Again", section 3.3).
Computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from megengine import Parameter

from qtrace import ops
from qtrace.graph.edit import GraphEditor
from qtrace.graph.flatten import delete_attribute, set_parameter
from qtrace.graph.origin import FileOrigin, move_results, read_origin, write_origin
from qtrace.graph.types import GetAttr, Node, TensorNode, TracedModule
from qtrace.graph.walk import exprs, get_module, owner
from qtrace.ops import OpCall
from qtrace.preparation.passes.base import Left, PassResult
from qtrace.preparation.passes.folding import affine, drop_dead_norms, free_bias


@dataclass(frozen=True)
class _Branch:
    """A node as a convolution of ``source``.

    Attributes:
        source: the input of the convolution.
        weight: (groups, out / groups, in / groups, kh, kw), float64; (C,) for a diagonal 1x1 kernel.
        bias: (out,), float64.
        padding: zeros around the source, (height, width).
        stride: (height, width).
        conv: the merged convolution with the largest kernel; None for a diagonal 1x1 kernel.
        parts: the ops that were merged.
    """

    source: Node
    weight: np.ndarray
    bias: np.ndarray
    padding: tuple[int, int]
    stride: tuple[int, int]
    conv: OpCall | None
    parts: tuple[OpCall, ...]


def reparameterize(traced: TracedModule) -> PassResult:
    """Merges convolutions, and BatchNorms, of one tensor that are added up.

    Fold the BatchNorms that follow convolutions first (``ptq: [fuse_bn, reparameterize]``).

    Args:
        traced: a flat, expanded traced module; graph and parameters are edited in place. The merged layer
            keeps the names of the convolution with the largest kernel.

    Returns:
        The merged convolutions, and the sums that were not merged, with the reason.
    """
    branches: dict[Node, _Branch] = {}
    merged: dict[Node, tuple[OpCall, _Branch]] = {}
    left: list[Left] = []
    for expr in exprs(traced):
        call = ops.read(expr)
        if call is None:
            continue
        if call.kind == "add" and len(call.inputs) == 2 and "scalar" not in call.attrs:
            total = _add_branches(traced, branches, call)
            if isinstance(total, str):
                left.append(Left(call.out.name, total))
            elif total is not None:
                branches[call.out] = total
                merged[call.out] = call, total
                for node in call.inputs:
                    merged.pop(node, None)
        elif (branch := _read_branch(traced, call)) is not None:
            branches[call.out] = branch
    biases: list[tuple[_Branch, str]] = []
    with GraphEditor(traced) as editor:
        for call, branch in merged.values():
            biases.append((branch, _write(traced, editor, call, branch)))
    move_results(traced, {call.out.name: _conv(b).out.name for call, b in merged.values()})
    _note_merged(traced, biases)
    dead = {n.expr.name for call, b in merged.values() for n in _parameters(b.parts)}
    _delete(traced, dead)
    drop_dead_norms(traced, [p for _, b in merged.values() for p in b.parts])
    return PassResult(tuple(_describe(branch) for _, branch in merged.values()), tuple(left))


def _describe(branch: _Branch) -> str:
    others = ", ".join(p.out.name for p in branch.parts if p is not branch.conv)
    return f"{_conv(branch).out.name}: merged {others}"


def _read_branch(traced: TracedModule, call: OpCall) -> _Branch | None:
    """Reads ``call`` as a convolution with parameters that nothing else reads; None if it is not one."""
    if call.kind == "batch_norm":
        module = owner(call.expr)
        if module is None or len(call.inputs[0].shape) != 4 or len(call.expr.inputs[0].users) > 1:
            return None
        norm = affine(traced, call)
        return _Branch(call.inputs[0], norm.gain, norm.shift, (0, 0), (1, 1), None, (call,))
    if call.kind != "conv2d" or call.attrs["dilation"] != (1, 1):
        return None
    unshared = all(isinstance(n.expr, GetAttr) and len(n.users) == 1 for n in _parameters((call,)))
    if not unshared or call.weight is None:
        return None
    weight = get_module(traced, call.weight.expr.name).numpy().astype(np.float64)
    weight = weight if weight.ndim == 5 else weight[None]
    bias = np.zeros(weight.shape[0] * weight.shape[1])
    if call.bias is not None:
        bias = get_module(traced, call.bias.expr.name).numpy().astype(np.float64).reshape(-1)
    attrs = call.attrs
    return _Branch(call.inputs[0], weight, bias, attrs["padding"], attrs["stride"], call, (call,))


def _add_branches(traced: TracedModule, branches: dict[Node, _Branch], call: OpCall) -> _Branch | str | None:
    """Adds the two branches that ``call`` reads.

    Returns:
        Their sum; the reason, as a clause, if they cannot be merged; None if ``call`` adds no branches.
    """
    left, right = (branches.get(n) for n in call.inputs)
    if left is None or right is None or left.source is not right.source:
        return None
    if left.conv is None and right.conv is None:
        return None
    for node in call.inputs:
        if len(node.users) > 1 or any(node is n for n in traced.graph.outputs):
            return f"{node.name} is also used elsewhere"
    large, small = sorted((left, right), key=lambda b: -1 if b.conv is None else b.weight.shape[-1])[::-1]
    if large.stride != small.stride:
        return "the strides of its branches differ"
    if small.conv is None:
        small = _expand_diagonal(small, large)
    if large.weight.shape[:3] != small.weight.shape[:3]:
        return "the channels or groups of its branches differ"
    top, side = (p - q for p, q in zip(large.padding, small.padding, strict=True))
    (kh, kw), (h, w) = large.weight.shape[3:], small.weight.shape[3:]
    if top < 0 or side < 0 or top + h > kh or side + w > kw:
        return "one kernel does not lie within the other"
    if (kh - h, kw - w) != (2 * top, 2 * side):
        return "its branches give maps of different sizes"  # one is broadcast, at this size or another
    widths = ((0, 0), (0, 0), (0, 0), (top, kh - h - top), (side, kw - w - side))
    weight = large.weight + np.pad(small.weight, widths)
    return replace(large, weight=weight, bias=large.bias + small.bias, parts=(*large.parts, *small.parts))


def _expand_diagonal(norm: _Branch, like: _Branch) -> _Branch:
    """Writes a diagonal branch as a 1x1 convolution with the groups of ``like``."""
    groups, outputs, inputs = like.weight.shape[:3]
    if outputs != inputs or groups * outputs != norm.weight.size:
        return replace(norm, weight=norm.weight.reshape(1, -1, 1, 1, 1))  # the caller refuses its channels
    eye = np.eye(outputs)[None, :, :] * norm.weight.reshape(groups, outputs, 1)
    return replace(norm, weight=eye[..., None, None])


def _conv(branch: _Branch) -> OpCall:
    assert branch.conv is not None
    return branch.conv


def _write(traced: TracedModule, editor: GraphEditor, call: OpCall, branch: _Branch) -> str:
    """Writes a merged layer in the place of the sum ``call``; returns the path of its bias."""
    conv = _conv(branch)
    assert conv.weight is not None
    path = conv.weight.expr.name
    bias_path = free_bias(traced, path) if conv.bias is None else conv.bias.expr.name
    form = tuple(int(n) for n in conv.weight.shape)
    set_parameter(traced, path, Parameter(branch.weight.reshape(form).astype(np.float32)))
    set_parameter(traced, bias_path, Parameter(branch.bias.reshape(1, -1, 1, 1).astype(np.float32)))
    if conv.bias is None:
        editor.set_argument(conv.expr, "bias", editor.get_attr(bias_path))
    editor.replace_uses(call.out, conv.out)
    editor.remove(call.expr)
    return bias_path


def _note_merged(traced: TracedModule, biases: Sequence[tuple[_Branch, str]]) -> None:
    """Records in the origin which parameters were merged, so that the file's layers can be filled in again.

    The layer that stays has the sum of the weights, the others add nothing. The sum of the biases belongs to
    the bias of the layer that stays or to its BatchNorm, or else to another branch's.

    Args:
        traced: the module, with the parameters that were merged.
        biases: the merged branches, each with the path of its bias.
    """
    origin = read_origin(traced)
    if origin is None:
        return
    for branch, bias in biases:
        merged = dict(origin.merged)
        own = {norm.bias for norm in origin.norms.values()} | {*origin.parameters}
        for path in (path for part in branch.parts if part is not branch.conv for path in _stored(part)):
            values = get_module(traced, path)
            if values is None or path in own or np.any(values.numpy()):
                count = 0 if values is None else int(values.numpy().size)
                merged[path] = float(path.endswith(".running_var")), count
        origin = _keep_bias(replace(origin, merged=merged), branch, bias)
    write_origin(traced, origin)


def _stored(part: OpCall) -> list[str]:
    """Returns the paths of the parameters and statistics that ``part`` reads.

    A BatchNorm without a gain has the path of one: nothing but a gain of 0 makes it add nothing.
    """
    if part.kind != "batch_norm":
        return [node.expr.name for node in _parameters((part,))]
    path, module = part.expr.inputs[0].expr.name, owner(part.expr)
    bias = [] if getattr(module, "bias", None) is None else ["bias"]
    return [f"{path}.{name}" for name in ("weight", *bias, "running_mean", "running_var")]


def _keep_bias(origin: FileOrigin, branch: _Branch, bias: str) -> FileOrigin:
    """Gives the bias of a merged layer a place among the file's tensors, if it has none of its own."""
    weight = _weight_path(_conv(branch))
    parameters, norms, merged = dict(origin.parameters), dict(origin.norms), dict(origin.merged)
    if bias in parameters or weight in norms:
        return origin
    for part in branch.parts:
        norm = norms.pop(_weight_path(part), None)
        if norm is not None:
            norms[weight] = norm._replace(bias=bias)
            if norm.bias not in parameters:
                merged.pop(norm.bias, None)
            break
        own = next((path for path in _stored(part) if path in parameters and path.endswith("bias")), None)
        if own is not None:
            parameters[bias] = parameters.pop(own)
            del merged[own]
            break
    return replace(origin, parameters=parameters, norms=norms, merged=merged)


def _weight_path(part: OpCall) -> str:
    return "" if part.kind == "batch_norm" or part.weight is None else str(part.weight.expr.name)


def _parameters(calls: tuple[OpCall, ...]) -> list[TensorNode]:
    return [n for c in calls for n in (c.weight, c.bias) if n is not None]


def _delete(traced: TracedModule, candidates: set[str]) -> None:
    """Deletes the parameters that no expr reads any more."""
    used = {e.name for e in exprs(traced) if isinstance(e, GetAttr)}
    for path in sorted(candidates - used):
        delete_attribute(traced, path)
