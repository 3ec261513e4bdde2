"""Expands MegEngine's recurrent layers: layers to one function of their parameters, cells to linear layers.

The functions have gradients, which the layers lack on CPU. The results differ by the order of sums.
"""

from __future__ import annotations

import inspect
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.graph import recurrent
from qtrace.graph.edit import GraphEditor
from qtrace.graph.types import Expr, GetAttr, TensorNode
from qtrace.graph.walk import owner

__all__ = ["RECURRENT", "expand_recurrent", "find_recurrent_obstacle"]


def find_recurrent_obstacle(module: Any) -> str | None:
    """Returns the reason why a recurrent layer cannot be expanded, as a clause; None if it can."""
    if isinstance(module, M.LSTM) and module.proj_size > 0:
        return "its hidden state is projected (proj_size)"
    return None


def expand_recurrent(editor: GraphEditor, expr: Expr) -> None:
    """Replaces a call of a recurrent layer or cell, one of `RECURRENT`."""
    module: Any = owner(expr)
    write: Any = _WRITERS[type(module)]
    bound = inspect.signature(type(module).forward).bind(*expr.args, **expr.kwargs)
    bound.apply_defaults()
    attribute = expr.inputs[0].expr
    assert isinstance(attribute, GetAttr)
    results = write(_Writer(editor, expr, attribute.name), module, *bound.args[1:])
    for new, old in zip(results, expr.outputs, strict=True):
        editor.put_in_place(new, old)
    editor.remove(expr)


class _Writer:
    """Writes new calls in the place of ``expr``, one after the other."""

    def __init__(self, editor: GraphEditor, expr: Expr, path: str) -> None:
        self.editor, self.after, self.path = editor, expr, path
        self.name = expr.outputs[0].name

    def __call__(self, func: Any, *args: Any, like: TensorNode | None = None, **kwargs: Any) -> Any:
        result = self.editor.call_function(
            func, *args, after=self.after, like=like, name=f"{self.name}_{func.__name__}", **kwargs
        )
        self.after = (result[0] if isinstance(result, (tuple, list)) else result).expr
        return result

    def parameter(self, name: str) -> TensorNode:
        """Returns the node of a parameter of the layer."""
        node = self.editor.get_attr(f"{self.path}.{name}")
        assert isinstance(node, TensorNode)
        return node


def _options(module: M.LSTM | M.RNN) -> dict[str, Any]:
    return {
        "hidden_size": module.hidden_size,
        "num_layers": module.num_layers,
        "bias": bool(module.bias),
        "bidirectional": bool(module.bidirectional),
        "batch_first": bool(module.batch_first),
    }


def _lstm(write: _Writer, module: M.LSTM, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    hidden, cell = (None, None) if hx is None else hx
    weights = write.parameter("_flatten_weights")
    return tuple(write(recurrent.stacked_lstm, x, weights, hidden, cell, **_options(module)))


def _rnn(write: _Writer, module: M.RNN, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    weights, mode = write.parameter("_flatten_weights"), str(module.nonlinearity).lower()
    return tuple(write(recurrent.stacked_rnn, x, weights, hx, **_options(module), nonlinearity=mode))


def _gates(write: _Writer, module: M.LSTMCell | M.RNNCell, x: TensorNode, hidden: Any) -> TensorNode:
    """Writes the products of the input and the hidden state, which is zero if it is None."""
    biases = [write.parameter(name) if module.bias else None for name in ("bias_ih", "bias_hh")]
    gates: TensorNode = write(F.linear, x, write.parameter("weight_ih"), biases[0])
    if hidden is not None:
        more = write(F.linear, hidden, write.parameter("weight_hh"), biases[1], like=gates)
    else:
        more = biases[1]
    return gates if more is None else write(F.add, gates, more, like=gates)


def _lstm_cell(write: _Writer, module: M.LSTMCell, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    hidden, state = (None, None) if hx is None else hx
    parts = write(F.split, _gates(write, module, x, hidden), 4, axis=1)
    i, f, o = (write(F.sigmoid, parts[place], like=parts[place]) for place in (0, 1, 3))
    g = write(F.tanh, parts[2], like=parts[2])
    new = write(F.mul, i, g, like=g)
    if state is not None:
        new = write(F.add, write(F.mul, f, state, like=g), new, like=g)
    return write(F.mul, o, write(F.tanh, new, like=g), like=g), new


def _rnn_cell(write: _Writer, module: M.RNNCell, x: TensorNode, hx: Any) -> tuple[TensorNode, ...]:
    gates = _gates(write, module, x, hx)
    function = F.relu if str(module.nonlinearity).lower() == "relu" else F.tanh
    return (write(function, gates, like=gates),)


def _onnx(
    write: _Writer, module: recurrent.OnnxRecurrent, x: TensorNode, *states: Any
) -> tuple[TensorNode, ...]:
    names = ("weight", "recurrence", *(() if module.bias is None else ("bias",)))
    weights = (*map(write.parameter, names), *(None,) * (3 - len(names)))
    if module.kind == "lstm":
        return tuple(write(recurrent.lstm, x, *weights, *states, module.direction))
    if module.kind == "gru":
        reset = module.linear_before_reset
        return tuple(write(recurrent.gru, x, *weights, states[0], module.direction, reset))
    return tuple(write(recurrent.rnn, x, *weights, states[0], module.direction, module.nonlinearity))


_WRITERS: dict[Any, Any] = {
    M.LSTM: _lstm,
    M.LSTMCell: _lstm_cell,
    M.RNN: _rnn,
    M.RNNCell: _rnn_cell,
    recurrent.OnnxRecurrent: _onnx,
}
# The classes of modules that `expand_recurrent` replaces.
RECURRENT = frozenset(_WRITERS)
