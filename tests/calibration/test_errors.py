"""What calibrate refuses, and that it leaves the module as it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import megengine as mge
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import fake_quants
from tests.each import each_of
from tests.nets import net

_X = np.random.RandomState(0).randn(2, 3, 4, 4).astype("float32")


def _prepared() -> TracedModule:
    return qtrace.prepare(qtrace.trace(M.Sequential(M.Conv2d(3, 4, 1)), _X, check=False))


@each_of("name", ["max_batches", "threads"])
@each_of("limit", [0, -1, 1.5, True, "2"])
def test_max_batches_and_threads_are_positive_whole_numbers(name: str, limit: Any) -> None:
    with pytest.raises(CalibrationError, match=f"{name} is"):
        qtrace.calibrate(_prepared(), [_X], progress=False, **{name: limit})


@each_of("batches", [None, 3, _X, {"x": _X}, "abc"], ids=lambda b: type(b).__name__)
def test_one_batch_is_no_list_of_batches(batches: Any) -> None:
    with pytest.raises(CalibrationError, match="give an iterable of batches"):
        qtrace.calibrate(_prepared(), batches, progress=False)


def test_a_failure_leaves_every_phase_as_it_was() -> None:
    prepared = qtrace.calibrate(_prepared(), [_X], progress=False)
    phases = [m.phase for m in prepared.modules() if hasattr(m, "phase")]
    with pytest.raises(CalibrationError, match="NaN"):
        qtrace.calibrate(prepared, [_X * np.nan], progress=False)
    assert [m.phase for m in prepared.modules() if hasattr(m, "phase")] == phases
    assert set(phases) == {"quantize"}


TAKES = r"the model takes 1 input, inp of shape \(2, 3, 4, 4\): "
MISFITS = {
    "image and label": (
        (_X, np.zeros(2, "int32")),
        f"2 inputs of shapes {{}} and \\(2,\\), but {TAKES}leave out",
    ),
    "another key": ({"image": _X}, f"'image' of shape {{}}, but {TAKES}name them so"),
    "a key too many": (
        {"inp": _X, "label": _X},
        f"'inp' of shape {{}} and 'label' of shape {{}}, but {TAKES}leave out what is no input, such "
        r"as labels \('label'\)",
    ),
    "several other keys": (
        {"a": _X, "b": _X},
        f"'a' of shape {{}} and 'b' of shape {{}}, but {TAKES}name one of them so, or give batches of "
        r"several sizes as a list \(pkg.mod:loader\)",
    ),
    "no key": ({}, f"nothing, but {TAKES}name them so"),
    "no input": ((), f"nothing, but {TAKES}give one array for each"),
    "a list inside": ({"inp": [_X]}, f"'inp' of shape \\[{{}}\\], but {TAKES}give one array for each"),
}


@each_of("case", MISFITS)
def test_a_batch_of_other_inputs_is_reported_what_the_model_takes(case: str) -> None:
    batch, sentence = MISFITS[case]
    sentence = sentence.replace("{}", r"\(2, 3, 4, 4\)")
    with pytest.raises(CalibrationError, match=f"^batch 1 gives {sentence}[^\n]*\\.$"):
        qtrace.calibrate(_prepared(), [_X, batch], progress=False)


def test_lists_of_numbers_are_reported_in_few_words() -> None:
    with pytest.raises(CalibrationError, match="make one array of each list of numbers") as caught:
        qtrace.calibrate(_prepared(), [_X.tolist()], progress=False)
    assert len(str(caught.value)) < 600


def test_a_named_tuple_is_a_tuple() -> None:
    class Batch(NamedTuple):
        image: np.ndarray

    prepared = qtrace.calibrate(_prepared(), [Batch(_X)], progress=False)
    assert float(prepared.qsites.inp.scale) > 0


def test_several_inputs_are_named_wherever_they_stand() -> None:
    def forward(self: M.Module, left: Any, pair: Any) -> mge.Tensor:
        return self.c(left + pair["right"] * pair["gains"][0])

    one = np.ones((1, 1, 1, 1), "float32")
    traced = qtrace.trace(net(forward, c=M.Conv2d(3, 4, 1)), _X, {"right": _X, "gains": [one]}, check=False)
    prepared = qtrace.prepare(traced)
    takes = "left of shape .*, pair\\['gains'\\]\\[0\\] of shape .1, 1, 1, 1. and pair\\['right'\\] of shape"
    with pytest.raises(CalibrationError, match=f"1 input of shape .*, but the model takes 3 inputs, {takes}"):
        qtrace.calibrate(prepared, [_X], progress=False)
    good: list[Any] = [
        (_X, {"right": _X, "gains": [one]}),
        {"left": _X, "pair": {"right": _X, "gains": [one]}},
    ]
    qtrace.calibrate(prepared, good, progress=False)


def test_a_dict_may_be_the_one_argument_even_with_its_name_as_a_key() -> None:
    module = net(lambda self, x: self.c(x["x"]), c=M.Conv2d(3, 4, 1))
    traced = qtrace.trace(module, {"x": _X}, check=False)
    batches = [
        [{"x": _X}, {"x": 2 * _X}],
        [{"x": {"x": _X}}, {"x": {"x": 2 * _X}}],
        [{"x": _X}, {"x": {"x": 2 * _X}}],
    ]
    plain, wrapped, mixed = (
        [fq.qparams() for fq in fake_quants(qtrace.calibrate(qtrace.prepare(traced), data, progress=False))]
        for data in batches
    )
    assert plain == wrapped == mixed


@pytest.mark.parametrize(
    ("shape", "cure"),
    [
        ((2, 2, 4, 4), "so give such shapes"),
        ((3, 4, 4), "it looks like one sample: write x[None], as the first axis counts the samples"),
    ],
    ids=["channels", "no samples"],
)
def test_a_shape_that_fails_is_reported_beside_that_of_the_trace(shape: tuple[int, ...], cure: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        qtrace.calibrate(_prepared(), [_X, np.zeros(shape, "float32")], progress=False)
    sentence = str(caught.value)
    assert sentence.startswith(
        f"batch 1 gives 1 input of shape {shape}, which does not fit the model: it was traced with inp of "
        f"shape (2, 3, 4, 4), {cure} (RuntimeError: "
    )
    assert "/" not in sentence
    assert "\n" not in sentence


def test_calibration_runs_in_eval_mode_and_gives_the_flags_back() -> None:
    module = net(lambda self, x: self.bn(self.c(x)), c=M.Conv2d(3, 4, 1), bn=M.BatchNorm2d(4))
    prepared = qtrace.prepare(qtrace.trace(module, _X, check=False), {"qat": {"bn": {"fold": False}}})
    prepared.train()
    prepared.c.eval()
    flags = [m.training for m in prepared.modules()]
    assert len(set(flags)) == 2
    before = {name: value.copy() for name, value in prepared.state_dict().items() if "running" in name}
    assert before
    qtrace.calibrate(prepared, [_X * 5 + 3], progress=False)
    assert [m.training for m in prepared.modules()] == flags
    with pytest.raises(CalibrationError, match="NaN"):
        qtrace.calibrate(prepared, [_X, _X * np.nan], progress=False)
    assert [m.training for m in prepared.modules()] == flags
    for name, value in before.items():
        np.testing.assert_array_equal(prepared.state_dict()[name], value)
