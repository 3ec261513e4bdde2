"""Parts of a prepared graph that are learned as one, found by structure alone.

Between two places of the graph where a single tensor is alive, everything that is computed depends on the
first tensor and reaches the rest through the second: a residual block, an inverted bottleneck with a way
around it, a squeeze-and-excitation, or one layer of a chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import Expr, ModuleNode, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner, users
from qtrace.ptq.layers.quantized import Layer

__all__ = ["Block", "bottlenecks", "single_layers", "structural_blocks"]


@dataclass(frozen=True)
class Block:
    """Exprs that are computed together.

    Attributes:
        exprs: in the order of the graph, without those that depend on parameters alone.
        layers: the layers among them whose roundings are learned.
        entries: the tensors that they read from outside.
        exits: the tensors that are compared with those of the float graph.
    """

    exprs: tuple[Expr, ...]
    layers: tuple[Layer, ...]
    entries: tuple[TensorNode, ...]
    exits: tuple[TensorNode, ...]

    @property
    def name(self) -> str:
        """The names of its exits."""
        return ", ".join(n.name for n in self.exits)


def single_layers(model: TracedModule, layers: Iterable[Layer]) -> list[Block]:
    """A block for each layer, with the activation that follows it and nothing else reads."""
    found = []
    for layer in layers:
        steps, out = [layer.call.expr], layer.call.out
        readers = list(users(out))
        if len(readers) == 1 and not any(out is n for n in model.graph.outputs):
            (after,) = readers
            if _alone(after) and not isinstance(owner(after), FakeQuant):
                steps.append(after)
                out = after.outputs[0]
        found.append(Block(tuple(steps), (layer,), (layer.call.inputs[0],), (out,)))
    return found


def _alone(expr: Expr) -> bool:
    """Whether ``expr`` computes one float tensor of the same shape from one."""
    tensors = [n for n in expr.inputs if isinstance(n, TensorNode)]
    if len(tensors) != 1 or len(expr.outputs) != 1 or not is_float_tensor(expr.outputs[0]):
        return False
    return tuple(expr.outputs[0].shape or ()) == tuple(tensors[0].shape or ())


def structural_blocks(model: TracedModule, layers: Iterable[Layer], most: int) -> list[Block]:
    """The blocks of a graph between tensors that are alive alone, just before these are rounded.

    Args:
        model: a prepared graph.
        layers: those whose roundings are to be learned; a block has one at least.
        most: how many layers a block may have; the layers of a larger one are blocks of their own.
    """
    known = {layer.call.expr: layer for layer in layers}
    outputs = [n for n in model.graph.outputs if isinstance(n, TensorNode)]
    moving = _moving(model)
    after = _read_after(model, moving)
    found: list[Block] = []
    steps: list[Expr] = []
    entry: list[TensorNode] = [n for n in model.graph.inputs if isinstance(n, TensorNode)]
    for index, expr in enumerate(moving):
        steps.append(expr)
        inside = [known[e] for e in steps if e in known]
        alive = after[index]
        last = index == len(moving) - 1
        if not inside or not (last or _is_cut(alive)):
            continue
        exits = outputs if last else alive
        block = Block(tuple(steps), tuple(inside), tuple(entry), tuple(exits))
        found += [block] if len(inside) <= most and exits else single_layers(model, inside)
        steps, entry = [], list(alive)
    return found


def bottlenecks(model: TracedModule) -> list[TensorNode]:
    """The tensors of a prepared graph that are alive alone and are rounded next, in graph order."""
    found = [alive[0] for alive in _read_after(model, _moving(model)) if _is_cut(alive)]
    return list({node: node for node in found}.values())


def _is_cut(alive: list[TensorNode]) -> bool:
    if len(alive) != 1 or not is_float_tensor(alive[0]):
        return False
    readers = list(users(alive[0]))
    return bool(readers) and all(isinstance(owner(e), FakeQuant) for e in readers)


def _moving(model: TracedModule) -> list[Expr]:
    """The exprs that depend on an input of the graph."""
    fixed = {n for n in model.graph.inputs if isinstance(n, ModuleNode)}
    found = []
    for expr in exprs(model):
        if all(n in fixed for n in expr.inputs):
            fixed.update(n for n in expr.outputs)
        else:
            found.append(expr)
    return found


def _read_after(model: TracedModule, moving: list[Expr]) -> list[list[TensorNode]]:
    """For each expr, the tensors, computed up to it or given, that are read later."""
    ours = {*model.graph.inputs, *(n for e in moving for n in e.outputs)}
    alive = {n: n for n in model.graph.outputs if isinstance(n, TensorNode)}
    found = []
    for expr in reversed(moving):
        found.append(list(alive.values()))
        for node in expr.outputs:
            alive.pop(node, None)
        alive.update((n, n) for n in expr.inputs if isinstance(n, TensorNode) and n in ours)
    return found[::-1]
