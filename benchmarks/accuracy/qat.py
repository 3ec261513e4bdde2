"""W4A4 with training: learned step sizes beside MegEngine's own `quantize_qat` in 4 bits, equal steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import megengine as mge
import megengine.module as M
from megengine.quantization import (
    disable_fake_quant,
    ema_fakequant_qconfig,
    ema_lowbit_fakequant_qconfig,
    enable_fake_quant,
    quantize_qat,
)

import qtrace
from benchmarks.accuracy.fitting import fit
from benchmarks.accuracy.four_bits import low_bits
from benchmarks.accuracy.judging import Judge, quantize
from benchmarks.accuracy.native import NATIVE, load_float
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.subjects import Subject, batches, in_megengine, split
from benchmarks.accuracy.training import shifted

__all__ = ["run"]

CHECK = "W4A4 QAT"
STEPS, LR, RANGE_LR, DECAY = 400, 1e-3, 1e-4, 1e-3
MAX_LOSS = 1.0


def run(subject: Subject, steps: int | None) -> Iterator[Row]:
    """Trains by MegEngine's own QAT and by qtrace, with the same optimizer, steps, rates, data and order."""
    steps = steps or STEPS
    judge = Judge(subject, in_megengine(subject.net))
    yield judge.float_row(CHECK)
    native = judge.row(
        CHECK, f"MegEngine quantize_qat, qint4, {steps} steps", in_megengine(_native(subject, steps))
    )
    ours = judge.row(CHECK, f"qtrace, lsq, {steps} steps", in_megengine(_ours(subject, steps)))
    assert ours.loss is not None
    assert ours.metric is not None
    assert native.metric is not None
    ahead = ours.metric - native.metric
    met = ours.loss <= MAX_LOSS and ahead > 0
    target = f"loss <= {MAX_LOSS:g}, above native"
    yield dataclasses.replace(ours, target=target, met=met, note=f"{ahead:+.1f} points to native")
    yield native


def _ours(subject: Subject, steps: int) -> Any:
    model = quantize(subject, {**low_bits(4), "fakequant": "lsq"}, convert=False)
    mge.config.async_level = 0
    qtrace.set_phase(model, "train")
    model.train()
    groups = [
        (group["params"], group.get("lr", LR), group.get("weight_decay", 0.0))
        for group in qtrace.param_groups(model, lr=LR, range_lr=RANGE_LR, weight_decay=DECAY)
    ]
    fit(model, groups, shifted(split()[0]), steps=steps, seed=1, title=f"{subject.name} lsq")
    model.eval()
    return qtrace.convert(model)


def _native(subject: Subject, steps: int) -> M.Module:
    net = NATIVE[subject.name]()
    load_float(net, subject.net)
    net.eval()
    model = quantize_qat(net, qconfig=ema_lowbit_fakequant_qconfig)
    stem = model.stem if subject.name == "resnet" else next(iter(model.features))
    for end in (model.quant, stem, model.fc):  # 8 bits at both ends, as in ours
        end.set_qconfig(ema_fakequant_qconfig)
    disable_fake_quant(model)
    model.train()
    for _ in range(10):  # its observers are moving averages: they need some batches to settle
        for batch in batches(subject.calibration):
            model(mge.Tensor(batch))
    enable_fake_quant(model)
    fit(
        model,
        [(list(model.parameters()), LR, DECAY)],
        shifted(split()[0]),
        steps=steps,
        seed=1,
        title="native",
    )
    model.eval()
    return model
