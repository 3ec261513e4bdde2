"""The engine torch: a graph whose values are torch's, the gradients of its losses, and Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from megengine import Tensor
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.module import Module
from megengine.module.batchnorm import _BatchNorm

from qtrace.extras.torch.learning import layers
from qtrace.extras.torch.learning.fake_quants import (
    MODULES,
    absolute,
    bias_quant,
    bn_fold,
    clip,
    dynamic_quant,
    fake_quant,
    larger,
    row_slices,
    smaller,
)
from qtrace.extras.torch.learning.layers import moved
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.fakequant.following.dynamic import DynamicQuant
from qtrace.graph.interpreter import Interpreter, interpret
from qtrace.graph.kernels import MAX_RANK
from qtrace.graph.types import Apply, Constant, Expr, GetAttr, Node, TracedModule
from qtrace.graph.walk import exprs, op_label, owner
from qtrace.learning import Adam, LearningEngine, LearningStep, UnsupportedError
from qtrace.ops import OpCall, Role, read, unsupported

Form = Callable[..., Any]


def _two(function: Callable[[Any, Any], Any]) -> Form:
    """Builds the form of an op of two operands, of which one may be a number or an array."""

    def compute(*_: Any, operands: tuple[Any, Any], **__: Any) -> Any:
        return function(*operands)

    return compute


def _one(function: Callable[[Any], Any]) -> Form:
    def compute(x: Any, **_: Any) -> Any:
        return function(x)

    return compute


def _tensors(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes tensors of both operands before ``function`` is called."""

    def compute(x: Any, y: Any) -> Any:
        like = x if isinstance(x, torch.Tensor) else y
        x, y = (v if isinstance(v, torch.Tensor) else torch.as_tensor(v, dtype=like.dtype) for v in (x, y))
        return function(x, y)

    return compute


def _clip(x: Any, lower: Any, upper: Any) -> Any:
    if isinstance(lower, torch.Tensor) or isinstance(upper, torch.Tensor):
        raise NotImplementedError("with bounds that are computed")
    return clip(x, lower, upper)


def _leaky_relu(x: Any, negative_slope: float) -> Any:
    return torch.where(x >= 0, x, x * negative_slope)


def _prelu(x: Any, slope: Any) -> Any:
    return torch.where(x >= 0, x, x * moved(slope, x))


def _gelu_tanh(x: Any) -> Any:
    return TF.gelu(x, approximate="tanh")


def _hard_sigmoid(x: Any, slope: float, offset: float) -> Any:
    return clip(x * slope + offset, 0.0, 1.0)


def _scale_and_shift(x: Any, scale: Any, shift: Any) -> Any:
    return x * scale + shift


def _elemwise(x: Any, y: Any, mode: str) -> Any:
    return {"FUSE_ADD_SIGMOID": torch.sigmoid, "FUSE_ADD_TANH": torch.tanh}[mode](x + y)


def _reduce(function: Callable[..., Any]) -> Form:
    def reduce(x: Any, axis: Any, keepdims: bool) -> Any:
        over = tuple(range(x.ndim)) if axis is None else axis
        return function(x, over, keepdims and axis is not None)

    return reduce


def _extreme(extreme: Callable[..., Any]) -> Form:
    def reduce(x: Any, over: Any, keepdims: bool) -> Any:
        top = extreme(x.detach(), over, keepdim=True)
        # Every value that equals the result gets its gradient, as in MegEngine.
        y = ((x - x.detach()) * (x.detach() == top)).sum(over, keepdim=keepdims)
        return y + (top if keepdims else extreme(x.detach(), over))

    return _reduce(reduce)


def _interpolate(x: Any, size: Any, scale_factor: Any, mode: str, align_corners: bool) -> Any:
    if mode not in ("nearest", "bilinear"):
        raise NotImplementedError(f"in the mode {mode}")
    if size is not None:
        size = tuple(int(n) for n in (size if hasattr(size, "__len__") else (size, size)))
    else:
        factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor,) * 2
        size = tuple(int(n * float(f)) for n, f in zip(x.shape[-2:], factors, strict=True))
    corners = {} if mode == "nearest" else {"align_corners": align_corners}
    return TF.interpolate(x, size=size, mode=mode, **corners)


def _integers(value: Any) -> tuple[int, ...]:
    values = value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else value
    return tuple(int(n) for n in values)


def _reshape(x: Any, target_shape: Any) -> Any:
    return x.reshape(_integers(target_shape))


