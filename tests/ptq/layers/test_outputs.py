"""The outputs before a change are those before it, whenever they are computed."""

from __future__ import annotations

from typing import Any

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace.calibration.engines import OnnxSegments
from qtrace.graph.flatten import flatten
from qtrace.graph.stepping import GraphSegment
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.phases import switch_phase
from qtrace.ptq.base import Batches
from qtrace.ptq.layers.outputs import CalibrationOutputs
from tests.nets import Chain, images

_BATCHES = [images(4, 3, 16, 16, seed=seed) for seed in range(2)]


@pytest.fixture
def graphs() -> tuple[QuantizedModel, TracedModule]:
    prepared = qtrace.prepare(qtrace.trace(Chain(3, 3), _BATCHES[0], check=False))
    qtrace.calibrate(prepared, _BATCHES, progress=False, engine="megengine")
    prepared.eval()
    model = QuantizedModel(prepared, "prepared")
    reference = flatten(prepared)
    switch_phase("float", model.view(reference))
    reference.eval()
    return model, reference


def _outputs(graphs: tuple[QuantizedModel, TracedModule], **options: Any) -> CalibrationOutputs:
    model, reference = graphs
    return CalibrationOutputs(model, reference, Batches(_BATCHES, model.module, 2), **options)


def _zero_weights(model: TracedModule) -> None:
    for name, tensor in model.named_parameters():
        if name.endswith("weight"):
            tensor._reset(mge.Tensor(0 * tensor.numpy()))


def test_the_ratios_before_a_change_are_computed_beside_it(
    graphs: tuple[QuantizedModel, TracedModule],
) -> None:
    engine, begun = OnnxSegments(graphs[0]), list[Any]()
    begin = engine.begin

    def record(segment: GraphSegment) -> Any:
        begun.append(segment.traced)
        return begin(segment)

    engine.begin = record  # type: ignore[method-assign]
    with _outputs(graphs, engine=engine, threads=2) as beside:
        assert begun == [graphs[1], graphs[0].module]
        alone = _outputs(graphs, engine=OnnxSegments(graphs[0]), threads=1)
        before = alone.ratios()
        _zero_weights(graphs[0].module)
        assert beside.before == alone.before == before
        assert beside.ratios() == alone.ratios() != before


@pytest.mark.parametrize("late", [False, True])
def test_what_the_engine_refuses_is_computed_by_megengine_as_it_was(
    graphs: tuple[QuantizedModel, TracedModule], late: bool
) -> None:
    engine = OnnxSegments(graphs[0])
    engine.begin = lambda *_: (lambda use: None) if late else None  # type: ignore[method-assign]
    with _outputs(graphs, engine=engine, threads=2) as beside:
        alone = _outputs(graphs).ratios()
        _zero_weights(graphs[0].module)
        assert beside.before == alone
    assert {fq.phase for fq in graphs[0].view(graphs[1]).fake_quants.values()} == {"float"}


def test_ratios_are_those_of_the_samples(graphs: tuple[QuantizedModel, TracedModule]) -> None:
    model, reference = graphs
    exact, rounded = (
        np.concatenate([graph(mge.Tensor(x)).numpy() for x in _BATCHES[:1]]).astype(np.float64)
        for graph in (reference, model.module)
    )
    (ratio,) = _outputs(graphs).before.values()
    assert ratio == pytest.approx(10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum()), rel=1e-5)
