"""Every convolutional network of the zoo on the whole road: trace, prepare, calibrate, train, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager

import qtrace
from tests.zoo import repvgg
from tests.zoo.cases import Case, leaves, run, sqnr
from tests.zoo.catalog import CNN
from tests.zoo.parts import pictures, settle
from tests.zoo.quick import parameters
from tests.zoo.shares import whole_share

# The others have the same layers. All are listed, as for the fixture, so that pytest keeps what it made.
_KINDS = (
    *("resnet_basic", "mobilenet_v3", "shufflenet_v1", "repvgg_train", "convnext"),
    *("unet_transposed", "native"),
)
OF_EACH_KIND = pytest.mark.parametrize("case", parameters(CNN, _KINDS), indirect=True, scope="module")


@pytest.fixture(scope="module", params=parameters(CNN))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(got: list[np.ndarray], want: list[np.ndarray], limit: float = 1e-5) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= limit * np.abs(other).max()


def gradients(module: M.Module, batch: np.ndarray) -> dict[str, np.ndarray | None]:
    """By name, those of the mean square of what the module gives."""
    parameters = dict(module.named_parameters())
    manager = GradManager().attach(list(parameters.values()))
    with manager:
        loss = sum(F.mean(x * x) for x in leaves(module(mge.Tensor(batch))))
        manager.backward(loss)
    found = {name: None if p.grad is None else p.grad.numpy() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def test_trace_equals_the_source(case: Case) -> None:
    assert_same(run(case.traced, case.batch), case.expected)


def test_float_phase_equals_the_source(case: Case) -> None:
    assert_close(run(case.in_phase("float"), case.batch), case.expected)


def test_without_folding_the_float_phase_is_exact(case: Case) -> None:
    config = qtrace.load_recipe(case.entry.recipe).to_dict()
    prepared = qtrace.prepare(case.traced, {**config, "ptq": []})
    assert_same(run(prepared, case.batch), case.expected)


def test_quantized_output_stays_close(case: Case) -> None:
    assert case.entry.sqnr >= 20 or case.entry.note
    assert min(case.ratios()) >= case.entry.sqnr


def test_nearly_all_is_computed_on_integers(case: Case) -> None:
    assert whole_share(case.calibrated) >= 0.99


@pytest.mark.usefixtures("synchronous")
@OF_EACH_KIND
def test_training_reaches_every_parameter(case: Case) -> None:
    trained = gradients(case.in_phase("train"), case.batch[:1])
    wanted = {name for name, _ in case.module.named_parameters()} - folded(case) - merged(case)
    assert wanted <= set(trained)
    for name, grad in trained.items():
        assert grad is not None, name
        assert np.isfinite(grad).all(), name
        assert grad.any(), name


def folded(case: Case) -> set[str]:
    """The parameters of the BatchNorms that the calibrated module no longer has."""
    left = {name for name, _ in case.calibrated.named_modules()}
    norms = [n for n, m in case.module.named_modules() if isinstance(m, M.BatchNorm2d) and n not in left]
    return {f"{name}.{tensor}" for name in norms for tensor in ("weight", "bias")}


def merged(case: Case) -> set[str]:
    """The parameters of RepVGG's smaller branches: they are part of the largest one's."""
    config = qtrace.load_recipe(case.entry.recipe)
    if "reparameterize" not in {spec.name for _, spec in config.ptq_entries}:
        return set()
    branches = [n for n, m in case.module.named_modules() if isinstance(m, repvgg.Branches)]
    return {f"{name}.point.weight" for name in branches}


@OF_EACH_KIND
def test_files_keep_every_number(case: Case, tmp_path: Path) -> None:
    prepared = case.in_phase("quantize")
    qtrace.save(prepared, tmp_path / "m.mge")
    assert_same(run(qtrace.load(tmp_path / "m.mge"), case.batch), run(prepared, case.batch))


def test_converted_graph_is_clean_and_exact(case: Case) -> None:
    prepared = case.in_phase("quantize")
    converted = qtrace.convert(prepared)
    assert qtrace.graph.lint(converted) == []
    assert_same(run(converted, case.batch), run(prepared, case.batch))


def test_other_batch_and_image_sizes(case: Case) -> None:
    for batch in case.other_inputs():
        want = run(case.module, batch)
        assert_close(run(case.in_phase("float"), batch), want)
        # The ranges are those of other images, and of another context around every pixel.
        assert sqnr(run(case.in_phase("quantize"), batch), want) >= case.entry.sqnr / 2


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"se": True}], ids=["plain", "groups", "se"])
def test_branches_are_merged_to_the_deployed_form(options: dict[str, Any]) -> None:
    """By the recipe: the numbers that the zoo's own merging, float64 without a graph, comes to."""
    train = settle(repvgg.RepVGG(**options), *repvgg.SHAPE)
    batch = pictures(2, *repvgg.SHAPE)
    want = run(train, batch)
    prepared = qtrace.prepare(qtrace.trace(train, batch), "repvgg")
    deployed = repvgg.deploy(train)
    assert not [n for n, _ in prepared.named_modules() if n.endswith(("point", "_bn", "identity"))]
    for index in range(len(deployed.blocks)):
        conv, body = getattr(prepared.blocks, str(index)).body.dense, deployed.blocks[index].body
        for name in ("weight", "bias"):
            got, expected = (getattr(m, name).numpy() for m in (conv, body))
            np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    assert_close(run(prepared, batch), want)
    assert_close(run(deployed, batch), want)


def test_names_are_unique() -> None:
    assert len({entry.name for entry in CNN}) == len(CNN)
