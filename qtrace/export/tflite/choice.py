"""Which form an op takes: a move, an operator on integers, a look-up, or floats between roundings."""

from __future__ import annotations

from qtrace.errors import ExportError
from qtrace.export.tflite import ops as forms
from qtrace.export.tflite.build import Build, allowing
from qtrace.export.tflite.plan import Job
from qtrace.export.tflite.writer import Grid
from qtrace.ops import OpCall, Role

__all__ = ["emit_job"]


def emit_job(b: Build, job: Job) -> None:
    """Writes one op.

    Args:
        b: the file.
        job: the op.

    Raises:
        ExportError: when the op has no form, or only one that computes what the graph does not.
    """
    call = job.call
    if job.state == "carried" and call.kind in ("mul", "div"):
        forms.rescaled(b, job, Grid.of(b.plan.graph.carried[job.out.name]))
        return
    # Of the modes of interpolate, one moves values; all else that moves them does in every type.
    if call.kind in forms.MOVES and (call.kind != "interpolate" or call.role is Role.CARRY):
        forms.MOVES[call.kind](b, job)
        return
    if _between_integers(b, job):
        if b.options.functions != "float" and call.kind in forms.FUNCTIONS and forms.tabular(job):
            _function(b, job)
            return
        if job.on_integers and call.kind in forms.INTEGER and not _in_float(b, call.kind):
            _check_widths(b, job)
            forms.INTEGER[call.kind](b, job)
            return
    _float(b, job)


def _in_float(b: Build, kind: str) -> bool:
    """Whether an op that has an integer kernel computes in float: as asked, or because that is exact."""
    return kind in b.options.allow_float or (kind in forms.INEXACT and b.options.functions == "float")


def _between_integers(b: Build, job: Job) -> bool:
    """Whether all that the op reads is integers, and its result is rounded at one site."""
    call = job.call
    weights = [n for n in (call.weight, call.bias) if n is not None]
    known = all(b.on_integers(n) for n in call.inputs) and all(n in b.integers for n in weights)
    return known and bool(call.inputs) and job.site is not None


def _function(b: Build, job: Job) -> None:
    """A function of one value without floats."""
    if b.options.functions == "native" and job.kind in forms.NATIVE:
        _check_widths(b, job)
        forms.NATIVE[job.kind](b, job)
    else:
        forms.table(b, job)


def _check_widths(b: Build, job: Job) -> None:
    """Refuses an op that reads and gives integers of different widths."""
    wanted = b.site_grid(job)[1]
    for node in job.call.inputs:
        given = b.integer_type(node)
        if given != wanted:
            raise ExportError(
                f"{job.out.name} reads {given.name} from {b.plan.graph.site_name(node)} and gives "
                f"{wanted.name}, but TFLite's kernels have one width for both: give both one scheme, or "
                f"{allowing(job.kind)}"
            )


def _float(b: Build, job: Job) -> None:
    call = job.call
    if call.kind not in forms.FLOAT:
        raise ExportError(
            f"it has no TFLite form yet: end the graph before {call.out.name}, or write it with others"
        )
    asked = _in_float(b, call.kind)
    # Where the graph leaves the result of a sum in float, the sum is one of floats; a layer is refused,
    # since its weights would be floats, too.
    bare = job.site is None and call.role is not Role.COMPUTE
    if job.on_integers and not asked and not bare and call.kind not in forms.FUNCTIONS:
        raise ExportError(_why_not(job))
    forms.FLOAT[call.kind](b, _alone(job, call))
    if job.clamp is not None:
        forms.FLOAT[job.clamp.kind](b, _alone(job, job.clamp))


def _alone(job: Job, call: OpCall) -> Job:
    """The job of one op without what is fused into it, or into which it is fused."""
    return Job(call, None, call.out, None, job.state)


def _why_not(job: Job) -> str:
    kind = job.call.kind
    if job.site is None:
        return (
            f"the result of {job.out.name} is read in float or rounded in two ways, but TFLite's {kind} "
            "gives integers of one scale: let it be rounded and give its readers one scheme, or "
            f"{allowing(kind)}"
        )
    if kind not in forms.INTEGER:
        return (
            f"{kind} has no integer kernel in TFLite: keep it in float by a rule that says "
            f"quantize: false, or {allowing(kind)}"
        )
    return f"not everything that {job.out.name} reads is integers: quantize its inputs, or {allowing(kind)}"
