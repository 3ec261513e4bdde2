"""The fault of depthwise networks, on purpose: channels of very different ranges with one scale a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np

from benchmarks.accuracy.judging import Judge, quantize
from benchmarks.accuracy.networks import Activation, Bottleneck
from benchmarks.accuracy.rows import Row, add_recovered_share
from benchmarks.accuracy.subjects import Subject, in_megengine

__all__ = ["run", "stretch_channels"]

CHECK = "planted imbalance, W8A8, per-tensor weights"
SPREAD, SHARE = 64.0, 0.9
_WAYS = {
    "round to nearest": (),
    "bias_correction": ("bias_correction",),
    "equalize": ("equalize",),
    "equalize, bias_correction": ("equalize", "bias_correction"),
}


class Relu(M.Module):
    """A ReLU in the place of a ReLU6: a channel behind it may be scaled."""

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return F.relu(x)


def stretch_channels(net: M.Module, spread: float = SPREAD, seed: int = 0) -> M.Module:
    """Stretches the channels inside of each bottleneck, in place; what the network computes stays.

    ReLU6 becomes ReLU first. Then a channel behind an activation is multiplied by f, between 1 / spread and
    spread, in its BatchNorm, and divided by f in the convolution that reads it.
    """
    random = np.random.RandomState(seed)
    _replace_relu6(net)
    for block in (m for m in net.modules() if isinstance(m, Bottleneck)):
        layers = list(block.body)
        for norm, reader in ((layers[1], layers[3]), (layers[4], layers[6])):
            channels = norm.weight.shape[1]
            factor = np.exp(random.uniform(-np.log(spread), np.log(spread), channels)).astype(np.float32)
            wide = mge.Tensor(factor.reshape(1, -1, 1, 1))
            norm.weight._reset(mge.Parameter(norm.weight * wide))
            norm.bias._reset(mge.Parameter(norm.bias * wide))
            depthwise = reader.groups > 1
            shape = (channels, 1, 1, 1, 1) if depthwise else (1, channels, 1, 1)
            reader.weight._reset(mge.Parameter(reader.weight / mge.Tensor(factor.reshape(shape))))
    return net


def _replace_relu6(module: M.Module) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Activation):
                setattr(parent, name, Relu())


def run(subject: Subject) -> Iterator[Row]:
    """Quantizes the stretched network with and without each algorithm; changes the subject's network."""
    stretch_channels(subject.net)
    judge = Judge(subject, in_megengine(subject.net))
    yield dataclasses.replace(judge.float_row(CHECK), note="ReLU for ReLU6")
    lost: float | None = None
    for way, ptq in _WAYS.items():
        config = {"weight": {"axis": None}, "ptq": ["fuse_bn", *ptq]}
        row = judge.row(CHECK, way, in_megengine(quantize(subject, config)))
        if lost is None:
            lost = row.loss
        else:
            row = add_recovered_share(row, lost, SHARE if way == "equalize, bias_correction" else None)
        yield row
