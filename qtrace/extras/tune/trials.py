"""The folder of a search, the log of its trials, and which of these no other one beats."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.errors import QtraceError, refusing
from qtrace.graph.failures import Saved, from_json
from qtrace.storage.files import parse_document, replacing
from qtrace.storage.outputs import locked

TRIALS, BEST, SUMMARY, PAGE, SEARCH = "trials.jsonl", "best.yaml", "tune.json", "tune.html", "search.json"
FILES = (TRIALS, BEST, SUMMARY, PAGE, SEARCH)
_LOCK = ".lock"


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all.

    Raises:
        QtraceError: when it cannot be written.
    """
    with refusing(QtraceError, path, "written"), replacing(path) as (stream,):
        stream.write(text.encode("utf-8"))


@contextmanager
def search_folder(
    folder: Path, about: dict[str, Any], *, force: bool, note: Callable[[str], None]
) -> Iterator[Path]:
    """Holds the lock on an output folder, which is made or belongs to the same search.

    Args:
        folder: the folder.
        about: all that trials depend on: model, data, recipe, seed ...; as JSON has it.
        force: whether to drop the trials of an earlier search.
        note: called with messages on stale locks.

    Raises:
        QtraceError: when the folder holds other files, or trials of another search, or is in use.
    """
    with refusing(QtraceError, folder, "a folder"):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / _LOCK, str(folder), note):
        others = sorted(e.name for e in folder.iterdir() if e.name not in FILES and e.name != _LOCK)
        others = [name for name in others if not name.endswith(".tmp")]  # of a killed run
        if others and not (folder / SEARCH).exists():
            raise QtraceError(
                f"{folder} holds files that are not of a search ({others[0]}): name another folder."
            )
        if force:
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
        _compare(folder, about)
        yield folder


def _compare(folder: Path, about: dict[str, Any]) -> None:
    """Writes down what the search is about, or refuses a folder of another search."""
    path = folder / SEARCH
    if not path.exists():
        write_text(path, json.dumps(about, indent=2) + "\n")
        return
    try:
        before = parse_document(path.read_bytes())
    except (OSError, ValueError) as error:
        raise QtraceError(f"{path} cannot be read: begin anew with --force.") from error
    keys = [key for key in about if before.get(key) != about[key]]
    if keys:
        raise QtraceError(
            f"{folder} holds the trials of a search with another {keys[0]}: name another folder, or begin "
            "anew with --force."
        )


_UNRELATED = ("name", "description")  # keys of a recipe that change nothing


def digest_of(recipe: Mapping[str, Any]) -> str:
    """Returns a hash of a recipe's settings, without its name and description."""
    settings = {key: value for key, value in recipe.items() if key not in _UNRELATED}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Suggestion(Saved):
    """A recipe to try.

    Attributes:
        recipe: the recipe as plain data.
        origin: where it comes from: ``recipe``, ``diagnosis``, ``structure``, ``packaged``, ``placement`` or
            ``search``.
        changes: key of the recipe -> why it differs from the parent's; ``rules[3]`` for a rule.
        parent: the number of the trial that it changes; None if it changes none.
    """

    recipe: dict[str, Any]
    origin: str
    changes: dict[str, str] = field(default_factory=dict)
    parent: int | None = None


@dataclass(frozen=True)
class Layer(Saved):
    """A layer whose bits a search may change.

    Attributes:
        name: the output node of its first op.
        nodes: the nodes that a rule names.
        weight_bits: bits of its weight, 32 for none.
        activation_bits: bits of what it reads.
        noise: the noise at the outputs if only this layer is rounded, relative to the signal.
    """

    name: str
    nodes: tuple[str, ...]
    weight_bits: int
    activation_bits: int
    noise: float