def _transpose(x: Any, pattern: Any) -> Any:
    if any(isinstance(axis, str) for axis in pattern):
        raise NotImplementedError("with new axes")
    return x.permute(_integers(pattern))


def _flatten(x: Any, start: int, end: int) -> Any:
    return x.flatten(start, end)


def _expand_dims(x: Any, axis: tuple[int, ...]) -> Any:
    rank = x.ndim + len(axis)
    for place in sorted(a % rank for a in axis):
        x = x.unsqueeze(place)
    return x


def _squeeze(x: Any, axis: Any) -> Any:
    return x.squeeze() if axis is None else x.squeeze(tuple(axis))


def _broadcast_to(x: Any, shape: Any) -> Any:
    return x.broadcast_to(_integers(shape))


def _repeat(x: Any, repeats: Any, axis: int | None) -> Any:
    if not isinstance(repeats, int):
        raise NotImplementedError("by several numbers")
    return torch.repeat_interleave(x, repeats, axis)


def _tile(x: Any, reps: Any) -> Any:
    return x.tile(_integers(reps))


def _split(x: Any, sections: Any, axis: int) -> Any:
    parts = sections if isinstance(sections, int) else _integers(sections)
    return torch.tensor_split(x, parts, axis)


def _pad(x: Any, width: Any, mode: str, value: float) -> Any:
    flat = [n for pair in reversed(width) for n in pair]
    if mode == "constant":
        return TF.pad(x, flat, value=value)
    planes = 2 * (x.ndim - 2)
    if x.ndim not in (3, 4) or any(flat[planes:]):
        raise NotImplementedError(f"in the mode {mode} of these axes")
    return TF.pad(x, flat[:planes], {"edge": "replicate", "replicate": "replicate"}.get(mode, mode))


