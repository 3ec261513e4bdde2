"""Runs a graph in torch: an interpreter whose values are torch's, and whose parameters are MegEngine's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megengine import Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.module.batchnorm import _BatchNorm

from qtrace.extras.torch.learning import elementwise, layers
from qtrace.extras.torch.learning.fake_quants import MODULES, bias_quant, bn_fold, dynamic_quant, fake_quant
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.types import Apply, Constant, Expr, GetAttr, Node, TracedModule
from qtrace.graph.walk import MAX_RANK, exprs, op_label, owner
from qtrace.learning import UnsupportedError
from qtrace.ops import OpCall, Role, read, unsupported

__all__ = ["TorchGraph"]

_FORMS = {**layers.FORMS, **elementwise.FORMS}


class TorchGraph(Interpreter):
    """Runs a flat graph in torch, on the current values of the module's Tensors.

    Args:
        traced: the graph, prepared or plain.
        names: names of the nodes whose values are recorded.
        fixed: whether the parameters never change, so that they are copied once.

    Raises:
        UnsupportedError: when torch cannot express an op of the graph.
    """

    def __init__(self, traced: TracedModule, names: Iterable[str] = (), fixed: bool = False) -> None:
        super().__init__(traced)
        self.names = frozenset(names)
        self.values: dict[str, Any] = {}
        self._learning: frozenset[int] = frozenset()
        self._leaves: dict[int, Any] = {}
        self._arrays: Mapping[int, np.ndarray] = {}
        self._fixed = fixed
        self._computes = {id(expr): self._compile(expr) for expr in exprs(traced)}

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Runs the graph once and returns the tensors of torch in the result of forward, in order.

        Args:
            args: positional arguments of forward, with Tensors of MegEngine.
            kwargs: keyword arguments of forward.
        """
        self.values = {}
        with torch.set_grad_enabled(bool(self._learning)):
            arg_def, values = self.bind(tuple(args), kwargs)
            return self.run_all(self.traced.argdef_graph_map[arg_def], values)

    @contextmanager
    def learning(self, parameters: Iterable[Tensor], arrays: Mapping[int, np.ndarray]) -> Iterator[None]:
        """Lets ``parameters`` get gradients within the block, at the end of which all values are freed.

        Args:
            parameters: the parameters whose gradients `gradient` returns.
            arrays: id of a parameter -> its value, in place of that in the module. The arrays are read, not
                copied.
        """
        self._arrays, self._learning = arrays, frozenset(map(id, parameters))
        try:
            yield
        finally:
            self.values, self._leaves, self._arrays, self._learning = {}, {}, {}, frozenset()

    def gradient(self, parameter: Tensor) -> np.ndarray | None:
        """Returns the gradient of a parameter after a backward pass; None if there is none."""
        leaf = self._leaves.get(id(parameter))
        return None if leaf is None or leaf.grad is None else leaf.grad.numpy()

    def run_expr(self, expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Computes the outputs of ``expr`` in torch; MegEngine computes shapes and integers."""
        try:
            return self._computes[id(expr)](inputs)
        except NotImplementedError as error:
            raise UnsupportedError(f"{_label(expr)} {error}, which cannot run in torch") from None

    def constant(self, value: Any) -> Any:
        """Returns the tensor of torch for a Tensor of MegEngine or an array, without a gradient."""
        array = value if isinstance(value, np.ndarray) else value.numpy()
        return torch.from_numpy(np.array(array))

    def on_node(self, node: Node, value: Any) -> Any:
        """Makes a tensor of torch of a Tensor of MegEngine, and records named values."""
        if isinstance(value, RawTensor):
            value = self.leaf(value)
        if node.name in self.names:
            self.values[node.name] = value
        return value

    def leaf(self, tensor: Any) -> Any:
        """Returns the tensor of torch that stands for ``tensor`` in this call."""
        key = id(tensor)
        if key not in self._leaves:
            array = self._arrays.get(key)
            leaf = torch.from_numpy(np.array(tensor.numpy()) if array is None else array)
            if key not in self._learning:
                return leaf
            self._leaves[key] = leaf.requires_grad_()
        return self._leaves[key]

    # -- the computation of each expr ---------------------------------------------------------------

    def _compile(self, expr: Expr) -> Callable[[Sequence[Any]], Sequence[Any] | None]:
        """Returns the function from the values of ``expr.inputs`` to the values of ``expr.outputs``."""
        if isinstance(expr, (GetAttr, Constant)):
            return self._compile_stored(expr)
        module = owner(expr)
        if isinstance(module, (FakeQuant, BiasQuant, BnFold, DynamicQuant)):
            return self._compile_own(expr, module)
        if isinstance(module, _BatchNorm):
            return lambda inputs: (layers.batch_norm(inputs[0], inputs[1], self.leaf),)
        call = read(expr)
        if call is None:
            raise UnsupportedError(f"{_label(expr)} cannot run in torch ({unsupported(expr)})")
        if call.kind == "shape" and isinstance(expr, Apply):
            return lambda inputs: (_shape(expr, inputs[0]),)
        if call.role is Role.SHAPE or not _has_floats(expr):
            return lambda inputs: _by_megengine(expr, inputs)
        return self._compile_op(expr, call)

    def _compile_stored(self, expr: Expr) -> Callable[[Sequence[Any]], Sequence[Any] | None]:
        if not self._fixed and isinstance(expr, GetAttr):
            return lambda inputs: interpret(expr, inputs)
        stored: list[Any] = []

        def compute(inputs: Sequence[Any]) -> Sequence[Any]:
            if not stored:
                values = interpret(expr, inputs) or ()
                stored.extend(self.leaf(v) if isinstance(v, RawTensor) else v for v in values)
            return stored

        return compute

    def _compile_own(self, expr: Expr, module: Module) -> Callable[[Sequence[Any]], Sequence[Any]]:
        if type(module) not in MODULES:
            raise UnsupportedError(f"{_label(expr)} is a fake quant of your own, which cannot run in torch")
        nodes, (_, *positional), named = expr.inputs, expr.args, expr.kwargs
        form: Any = fake_quant
        if not isinstance(module, FakeQuant):
            forms: dict[type, Any] = {BiasQuant: bias_quant, BnFold: bn_fold, DynamicQuant: dynamic_quant}
            form = forms[type(module)]

        def compute(inputs: Sequence[Any]) -> Sequence[Any]:
            values = dict(zip(nodes, inputs, strict=True))
            args, kwargs = self._resolve(positional, values), self._resolve(named, values)
            return (form(module, self.leaf, *args, **kwargs),)

        return compute

    def _compile_op(self, expr: Expr, call: OpCall) -> Callable[[Sequence[Any]], Sequence[Any]]:
        form = _FORMS.get(call.kind)
        if form is None:
            raise UnsupportedError(f"{_label(expr)} cannot run in torch")
        positional, attrs = call.inputs, dict(call.attrs)
        if "operands" in attrs:  # the two operands hold the inputs
            positional = ()
        for name, node in (("weight", call.weight), ("bias", call.bias)):
            if call.weight is not None:
                attrs[name] = node
        for name in ("scalar", "side"):
            attrs.pop(name, None)
        several = len(expr.outputs) > 1

        def compute(inputs: Sequence[Any]) -> Sequence[Any]:
            values = dict(zip(expr.inputs, inputs, strict=True))
            result = form(*self._resolve(positional, values), **self._resolve(attrs, values))
            return tuple(result) if several or isinstance(result, (tuple, list)) else (result,)

        return compute

    def _resolve(self, value: Any, values: dict[Node, Any]) -> Any:
        """Replaces the nodes, Tensors and arrays in nested arguments by tensors of torch."""
        if isinstance(value, Node):
            return values[value]
        if isinstance(value, RawTensor):
            return self.leaf(value)
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.astype(np.float32) if value.dtype.kind == "f" else value)
        if isinstance(value, dict):
            return {key: self._resolve(item, values) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*self._resolve((value.start, value.stop, value.step), values))
        if isinstance(value, (tuple, list)):
            return tuple(self._resolve(item, values) for item in value)
        return value


def _label(expr: Expr) -> str:
    return f"{op_label(expr)} at {expr.outputs[0].name if expr.outputs else expr}"


def _has_floats(expr: Expr) -> bool:
    """Whether ``expr`` reads or gives a float tensor."""
    nodes = (*expr.inputs, *expr.outputs)
    return any(np.dtype(n.dtype).kind == "f" for n in nodes if getattr(n, "dtype", None) is not None)


def _shape(expr: Apply, x: Any) -> Any:
    """Computes MegEngine's GetVarShape: all sizes of a tensor, or the size of one axis."""
    axis = getattr(expr.opdef, "axis", MAX_RANK)
    sizes = tuple(x.shape) if axis >= MAX_RANK else (x.shape[axis],)
    return torch.tensor(sizes, dtype=torch.int32)


def _by_megengine(expr: Expr, inputs: Sequence[Any]) -> Sequence[Any] | None:
    """Computes an op on shapes and integers, which is without a gradient, by MegEngine."""
    tensors = [Tensor(v.detach().numpy()) if isinstance(v, torch.Tensor) else v for v in inputs]
    return interpret(expr, tensors)
