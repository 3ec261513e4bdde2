"""The search: proposals that depend on seed and trials only, limits, and a log that loses no trial."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config import QConfig
from qtrace.errors import CalibrationError, ConfigError, QtraceError
from qtrace.extras.tune import CostLimits, TuneSettings, tune
from qtrace.extras.tune.search import _Raise, propose, split
from qtrace.extras.tune.trials import BEST, SEARCH, TRIALS, Layer, Trial, TrialLog, digest_of
from qtrace.graph.failures import from_json
from tests.nets import net
from tests.preparation.passes.test_rules import by_conv, distributions
from tests.sensitivity.diagnosis import planted

ROOT = Path(__file__).parents[3]


def small() -> M.Module:
    return net(
        lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))),
        a=M.Linear(8, 16),
        b=M.Linear(16, 16),
        c=M.Linear(16, 4),
    )


def data() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_t(3, size=(4, 8)).astype(np.float32) for _ in range(8)]


def start() -> QConfig:
    return QConfig(backend="generic", observers={"activation": "minmax", "weight": "minmax"})


def run(folder: Path, trials: int | None = 8, workers: int = 1, **options) -> object:
    batches = data()
    settings = TuneSettings(trials=trials, **options)
    traced = qtrace.trace(small(), batches[0], check=False)
    return tune(traced, start(), batches, folder, settings, workers=workers)


def told(trials) -> list[tuple]:
    """What must not depend on the clock."""
    return [(t.number, t.digest, t.rung, t.value, t.samples, t.problem, t.parent) for t in trials]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("whole") / "best"
    return folder, run(folder)


def test_the_result_is_the_best_of_the_trials_on_all_data(whole) -> None:
    folder, result = whole
    full = [t for t in result.trials if t.rung == result.top and t.value is not None]
    allowed = [t for t in full if t.bytes <= result.trials[0].bytes]
    assert result.best.value == max(t.value for t in allowed)
    assert result.best.value > result.trials[0].value
    assert len(result.trials) == 8 == len((folder / TRIALS).read_text().splitlines())
    recipe = {k: v for k, v in result.best.recipe.items() if k not in ("name", "description")}
    assert qtrace.load_recipe(folder / BEST) == QConfig.model_validate(recipe)


def test_every_line_of_the_best_recipe_has_a_reason(whole) -> None:
    lines = (whole[0] / BEST).read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if line and not line.lstrip().startswith("#") and line != "rules:":
            assert above.lstrip().startswith("# "), line


@pytest.mark.slow
def test_two_runs_are_equal_and_another_seed_is_not(whole, tmp_path: Path) -> None:
    again = run(tmp_path / "again")
    assert told(again.trials) == told(whole[1].trials)
    assert (tmp_path / "again" / BEST).read_text() == (whole[0] / BEST).read_text()
    other = run(tmp_path / "other", trials=6, seed=1)
    assert told(other.trials) != told(again.trials[:6])


def test_an_unfinished_line_is_noted_and_its_trial_runs_again(whole, tmp_path: Path) -> None:
    run(tmp_path / "b", trials=4)
    path, notes = tmp_path / "b" / TRIALS, []  # and eight trials after four are the same as eight
    path.write_bytes(path.read_bytes()[:-30])
    assert len(TrialLog(path, notes.append).trials) == 3
    assert "last line is unfinished" in notes[0]
    assert told(run(tmp_path / "b").trials) == told(whole[1].trials)


def test_a_damaged_line_in_the_middle_is_refused(whole, tmp_path: Path) -> None:
    lines = (whole[0] / TRIALS).read_text().splitlines(keepends=True)
    path = tmp_path / TRIALS
    for damaged in ("{}\n", "no json\n", lines[3]):
        path.write_text("".join([*lines[:1], damaged, *lines[2:]]))
        with pytest.raises(QtraceError, match=r"trials.jsonl:2: this is no trial .*--force"):
            TrialLog(path)


def test_trials_survive_json(whole) -> None:
    for trial in whole[1].trials:
        assert from_json(Trial, trial.to_json()) == trial


def test_a_folder_of_another_search_is_refused(whole, tmp_path: Path) -> None:
    run(tmp_path / "b", trials=1)
    with pytest.raises(QtraceError, match=r"a search with another seed: name another folder"):
        run(tmp_path / "b", trials=1, seed=5)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.txt").write_text("")
    with pytest.raises(QtraceError, match=r"files that are not of a search \(mine.txt\)"):
        run(tmp_path / "c", trials=1)
    assert not (tmp_path / "c" / SEARCH).exists()


@pytest.mark.slow
def test_no_result_is_beyond_a_limit_and_refused_trials_are_not_judged(whole, tmp_path: Path) -> None:
    size = whole[1].trials[0].bytes - 100
    result = run(tmp_path / "b", trials=14, limits=CostLimits(bytes=size))
    assert result.best.bytes <= size
    for trial in result.trials[1:]:
        assert (trial.bytes <= size) == (trial.value is not None) or trial.problem
    assert any("more than" in trial.problem for trial in result.trials)
    none = run(tmp_path / "c", trials=3, limits=CostLimits(bytes=1))
    assert none.best is None
    assert not (tmp_path / "c" / BEST).exists()
    assert "no recipe of 3 trials is within the limits" in none.table()


def test_the_budget_counts_the_trials_of_earlier_runs(tmp_path: Path) -> None:
    assert len(run(tmp_path / "b", trials=None, seconds=1e-6).trials) == 1
    assert len(run(tmp_path / "b", trials=None, seconds=1e-6).trials) == 1
    assert len(run(tmp_path / "b", trials=2, seconds=1e6).trials) == 2


def test_a_limit_on_time_needs_measured_times(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backend generic lacks measured times"):
        run(tmp_path / "b", limits=CostLimits(milliseconds=1.0))


def test_evaluation_data_are_read_once_after_the_last_trial(tmp_path: Path) -> None:
    batches, reads = data(), []

    def evaluation():
        reads.append(len((tmp_path / "b" / TRIALS).read_text().splitlines()))
        return batches[:2]

    traced = qtrace.trace(small(), batches[0], check=False)
    result = tune(traced, start(), batches, tmp_path / "b", TuneSettings(trials=3), evaluation=evaluation)
    assert reads == [3]
    assert result.evaluation.keys() == {"best", "second", "first"}


def test_a_metric_may_give_a_number_or_one_for_each_sample(tmp_path: Path) -> None:
    batches = data()
    traced = qtrace.trace(small(), batches[0], check=False)

    def closeness(model):
        outputs = [np.abs(model(qtrace_tensor(b)).numpy()).sum(axis=1) for b in batches]
        return -np.concatenate(outputs)

    def qtrace_tensor(batch):
        import megengine as mge

        return mge.Tensor(batch)

    many = tune(traced, start(), batches, tmp_path / "many", TuneSettings(trials=2), metric=closeness)
    assert len(many.best.samples) == 32
    assert many.best.value == pytest.approx(np.mean(many.best.samples))
    one = tune(
        *(traced, start(), batches, tmp_path / "one", TuneSettings(trials=2)),
        metric=lambda model: float(closeness(model).mean()),
    )
    assert one.best.digest == many.best.digest
    assert one.certainty is None
    with pytest.raises(ConfigError, match="return a finite number"):
        tune(traced, start(), batches, tmp_path / "nan", TuneSettings(trials=1), metric=lambda model: np.nan)


def test_parts_of_the_data_grow_and_do_not_overlap() -> None:
    parts = split(list(range(32)))
    assert [(len(p.calibration), len(p.held_back)) for p in parts] == [(6, 2), (12, 4), (24, 8)]
    for smaller, larger in itertools.pairwise(parts):
        assert larger.held_back[: len(smaller.held_back)] == smaller.held_back
    assert sorted(parts[-1].calibration + parts[-1].held_back) == list(range(32))
    assert [(len(p.calibration), len(p.held_back)) for p in split([1, 2])] == [(1, 1)]
    with pytest.raises(CalibrationError, match="one batch only"):
        split([1])


def test_the_better_half_of_a_rung_is_promoted() -> None:
    recipe = {"backend": "generic"}

    def trial(number: int, rung: int, value: float) -> Trial:
        own = {**recipe, "weight": {"bits": number + 2}}
        return Trial(number, own, "search", {}, 0, digest_of(own), rung, value)

    first = Trial(0, recipe, "recipe", {}, None, digest_of(recipe), 2, 20.0)
    known = [{**recipe, "name": "x"}]
    assert digest_of(known[0]) == digest_of(recipe)  # a name changes nothing
    packaged = []
    while (
        proposal := propose([first, *packaged], recipe, TuneSettings(), 3)
    ).suggestion.origin == "packaged":
        own = proposal.suggestion.recipe
        packaged.append(Trial(len(packaged) + 1, own, "packaged", {}, None, digest_of(own), 2, None))
    done = [first, *packaged, trial(5, 0, 10.0), trial(6, 0, 12.0)]
    proposal = propose(done, recipe, TuneSettings(), 3)
    assert (proposal.suggestion.recipe["weight"]["bits"], proposal.rung) == (8, 1)
    done += [Trial(**{**trial(6, 1, 9.0).__dict__})]
    assert propose(done, recipe, TuneSettings(), 3).suggestion.origin == "search"
    assert propose(done, recipe, TuneSettings(), 3) == propose(list(done), recipe, TuneSettings(), 3)


def test_the_cure_of_an_outlier_channel_is_tried_first_and_wins(tmp_path: Path) -> None:
    network, x = planted.build("plain"), planted.images(32)
    planted.plant_outlier(network)
    batches = [x[i : i + 4] for i in range(0, 32, 4)]
    traced = qtrace.trace(network, batches[0], check=False)
    result = tune(traced, qtrace.load_recipe("onnxruntime"), batches, tmp_path / "b", TuneSettings(trials=2))
    assert result.trials[1].origin == "diagnosis"
    assert result.best.number == 1
    assert result.best.value > result.trials[0].value + 10
    text = (tmp_path / "b" / BEST).read_text().splitlines()
    line = next(i for i, text in enumerate(text) if text.startswith("ptq: [fuse_bn, equalize]"))
    assert "trial 1, outlier-channels at " in text[line - 1]
    assert " dB" in text[line - 1]
    assert result.certainty.low > 0
    assert result.table().count("sure:") == 1


def test_by_default_the_choice_is_no_dearer_than_the_first_recipe(tmp_path: Path) -> None:
    x = planted.images(16)
    batches = [x[i : i + 4] for i in range(0, 16, 4)]
    traced = qtrace.trace(planted.build("plain"), batches[0], check=False)
    result = tune(traced, qtrace.load_recipe("onnxruntime"), batches, tmp_path / "b", TuneSettings(trials=6))
    first = result.trials[0]
    assert first.milliseconds > 0
    placements = [trial.recipe["placement"] for trial in result.trials if trial.origin == "placement"]
    assert placements == ["balanced", "fastest"]
    assert result.best.milliseconds <= first.milliseconds
    assert result.best.bytes <= first.bytes
    # What costs more is judged and shown.
    dearer = [t for t in result.trials if t.bytes > first.bytes and t.origin != "search"]
    assert dearer
    assert all(trial.value is not None for trial in dearer)


CODE = """
import os, signal, sys
from pathlib import Path
from tests.extras.tune.test_search import run

