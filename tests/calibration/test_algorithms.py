"""Algorithms in a recipe: options, order, data that is read again, failures and interruptions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import QConfig
from qtrace.errors import CalibrationError, ConfigError
from qtrace.preparation.model import read_record, write_record
from qtrace.ptq.base import Batches, CalibratedAlgorithm, CalibratedTask, Report
from tests.each import each_of
from tests.nets import images, left_lines, net


def _module() -> M.Module:
    return net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(4, 6, 3), b=M.Conv2d(6, 5, 1))


def _prepared(*ptq: Any) -> Any:
    x = images(2, 4, 8, 8)
    return qtrace.prepare(qtrace.trace(_module(), x, check=False), QConfig(ptq=ptq))


BATCHES = [images(2, 4, 8, 8, seed=s) for s in range(2)]


@each_of(
    ("text", "message"),
    [
        (
            "ptq: [fuse_bn, equalise]",
            "my.yaml:2: ptq[1]: unknown algorithm 'equalise'; did you mean 'equal",
        ),
        (
            "ptq:\n  - fuse_bn\n  - cle",
            "my.yaml:4: ptq[1]: unknown algorithm 'cle'; did you mean 'equal",
        ),
        ("ptq: [equalize, fuse_bn]", "my.yaml:2: put fuse_bn before equalize in ptq, for equalize needs"),
        ("ptq:\n  - bias_correction\n  - equalize", "my.yaml:4: put equalize before bias_correction in ptq"),
        ("ptq: [fuse_bn, fuse_bn]", "my.yaml:2: ptq lists fuse_bn twice"),
        (
            "ptq:\n  - fuse_bn\n  - equalize:\n      relu6: keep\n      absorbs: true",
            "my.yaml:6: unknown key 'absorbs' in equalize; did you mean 'absorb'?",
        ),
        (
            "ptq:\n  - equalize:\n      iterations: 0",
            "my.yaml:4: equalize.iterations must be greater than 0, not 0.",
        ),
        ("ptq: [{equalize: 3}]", "my.yaml:2: ptq[0].options: options are a mapping"),
    ],
)
def test_a_mistake_is_reported_with_its_line(
    tmp_path: Path, monkeypatch: Any, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(f"schema: qtrace/1\n{text}\n")
    traced = qtrace.trace(_module(), BATCHES[0], check=False)
    with pytest.raises(ConfigError) as error:
        qtrace.prepare(traced, "my.yaml")
    assert message in str(error.value)


def test_an_iterator_is_refused_before_anything_runs() -> None:
    prepared = _prepared("bias_correction")

    def once() -> Any:
        raise AssertionError("a batch was taken")
        yield

    with pytest.raises(CalibrationError, match=r"an iterator, .* ptq: bias_correction reads the data again"):
        qtrace.calibrate(prepared, once(), progress=False)
    plain = _prepared("fuse_bn")
    qtrace.calibrate(plain, iter(BATCHES), progress=False)  # nothing reads it twice


def test_a_second_calibration_of_a_changed_model_is_refused() -> None:
    prepared = _prepared("bias_correction")
    qtrace.calibrate(prepared, BATCHES, progress=False)
    with pytest.raises(CalibrationError, match="bias_correction changed this model .* prepare it again"):
        qtrace.calibrate(prepared, BATCHES, progress=False)


def _state(model: Any) -> dict[str, np.ndarray]:
    return {n: t.numpy().copy() for n, t in model.named_tensors()}


class Breaks(CalibratedAlgorithm):
    """Changes the model and then fails."""

    how: str = "interrupted"

    def apply(self, task: CalibratedTask) -> Report:
        task.model.a.weight._reset(mge.Parameter(task.model.a.weight.numpy() + 1))
        raise KeyboardInterrupt if self.how == "interrupted" else CalibrationError("a_out is NaN")


@pytest.mark.parametrize(("how", "error"), [("interrupted", KeyboardInterrupt), ("failed", CalibrationError)])
def test_a_run_that_ends_early_leaves_the_model_as_it_was(how: str, error: type[BaseException]) -> None:
    prepared = _prepared({f"{__name__}:Breaks": {"how": how}})
    before, record = _state(prepared), read_record(prepared)
    with pytest.raises(error):
        qtrace.calibrate(prepared, BATCHES, progress=False)
    after = _state(prepared)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert read_record(prepared) == record
    assert {fq.phase for fq in prepared.qsites.__dict__.values() if hasattr(fq, "phase")} == {"float"}


def test_a_value_that_is_not_finite_is_reported_with_its_site() -> None:
    module = _module()
    module.b.bias._reset(mge.Parameter(np.full((1, 5, 1, 1), 3e38, np.float32)))
    traced = qtrace.trace(module, BATCHES[0], check=False)
    rules = [{"match": {"name": "b"}, "quantize_output": False}]
    prepared = qtrace.prepare(traced, QConfig(backend="generic", rules=rules, ptq=["bias_correction"]))
    before = _state(prepared)
    big = [np.full_like(b, 3e38) for b in BATCHES]
    with pytest.raises(CalibrationError):
        qtrace.calibrate(prepared, big, progress=False)
    assert all(np.array_equal(v, _state(prepared)[n]) for n, v in before.items())


def test_reports_are_in_the_record_in_explain_and_survive_a_file(tmp_path: Path) -> None:
    prepared = _prepared("fuse_bn", {"equalize": {"absorb": False}}, "bias_correction")
    qtrace.calibrate(prepared, BATCHES, progress=False)
    qtrace.save(prepared, tmp_path / "prepared.mge")
    loaded = qtrace.load(tmp_path / "prepared.mge")
    explanation = qtrace.explain(loaded)
    reports = explanation.to_dict()["ptq"]
    assert json.loads(json.dumps(reports, allow_nan=False)) == reports
    assert [r["algorithm"] for r in reports] == ["fuse_bn", "equalize", "bias_correction"]
    assert reports[1]["options"] == {"absorb": False}
    text = explanation.summary()
    assert "Post-training algorithms:" in text
    assert "bias_correction: 2 changed, 0 left\n  outputs: " in text
    assert "equalize (absorb False): 1 changed, 0 left\n  outputs: " in text


def test_a_model_file_cannot_have_a_module_imported(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "bad_luck.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    prepared = _prepared("fuse_bn")
    record = read_record(prepared)
    named = {**record.qconfig, "ptq": ["bad_luck:Class"]}
    write_record(prepared, dataclasses.replace(record, qconfig=named))
    with pytest.raises(ConfigError, match="'bad_luck:Class' of its own: import bad_luck first"):
        qtrace.calibrate(prepared, BATCHES, progress=False)


def test_algorithms_without_work_say_so_and_change_nothing() -> None:
    x = images(2, 4, 8, 8)
    names = ["fuse_bn", "reparameterize", "equalize", "bn_reestimate", "bias_correction"]
    traced = qtrace.trace(net(lambda self, x: F.relu(x + x)), x, check=False)
    prepared = qtrace.prepare(traced, QConfig(ptq=names))
    before = _state(prepared)
    qtrace.calibrate(prepared, BATCHES, progress=False)
    reports = read_record(prepared).ptq
    assert [r["changed"] for r in reports] == [[]] * 5
    assert [left_lines(r) for r in reports] == [
        ["the graph has no BatchNorm"],
        ["the graph adds no convolutions of one tensor"],
        ["no two layers follow each other"],
        ["no layer has quantized weights"],
        ["no layer has quantized weights"],
    ]
    assert before.keys() == _state(prepared).keys()


def test_a_config_with_algorithms_survives_yaml(tmp_path: Path) -> None:
    config = QConfig(ptq=["fuse_bn", {"equalize": {"relu6": "relu"}}])
    path = tmp_path / "r.yaml"
    from qtrace.config.recipe import dump_recipe

    path.write_text(dump_recipe(config))
    assert qtrace.load_recipe(path) == config


class _Unsized:
    def __init__(self, data: list[np.ndarray]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def test_samples_bounds_what_algorithms_read_evenly_spread() -> None:
    data = [images(4, 4, 8, 8, seed=s) for s in range(7)]
    prepared = _prepared({"gptq": {"samples": 12}}, "bias_correction")
    seen: list[int] = []

    class Source:
        def __len__(self) -> int:
            return len(data)

        def __iter__(self) -> Any:
            for index, batch in enumerate(data):
                seen.append(index)
                yield batch

    qtrace.calibrate(prepared, Source(), progress=False)
    left = [left_lines(report) for report in read_record(prepared).ptq]
    assert left[0][-1] == "3 of 7 batches were read, since samples is 12"
    assert not any("batches were read" in line for line in left[1])  # 128 are more than there are
    few = _prepared({"gptq": {"samples": 12}}, "bias_correction")
    qtrace.calibrate(few, _Unsized(data), max_batches=100, progress=False)  # spread over those that there are
    np.testing.assert_array_equal(few.a.weight.numpy(), prepared.a.weight.numpy())
    assert max(seen) == 6


def test_the_batches_that_are_read_are_evenly_spread() -> None:
    traced = qtrace.trace(_module(), BATCHES[0], check=False)
    data = [np.full((4, 4, 8, 8), s, np.float32) for s in range(7)]
    every = Batches(data, traced, 7)
    assert [int(args[0].numpy().flat[0]) for args, _ in every.spread(12)] == [0, 2, 4]
    assert [int(args[0].numpy().flat[0]) for args, _ in every.spread(1)] == [0]
    assert every.spread(28) is every
    assert len(Batches(data, traced, 3)) == 3
