"""The search for the range of one tensor in a histogram that is filled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import qtrace
from benchmarks.nets import ResNet50, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import run_interleaved
from qtrace import QScheme
from qtrace.calibration.collecting import CollectOptions, collect, observe_parameters
from qtrace.observers.base import Observer
from qtrace.observers.mse import MeanSquaredError
from qtrace.observers.percentile import Percentile
from qtrace.preparation.model import QuantizedModel

__all__ = ["run"]

_BINS = 2048
_TARGET = 20.0


def run(size: Size) -> Iterator[Row]:
    """Three shapes of distributions for the check; other observers and schemes for information."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(1 << 18, dtype=np.float32)
    tails = rng.standard_t(2, 1 << 18).astype(np.float32)
    weights = rng.standard_normal((64, 1024), dtype=np.float32)
    affine = QScheme(bits=8, signed=False, symmetric=False)
    checked = {
        "normal": _filled(MeanSquaredError(affine, bins=_BINS), normal),
        "after ReLU": _filled(MeanSquaredError(affine, bins=_BINS), np.maximum(normal, 0)),
        "long tails": _filled(MeanSquaredError(affine, bins=_BINS), tails),
    }
    four = QScheme(bits=4, signed=False, symmetric=False)
    channels = QScheme(bits=8, signed=True, symmetric=True, axis=0)
    others = {
        "mse, 4-bit affine, normal": _filled(MeanSquaredError(four, bins=_BINS), normal),
        "mse, 8-bit symmetric, 64 channels": _filled(MeanSquaredError(channels, bins=_BINS), weights),
        "percentile, 8-bit affine, normal": _filled(Percentile(affine, bins=_BINS), normal),
    }
    samples = run_interleaved({n: o.qparams for n, o in {**checked, **others}.items()}, size.repeats)
    for name in checked:
        title = f"range search, mse, {_BINS} bins, 8-bit affine, {name}"
        yield Row(title, samples.seconds(name, per=1e-3), "ms", _TARGET)
    for name in others:
        yield Row(f"range search, {name}", samples.seconds(name, per=1e-3), "ms")
    yield from _every_site(size)


def _every_site(size: Size) -> Iterator[Row]:
    """All ranges of a whole network, weights included, after one batch."""
    shape = (4, 3, 64, 64)
    batches = image_batches(1, shape)
    net = settle(ResNet50(size.width), batches[0])
    traced = qtrace.trace(net, batches[0], check=False)
    for observer in ("mse", "percentile"):
        prepared = qtrace.prepare(traced, {"observers": {"activation": observer}})
        collected = collect(prepared, enumerate(batches), CollectOptions("megengine")).statistics
        observers = observe_parameters(QuantizedModel(prepared), collected).observers.values()
        search = {observer: lambda o=observers: [each.qparams() for each in o if not each.empty]}  # type: ignore[misc]
        samples = run_interleaved(search, size.slow_repeats)
        title = f"range search, {observer}, all {len(observers)} groups of ResNet-50"
        yield Row(title, samples.seconds(observer), "s", 1.0)


def _filled(observer: Observer, values: np.ndarray) -> Observer:
    observer.observe(values)
    return observer
