"""MSC's names of op kinds, its form of their arguments, and the layouts of tensors."""

from __future__ import annotations

from typing import Any

from qtrace.export.converted.document import DocumentOp, Value

__all__ = ["attributes", "optype", "output_layout", "weight_layout", "weight_shape"]

_IN_NN = (
    "conv1d conv2d conv3d relu prelu silu gelu softmax batch_norm layer_norm group_norm instance_norm "
    "max_pool2d avg_pool2d adaptive_avg_pool2d pad pixel_shuffle"
)
# Op kind -> MSC's name of it; the other kinds have the same name in MSC.
_OPTYPES = {
    **{kind: f"nn.{kind}" for kind in _IN_NN.split()},
    "conv_transpose2d": "nn.conv2d_transpose",
    "linear": "msc.linear",
    "embedding": "msc.embedding",
    "relu6": "clip",
    "leaky_relu": "nn.leakyrelu",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "pow": "power",
    "neg": "negative",
    "flatten": "reshape",
    "transpose": "permute_dims",
    "swapaxes": "permute_dims",
    "interpolate": "image.resize2d",
    "getitem": "strided_slice",
}
_WITH_BIAS = {"conv1d": "msc.conv1d_bias", "conv2d": "msc.conv2d_bias", "linear": "msc.linear_bias"}
_SPATIAL = frozenset(
    {
        "conv2d",
        "conv_transpose2d",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "interpolate",
    }
)
# Kinds after which the letters of a layout no longer apply.
_MOVES = "reshape flatten getitem expand_dims squeeze broadcast_to tile repeat stack matmul"
_RESHAPES = frozenset(_MOVES.split())
_PLURAL = {"stride": "strides"}


def optype(op: DocumentOp) -> str:
    """Returns the type of a node; a kind that MSC does not know keeps qtrace's name."""
    if "bias" in op.weights and op.kind in _WITH_BIAS:
        return _WITH_BIAS[op.kind]
    return _OPTYPES.get(op.kind) or op.kind or op.label


def attributes(op: DocumentOp) -> dict[str, str]:
    """Returns the arguments of a node as MSC writes them: text, with commas between numbers."""
    texts = {_PLURAL.get(k, k): _text(v) for k, v in op.attrs.items()}
    if op.kind == "relu6":
        texts = {"min": "0", "max": "6"}
    if op.kind == "clip":
        texts = {"min": _text(op.attrs["lower"]), "max": _text(op.attrs["upper"])}
    if "kernel" in texts:
        texts["pool_size"] = texts.pop("kernel")
    if op.kind in _SPATIAL:
        padding = op.attrs.get("padding")
        if padding is not None:
            texts["padding"] = _text((*padding, *padding))
        texts["data_layout" if "weight" in op.weights else "layout"] = "NCHW"
        if "weight" in op.weights:
            texts["kernel_layout"] = weight_layout(op.kind, op.weights["weight"])
            texts["out_layout"], texts["out_dtype"] = "NCHW", op.outputs[0].dtype
    return texts


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(_text(v) for v in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def weight_layout(kind: str, value: Value) -> str:
    """Returns the layout of a layer's weight, whose axis of groups was merged by `weight_shape`."""
    if kind == "linear":
        return "OI"
    if kind == "prelu":
        return "O"
    if kind == "embedding":
        return ""
    spatial = {"conv1d": "W", "conv3d": "DHW"}.get(kind, "HW")
    front = "IO" if kind.startswith("conv_transpose") else "OI"
    return f"{front}{spatial}"


def weight_shape(kind: str, value: Value) -> tuple[int, ...]:
    """Returns the shape of a layer's weight without an axis of groups: that of channels has all groups."""
    shape = value.shape
    grouped = kind.startswith("conv") and len(shape) == len(weight_layout(kind, value)) + 1
    return (shape[0] * shape[1], *shape[2:]) if grouped else shape


def output_layout(op: DocumentOp, value: Value, inputs: list[str]) -> str:
    """Returns the layout of an output, or "" if it is not known."""
    rank = len(value.shape)
    if op.kind == "input" or op.kind in _SPATIAL:
        return {4: "NCHW", 3: "NCW", 2: "NC"}.get(rank, "")
    before = inputs[0] if inputs else ""
    if op.kind in ("transpose", "swapaxes"):
        order = op.attrs.get("pattern") or tuple(reversed(range(rank)))
        fits = before and all(isinstance(p, int) for p in order) and len(order) == len(before)
        return "".join(before[p] for p in order) if fits else ""
    if op.kind in _RESHAPES or not before:
        return "NC" if rank == 2 and before.startswith("NC") else ""
    if len(before) == rank:
        return before
    return "NC" if rank == 2 and before == "NCHW" else ""  # a mean over the image
