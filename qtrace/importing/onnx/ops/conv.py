"""Convolutions, plain and transposed, and poolings, with their windows as ONNX writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.model import Stored, Value

_MODULES = {1: M.Conv1d, 2: M.Conv2d, 3: M.Conv3d}
_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED_FUNCTIONS = {2: F.conv_transpose2d, 3: F.conv_transpose3d}
_TRANSPOSED = {2: M.ConvTranspose2d, 3: M.ConvTranspose3d}


@dataclass(frozen=True)
class Window:
    """A window that moves along the last axes.

    Attributes:
        kernel: the size of the window along each axis.
        stride: the step of the window along each axis.
        dilation: the distance between the places of the window.
        before: zeros before the first place of each axis.
        after: zeros after the last place of each axis.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether both ends are padded alike."""
        return self.before == self.after

    def as_image(self) -> Window:
        """Returns the window along one axis as a window of an image with one column."""
        before, after = (*self.before, 0), (*self.after, 0)
        return Window((*self.kernel, 1), (*self.stride, 1), (*self.dilation, 1), before, after)


def read_window(call: Call, kernel: Sequence[int]) -> Window:
    """Reads the attributes of a window.

    Args:
        call: the node; its input 0 is the image.
        kernel: the size of the window; its length is the number of axes.
    """
    count = len(kernel)
    stride = call.ints("strides", [1] * count)
    dilation = call.ints("dilations", [1] * count)
    pads = call.ints("pads", [0] * 2 * count)
    automatic = call.attribute("auto_pad", "NOTSET")
    if not len(stride) == len(dilation) == len(pads) // 2 == count:
        call.refuse("has strides, dilations or pads of another number of axes than its kernel")
    if any(n < 1 for n in (*stride, *dilation, *kernel)):
        call.refuse("has a kernel, stride or dilation below 1")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        if any(s != 1 for s in stride):
            call.refuse_open(0, range(2, call.rank(0)), f"has auto_pad {automatic} and strides for an input")
        pads = _same(call.shape(0)[2:], kernel, stride, dilation, automatic == "SAME_UPPER")
        if any(n < 0 for n in pads[:count]):
            call.refuse(f"has auto_pad {automatic} with strides by which its first window begins inside")
        pads = [max(n, 0) for n in pads]
    elif automatic == "VALID":
        pads = [0] * 2 * count
    elif automatic != "NOTSET":
        call.refuse(f"has auto_pad {automatic!r}")
    if any(n < 0 for n in pads):
        call.refuse("has negative pads")
    return Window(tuple(kernel), tuple(stride), tuple(dilation), tuple(pads[:count]), tuple(pads[count:]))


def _same(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], upper: bool
) -> list[int]:
    """Returns the pads with which the result has the size of the image divided by the stride, rounded up.

    Where the stride exceeds the kernel, they are negative: onnxruntime skips places at both ends.
    """
    before, after = [], []
    for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        total = (-(-size // s) - 1) * s + (k - 1) * d + 1 - size
        before.append(int((total if upper else total + 1) / 2))  # towards 0, as in C
        after.append(total - before[-1])
    return [*before, *after]


def pad(call: Call, node: Any, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Any:
    """Pads the last axes of an image with a number."""
    if not any((*before, *after)):
        return node
    widths = ((0, 0), (0, 0), *zip(before, after, strict=True))
    return call.function(F.nn.pad, node, widths, "constant", value, name=f"{call.name}_padded")


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
    is_image = count == 1 and groups > 1  # Conv1d lacks groups
    if is_image:
        x, window, padding = _image(call, x), window.as_image(), (*padding, 0)
    axes, name = len(window.kernel), f"{call.name}_column" if is_image else ""
    sizes = {
        "kernel": window.kernel,
        "stride": window.stride,
        "padding": padding,
        "dilation": window.dilation,
    }
    options: dict[str, Any] = {key: value[0] if axes == 1 else value for key, value in sizes.items()}
    channels = (call.shape(0)[1], shape[0], options.pop("kernel"))
    options = {"groups": groups, **options}
    result = _module(call, _MODULES[axes], channels, options, x, name)
    if result is None:
        flat = _flat(call, shape[0], axes, f"{call.name}_bias")
        filters = _filters(call, groups, window)
        result = call.function(_FUNCTIONS[axes], x, filters, flat, **options, name=name)
    return call.function(F.squeeze, result, -1) if is_image else result


def _image(call: Call, signal: Any) -> Any:
    """Returns a signal as an image of one column."""
    return call.function(F.expand_dims, signal, -1, name=f"{call.name}_image")


def _filters(call: Call, groups: int, window: Window) -> Any:
    """Returns a weight as MegEngine's functions take it, with an axis for the groups if there are several."""
    rows, columns = call.shape(1)[:2]
    form = (rows, columns) if groups == 1 else (groups, rows // groups, columns)
    form, filters = (*form, *window.kernel), call.tensor(1)
    same = form == call.shape(1)
    return filters if same else call.function(F.reshape, filters, form, name=f"{call.name}_weight")


def _flat(call: Call, channels: int, axes: int, name: str = "") -> Any:
    """Returns the bias with an axis for each of the result's."""
    if _bias(call) is None:
        return None
    return call.function(F.reshape, call.tensor(2), (1, channels, *[1] * axes), name=name)


def _bias(call: Call) -> Value | None:
    """Returns the bias; None for zeros that are not learned, which PyTorch's exporter writes for no bias."""
    bias = call.values[2] if call.has(2) else None
    if isinstance(bias, Stored) and not bias.learned and not bias.array.any():
        return None
    return bias


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
    x, name, channels = call.tensor(0), "", shape[1] * groups
    if count == 1:
        x, name = _image(call, x), f"{call.name}_column"
        window, extra = window.as_image(), (*extra, 0)
    axes, common = len(window.kernel), _common(window)
    # MegEngine's output_padding must be below the stride: the whole result is cut instead.
    options: dict[str, Any] = {"stride": window.stride, "padding": common, "dilation": window.dilation}
    options.update(output_padding=extra, groups=groups)
    result = _module(call, _TRANSPOSED[axes], (shape[0], channels, window.kernel), options, x, name)
    if result is None:
        filters, flat = _filters(call, groups, window), _flat(call, channels, axes)
        result = call.function(_TRANSPOSED_FUNCTIONS[axes], x, filters, flat, **options, name=name)
    ends = zip(window.before, window.after, common, strict=True)
    cuts = [slice(b - c, (c - a) or None) for b, a, c in ends][:count]
    if any(cut != slice(0, None) for cut in cuts):
        index = (slice(None), slice(None), *cuts)
        result = call.method("__getitem__", result, index, name=f"{call.name}_cut" if count == 1 else "")
    return call.function(F.squeeze, result, -1) if count == 1 else result


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


def _max_pool(call: Call) -> Any:
    window = _window(call)
    call.attribute("storage_order", 0)
    if len(call.node.outputs) > 1 and call.node.outputs[1]:
        call.refuse("gives the indices of the largest values")
    if any(d != 1 for d in window.dilation):
        call.refuse("has dilations, which MegEngine's max_pool2d lacks")
    window = _ceiled(call, window)
    x, padding = call.tensor(0), window.before
    if not window.symmetric:
        x = pad(call, x, window.before, window.after, float(np.finfo(np.float32).min))
        padding = (0, 0)
    return _pooled(call, F.max_pool2d, x, window, padding)


def _average_pool(call: Call) -> Any:
    window = _window(call)
    counts = bool(call.attribute("count_include_pad", 0))
    if any(d != 1 for d in window.dilation):
        call.refuse("has dilations, which MegEngine's avg_pool2d lacks")
    ceiled = _ceiled(call, window)
    if counts:
        _refuse_disputed_counts(call, window, ceiled)
    if ceiled != window or not (window.symmetric or counts):
        return _averaged(call, window, ceiled, counts)
    x, padding = call.tensor(0), window.before
    if not window.symmetric:
        x, padding = pad(call, x, window.before, window.after), (0, 0)
    mode = "average" if counts else "average_count_exclude_padding"
    return _pooled(call, F.avg_pool2d, x, window, padding, mode=mode)


def _refuse_disputed_counts(call: Call, window: Window, ceiled: Window) -> None:
    """Refuses averages that count padding where versions of onnxruntime divide by other numbers.

    The last windows may reach past the padding. ONNX, and onnxruntime 1.32, count the places up to the end of
    the padding. In opsets below 19, onnxruntime 1.23 counts the whole kernel. From 19 on it cuts the windows
    of axis i at the size plus ``pads[2 * i + 1]``. That is another axis' padding if there are more.
    """
    pads = (*window.before, *window.after)
    cuts = "dilations" in onnx.defs.get_schema("AveragePool", call.version).attributes  # from opset 19 on
    for i, kernel in enumerate(window.kernel):
        after = window.after[i]
        end = pads[2 * i + 1] if cuts else after + kernel
        for shape in call.shapes(0):
            size = shape[i + 2]
            padded = size + window.before[i] + ceiled.after[i]
            last = (padded - kernel) // window.stride[i] * window.stride[i] - window.before[i] + kernel
            if min(last, size + after) != min(last, size + end):
                call.refuse("counts padding that versions of onnxruntime count otherwise")
        if end != after and len({shape[i + 2] for shape in call.shapes(0)}) > 1:
            call.refuse("counts padding that versions of onnxruntime count otherwise")


def _averaged(call: Call, window: Window, ceiled: Window, counts: bool) -> Any:
    """Averages over the whole kernel, then multiplies by its size over the number of counted places."""
    call.refuse_open(0, range(2, call.rank(0)), "counts the places of each window of an input")
    factors = np.ones((1, 1), np.float64)
    for i, size in enumerate(call.shape(0)[2:]):
        kernel, stride, before = window.kernel[i], window.stride[i], window.before[i]
        steps = (size + before + ceiled.after[i] - kernel) // stride + 1
        first = np.arange(steps) * stride - before
        low, high = (-before, size + window.after[i]) if counts else (0, size)
        counted = np.minimum(first + kernel, high) - np.maximum(first, low)
        factors = factors[..., None] * (kernel / np.maximum(counted, 1))
    x = pad(call, call.tensor(0), ceiled.before, ceiled.after)
    average = _pooled(call, F.avg_pool2d, x, window, (0, 0), mode="average")
    stored = Stored(factors.astype(np.float32), f"{call.name}_counts")
    return call.function(F.mul, average, call.layers.tensor(stored))


def _lp_pool(call: Call) -> Any:
    """Computes (sum |x|^p)^(1 / p) as a root of the average of powers, times the size of the kernel."""
    window, power = _window(call), call.attribute("p", 2)
    if any(d != 1 for d in window.dilation) or power < 1:
        call.refuse(f"has dilations, or the power {power}, which MegEngine's pooling lacks")
    window = _ceiled(call, window)
    x = pad(call, _powers(call, power), window.before, window.after)
    zeros = (0,) * len(window.kernel)
    average = _pooled(call, F.avg_pool2d, x, window, zeros, mode="average")
    return _root(call, call.function(F.mul, average, float(np.prod(window.kernel))), power)


def _global_lp_pool(call: Call) -> Any:
    power = call.attribute("p", 2)
    if not call.is_float(0) or power < 1:
        call.refuse(f"pools {call.dtype(0).name} by the power {power}")
    axes = tuple(range(2, call.rank(0)))
    return _root(call, call.function(F.sum, _powers(call, power), axis=axes, keepdims=True), power)


def _powers(call: Call, power: int) -> Any:
    if power == 2:
        return call.function(F.square, call.tensor(0))
    sizes = call.function(F.abs, call.tensor(0))
    return sizes if power == 1 else call.function(F.pow, sizes, float(power))


def _root(call: Call, total: Any, power: int) -> Any:
    if power == 2:
        return call.function(F.sqrt, total)
    return total if power == 1 else call.function(F.pow, total, 1.0 / power)


def _window(call: Call) -> Window:
    kernel = call.ints("kernel_shape")
    if len(kernel) not in (1, 2) or call.rank(0) != len(kernel) + 2 or not call.is_float(0):
        call.refuse(f"pools {call.dtype(0).name} along {len(kernel)} axes; MegEngine pools float32 along two")
    window = read_window(call, kernel)
    if any(p >= k for p, k in zip((*window.before, *window.after), (*kernel, *kernel), strict=True)):
        call.refuse("has pads as large as its kernel")
    return window


def _ceiled(call: Call, window: Window) -> Window:
    """Returns the window with more padding at the end, as ceil_mode has it."""
    if not call.attribute("ceil_mode", 0):
        return window
    after = list(window.after)
    if all(a + s - 1 < k for a, s, k in zip(after, window.stride, window.kernel, strict=True)):
        opened = [len({shape[i + 2] for shape in call.shapes(0)}) > 1 for i in range(len(after))]
    else:
        call.refuse_open(0, range(2, call.rank(0)), "rounds up the number of its windows over an input")
        opened = [False] * len(after)
    for i, size in enumerate(call.shape(0)[2:]):
        if opened[i]:  # a stride less one completes the last window of every size, and begins none after it
            after[i] += window.stride[i] - 1
            continue
        padded = size + window.before[i] + after[i] - window.kernel[i]
        steps = -(-padded // window.stride[i])
        if steps * window.stride[i] >= size + window.before[i]:  # the last window would begin in the padding
            steps -= 1
        after[i] += max(steps * window.stride[i] - padded, 0)
    return Window(window.kernel, window.stride, window.dilation, window.before, tuple(after))


def _pooled(call: Call, function: Any, x: Any, window: Window, padding: Any, **options: Any) -> Any:
    if len(window.kernel) == 2:
        return call.function(function, x, window.kernel, window.stride, padding, **options)
    image = _pooled(call, function, _image(call, x), window.as_image(), (padding[0], 0), **options)
    return call.function(F.squeeze, image, -1)


def _global(function: Any) -> Lowering:
    def lower(call: Call) -> Any:
        if not call.is_float(0):
            call.refuse("pools integers")
        axes = tuple(range(2, call.rank(0)))
        return call.function(function, call.tensor(0), axis=axes, keepdims=True)

    return lower


def _global_average(call: Call) -> Any:
    if call.rank(0) == 4:
        return call.function(F.adaptive_avg_pool2d, call.tensor(0), 1)
    return _global(F.mean)(call)


LOWERINGS: dict[str, Lowering] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalLpPool": _global_lp_pool,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global(F.max),
}
