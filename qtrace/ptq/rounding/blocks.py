"""The blocks of a prepared graph that are learned together, only by structure.

A block lies between two places of the graph where a single tensor is alive. All its exprs depend on the first
tensor and reach the rest of the graph through the second: a residual block, an inverted bottleneck with a
skip connection, a squeeze-and-excitation, or one layer of a chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qtrace.fakequant.base import FakeQuant
from qtrace.graph.types import Expr, ModuleNode, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner, users
from qtrace.preparation.phases import has_wrong_gradient
from qtrace.ptq.layers.quantized import QuantizedLayer

__all__ = ["Block", "bottlenecks", "single_layers", "structural_blocks"]


@dataclass(frozen=True)
class Block:
    """Exprs that are computed together.

    Attributes:
        exprs: the exprs in graph order, without exprs that depend only on parameters.
        layers: the layers of the block whose roundings are learned.
        entries: the tensors that the block reads from outside.
        exits: the outputs of the block, which are compared with the float graph's.
    """

    exprs: tuple[Expr, ...]
    layers: tuple[QuantizedLayer, ...]
    entries: tuple[TensorNode, ...]
    exits: tuple[TensorNode, ...]

    @property
    def name(self) -> str:
        """The names of the exits."""
        return ", ".join(n.name for n in self.exits)


def single_layers(model: TracedModule, layers: Iterable[QuantizedLayer]) -> list[Block]:
    """Builds a block for each layer, with the activation after it if that is the only consumer."""
    blocks = []
    for layer in layers:
        steps, out = [layer.call.expr], layer.call.out
        consumers = list(users(out))
        if len(consumers) == 1 and not any(out is n for n in model.graph.outputs):
            (consumer,) = consumers
            if _is_unary(consumer) and not isinstance(owner(consumer), FakeQuant):
                steps.append(consumer)
                out = consumer.outputs[0]
        blocks.append(Block(tuple(steps), (layer,), (layer.call.inputs[0],), (out,)))
    return blocks


def _is_unary(expr: Expr) -> bool:
    """Whether ``expr`` computes one float tensor from one tensor of the same shape."""
    tensors = [n for n in expr.inputs if isinstance(n, TensorNode)]
    if len(tensors) != 1 or len(expr.outputs) != 1 or not is_float_tensor(expr.outputs[0]):
        return False
    return tuple(expr.outputs[0].shape or ()) == tuple(tensors[0].shape or ())


def structural_blocks(model: TracedModule, layers: Iterable[QuantizedLayer], max_layers: int) -> list[Block]:
    """Splits a graph into blocks at bottleneck tensors, before these are rounded.

    Args:
        model: a prepared graph.
        layers: the layers whose roundings are learned; each block has at least one.
        max_layers: the most layers of a block; a larger block is split into its layers, as is one with a
            recurrent layer that MegEngine has a wrong gradient for.
    """
    by_expr = {layer.call.expr: layer for layer in layers}
    outputs = [n for n in model.graph.outputs if isinstance(n, TensorNode)]
    dynamic = _dynamic_exprs(model)
    alive_after = _alive_after(model, dynamic)
    blocks: list[Block] = []
    steps: list[Expr] = []
    entry: list[TensorNode] = [n for n in model.graph.inputs if isinstance(n, TensorNode)]
    for index, expr in enumerate(dynamic):
        steps.append(expr)
        inside = [by_expr[e] for e in steps if e in by_expr]
        alive = alive_after[index]
        last = index == len(dynamic) - 1
        if not inside or not (last or _is_cut(alive)):
            continue
        exits = outputs if last else alive
        block = Block(tuple(steps), tuple(inside), tuple(entry), tuple(exits))
        joint = len(inside) <= max_layers and exits and not any(map(has_wrong_gradient, steps))
        blocks += [block] if joint else single_layers(model, inside)
        steps, entry = [], list(alive)
    return blocks


def bottlenecks(model: TracedModule) -> list[TensorNode]:
    """Returns the bottleneck tensors of a prepared graph that are rounded next, in graph order."""
    alive_after = _alive_after(model, _dynamic_exprs(model))
    return list(dict.fromkeys(alive[0] for alive in alive_after if _is_cut(alive)))


def _is_cut(alive: list[TensorNode]) -> bool:
    if len(alive) != 1 or not is_float_tensor(alive[0]):
        return False
    consumers = list(users(alive[0]))
    return bool(consumers) and all(isinstance(owner(e), FakeQuant) for e in consumers)


def _dynamic_exprs(model: TracedModule) -> list[Expr]:
    """Returns the exprs that depend on an input of the graph."""
    fixed = {n for n in model.graph.inputs if isinstance(n, ModuleNode)}
    dynamic = []
    for expr in exprs(model):
        if all(n in fixed for n in expr.inputs):
            fixed.update(expr.outputs)
        else:
            dynamic.append(expr)
    return dynamic


def _alive_after(model: TracedModule, dynamic: list[Expr]) -> list[list[TensorNode]]:
    """Returns, for each expr, the inputs and computed tensors that later exprs read."""
    tensors = {*model.graph.inputs, *(n for e in dynamic for n in e.outputs)}
    alive = {n: n for n in model.graph.outputs if isinstance(n, TensorNode)}
    result = []
    for expr in reversed(dynamic):
        result.append(list(alive.values()))
        for node in expr.outputs:
            alive.pop(node, None)
        alive.update((n, n) for n in expr.inputs if isinstance(n, TensorNode) and n in tensors)
    return result[::-1]
