"""Every convolutional network of the zoo on the whole road: trace, prepare, calibrate, train, convert."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import GradManager

import qtrace
from qtrace.graph.types import TracedModule
from tests.zoo import repvgg
from tests.zoo.catalog import CNN, Entry
from tests.zoo.parts import pictures


class Case:
    """A network and what becomes of it; each step is done once, by the first test that needs it."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.module = entry.build()
        self.batches = [pictures(8, *entry.input_shape, seed=seed) for seed in (2, 3)]
        # Two of the images of the calibration: of so few, the ranges of others would be another matter.
        self.batch = self.batches[0][:2]

    @cached_property
    def traced(self) -> TracedModule:
        return qtrace.trace(self.module, self.batch)

    @cached_property
    def calibrated(self) -> TracedModule:
        prepared = qtrace.prepare(self.traced, self.entry.recipe)
        return qtrace.calibrate(prepared, self.batches, progress=False)

    def in_phase(self, phase: str) -> TracedModule:
        """The calibrated module, in eval mode."""
        qtrace.set_phase(self.calibrated, phase)
        self.calibrated.eval()
        return self.calibrated

    @cached_property
    def expected(self) -> list[np.ndarray]:
        return run(self.module, self.batch)

    def other_inputs(self) -> Iterator[np.ndarray]:
        """Another batch size, and other image sizes."""
        yield pictures(3, *self.entry.input_shape, seed=4)
        for size in self.entry.other_sizes:
            yield pictures(1, self.entry.input_shape[0], *size, seed=5)


def parameters() -> list[Any]:
    """The entries, those that are slow with the mark."""
    return [pytest.param(e, id=e.name, marks=[pytest.mark.slow] if e.slow else []) for e in CNN]


@pytest.fixture(scope="module", params=parameters())
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture
def synchronous() -> Iterator[None]:
    """Gradients race when ops run ahead."""
    level = mge.config.async_level
    mge.config.async_level = 0
    yield
    mge.config.async_level = level


def leaves(value: Any) -> list[Any]:
    """The tensors of a result, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in leaves(v)] if isinstance(value, (list, tuple)) else [value]


def run(module: M.Module, batch: np.ndarray) -> list[np.ndarray]:
    return [x.numpy() for x in leaves(module(mge.Tensor(batch)))]


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(got: list[np.ndarray], want: list[np.ndarray], limit: float = 1e-5) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= limit * np.abs(other).max()


def sqnr(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Signal to quantization noise of the worst output, in dB."""
    pairs = list(zip(got, want, strict=True))
    return min(float(10 * np.log10(np.sum(w**2) / np.sum((g - w) ** 2))) for g, w in pairs)


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
    assert sqnr(run(case.in_phase("quantize"), case.batch), case.expected) >= case.entry.sqnr


@pytest.mark.usefixtures("synchronous")
def test_training_reaches_every_parameter(case: Case) -> None:
    trained = gradients(case.in_phase("train"), case.batch[:1])
    wanted = {name for name, _ in case.module.named_parameters()} - folded(case)
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


@pytest.mark.parametrize(
    ("train", "deploy"),
    [
        (repvgg.repvgg_train, repvgg.repvgg_deploy),
        (repvgg.repvgg_groups_train, repvgg.repvgg_groups_deploy),
        (repvgg.repvgg_se_train, repvgg.repvgg_se_deploy),
    ],
)
def test_merged_branches_compute_the_same(train: Any, deploy: Any) -> None:
    batch = pictures(2, *repvgg.SHAPE)
    assert_close(run(deploy(), batch), run(train(), batch))


def test_names_are_unique() -> None:
    assert len({entry.name for entry in CNN}) == len(CNN)
