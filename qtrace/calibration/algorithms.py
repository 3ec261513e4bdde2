"""Runs the algorithms of the calibrated stage, and keeps what they have learned for a run that goes on."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.calibration.choice import Chosen
from qtrace.calibration.collecting import Statistics, no_statistics
from qtrace.config.checking import Named, algorithms, check_imported
from qtrace.errors import CalibrationError, ConfigError
from qtrace.graph.flatten import flatten
from qtrace.graph.kernels import read_array, shared_copy
from qtrace.graph.stepping import SegmentEngine
from qtrace.graph.types import TracedModule
from qtrace.learning import LearningEngine
from qtrace.preparation.float16 import float_values, uses_float16
from qtrace.preparation.model import QuantizedModel, hash_tensors
from qtrace.preparation.passes.base import named_report
from qtrace.preparation.phases import switch_phase
from qtrace.ptq.base import Batches, CalibratedAlgorithm, CalibratedTask, Left
from qtrace.ptq.layers.outputs import CalibrationOutputs, output_errors
from qtrace.storage import checkpoints
from qtrace.storage.checkpoints import Checkpoint
from qtrace.storage.outputs import PART

# Checkpoints of a calibration: files with parts of its statistics, from which it goes on.


@dataclass(frozen=True)
class Part:
    """The statistics that one process collected.

    Attributes:
        statistics: the statistics of the batches that the process ran.
        chosen: the engine and the reason for its choice; None if unknown.
        skipped: the unreadable images that were skipped.
        passed: number -> checksum of each batch that the process read and left to others.
    """

    statistics: Statistics
    chosen: Chosen | None = None
    skipped: tuple[str, ...] = ()
    passed: dict[int, int] = field(default_factory=dict)


@dataclass
class Cadence:
    """Decides when a checkpoint is due: after some batches or some seconds, whichever comes first.

    Attributes:
        batches: number of batches between checkpoints; None for any number.
        seconds: time between checkpoints; None for any time.
    """

    batches: int | None = None
    seconds: float | None = 60.0
    _since: float = field(default_factory=time.monotonic)
    _count: int = 0

    def due(self) -> bool:
        """Counts a batch and returns whether a checkpoint is due; if so, the count restarts."""
        self._count += 1
        now = time.monotonic()
        late = self.seconds is not None and now - self._since >= self.seconds
        if not late and (self.batches is None or self._count < self.batches):
            return False
        self._since, self._count = now, 0
        return True


def fingerprint(prepared: TracedModule | QuantizedModel, *others: Any) -> str:
    """Hashes everything on which the statistics depend: graph, decisions, weights, and ``others``."""
    model = QuantizedModel.of(prepared, "prepared")
    ranges = [float_values(model)] if uses_float16(model) else []
    text = json.dumps([model.annotation.to_json(), others, *ranges], sort_keys=True)
    return hash_tensors(text, model.float_tensors())


def write_part(path: Path, part: Part, identity: str) -> None:
    """Writes a part; the file appears whole or not at all, and is on the disk afterwards.

    Raises:
        QtraceError: when the file cannot be written.
    """
    checkpoints.write(path, pack(part, identity))


def pack(part: Part, identity: str) -> bytes:
    """Packs a part into the content of an .npz file."""
    observers = part.statistics.observers
    content: dict[str, Any] = {}
    for name, checksums in (("batches", part.statistics.batches), ("passed", part.passed)):
        content[name] = np.array(sorted(checksums.items()), np.int64).reshape(-1, 2)
    for index, observer in enumerate(observers.values()):
        content.update({f"{index}/{key}": value for key, value in observer.state_dict().items()})
    return checkpoints.pack(
        identity,
        content,
        groups=list(observers),
        chosen=part.chosen and dataclasses.asdict(part.chosen),
        skipped=list(part.skipped),
    )


def read_part(path: Path, prepared: QuantizedModel, identity: str) -> Part:
    """Reads a part that belongs to a prepared graph.

    Raises:
        CalibrationError: when the part belongs to another calibration, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"the checkpoint {path} cannot be read: {error.strerror}.") from error
    return unpack(data, prepared, identity, f"the checkpoint {path}")


