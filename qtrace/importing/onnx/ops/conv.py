"""Convolutions, plain and transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import megengine.functional as F
import megengine.module as M

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.ops.windows import Window, pad, read_window
from qtrace.importing.onnx.values import Stored, Value

__all__ = ["LOWERINGS"]

_MODULES = {1: M.Conv1d, 2: M.Conv2d, 3: M.Conv3d}
_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED_FUNCTIONS = {2: F.conv_transpose2d, 3: F.conv_transpose3d}
_TRANSPOSED = {2: M.ConvTranspose2d, 3: M.ConvTranspose3d}


def _conv(call: Call) -> Any:
    shape = call.shape(1)
    window = read_window(call, call.ints("kernel_shape", None) or list(shape[2:]))
    groups, count = call.attribute("group", 1), len(window.kernel)
    _check(call, window, count, _MODULES)
    if shape[1] * groups != call.shape(0)[1] or shape[0] % groups:
        call.refuse(f"has a weight {list(shape)} that does not fit its input and {groups} groups")
    x, padding = call.tensor(0), window.before
    if not window.symmetric:
        x, padding = pad(call, x, window.before, window.after), (0,) * count
    options = {"stride": window.stride, "padding": padding, "dilation": window.dilation}
    if count == 1 and groups > 1:
        return _signal(call, x, groups, options)
    sizes: dict[str, Any] = {"kernel_size": window.kernel, **options}
    sizes = {key: value[0] if count == 1 else value for key, value in sizes.items()}
    result = _module(call, _MODULES[count], (call.shape(0)[1], shape[0]), {"groups": groups, **sizes}, x)
    if result is not None:
        return result
    bias = _bias(call)
    axes = [1, shape[0], *[1] * count]
    flat = None if bias is None else call.function(F.reshape, call.tensor(2), axes, name=f"{call.name}_bias")
    filters = call.tensor(1)
    if groups > 1:
        grouped = (groups, shape[0] // groups, *shape[1:])
        filters = call.function(F.reshape, filters, grouped, name=f"{call.name}_weight")
    arguments: dict[str, Any] = {k: v[0] if count == 1 else v for k, v in options.items()}
    return call.function(_FUNCTIONS[count], x, filters, flat, groups=groups, **arguments)


def _bias(call: Call) -> Value | None:
    """Returns the bias; None for zeros that are not learned, which PyTorch's exporter writes for no bias."""
    bias = call.values[2] if call.has(2) else None
    if isinstance(bias, Stored) and not bias.learned and not bias.array.any():
        return None
    return bias


