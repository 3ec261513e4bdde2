"""A step of quantization-aware training beside a float step: qtrace's, MegEngine's, eager and traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megengine
import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.autodiff import GradManager
from megengine.jit import trace
from megengine.module import Module
from megengine.optimizer import SGD
from megengine.quantization import quantize_qat

import qtrace
from benchmarks.nets import NativeResNet18, ResNet18, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import Samples, run_interleaved
from examples.detector.net import pretrained
from qtrace.gradients import fast_gradients

__all__ = ["run"]

_TARGETS = {"fixed": 1.25, "lsq": 1.35}
_OF_NATIVE = 0.35
_DETECTOR_TARGET = 1.5
_DETECTOR_SHAPE = (16, 3, 64, 64)


def run(size: Size) -> Iterator[Row]:
    """Times forward, backward and optimizer step of all networks, in turns."""
    level, megengine.config.async_level = megengine.config.async_level, 0  # else gradients race on CPU
    try:
        # jit.trace compiles at the second call.
        samples = run_interleaved(_sides(size), size.slow_repeats, warm_up=2)
        detector = run_interleaved(_detector_sides(size), 3 * size.slow_repeats, warm_up=2)
    finally:
        megengine.config.async_level = level
    yield from _rows(f"{size.net}: ", samples)
    yield from _detector_rows(detector)


def _sides(size: Size) -> dict[str, Callable[[], object]]:
    """The steps that take turns."""
    batch = image_batches(1, size.image)[0]
    net = settle(ResNet18(size.width), batch)
    native = settle(NativeResNet18(size.width), batch)
    traced = qtrace.trace(net, batch, check=False)
    sides: dict[str, Callable[[], object]] = {}
    for kind in ("float", "fixed", "lsq"):
        sides[kind] = _step(_prepared(traced, kind, batch), batch)
        if size.traced:
            sides[f"{kind}, traced"] = trace(_step(_prepared(traced, kind, batch), batch), symbolic=True)
    sides["original"] = _step(net, batch)
    sides["original, fast"] = _fast(net, batch)
    sides["native"] = _step(quantize_qat(native, inplace=False), batch)
    return sides


def _detector_sides(size: Size) -> dict[str, Callable[[], object]]:
    """The steps of the detector of the examples, whose tensors are small."""
    shape = _DETECTOR_SHAPE if size.width == 64 else (2, *_DETECTOR_SHAPE[1:])
    batch = image_batches(1, shape)[0]
    traced = qtrace.trace(pretrained(), batch[:1], check=False)

    def step(kind: str) -> Callable[[], None]:
        return _step(_prepared(traced, kind, batch), batch, _mean_square)

    sides: dict[str, Callable[[], object]] = {kind: step(kind) for kind in ("float", "fixed", "lsq")}
    if size.traced:
        sides.update({f"{k}, traced": trace(step(k), symbolic=True) for k in ("float", "lsq")})
    return sides


def _mean_square(maps: Sequence[Tensor]) -> Tensor:
    return sum((m**2).mean() for m in maps)


def _detector_rows(samples: Samples) -> Iterator[Row]:
    net = f"small detector {'x'.join(map(str, _DETECTOR_SHAPE))}: "
    for kind in ("fixed", "lsq"):
        ratio = samples.ratio(kind, "float")
        yield Row(f"{net}QAT step / float step, {kind}", ratio, "x", _DETECTOR_TARGET, "eager")
    if "lsq, traced" in samples.by_side:
        ratio = samples.ratio("lsq, traced", "float, traced")
        yield Row(f"{net}QAT step / float step under jit.trace, lsq", ratio, "x")
    for side in samples.by_side:
        yield Row(f"{net}step, {side}", samples.seconds(side), "s")


def _rows(net: str, samples: Samples) -> Iterator[Row]:
    for kind in ("fixed", "lsq"):
        ratio = samples.ratio(kind, "native")
        yield Row(f"{net}QAT step / step of MegEngine's quantize_qat, {kind}", ratio, "x", _OF_NATIVE)
    for kind, target in _TARGETS.items():
        note = "the same graph and gradients of convolutions"
        yield Row(f"{net}QAT step / float step, {kind}", samples.ratio(kind, "float"), "x", target, note)
    for kind in ("fixed", "lsq") if "lsq, traced" in samples.by_side else ():
        ratio = samples.ratio(f"{kind}, traced", "float, traced")
        yield Row(f"{net}QAT step / float step under jit.trace, {kind}", ratio, "x")
        yield Row(f"{net}traced / eager QAT step, {kind}", samples.ratio(f"{kind}, traced", kind), "x")
    ratio = samples.ratio("original, fast", "original")
    yield Row(f"{net}float step with fast_gradients / without", ratio, "x", note="BatchNorm trains")
    for side in samples.by_side:
        yield Row(f"{net}step, {side}", samples.seconds(side), "s")


def _prepared(traced: Module, kind: str, batch: Tensor) -> Module:
    """A prepared network in the phase train with fake quant ``kind``, or in the phase float."""
    fake = "fixed" if kind == "float" else kind
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}, "fakequant": fake})
    qtrace.calibrate(prepared, [batch], progress=False)
    qtrace.set_phase(prepared, "float" if kind == "float" else "train")
    return prepared


def _step(
    module: Module, batch: Tensor, loss_of: Callable[[Any], Tensor] | None = None
) -> Callable[[], None]:
    """Returns a step on a batch; its loss is ``loss_of`` the result, or the cross entropy of classes."""
    module.train()
    parameters = list(module.parameters())
    manager = GradManager().attach(parameters)
    # So slow that the values, and with them the work, stay what they are.
    optimizer = SGD(parameters, lr=1e-6)
    labels = Tensor(np.arange(batch.shape[0], dtype=np.int32))

    def step() -> None:
        with manager:
            result = module(batch)
            loss = F.nn.cross_entropy(result, labels) if loss_of is None else loss_of(result)
            manager.backward(loss)
        optimizer.step().clear_grad()

    return step


def _fast(module: Module, batch: Tensor) -> Callable[[], None]:
    step = _step(module, batch)

    def fast() -> None:
        with fast_gradients(module):
            step()

    return fast
