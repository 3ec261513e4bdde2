"""Measures each family's recipe beside the default, on networks of the family.

    python -m benchmarks.families              # every family: about an hour on one core
    python -m benchmarks.families resnet vit   # some families
    python -m benchmarks.families --missing    # networks without a stored row
    python -m benchmarks.families --rules vit  # and the recipe without each file of rules
    python -m benchmarks.families --rounded    # each rule where everything is rounded; rows are stored before

The networks are those of the zoo, wider where their classes can be: on a few channels nothing gains by
integers. What is too narrow all the same is rounded everywhere, by both recipes. Weights are random, three
times. A row is the median over seeds; rows are stored as they come.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import megengine as mge
import megengine.module as M
import numpy as np

import qtrace
from qtrace import process
from qtrace.config import QConfig
from qtrace.config.recipe import DEFAULT_RECIPE
from qtrace.errors import QtraceError
from qtrace.extras.tune.judge import Judge, RungData
from qtrace.graph.types import TracedModule
from scripts.stored import RESULTS, RecipeRow, load, store, today
from tests.zoo import (
    convnext,
    darknet,
    efficientnet,
    ghostnet,
    hrnet,
    mobilenet,
    repvgg,
    resnet,
    segmentation,
    shufflenet,
)
from tests.zoo.detectors import dense, detr, regions, yolo
from tests.zoo.detectors.entry import bounded, trained
from tests.zoo.parts import Gate, pictures, settle
from tests.zoo.transformers import swin, vit

__all__ = ["NETWORKS", "Net", "main", "measure", "measure_rounded"]

SEEDS = (0, 1, 2)
# Samples: half of them to calibrate on, and as many others to measure.
SAMPLES = 8


@dataclass(frozen=True)
class Net:
    """A network of a family.

    Attributes:
        recipe: the recipe of the family.
        name: the network with its width.
        build: makes the module.
        size: height and width of the images.
        detector: whether it has the weights and images of the zoo's detectors and transformers.
    """

    recipe: str
    name: str
    build: Callable[[], M.Module]
    size: int = 64
    detector: bool = False

    def module(self, seed: int) -> M.Module:
        """The module in eval mode, with the weights of a seed."""
        module = self.build()
        return trained(module, seed) if self.detector else settle(module, 3, self.size, self.size, seed=seed)

    def images(self, seed: int) -> np.ndarray:
        """`SAMPLES` images."""
        if self.detector:
            return bounded(SAMPLES, seed, self.size)
        return pictures(SAMPLES, 3, self.size, self.size, seed=seed)


def _silu_in_pieces() -> M.Module:
    return Gate(lambda x: x * mge.functional.sigmoid(x))


def _hswish() -> M.Module:
    return Gate(mge.functional.hswish)


_B0 = ((16, 16, 1, 3, 1), (16, 24, 6, 3, 2), (24, 24, 6, 5, 1), (24, 32, 6, 5, 2))

NETWORKS = (
    Net("vit", "ViT, 64 wide", lambda: vit.Vit(32, 8, 64, 2), 32, True),
    Net("efficientnet", "EfficientNet, 16 wide", lambda: efficientnet.EfficientNet(_B0, M.SiLU, True)),
    Net("resnet", "SE-ResNet, 16 wide", lambda: resnet.ResNet(resnet.Basic, 16, (1, 1, 1), se=True)),
    Net("repvgg", "RepVGG, 32 wide", lambda: repvgg.RepVGG(width=32)),
    Net(
        "csp_darknet", "CSPDarknet, SiLU in pieces, 16 wide", lambda: darknet.CSPDarknet(_silu_in_pieces, 16)
    ),
    Net("convnext", "ConvNeXt, 32 wide", lambda: convnext.ConvNeXt(32), 32),
    Net("detr", "DETR, 64 wide", lambda: detr.Detr(64), 64, True),
    Net("yolox", "YOLOX, 8 wide", lambda: yolo.Yolox(width=8), 64, True),
    Net("yolox", "YOLOX, decoded, 8 wide", lambda: yolo.Yolox(infer=True, width=8), 64, True),
    Net("unet", "U-Net, 16 wide", lambda: segmentation.UNet(True, 16)),
    Net("mobilenet_v3", "MobileNetV3, 16 wide", lambda: mobilenet.MobileNetV3(_hswish, 16)),
    Net("retinanet", "RetinaNet, decoded, 8 wide", lambda: dense.RetinaNet(infer=True), 64, True),
    Net("swin", "Swin, 32 wide", lambda: swin.Swin(32, 32), 32, True),
    Net("faster_rcnn", "Faster R-CNN, proposals, 8 wide", regions.ProposalNet, 64, True),
    Net("fcos", "FCOS, decoded, 8 wide", lambda: dense.Fcos(infer=True), 64, True),
    Net("yolov3", "YOLOv3, decoded, 8 wide", lambda: yolo.YoloV3(infer=True), 64, True),
    Net("centernet", "CenterNet, 8 wide", regions.CenterNet, 64, True),
    Net("simplebaseline", "SimpleBaseline, 8 wide", lambda: segmentation.SimpleBaseline(8)),
    Net("deeplabv3plus", "DeepLabV3+, 8 wide", lambda: segmentation.DeepLab(False)),
    Net("atss", "ATSS, decoded, 8 wide", lambda: dense.Atss(infer=True), 64, True),
    Net("shufflenet_v2", "ShuffleNetV2, 16 wide", lambda: shufflenet.ShuffleNetV2(16)),
    Net("ghostnet", "GhostNet, 8 wide", ghostnet.GhostNet),
    Net("csp_darknet", "CSPDarknet, 16 wide", lambda: darknet.CSPDarknet(M.SiLU, 16)),
    Net("hrnet", "HRNet, 8 wide", lambda: hrnet.HRNet("nearest", 8)),
)


@dataclass(frozen=True)
class _Trial:
    """A network with the weights of a seed, and its data."""

    traced: TracedModule
    part: RungData

    def judge(self, config: QConfig) -> tuple[float, float]:
        """The dB and the predicted milliseconds of a recipe; infinite dB where it leaves all in float."""
        judged = Judge(self.traced, threads=1).judge(config, self.part)
        value = float("inf") if judged.value is None else judged.value
        return value, judged.milliseconds or 0.0


def _trial(net: Net, seed: int) -> _Trial:
    module, images = net.module(seed), net.images(seed + 10)
    half = SAMPLES // 2
    traced = qtrace.trace(module, images[:2], check=False)
    calibration = tuple((images[i : i + half],) for i in range(0, SAMPLES, half))
    return _Trial(traced, RungData(calibration, ((net.images(seed + 20),),)))


def _without(config: QConfig, part: str, exactly: bool = False) -> QConfig:
    others = tuple(
        rule
        for rule in config.rules
        if not (rule.origin == part if exactly else rule.origin.startswith(part))
    )
    return config.model_copy(update={"rules": others})


def measure_rounded(net: Net, row: RecipeRow) -> RecipeRow:
    """Adds the dB of a recipe without each of its rules, where everything is rounded, to a stored row.

    That is what a rule does for targets without a placement; where there is one, it keeps in float what costs
    more noise than its time is worth, with the rule or without it.
    """
    trials = [_trial(net, seed) for seed in SEEDS]
    recipe, default = (qtrace.load_recipe(name).without_placement() for name in (net.recipe, DEFAULT_RECIPE))
    common = {rule.origin for rule in default.rules}
    here = [r for r in recipe.rules if r.backends is None or "onnxruntime" in r.backends]
    origins = list(dict.fromkeys(rule.origin for rule in here if rule.origin not in common))
    without = {o: [trial.judge(_without(recipe, o, exactly=True))[0] for trial in trials] for o in origins}
    own = [trial.judge(recipe)[0] for trial in trials]
    return replace(row, rounded_db=own, rounded_without=without)


def _parts(recipe: QConfig, default: QConfig) -> list[str]:
    """The files of a recipe with rules for onnxruntime that the default lacks; each rule of a transformer."""
    common = {rule.origin for rule in default.rules}
    here = [r for r in recipe.rules if r.backends is None or "onnxruntime" in r.backends]
    origins = [rule.origin for rule in here if rule.origin not in common]
    return list(dict.fromkeys(o if "transformer" in o else o.rpartition(":")[0] for o in origins))


def measure(net: Net, rules: bool = False) -> RecipeRow:
    """Measures a network by its family's recipe and by the default, for every seed.

    Args:
        net: the network.
        rules: whether the recipe is also measured without each of its files of rules.
    """
    trials = [_trial(net, seed) for seed in SEEDS]
    recipe, default = qtrace.load_recipe(net.recipe), qtrace.load_recipe(DEFAULT_RECIPE)
    results = [[trial.judge(config) for trial in trials] for config in (recipe, default)]
    everywhere = any(np.isinf(db) for result in results for db, _ in result)
    if everywhere:
        recipe, default = recipe.without_placement(), default.without_placement()
        results = [[trial.judge(config) for trial in trials] for config in (recipe, default)]
    (db, times), (default_db, default_times) = (list(zip(*result, strict=True)) for result in results)
    without = {}
    for part in _parts(recipe, default) if rules else ():
        pairs = [trial.judge(_without(recipe, part)) for trial in trials]
        without[part] = [statistics.median(column) for column in zip(*pairs, strict=True)]
    columns = list(db), list(default_db), list(times), list(default_times)
    return RecipeRow(
        net.recipe, net.name, net.size, everywhere, *columns, SAMPLES, without=without, measured=today()
    )


def _each(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code is 1 if a recipe is worse than the default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("family", nargs="*", help="the recipes to measure; all without")
    parser.add_argument("--rules", action="store_true", help="measure without each rule, too")
    parser.add_argument("--rounded", action="store_true", help="add each rule's dB where all is rounded")
    parser.add_argument("--missing", action="store_true", help="only networks without a stored row")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="the folder of the stored rows")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    process.quiet()
    mge.config.async_level = 0  # F.arange races when several are queued
    worse = False
    rows = {row.network: row for row in load(RecipeRow, options.folder)} if options.folder.exists() else {}
    known = rows if options.missing else {}
    for net in NETWORKS:
        if (options.family and net.recipe not in options.family) or net.name in known:
            continue
        try:
            if options.rounded:
                row = measure_rounded(net, rows[net.name])
            else:
                row = measure(net, options.rules)
        except QtraceError as error:
            print(f"{net.name}: {error}", file=sys.stderr, flush=True)
            worse = True
            continue
        store([row], RecipeRow, options.folder)
        print(f"| {' | '.join(row.cells())} |", flush=True)
        for origin, (db, time) in row.without.items():
            print(f"  without {origin}: {db:.1f} dB, {time:.3g} ms", flush=True)
        for origin, values in row.rounded_without.items():
            print(f"  rounded: {_each(row.rounded_db)} dB, {_each(values)} without {origin}", flush=True)
        worse |= not row.met
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