def _signal(call: Call, signal: Any, groups: int, options: dict[str, tuple[int, ...]]) -> Any:
    """Convolves groups of channels of a signal as an image of one column: Conv1d lacks groups."""
    outputs, inputs, size = call.shape(1)
    neutral = {"stride": 1, "padding": 0, "dilation": 1}
    sizes: dict[str, Any] = {name: (value[0], neutral[name]) for name, value in options.items()}
    image = call.function(F.expand_dims, signal, -1, name=f"{call.name}_image")
    column = f"{call.name}_column"
    channels = (inputs * groups, outputs, (size, 1))
    result = _module(call, M.Conv2d, channels, {"groups": groups, **sizes}, image, column)
    if result is None:
        form = (groups, outputs // groups, inputs, size, 1)
        filters = call.function(F.reshape, call.tensor(1), form, name=f"{call.name}_weight")
        flat = None
        if _bias(call) is not None:
            flat = call.function(F.reshape, call.tensor(2), (1, outputs, 1, 1), name=f"{call.name}_bias")
        result = call.function(F.conv2d, image, filters, flat, groups=groups, name=column, **sizes)
    return call.function(F.squeeze, result, -1)


def _module(
    call: Call, kind: type[M.Module], sizes: tuple[Any, ...], options: dict[str, Any], x: Any, name: str = ""
) -> Any:
    """Calls a layer; None if weight or bias is computed, or something else reads the weight, too."""
    weight, bias = call.values[1], _bias(call)
    if not isinstance(weight, Stored) or not isinstance(bias, (Stored, type(None))):
        return None
    module = kind(*sizes, bias=bias is not None, **options)
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return call.module(module, tensors, x, name=name) if call.layers.owns(module, tensors) else None


def _check(call: Call, window: Window, count: int, kinds: Any) -> None:
    if count not in kinds:
        call.refuse(f"moves along {count} axes; MegEngine has {' and '.join(map(str, kinds))}")
    if not call.is_float(0) or len(window.kernel) != call.rank(0) - 2:
        call.refuse("has an input of another type or number of axes than its kernel")
    if window.kernel != call.shape(1)[2:]:
        call.refuse("has another kernel_shape than its weight")


def _conv_transpose(call: Call) -> Any:
    shape = call.shape(1)
    kernel = call.ints("kernel_shape", None) or list(shape[2:])
    groups, count = call.attribute("group", 1), len(kernel)
    output_shape = call.ints("output_shape", None)
    window, extra = _transposed_window(call, kernel, output_shape)
    _check(call, window, count, (1, *_TRANSPOSED))
    if groups > 1 and any(extra):  # MegEngine lacks such a kernel: less is cut off the end instead
        after = tuple(a - e for a, e in zip(window.after, extra, strict=True))
        if min(after) < 0:
            call.refuse("has groups, and more output_padding than pads, for which MegEngine has no kernel")
        window, extra = replace(window, after=after), (0,) * count
    if count == 1:
        return _signal_transpose(call, window, extra, groups)
    channels = shape[1] * groups
    # MegEngine's output_padding must be below the stride: the whole result is cut instead.
    options: dict[str, Any] = {
        "stride": window.stride,
        "padding": _common(window),
        "dilation": window.dilation,
    }
    options.update(output_padding=extra, groups=groups)
    sizes = (shape[0], channels, window.kernel)
    result = _module(call, _TRANSPOSED[count], sizes, options, call.tensor(0))
    if result is None:
        filters = call.tensor(1)
        if groups > 1:
            grouped = (groups, shape[0] // groups, *shape[1:])
            filters = call.function(F.reshape, filters, grouped, name=f"{call.name}_weight")
        flat = None
        if _bias(call) is not None:
            flat = call.function(F.reshape, call.tensor(2), (1, channels, *[1] * count))
        result = call.function(_TRANSPOSED_FUNCTIONS[count], call.tensor(0), filters, flat, **options)
    common = _common(window)
    cuts = [
        slice(b - c, (c - a) or None) for b, a, c in zip(window.before, window.after, common, strict=True)
    ]
    if all(cut == slice(0, None) for cut in cuts):
        return result
    return call.method("__getitem__", result, (slice(None), slice(None), *cuts))


def _signal_transpose(call: Call, window: Window, extra: tuple[int, ...], groups: int) -> Any:
    """Transposes a convolution along one axis, as an image of one column."""
    inputs, outputs, size = call.shape(1)
    options: dict[str, Any] = {"stride": (window.stride[0], 1), "dilation": (window.dilation[0], 1)}
    options.update(padding=(_common(window)[0], 0), output_padding=(extra[0], 0), groups=groups)
    image = call.function(F.expand_dims, call.tensor(0), -1, name=f"{call.name}_image")
    sizes, column = (inputs, outputs * groups, (size, 1)), f"{call.name}_column"
    result = _module(call, M.ConvTranspose2d, sizes, options, image, column)
    if result is None:
        form = (inputs, outputs, size, 1) if groups == 1 else (groups, inputs // groups, outputs, size, 1)
        filters = call.function(F.reshape, call.tensor(1), form, name=f"{call.name}_weight")
        flat = None
        if _bias(call) is not None:
            flat = call.function(F.reshape, call.tensor(2), (1, outputs * groups, 1, 1))
        result = call.function(F.conv_transpose2d, image, filters, flat, name=column, **options)
    common = _common(window)[0]
    cut = slice(window.before[0] - common, (common - window.after[0]) or None)
    if cut != slice(0, None):
        result = call.method("__getitem__", result, (slice(None), slice(None), cut), name=f"{call.name}_cut")
    return call.function(F.squeeze, result, -1)


def _common(window: Window) -> tuple[int, ...]:
    return tuple(min(b, a) for b, a in zip(window.before, window.after, strict=True))


def _transposed_window(
    call: Call, kernel: list[int], output_shape: list[int] | None
) -> tuple[Window, tuple[int, ...]]:
    """Returns the window and the output padding of a transposed convolution."""
    count = len(kernel)
    extra = call.ints("output_padding", [0] * count)
    automatic = call.attribute("auto_pad", "NOTSET")
    if output_shape is None and automatic in ("NOTSET", "VALID"):
        window = read_window(call, kernel)
        return window, tuple(extra)
    stride, dilation = call.ints("strides", [1] * count), call.ints("dilations", [1] * count)
    call.ints("pads", None)
    call.refuse_open(0, range(2, call.rank(0)), "has an output_shape or auto_pad for an input")
    sizes = call.shape(0)[2:]
    target = output_shape[-count:] if output_shape else [n * s for n, s in zip(sizes, stride, strict=True)]
    full = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, s, e, k, d in zip(sizes, stride, extra, kernel, dilation, strict=True)
    ]
    totals = [f - w for f, w in zip(full, target, strict=True)]
    if any(total < 0 for total in totals):
        call.refuse("has an output_shape that is larger than its result")
    halves = [t // 2 for t in totals]
    rest = [t - h for t, h in zip(totals, halves, strict=True)]
    before, after = (halves, rest) if automatic == "SAME_UPPER" else (rest, halves)
    return (
        Window(tuple(kernel), tuple(stride), tuple(dilation), tuple(before), tuple(after)),
        tuple(extra),
    )


LOWERINGS: dict[str, Lowering] = {"Conv": _conv, "ConvTranspose": _conv_transpose}
