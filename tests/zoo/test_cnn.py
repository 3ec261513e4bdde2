"""Every convolutional network of the zoo on the whole road: trace, prepare, calibrate, train, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtrace
from tests.zoo import repvgg
from tests.zoo.catalog import CNN
from tests.zoo.checks import Case, close, run
from tests.zoo.parts import pictures, settle
from tests.zoo.quick import parameters

# The slow suite has the others, whose layers one of these has.
_KINDS = (
    *("resnet_basic", "mobilenet_v3", "shufflenet_v1", "repvgg_train", "convnext"),
    *("unet_transposed", "native"),
)


@pytest.fixture(scope="module", params=parameters(CNN, _KINDS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_trace_equals_the_source(case: Case) -> None:
    case.check_trace()


def test_float_phase_equals_the_source(case: Case) -> None:
    case.check_float()


def test_without_folding_the_float_phase_is_exact(case: Case) -> None:
    case.check_unfolded()


def test_quantized_outputs_stay_close(case: Case) -> None:
    case.check_quantized()


def test_nearly_all_is_computed_on_integers(case: Case) -> None:
    case.check_share()


def test_training_reaches_every_parameter(case: Case) -> None:
    case.check_training()
    assert all(gradient.any() for gradient in case.trained.values())


def test_files_keep_every_number(case: Case, tmp_path: Path) -> None:
    case.check_files(tmp_path)


def test_converted_graph_is_clean_and_exact(case: Case) -> None:
    case.check_converted()
    assert qtrace.graph.lint(case.converted) == []


def test_other_batch_and_image_sizes(case: Case) -> None:
    case.check_shapes()


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"se": True}], ids=["plain", "groups", "se"])
def test_branches_are_merged_to_the_deployed_form(options: dict[str, Any]) -> None:
    """By the recipe: the numbers that the zoo's own merging, float64 without a graph, comes to."""
    train = settle(repvgg.RepVGG(**options), *repvgg.SHAPE)
    batch = pictures(2, *repvgg.SHAPE)
    reference = run(train, (batch,))
    prepared = qtrace.prepare(qtrace.trace(train, batch), "repvgg")
    deployed = repvgg.deploy(train)
    assert not [n for n, _ in prepared.named_modules() if n.endswith(("point", "_bn", "identity"))]
    for index in range(len(deployed.blocks)):
        conv, body = getattr(prepared.blocks, str(index)).body.dense, deployed.blocks[index].body
        for name in ("weight", "bias"):
            merged, expected = (getattr(m, name).numpy() for m in (conv, body))
            np.testing.assert_allclose(merged.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    close(reference, run(prepared, (batch,)))
    close(reference, run(deployed, (batch,)))


def test_names_are_unique() -> None:
    assert len({entry.name for entry in CNN}) == len(CNN)
