"""Whole networks in LiteRT: the recipe of the target with that of the family, calibrated, exported, compared.

``python -m tests.export.test_tflite_networks [NAME ...]`` prints the figures.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.report import VerifyReport
from tests.export.tflite_files import kinds
from tests.nets import MobileNetV2, images, net
from tests.zoo import mobilenet, repvgg, shufflenet
from tests.zoo.detectors.entry import bounded, trained
from tests.zoo.detectors.yolo import Yolox
from tests.zoo.parts import conv_bn, settle
from tests.zoo.resnet import Basic, Bottleneck


def _resnet(block: Any, counts: tuple[int, ...], width: int) -> M.Module:
    """ResNet as published, of any width: a 7x7 stem, four stages, a classifier."""
    layers, inside = [conv_bn(3, width, 7, 2), M.MaxPool2d(3, 2, 1)], width
    for stage, count in enumerate(counts):
        middle = width * 2**stage
        for number in range(count):
            stride, outside = 2 if stage and not number else 1, middle * block.expansion
            same = inside == outside and stride == 1
            shortcut = M.Identity() if same else conv_bn(inside, outside, 1, stride, None)
            layers.append(block(inside, middle, stride, shortcut))
            inside = outside

    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        return self.fc(F.flatten(F.adaptive_avg_pool2d(self.layers(x), 1), 1))

    return settle(net(forward, layers=M.Sequential(*layers), fc=M.Linear(inside, 100)), 3, 64, 64)


@dataclass(frozen=True)
class _Network:
    """A network and how it is quantized.

    Attributes:
        family: the recipe of its family.
        build: makes it, in eval mode.
        size: of its images.
        detects: whether its images have bounds, and MegEngine may not run ahead, because of ops that race.
    """

    family: str
    build: Callable[[], M.Module]
    size: int = 64
    detects: bool = False

    def batch(self, count: int, seed: int) -> np.ndarray:
        """Images."""
        if self.detects:
            return bounded(count, seed, self.size)
        return images(count, 3, self.size, self.size, seed=seed)


NETWORKS = {
    "ResNet-18": _Network("resnet", lambda: _resnet(Basic, (2, 2, 2, 2), 16)),
    "ResNet-50": _Network("resnet", lambda: _resnet(Bottleneck, (3, 4, 6, 3), 8)),
    "MobileNetV2": _Network("mobilenet_v2", lambda: settle(MobileNetV2(0.5, 100), 3, 64, 64)),
    "MobileNetV3": _Network("mobilenet_v3", mobilenet.mobilenet_v3, size=32),
    "ShuffleNetV2": _Network("shufflenet_v2", shufflenet.shufflenet_v2, size=32),  # each half is a slice
    "RepVGG": _Network("repvgg", repvgg.repvgg_deploy, size=32),
    "CSPDarknet, PAFPN, YOLOX head": _Network("yolox", lambda: trained(Yolox()), detects=True),
}
QUICK = ("MobileNetV3", "ShuffleNetV2")


@contextmanager
def _serial(network: _Network) -> Iterator[None]:
    level = mge.config.async_level
    mge.config.async_level = 0 if network.detects else level
    try:
        yield
    finally:
        mge.config.async_level = level


def _measured(network: _Network, folder: Path) -> tuple[VerifyReport, Path]:
    recipe, path = folder / "recipe.yaml", folder / "m.tflite"
    recipe.write_text(f"schema: qtrace/1\nimports: [backend/tflite, {network.family}]\n")
    batches = [network.batch(8, seed) for seed in range(4)]
    with _serial(network):
        traced = qtrace.trace(network.build(), batches[0][:2], check=False)
        prepared = qtrace.prepare(traced, recipe)
        model = qtrace.convert(qtrace.calibrate(prepared, batches[:3], progress=False))
        qtrace.export(model, path)
        # End to end, random weights magnify a step that is off: only trained ones would be held to 35 dB.
        return qtrace.verify(path, model, batches[3:], runtime="litert", min_sqnr_db=25.0), path


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS]
)
def test_litert_computes_every_op_as_the_graph_does(name: str, tmp_path: Path) -> None:
    report, path = _measured(NETWORKS[name], tmp_path)
    assert report.worst_lsb() <= 1
    assert report.equal_share() >= 0.999
    assert report.passed, report.table()
    assert len(report.sites["op_by_op"]) > 10
    assert "TRANSPOSE" not in kinds(path)


def _main() -> None:
    print("| network | sites | worst LSB, equal | deployed: dB, same prediction | operators |")
    print("| --- | --- | --- | --- | --- |")
    for name in sys.argv[1:] or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            report, path = _measured(NETWORKS[name], Path(folder))
            operators = ", ".join(f"{n} {k}" for k, n in Counter(kinds(path)).most_common())
        share = f"{report.worst_lsb()}, {report.equal_share():.4%}"
        deployed = f"{report.sqnr_db('deployed'):.1f}, {report.agreement():.1%}"
        cells = (name, str(len(report.sites["op_by_op"])), share, deployed, operators)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    _main()