@dataclass(frozen=True)
class Trial(Saved):
    """One recipe, prepared, calibrated and judged; a line of ``trials.jsonl``.

    Attributes:
        number: the number of its line, from 0.
        recipe, origin, changes, parent: as for `Suggestion`.
        digest: `digest_of` the recipe.
        rung: how much of the data it used, from 0 up.
        value: the metric, more is better; None if the recipe was not judged.
        samples: the noise of each held-back sample relative to the signal, or the values of the user's metric
            for each sample; empty if the metric is one number.
        milliseconds: the predicted time; None without measured times of the backend.
        bytes: the size of the parameters.
        seconds: what the trial added to the time of the search.
        problem: why the recipe was not judged, or "".
        layers: the layers of the first trial's graph.
        suggestions: recipes that the first trial's diagnosis suggests.
    """

    number: int
    recipe: dict[str, Any]
    origin: str
    changes: dict[str, str]
    parent: int | None
    digest: str
    rung: int
    value: float | None
    samples: tuple[float, ...] = ()
    milliseconds: float | None = None
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    layers: tuple[Layer, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()

    def to_json(self) -> str:
        """Returns the trial as one line, without the line's end."""
        return json.dumps(asdict(self), allow_nan=False)


class TrialLog:
    """The file of all trials of a search.

    Args:
        path: the file; it is made with the first trial.
        note: called with a message when an unfinished line is ignored.

    Attributes:
        trials: all trials, in the order of their numbers.

    Raises:
        QtraceError: when the file cannot be read, or has a line before its last one that is no trial.
    """

    def __init__(self, path: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self._path = path
        self.trials: list[Trial] = []
        with refusing(QtraceError, path, "read"):
            data = path.read_bytes() if path.exists() else b""
        self._end = 0
        lines = data.splitlines(keepends=True)
        for index, line in enumerate(lines):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line does not end.")
                trial = from_json(Trial, line)
                if trial.number != index:
                    raise ValueError(f"the trial has number {trial.number}.")
            except ValueError as error:
                if index < len(lines) - 1:
                    raise QtraceError(
                        f"{path}:{index + 1}: this is no trial ({error}): repair the line, or begin anew "
                        "with --force."
                    ) from error
                note(f"{path}:{index + 1}: the last line is unfinished and ignored; its trial runs again")
                break
            self.trials.append(trial)
            self._end += len(line)

    def append(self, trial: Trial) -> None:
        """Appends a trial; it is on the disk when the method returns.

        Raises:
            QtraceError: when the file cannot be written.
        """
        line = f"{trial.to_json()}\n".encode()
        with refusing(QtraceError, self._path, "written"):
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(handle, self._end)  # an unfinished line
                if os.pwrite(handle, line, self._end) != len(line):
                    raise OSError(28, "there is no space left")
                os.fsync(handle)
            finally:
                os.close(handle)
        self._end += len(line)
        self.trials.append(trial)


_DRAWS = 2000


@dataclass(frozen=True)
class CostLimits:
    """The most that a recipe may cost.

    Attributes:
        milliseconds: predicted time; None for any.
        bytes: size of the parameters; None for any.
    """

    milliseconds: float | None = None
    bytes: int | None = None

    def exceeded_by(self, milliseconds: float | None, size: int) -> str:
        """Returns the limit that is exceeded, in words; "" for none.

        Args:
            milliseconds: the predicted time; None if unknown, which exceeds no limit.
            size: bytes of the parameters.
        """
        if self.milliseconds is not None and milliseconds is not None and milliseconds > self.milliseconds:
            return f"{milliseconds:.4g} ms, more than {self.milliseconds:.4g}"
        if self.bytes is not None and size > self.bytes:
            return f"{size} bytes, more than {self.bytes}"
        return ""


@dataclass(frozen=True)
class Certainty:
    """The difference of two trials' metrics, and a 95 % interval of it by the bootstrap.

    Attributes:
        difference: the difference, in the metric's unit.
        low, high: the ends of the interval.
        probability: the share of draws in which the first trial is better.
    """

    difference: float
    low: float
    high: float
    probability: float


def cost_of(trial: Trial) -> tuple[float, int]:
    """Returns predicted time and size; the time is 0 where none is known."""
    return trial.milliseconds or 0.0, trial.bytes


def rank(trials: Sequence[Trial]) -> list[Trial]:
    """Sorts judged trials, the best first: by the metric, then by time, size and number."""
    judged = [trial for trial in trials if trial.value is not None]
    return sorted(judged, key=lambda t: (-(t.value or 0.0), *cost_of(t), t.number))


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the judged trials that no other one beats, the cheapest first.

    A trial beats another one if it is as good in metric, time and size, and better in one of them. Of equal
    trials the first stays.
    """
    front: list[Trial] = []
    for trial in rank(trials):  # whatever beats a trial stands before it
        time, size = cost_of(trial)
        if not any(cost_of(other)[0] <= time and cost_of(other)[1] <= size for other in front):
            front.append(trial)
    return sorted(front, key=lambda t: (*cost_of(t), t.number))


def certainty(first: Trial, second: Trial, *, noise: bool, seed: int) -> Certainty | None:
    """Compares two trials on samples drawn with replacement (Efron 1979, "Bootstrap Methods").

    Both trials are compared on the same draws, so that samples which are hard for both add no spread.

    Args:
        first: the better trial.
        second: the other one, judged on the same samples.
        noise: whether the values of the samples are noise, so that metrics are ``-10 log10`` of the sum; else
            metrics are the mean.
        seed: the seed of the draws.

    Returns:
        The difference and its percentile interval; None without two values of samples, or as many on both
        sides.
    """
    a, b = (np.array(trial.samples, np.float64) for trial in (first, second))
    if len(a) != len(b) or len(a) < 2:
        return None
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):  # one at a time, which bounds the memory
        places = rng.integers(0, len(a), len(a))
        drawn.append(_difference(a[places].mean(keepdims=True), b[places].mean(keepdims=True), noise))
    differences = np.concatenate(drawn)
    low, high = np.quantile(differences, (0.025, 0.975))
    own = float(_difference(a.mean(keepdims=True), b.mean(keepdims=True), noise)[0])
    return Certainty(own, float(low), float(high), float(np.mean(differences > 0)))


def choose(ranked: Sequence[Trial], first: Trial, *, noise: bool, seed: int) -> Trial:
    """Returns the best trial that is surely better than the first, or as good and cheaper; else that.

    The best of many trials on a few held-back samples is often worse than the first on others.

    Args:
        ranked: trials within the limits, the best first.
        first: the trial of the user's recipe. If it is not within the limits, the best trial is chosen.
        noise: as for `certainty`.
        seed: as for `certainty`.
    """
    if all(trial.digest != first.digest for trial in ranked):
        return ranked[0]
    for trial in ranked:
        if trial.digest == first.digest:
            break
        sure = certainty(trial, first, noise=noise, seed=seed)
        if sure is None or sure.low > 0 or (sure.low == 0 and cost_of(trial) < cost_of(first)):
            break
    return trial


def _difference(a: np.ndarray, b: np.ndarray, noise: bool) -> np.ndarray:
    if not noise:
        return a - b
    smallest = math.ldexp(1.0, -100)  # as `judge` counts it
    difference: np.ndarray = 10.0 * np.log10(np.maximum(b, smallest) / np.maximum(a, smallest))
    return difference
