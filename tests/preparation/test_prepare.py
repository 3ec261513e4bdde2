"""What prepare refuses in a config, and at which line of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.comparing.sums import sqnr_db
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.types import TracedModule
from qtrace.scheme import QScheme
from tests.each import each_of
from tests.nets import images, net

_X = np.random.RandomState(0).randn(2, 3, 8, 8).astype("float32")


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(M.Conv2d(3, 4, 3), _X, check=False)


@each_of(
    ("samples", "message"),
    [
        (_X, "samples is one ndarray: give an iterable of batches"),
        (4, "samples is one int: give an iterable of batches"),
        ([_X[:, :2]], r"batch 0 gives 1 input of shape \(2, 2, 8, 8\), which does not fit the model"),
        ([_X, (_X, _X)], "batch 1 gives 2 inputs"),
        ([_X, _X * np.nan], "batch 1 holds NaN"),
    ],
    ids=["array", "number", "channels", "inputs", "nan"],
)
@each_of("ptq", [(), ("smooth",)])
def test_samples_that_do_not_fit_are_named(
    traced: TracedModule, samples: Any, message: str, ptq: tuple[str, ...]
) -> None:
    placement = "everything" if ptq else "balanced"
    config = qtrace.QConfig(backend="onnxruntime", placement=placement, ptq=ptq)
    with pytest.raises(CalibrationError, match=message):
        qtrace.prepare(traced, config, samples=samples)


# The body, which begins in line 2, and the sentence.
MISTAKES = [
    (
        "name: a\nactivation:\n  narrow: true",
        "my.yaml:3: backend onnxruntime cannot run activation scheme uint8 affine narrow: narrow ranges",
    ),
    (
        "rules:\n  - match: {op: conv2d}\n    activation: {narrow: true}",
        "my.yaml:3: backend onnxruntime cannot run activation scheme uint8 affine narrow: narrow ranges",
    ),
    (
        "name: a\nweight: {symmetric: false}",
        "my.yaml:3: backend onnxruntime cannot run weight scheme int8 affine per-channel(0) narrow: per",
    ),
    (
        "observers:\n  weight: minmax\n  activation: {mse: {bins: 1}}",
        "my.yaml:4: mse.bins must be at least 64, not 1.",
    ),
    (
        "observers:\n  activation: mse\n  weight: {minmax: {bins: 1}}",
        "my.yaml:4: unknown key 'bins' in minmax; known: (none).",
    ),
    ("\nfakequant: {lsq: {x: 1}}", "my.yaml:3: unknown key 'x' in lsq; known: grad_scale."),
    (
        "qat:\n  epochs: 1\n  fakequant: {lsq: {x: 1}}",
        "my.yaml:4: unknown key 'x' in lsq; known: grad_scale.",
    ),
    (
        "fakequant:\n  lsq:\n    # why\n    grad_scale: -1",
        "my.yaml:5: lsq.grad_scale: choose true (1 / sqrt(N * Q)), false (1) or a number above 0, not -1.",
    ),
    (
        "observers:\n  weight:\n    mse:\n      bins: 1\n      bin: 2",
        "my.yaml:5: mse.bins must be at least 64, not 1.\n"
        "my.yaml:6: unknown key 'bin' in mse; did you mean 'bins'?",
    ),
    ("fakequant: no_such_module:X", "my.yaml:2: fakequant names code, 'no_such_module:X'"),
    ("imports: [w4a4_lsq]\nactivation: {bits: 5}", "my.yaml:3: backend onnxruntime cannot run activation"),
]


@each_of(("body", "sentence"), MISTAKES)
def test_a_mistake_in_a_recipe_has_its_line(
    traced: TracedModule, body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(f"schema: qtrace/1\n{body}\n")
    for ask in (qtrace.prepare, qtrace.explain):
        with pytest.raises(ConfigError) as caught:
            ask(traced, "my.yaml")
        assert str(caught.value).startswith(sentence)


def test_a_mistake_in_an_import_has_the_line_there(
    traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("schema: qtrace/1\n\nweight: {bits: 9}\n")
    Path("my.yaml").write_text("schema: qtrace/1\nimports: [base.yaml]\nactivation: {bits: 8}\n")
    with pytest.raises(ConfigError, match=r"^base.yaml:3: backend onnxruntime cannot run weight scheme int9"):
        qtrace.prepare(traced, "my.yaml")


@pytest.mark.parametrize("config", [{"activation": {"narrow": True}}, {"activation": QScheme(narrow=True)}])
def test_a_mistake_in_python_has_no_line(traced: TracedModule, config: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="^QConfig: backend onnxruntime cannot run activation scheme uint8 aff"
    ):
        qtrace.prepare(traced, qtrace.QConfig(**config))


def test_a_whole_scheme_is_taken_as_it_is(traced: TracedModule) -> None:
    scheme = QScheme(bits=8, signed=True, symmetric=True)
    prepared = qtrace.prepare(traced, qtrace.QConfig(activation=scheme))
    qtrace.calibrate(prepared, [_X], progress=False)
    activations = [m for m in prepared.modules() if getattr(m, "site", "") in ("inp", "conv2d_out")]
    assert [m.scheme for m in activations] == [scheme, scheme]


@pytest.mark.parametrize("count", [3, 9])  # 4 images are measured, and 8 by algorithms
def test_samples_in_batches_of_the_size_that_the_model_fixes(count: int) -> None:
    module = net(
        lambda self, x: self.b(F.reshape(self.a(x), (count, 4 * 16))), a=M.Conv2d(2, 4, 1), b=M.Linear(64, 5)
    )
    batches = [images(count, 2, 4, 4, seed=seed) for seed in range(3)]
    traced = qtrace.trace(module, batches[0], check=False)
    prepared = qtrace.prepare(traced, samples=batches)
    qtrace.calibrate(prepared, batches, progress=False)
    exact, rounded = (m(mge.Tensor(batches[0])).numpy() for m in (traced, qtrace.convert(prepared)))
    assert sqnr_db(exact, rounded) > 20


def test_one_batchnorm_behind_two_layers_that_keeps_its_place_in_training() -> None:
    module = net(
        lambda self, x: (self.n(self.a(x)), self.n(self.b(x))),
        a=M.Conv2d(2, 4, 1),
        b=M.Conv2d(2, 4, 3, 1, 1),
        n=M.BatchNorm2d(4),
    )
    x = images(2, 2, 8, 8)
    traced = qtrace.trace(module, x, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, "vit"), [x], progress=False)
    outputs = zip(traced(mge.Tensor(x)), qtrace.convert(prepared)(mge.Tensor(x)), strict=True)
    assert all(sqnr_db(exact.numpy(), rounded.numpy()) > 25 for exact, rounded in outputs)


def test_prepare_shows_the_runs_of_the_graph(
    traced: TracedModule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qtrace.display._ipython", object)
    monkeypatch.setattr("qtrace.preparation.prepare._SHOWN_AFTER", 0.0)
    config = {"placement": "balanced"}
    qtrace.prepare(traced, config, samples=[_X], progress=False)
    assert "prepare" not in capsys.readouterr().err
    qtrace.prepare(traced, config, samples=[_X])
    assert "prepare: 0 forward passes" in capsys.readouterr().err