left, part, write = int(sys.argv[4]), float(sys.argv[5]), os.pwrite

def write_or_die(handle, line, place):
    global left
    left -= 1
    if left:
        return write(handle, line, place)
    write(handle, line[: int(part * len(line))], place)
    os.kill(os.getpid(), signal.SIGKILL)

os.pwrite = write_or_die
run(Path(sys.argv[1]), trials=int(sys.argv[2]), workers=int(sys.argv[3]))
"""


def kill_and_resume(folder: Path, kills: int, trials: int, workers: int) -> list[Trial]:
    """Kills a search as it writes a trial: before, in the middle, or behind it. Lets the last run end."""
    lines: list[str] = []
    for kill in range(kills + 1):
        dies_at, part = (1 + kill % 2, kill % 3 / 2) if kill < kills else (0, 0.0)
        command = [sys.executable, "-W", "ignore", "-c", CODE, str(folder)]
        command += map(str, (trials, workers, dies_at, part))
        process = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ)
        assert process.returncode == (-signal.SIGKILL if kill < kills else 0)
        path = folder / TRIALS
        now = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        ended = [line for line in now if line.endswith(b"\n")]
        assert ended[: len(lines)] == lines  # no trial is lost or changed
        lines = ended
    return TrialLog(folder / TRIALS).trials


class _KilledError(BaseException):
    """The end of a process, as far as this one can show it: nothing in qtrace catches it."""


@pytest.mark.slow
def test_a_search_that_ends_as_it_writes_a_trial_goes_on_to_the_same_recipe(
    whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, folder = os.pwrite, tmp_path / "killed"
    for kill, part in enumerate((0, 0.5, 1)):
        left = itertools.count()

        def write_or_die(handle, line, place, dies_at=kill % 2, part=part, left=left):
            if next(left) < dies_at:
                return write(handle, line, place)
            write(handle, line[: int(part * len(line))], place)
            raise _KilledError

        monkeypatch.setattr(os, "pwrite", write_or_die)
        with pytest.raises(_KilledError):
            run(folder)
        monkeypatch.undo()
    assert told(run(folder).trials) == told(whole[1].trials)
    assert told(TrialLog(folder / TRIALS).trials) == told(whole[1].trials)
    assert (folder / BEST).read_text() == (whole[0] / BEST).read_text()
    assert json.loads((folder / "tune.json").read_text())["trials"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "trials", "workers"), [(9, 14, 1), (4, 9, 3)])
def test_a_search_that_is_killed_ends_with_the_same_recipe(
    tmp_path: Path, kills: int, trials: int, workers: int
) -> None:
    expected = run(tmp_path / "whole", trials=trials, workers=workers)
    trials_after = kill_and_resume(tmp_path / "killed", kills, trials, workers)
    assert told(trials_after) == told(expected.trials)
    assert (tmp_path / "killed" / BEST).read_text() == (tmp_path / "whole" / BEST).read_text()
    summary = json.loads((tmp_path / "killed" / "tune.json").read_text())
    assert summary["trials"] == trials


def test_the_decoding_of_a_detector_is_found_by_its_structure(whole, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(2, 4, 8, 8)).astype(np.float32) for _ in range(4)]
    traced = qtrace.trace(distributions(by_conv), batches[0], check=False)
    config = QConfig(backend="generic", observers={"activation": "minmax", "weight": "minmax"})
    result = tune(traced, config, batches, tmp_path / "b", TuneSettings(trials=4))
    trial = next(t for t in result.trials if t.origin == "structure")
    assert trial.recipe["rules"][-1]["match"] == {"position": "tail"}
    assert "the decoding behind the last layers" in next(iter(trial.changes.values()))
    assert trial.value > result.trials[0].value
    assert all(t.origin != "structure" for t in whole[1].trials)


def test_a_packaged_recipe_that_is_surely_better_wins_with_its_reason(tmp_path: Path) -> None:
    batches = data()
    result = tune(
        qtrace.trace(small(), batches[0], check=False),
        start(),
        batches,
        tmp_path / "b",
        TuneSettings(trials=3),
    )
    assert (result.best.number, result.best.origin) == (1, "packaged")
    text = (tmp_path / "b" / BEST).read_text()
    assert "# trial 1, recipe int8: Weights of a layer are fitted" in text


def test_a_recipe_that_only_looks_better_does_not_win(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.standard_t(3, size=(4, 8)).astype(np.float32) for _ in range(16)]
    result = tune(
        qtrace.trace(small(), batches[0], check=False),
        start(),
        batches,
        tmp_path / "b",
        TuneSettings(trials=3),
    )
    first = result.trials[0]
    assert max(trial.value for trial in result.trials) > first.value
    assert result.best is first
    assert "the first recipe stays: no other one within the limits is surely better" in result.table()
    assert "not sure: -" in result.table()


@pytest.mark.parametrize(("narrow", "bits"), [(False, {8}), (True, {4, 8})])
def test_bits_of_a_weight_rise_and_fall_only_where_that_is_asked_for(narrow: bool, bits: set[int]) -> None:
    layer = Layer("a_out", ("a_out",), weight_bits=6, activation_bits=8, noise=0.1)
    options = _Raise([layer], start(), narrow)._options(layer, False)
    assert {option["weight"]["bits"] for option in options if "weight" in option} == bits
