"""Calibration beside the float module's own forward, qtrace's and MegEngine's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import megengine.module as M
from megengine import Tensor
from megengine.module import Module
from megengine.quantization import calibration_qconfig, quantize_qat

import qtrace
from benchmarks.nets import MobileNetV2, NativeResNet18, ResNet18, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import run_interleaved
from qtrace.calibration.base import watched
from qtrace.calibration.choice import choose_engine
from qtrace.calibration.collecting import Observing, no_statistics
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from tests.zoo.darknet import CSPDarknet

__all__ = ["one_pass", "run"]

# Observer of activations -> the largest ratio that is good enough; None for information.
_TARGETS: dict[str, float | None] = {"minmax": 1.05, "percentile": 1.12, "mse": 1.12, "kl": 1.12}
_OTHERS = ("aciq", "cosine", "lsq_plus", "moving_average", "moving_percentile", "power_of_two")


def run(size: Size) -> Iterator[Row]:
    """The passes over single batches, whole calibrations, and MegEngine's own."""
    batches = image_batches(size.batches, size.image)
    net = settle(ResNet18(size.width), batches[0])
    yield from _passes(net, batches, size.net, _TARGETS, size.repeats)
    yield from _passes(net, batches, size.net, dict.fromkeys(_OTHERS), size.slow_repeats)
    yield from _whole(net, batches, size.net, size.slow_repeats)
    mobile = settle(MobileNetV2(size.mobile_width), batches[0])
    yield from _passes(mobile, batches, "MobileNetV2", _TARGETS, size.slow_repeats)
    darknet = settle(CSPDarknet(M.SiLU, size.width), batches[0])
    yield from _passes(darknet, batches, "CSPDarknet", _TARGETS, size.slow_repeats)
    yield from _sampled(darknet, "CSPDarknet", size)
    yield from _native(batches, size)


def _passes(
    net: Module, batches: list[Tensor], name: str, targets: dict[str, float | None], repeats: int
) -> Iterator[Row]:
    """Times one batch of calibrate in either engine, beside MegEngine's float forward."""
    traced = qtrace.trace(net, batches[0], check=False)
    sides: dict[str, Callable[[], Any]] = {"float": _forward(net, batches)}
    for observer in targets:
        prepared = qtrace.prepare(traced, {"observers": {"activation": observer}})
        sides[observer] = one_pass(prepared, batches, "megengine")
        sides[f"{observer} onnxruntime"] = one_pass(prepared, batches, "onnxruntime")
    # Two rounds before: the first batch also observes the weights.
    samples = run_interleaved(sides, repeats, warm_up=2)
    for observer, target in targets.items():
        title = f"{name}: calibration pass / float forward, {observer}"
        yield Row(title, samples.ratio(observer, "float"), "x", target)
        fast = samples.ratio(f"{observer} onnxruntime", "float")
        yield Row(
            f"{title}, onnxruntime", fast, "x", target, "what auto takes; MegEngine's forward is the unit"
        )
    yield Row(f"{name}: float forward", samples.seconds("float"), "s")


def one_pass(prepared: TracedModule, batches: list[Tensor], engine: str) -> Callable[[], None]:
    """Runs and observes one batch after the other, in a circle."""
    model = QuantizedModel(prepared)
    watched_nodes, statistics = watched(model), no_statistics(model)
    runner = choose_engine(model, watched_nodes, engine)
    sites = {name: fq.site for name, fq in model.fake_quants.items()}
    observing = Observing(statistics, watched_nodes, sites, {})
    endless = enumerate(itertools.cycle(batches))

    def run() -> None:
        index, batch = next(endless)
        observing.begin(index, batch)
        runner.run(((batch,), {}), index, observing.observe)
        observing.commit()

    return run


def _whole(net: Module, batches: list[Tensor], name: str, repeats: int) -> Iterator[Row]:
    """qtrace.calibrate from the first batch to the last range, beside as many float forwards."""
    traced = qtrace.trace(net, batches[0], check=False)

    def forwards() -> None:
        for batch in batches:
            net(batch)

    sides: dict[str, Callable[[], Any]] = {"float": forwards}
    for observer in ("minmax", "mse"):
        prepared = qtrace.prepare(traced, {"observers": {"activation": observer}})
        sides[observer] = lambda p=prepared: qtrace.calibrate(p, batches, progress=False)
    samples = run_interleaved(sides, repeats)
    for observer in ("minmax", "mse"):
        title = f"{name}: calibrate, {len(batches)} batches / {len(batches)} forwards, {observer}"
        yield Row(title, samples.ratio(observer, "float"), "x", note="with weights and range search")


def _native(batches: list[Tensor], size: Size) -> Iterator[Row]:
    """MegEngine's HistogramObserver on the same network, rewritten for quantize_qat."""
    net = settle(NativeResNet18(size.width), batches[0])
    # By keyword: MegEngine silently ignores a positional qconfig.
    observed = quantize_qat(net, inplace=False, qconfig=calibration_qconfig)
    observed.eval()
    sides = {"float": _forward(net, batches), "native": _forward(observed, batches)}
    samples = run_interleaved(sides, size.slow_repeats)
    title = f"{size.net}: MegEngine's own HistogramObserver / float forward"
    yield Row(title, samples.ratio("native", "float"), "x", note="it searches a range at every batch")


def _sampled(net: Module, name: str, size: Size) -> Iterator[Row]:
    """Counting a part of the values of larger images beside counting all; the extremes are always of all."""
    count, channels, height, width = size.image
    shape = (max(1, count // 2), channels, 2 * height, 2 * width)
    batches = image_batches(2, shape)
    traced = qtrace.trace(net, batches[0], check=False)
    parts = (1, 4, 16)
    sides = {}
    for part in parts:
        prepared = qtrace.prepare(traced, {"observers": {"activation": {"mse": {"sample": part}}}})
        sides[str(part)] = one_pass(prepared, batches, "onnxruntime")
    samples = run_interleaved(sides, size.slow_repeats, warm_up=2)
    title = f"{name} {'x'.join(map(str, shape))}: calibration pass, mse, onnxruntime"
    for part in parts[1:]:
        yield Row(f"{title}, sample: {part} / all", samples.ratio(str(part), "1"), "x")


def _forward(module: Module, batches: list[Tensor]) -> Callable[[], Tensor]:
    """Calls ``module`` on one batch after the other, in a circle."""
    endless = itertools.cycle(batches)
    return lambda: module(next(endless))
