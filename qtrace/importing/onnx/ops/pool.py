"""Poolings."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np

from qtrace.importing.onnx.call import Call, Lowering
from qtrace.importing.onnx.ops.windows import Window, pad, read_window
from qtrace.importing.onnx.values import Stored

__all__ = ["LOWERINGS"]

_CUTS_WINDOWS = 19  # the opset from which AveragePool counts no place after the padding


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

    The last windows may reach past the padding. ONNX, and onnxruntime 1.32, count the places up to the end
    of the padding. onnxruntime 1.23 counts the whole kernel in opsets below 19, and from 19 on cuts the
    windows of axis i at the size plus ``pads[2 * i + 1]``, which is another axis' padding if there are more.
    """
    pads = (*window.before, *window.after)
    for i, kernel in enumerate(window.kernel):
        after = window.after[i]
        end = pads[2 * i + 1] if call.version >= _CUTS_WINDOWS else after + kernel
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
    # Along one axis: as an image of one column.
    image = call.function(F.expand_dims, x, -1, name=f"{call.name}_image")
    kernel, stride = (window.kernel[0], 1), (window.stride[0], 1)
    result = call.function(function, image, kernel, stride, (padding[0], 0), **options)
    return call.function(F.squeeze, result, -1)


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
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalLpPool": _global_lp_pool,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global(F.max),
}
