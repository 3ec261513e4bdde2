"""Chooses the form of each op: a move, an integer operator, a look-up table, or floats between roundings."""

from __future__ import annotations

from dataclasses import replace

from qtrace.errors import ExportError
from qtrace.graph.opaque import cure_for_opaque
from qtrace.ops import OpCall, Role
from qtrace.targets.tflite import ops as forms
from qtrace.targets.tflite.build import Builder, OpInFloat, allowing
from qtrace.targets.tflite.layout import FusedOp
from qtrace.targets.tflite.writer import Grid

__all__ = ["emit_op"]


def emit_op(b: Builder, op: FusedOp) -> None:
    """Writes one op, in the form that computes what the graph does.

    Args:
        b: the file.
        op: the op, with what its operator fuses.

    Raises:
        ExportError: when TFLite cannot express the op, or only as something else.
    """
    call = op.call
    if op.state == "carried" and call.kind in ("mul", "div"):
        forms.rescaled(b, op, Grid.of(b.plan.graph.carried[op.out.name]))
        return
    # Of the modes of interpolate, only nearest moves values. All other moves work on every type.
    if call.kind in forms.MOVES and (call.kind != "interpolate" or call.role is Role.CARRY):
        forms.MOVES[call.kind](b, op)
        return
    unable = ""
    if _between_integers(b, op):
        if b.options.functions != "float" and call.kind in forms.FUNCTIONS and forms.tabular(op):
            _function(b, op)
            return
        if op.on_integers and call.kind in forms.INTEGER and not _in_float(b, call.kind):
            unable = forms.why_in_float(b, op)
            if not unable:
                _check_widths(b, op)
                forms.INTEGER[call.kind](b, op)
                return
    _float(b, op, unable)


def _in_float(b: Builder, kind: str) -> bool:
    """Whether an op with an integer kernel computes in float: the caller allows it, or only that is exact."""
    return kind in b.options.allow_float or (kind in forms.INEXACT and b.options.functions == "float")


def _between_integers(b: Builder, op: FusedOp) -> bool:
    """Whether the op reads integers only, and its result is rounded at one site."""
    call = op.call
    weights = [n for n in (call.weight, call.bias) if n is not None]
    known = all(b.on_integers(n) for n in call.inputs) and all(n in b.integers for n in weights)
    return known and bool(call.inputs) and op.site is not None


def _function(b: Builder, op: FusedOp) -> None:
    """Writes a function of one value without floats."""
    if b.options.functions == "native" and op.kind in forms.NATIVE:
        _check_widths(b, op)
        forms.NATIVE[op.kind](b, op)
    else:
        forms.table(b, op)


def _check_widths(b: Builder, op: FusedOp) -> None:
    """Refuses an op whose inputs and result are integers of different widths."""
    kind = b.site_grid(op)[1]
    for node in op.call.inputs:
        input_kind = b.integer_type(node)
        if input_kind != kind:
            raise ExportError(
                f"{op.out.name} reads {input_kind.name} from {b.plan.graph.site_name(node)} and gives "
                f"{kind.name}, but TFLite's kernels have one width for both: give both one scheme, or "
                f"{allowing(op.kind)}"
            )


def _float(b: Builder, op: FusedOp, unable: str) -> None:
    """Writes an op in float.

    Args:
        b: the file.
        op: the op.
        unable: why its integer kernel cannot compute it, "" if another reason keeps it in float.

    Raises:
        ExportError: when the graph computes the op on integers, and nothing but a missing kernel or an input
            in float is in the way.
    """
    call = op.call
    if call.kind not in forms.FLOAT:
        cure = cure_for_opaque(call.out.expr)
        cure = cure or f"end the graph before {call.out.name}, or write it with others"
        raise ExportError(f"it cannot become TFLite yet: {cure}")
    allowed = _in_float(b, call.kind)
    # A sum whose result stays float in the graph is computed in float. A layer is refused,
    # because its weights would be floats too.
    bare = op.site is None and call.role is not Role.COMPUTE
    refused = op.on_integers and not allowed and not bare and call.kind not in forms.FUNCTIONS
    if refused and not unable:
        raise ExportError(_why_not(op))
    b.float_ops.append(OpInFloat(call.out.name, call.kind, unable or _why_float(b, op)))
    if not op.on_integers:
        forms.FLOAT[call.kind](b, replace(op, site=None))
        return
    forms.FLOAT[call.kind](b, _alone(op, call))
    if op.clamp is not None:
        forms.FLOAT[op.clamp.kind](b, _alone(op, op.clamp))


def _alone(op: FusedOp, call: OpCall) -> FusedOp:
    """Returns ``call`` as an op of its own, with nothing fused."""
    return FusedOp(call, None, call.out, None, op.state)


def _why_float(b: Builder, op: FusedOp) -> str:
    """Returns why an op computes in float, although its kind may have an integer kernel."""
    kind, note = op.kind, b.plan.notes.get(op.call.out.name)
    if kind in b.options.allow_float:
        return "allow_float names it"
    if note is not None and note.reason and not op.on_integers:
        return note.reason
    if op.site is None:
        return "its result is not rounded"
    if kind in forms.FUNCTIONS or kind in forms.INEXACT:
        return f"functions={b.options.functions!r} computes it between DEQUANTIZE and QUANTIZE"
    return "it stays in float in the graph"


def _why_not(op: FusedOp) -> str:
    kind = op.call.kind
    if op.site is None:
        return (
            f"the result of {op.out.name} is read in float or rounded in two ways, but TFLite's {kind} "
            "gives integers of one scale: let it be rounded and give its readers one scheme, or "
            f"{allowing(kind)}"
        )
    if kind not in forms.INTEGER:
        return (
            f"{kind} has no integer kernel in TFLite: keep it in float by a rule that says "
            f"quantize: false, or {allowing(kind)}"
        )
    return f"not everything that {op.out.name} reads is integers: quantize its inputs, or {allowing(kind)}"