def _channel_shuffle(x: Any, groups: int) -> Any:
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def _space_to_depth(x: Any, block: int, order: Any) -> Any:
    batch, channels, high, wide = x.shape
    parts = x.reshape(batch, channels, high // block, block, wide // block, block)
    parts = parts.permute(0, *((3, 5, 1)[i] for i in order), 2, 4)
    return parts.reshape(batch, -1, high // block, wide // block)


def _concat(*_: Any, parts: Any, axis: int) -> Any:
    return torch.cat([p for p in parts if p.numel() or p.ndim > 1], axis)


def _stack(*_: Any, parts: Any, axis: int) -> Any:
    return torch.stack(list(parts), axis)


def _getitem(x: Any, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    plain = all(
        isinstance(i, (int, slice, type(None), type(...))) or getattr(i, "ndim", None) == 0 for i in items
    )
    if not plain:
        raise NotImplementedError("by an index that is computed")
    if any(isinstance(i, slice) and (i.step or 1) < 0 for i in items):
        raise NotImplementedError("backwards")
    return x[tuple(int(i) if isinstance(i, torch.Tensor) else i for i in items)]


def _where(*_: Any, mask: Any, operands: tuple[Any, Any]) -> Any:
    return torch.where(mask.bool(), *operands)


FORMS: dict[str, Form] = {
    "add": _two(lambda x, y: x + y),
    "sub": _two(lambda x, y: x - y),
    "mul": _two(lambda x, y: x * y),
    "div": _two(lambda x, y: x / y),
    "maximum": _two(_tensors(larger)),
    "minimum": _two(_tensors(smaller)),
    "less": _two(lambda x, y: x < y),
    "less_equal": _two(lambda x, y: x <= y),
    "greater": _two(lambda x, y: x > y),
    "greater_equal": _two(lambda x, y: x >= y),
    "pow": _two(lambda x, y: x**y),
    "neg": _one(torch.neg),
    "abs": _one(absolute),
    "square": _one(torch.square),
    "elemwise": _elemwise,
    "relu": _one(torch.relu),
    "relu6": _one(TF.relu6),
    "clip": _clip,
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "sigmoid": _one(torch.sigmoid),
    "silu": _one(TF.silu),
    "hswish": _one(TF.hardswish),
    "hsigmoid": _one(TF.hardsigmoid),
    "tanh": _one(torch.tanh),
    "gelu": _one(TF.gelu),
    "gelu_tanh": _one(_gelu_tanh),
    "softplus": _one(TF.softplus),
    "logsigmoid": _one(TF.logsigmoid),
    "erf": _one(torch.erf),
    "exp": _one(torch.exp),
    "log": _one(torch.log),
    "sqrt": _one(torch.sqrt),
    "sin": _one(torch.sin),
    "cos": _one(torch.cos),
    "mish": _one(TF.mish),
    "hard_sigmoid": _hard_sigmoid,
    "scale_and_shift": _scale_and_shift,
    "mean": _reduce(lambda x, over, keepdims: x.mean(over, keepdim=keepdims)),
    "sum": _reduce(lambda x, over, keepdims: x.sum(over, keepdim=keepdims)),
    "max": _extreme(torch.amax),
    "min": _extreme(torch.amin),
    "interpolate": _interpolate,
    "reshape": _reshape,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "flatten": _flatten,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "broadcast_to": _broadcast_to,
    "repeat": _repeat,
    "tile": _tile,
    "split": _split,
    "pad": _pad,
    "identity": _one(lambda x: x),
    "dropout": _one(lambda x: x),
    "pixel_shuffle": lambda x, factor: TF.pixel_shuffle(x, factor),
    "channel_shuffle": _channel_shuffle,
    "space_to_depth": _space_to_depth,
    "concat": _concat,
    "stack": _stack,
    "getitem": _getitem,
    "where": _where,
}
"""Kind of an op -> its form."""


_FORMS = {**layers.FORMS, **FORMS}


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


_FEW = 2**12  # values for which numpy's calls, which are shorter, take less time


class TorchAdam(Adam):
    """Adam (Kingma and Ba 2015, algorithm 1) for one array, which torch changes in place."""

    def step(self, gradient: np.ndarray, factor: float = 1.0, share: float = 1.0) -> None:
        """Moves the value by one step against ``gradient``.

        Args:
            gradient: the gradient.
            factor: the factor of the learning rate.
            share: the factor of the gradient.
        """
        if self.value.size <= _FEW:
            super().step(gradient, factor, share)
            return
        self.steps += 1
        arrays = (self.value, self.first, self.second, gradient, np.float32(self.lr))
        value, first, second, slope, lr = (torch.from_numpy(np.asarray(array)) for array in arrays)
        rate, root = factor / (1.0 - 0.9**self.steps), math.sqrt(1.0 - 0.999**self.steps)
        by_row = lr.ndim == value.ndim > 0 and lr.shape[0] > 1
        for rows in row_slices(value):
            part = slope[rows] if share == 1.0 else slope[rows] * share
            first[rows].lerp_(part, 0.1)
            second[rows].mul_(0.999).addcmul_(part, part, value=0.001)
            size = second[rows].sqrt().div_(root).add_(1e-8)
            value[rows].sub_((first[rows] * (lr[rows] if by_row else lr)).div_(size), alpha=rate)

    def is_finite(self) -> bool:
        """Returns whether all values are numbers; a sum of them tells, unless it overflows."""
        if self.value.size <= _FEW:
            return super().is_finite()
        value = torch.from_numpy(np.asarray(self.value))
        return math.isfinite(value.sum().item()) or bool(value.isfinite().all())

    @staticmethod
    def square_sum(values: np.ndarray, unit: np.ndarray) -> float:
        """Returns the sum of the squares of ``values * unit``; each row is summed in float32."""
        if values.size <= _FEW:
            return Adam.square_sum(values, unit)
        rows, scale = torch.from_numpy(np.asarray(values)), torch.from_numpy(np.asarray(unit))
        if scale.numel() > 1 and scale.numel() != scale.shape[0]:
            rows, scale = rows * scale, torch.ones(())
        rows = rows.reshape(rows.shape[0] if rows.ndim else 1, -1)
        squares = torch.linalg.vecdot(rows, rows).double() * scale.double().reshape(-1).square()
        total = squares.sum().item()
        return total if math.isfinite(total) else Adam.square_sum(values, unit)


class TorchEngine(LearningEngine):
    """Computes steps in torch.

    Args:
        graph: the graph whose parameters learn; the losses run it, or its exprs.
    """

    name = "torch"
    reads_arrays = True
    adam = TorchAdam

    def __init__(self, graph: TorchGraph) -> None:
        self.graph = graph

    def gradients(self, step: LearningStep) -> list[np.ndarray | None]:
        """Computes the losses and the gradients; see `LearningEngine`."""
        with self.graph.learning(step.parameters, step.values):
            computed = step.losses(*step.inputs)
            if computed[0].requires_grad:
                computed[0].backward()
            gradients = [self.graph.gradient(parameter) for parameter in step.parameters]
        return [*(loss.detach().numpy() for loss in computed), *gradients]


def torch_engine(model: TracedModule) -> TorchEngine:
    """Returns the engine of a calibrated graph.

    Raises:
        UnsupportedError: when an op lacks a form in torch.
    """
    return TorchEngine(TorchGraph(model))