def unpack(data: bytes, prepared: QuantizedModel, identity: str, label: str) -> Part:
    """Reads a part from the bytes that `pack` returned.

    Args:
        data: the content of the .npz file.
        prepared: the graph that the part belongs to.
        identity: the `fingerprint` of the calibration.
        label: the name of the part in an error.

    Raises:
        CalibrationError: when the part belongs to another calibration, or is damaged.
    """
    try:
        return _part(*checkpoints.unpack(data, identity), prepared)
    except checkpoints.OtherIdentityError:
        raise CalibrationError(
            f"{label} belongs to another calibration: the model, the recipe, the data "
            "or an option has changed since. Put it back, or calibrate anew with --force."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise CalibrationError(f"{label} is damaged ({reason}): calibrate anew with --force.") from error


def _part(metadata: dict[str, Any], content: dict[str, np.ndarray], prepared: QuantizedModel) -> Part:
    batches, passed = ({int(k): int(v) for k, v in content[name]} for name in ("batches", "passed"))
    chosen = metadata["chosen"] and Chosen.from_dict(metadata["chosen"])
    observers = no_statistics(prepared).observers
    for index, group in enumerate(metadata["groups"]):
        state = {k.partition("/")[2]: v for k, v in content.items() if k.startswith(f"{index}/")}
        observers[group].load_state_dict(state)
    return Part(Statistics(observers, batches), chosen, tuple(metadata["skipped"]), passed)


class StoredParts:
    """The parts of a calibration in a folder.

    Args:
        folder: the folder of the parts.
        prepared: the graph that the parts belong to.
        identity: the `fingerprint` of the calibration.
    """

    def __init__(self, folder: Path, prepared: QuantizedModel, identity: str) -> None:
        self.folder, self.prepared, self.identity = folder, prepared, identity

    def path(self, name: str) -> Path:
        """Returns the path of the part ``name``."""
        return self.folder / f"{name}{PART}"

    def write(self, name: str, part: Part) -> None:
        """Writes a part as the file of ``name``."""
        write_part(self.path(name), part, self.identity)

    def gather(self) -> Part:
        """Merges all parts into one file, which replaces them.

        A process that is killed at any moment neither loses a batch nor counts one twice.

        Raises:
            CalibrationError: when a part is damaged or belongs to another calibration.
        """
        paths = sorted(self.folder.glob(f"*{PART}"))
        parts = [read_part(path, self.prepared, self.identity) for path in paths]
        parts.sort(key=lambda part: len(part.statistics.batches), reverse=True)
        whole = Part(no_statistics(self.prepared))
        for part in parts:
            if set(part.statistics.batches) <= set(whole.statistics.batches):
                continue  # merged before by a process that was killed before it removed the file
            whole = merge_parts(whole, part)
        if paths:
            self.write("gathered", whole)
            for path in paths:
                if path != self.path("gathered"):
                    path.unlink(missing_ok=True)
        return whole


def merge_parts(first: Part, second: Part) -> Part:
    """Merges two parts.

    Raises:
        CalibrationError: when both hold the same batch, or have different data under the same number.
    """
    checksums = {**first.passed, **first.statistics.batches}
    for number, checksum in (*second.passed.items(), *second.statistics.batches.items()):
        if checksums.get(number, checksum) != checksum:
            raise CalibrationError(
                f"batch {number} is not the same at every iteration: give the loader a fixed seed, so that "
                "workers and resumed runs see the same batches."
            )
    skipped = tuple(sorted({*first.skipped, *second.skipped}))
    statistics = first.statistics.merge(second.statistics)
    return Part(statistics, first.chosen or second.chosen, skipped, {**first.passed, **second.passed})


# The last step of ``calibrate``: the algorithms of a config that work on the calibrated graph.


def calibrated_algorithms(model: QuantizedModel, batches: Any) -> tuple[Named, ...]:
    """Returns the algorithms that ``calibrate`` runs.

    Args:
        model: the prepared model.
        batches: the calibration data.

    Raises:
        CalibrationError: when the data cannot be read twice, or an algorithm changed the model before.
        ConfigError: when an algorithm lies in a module that is not imported.
    """
    check_imported(spec for _, spec in model.config.ptq_entries)
    selected = tuple((name, a) for name, a in algorithms(model.config) if a.stage == "calibrated")
    names = ", ".join(name for name, _ in selected)
    if selected and iter(batches) is batches:
        raise CalibrationError(
            f"batches is an iterator, which can be read once, but ptq: {names} reads the data again: give a "
            "list, or an object whose __iter__ begins anew."
        )
    earlier = {report["algorithm"] for report in model.ptq if report["changed"]}
    repeated = [name for name, _ in selected if name in earlier]
    if repeated:
        raise CalibrationError(
            f"{', '.join(repeated)} changed this model in an earlier calibration: prepare it again from the "
            "float model."
        )
    return selected


def run_calibrated(
    model: QuantizedModel,
    selected: tuple[Named, ...],
    batches: Batches,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    engine: SegmentEngine | None = None,
    learning: LearningEngine | None = None,
    threads: int | None = None,
) -> None:
    """Runs the algorithms of the calibrated stage and writes their reports into the record.

    Args:
        model: the calibrated model, in the phase ``quantize`` and in eval mode; it is changed in place.
        selected: the algorithms that `calibrated_algorithms` returned.
        batches: the calibration data.
        progress: whether to show progress bars.
        checkpoint: the storage of learned blocks; None to store none.
        engine: computes the values of layers where it can; None for MegEngine.
        learning: computes the steps of what is learned where it can; None for MegEngine.
        threads: number of threads that compute; None for all cores.
    """
    if not selected:
        return
    reference = flatten(model.module)
    switch_phase("float", model.view(reference))
    reference.eval()
    reports, before = [], None
    with CalibrationOutputs(model, reference, batches, engine, threads) as outputs:
        for name, algorithm in selected:
            assert isinstance(algorithm, CalibratedAlgorithm)
            subset = batches.spread(algorithm.samples)
            report = algorithm.apply(
                CalibratedTask(
                    model.module, reference, subset, progress, checkpoint, engine, learning, threads
                )
            )
            before = outputs.before if before is None else before
            after = outputs.ratios() if report.changed else before
            errors = output_errors(before, after)
            report = dataclasses.replace(report, outputs=errors, measured=outputs.measured)
            before = after
            if len(subset) < len(batches):
                reason = (
                    f"{len(subset)} of {len(batches)} batches were read, since samples is {algorithm.samples}"
                )
                report = dataclasses.replace(report, left=(*report.left, Left("", reason)))
            reports.append(named_report(report, name, algorithm))
    model.add_reports(*reports)


@contextmanager
def restoring(model: TracedModule) -> Iterator[None]:
    """Restores every parameter and buffer of ``model`` when the block fails."""
    before = [(tensor, shared_copy(tensor)) for _, tensor in model.named_tensors()]
    try:
        yield
    except BaseException:
        for tensor, value in before:
            if not np.array_equal(read_array(tensor), read_array(value), equal_nan=True):
                tensor._reset(value)
        raise
