"""Runners of a network, with one interface: from normalized images to nine maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import megengine as mge

from examples.detector.boxes import Runner


def in_megengine(model: Callable[[mge.Tensor], Sequence[mge.Tensor]]) -> Runner:
    """A module or a graph, in MegEngine."""
    return lambda images: [m.numpy() for m in model(mge.Tensor(images))]


def in_onnxruntime(file: Path) -> Runner:
    """An exported file, with all of onnxruntime's optimizations."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images})
