"""A step of quantization-aware training beside a float step, eager, qtrace's and MegEngine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import megengine.functional as F
import numpy as np
from megengine import Tensor
from megengine.autodiff import GradManager
from megengine.module import Module
from megengine.optimizer import SGD
from megengine.quantization import quantize_qat

import qtrace
from benchmarks.nets import NativeResNet18, ResNet18, image_batches, settle
from benchmarks.rows import Row, Size
from benchmarks.timing import take_turns

__all__ = ["run"]

_TARGET = 1.15


def run(size: Size) -> Iterator[Row]:
    """Forward, backward and optimizer step of all networks, in turns."""
    batch = image_batches(1, size.image)[0]
    net = settle(ResNet18(size.width), batch)
    native = settle(NativeResNet18(size.width), batch)
    traced = qtrace.trace(net, batch, check=False)
    modules = {name: _prepared(traced, name, batch) for name in ("float", "fixed", "lsq")}
    modules |= {"original": net, "native float": native, "native": quantize_qat(native, inplace=False)}
    samples = take_turns({name: _step(m, batch) for name, m in modules.items()}, size.few)
    name = f"{size.net}: QAT step / float step"
    for fake in ("fixed", "lsq"):
        yield Row(f"{name}, {fake}", samples.ratio(fake, "float"), "x", _TARGET, "both with BatchNorm folded")
    for fake in ("fixed", "lsq"):
        note = "the original trains its BatchNorm"
        yield Row(f"{name} of the original, {fake}", samples.ratio(fake, "original"), "x", note=note)
    yield Row(f"{name}, MegEngine's own quantize_qat", samples.ratio("native", "native float"), "x")
    yield Row(f"{size.net}: float step, BatchNorm folded", samples.seconds("float"), "s")
    yield Row(f"{size.net}: float step, original", samples.seconds("original"), "s")


def _prepared(traced: Module, kind: str, batch: Tensor) -> Module:
    """A prepared network in the phase train with fake quant ``kind``, or in the phase float."""
    fake = "fixed" if kind == "float" else kind
    prepared = qtrace.prepare(traced, {"observers": {"activation": "minmax"}, "fakequant": fake})
    qtrace.calibrate(prepared, [batch], progress=False)
    qtrace.set_phase(prepared, "float" if kind == "float" else "train")
    return prepared


def _step(module: Module, batch: Tensor) -> Callable[[], None]:
    module.train()
    parameters = list(module.parameters())
    manager = GradManager().attach(parameters)
    # So slow that the values, and with them the work, stay what they are.
    optimizer = SGD(parameters, lr=1e-6)
    labels = Tensor(np.arange(batch.shape[0], dtype=np.int32))

    def step() -> None:
        with manager:
            loss = F.nn.cross_entropy(module(batch), labels)
            manager.backward(loss)
        optimizer.step().clear_grad()

    return step
