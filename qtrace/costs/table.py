"""Times of ops in one runtime on one processor: measured points, and what is predicted from them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qtrace.costs.families import ALIKE, ALIKE_IN_FLOAT, FLOAT, FORMS, MonotoneGrid, OpShape, families
from qtrace.errors import ConfigError

__all__ = ["SCHEMA", "CostTable", "Machine", "Measurement"]

SCHEMA = "qtrace-costs/1"
_FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Machine:
    """What times depend on besides the op.

    Attributes:
        runtime: the name of the runtime.
        version: the version of the runtime.
        processor: the name of the processor.
        flags: the instruction sets that integer and float kernels use, such as ``avx512_vnni``.
        threads: the number of threads.
        date: the day of the measurement.
    """

    runtime: str
    version: str
    processor: str
    flags: tuple[str, ...]
    threads: int
    date: str

    def runs_like(self, other: Machine) -> bool:
        """Returns whether kernels of the same runtime run on processors of the same name."""
        mine, others = ((m.runtime, m.version, m.processor, m.flags, m.threads) for m in (self, other))
        return mine == others


@dataclass(frozen=True)
class Measurement:
    """The time of one op in one form."""

    op: OpShape
    form: str
    seconds: float


class CostTable:
    """The times of ops in a runtime, by kind, shape and form.

    Args:
        machine: where the times were measured.
        measurements: the measured points.
        per_run: the seconds that a run takes besides its ops.
    """

    def __init__(self, machine: Machine, measurements: Iterable[Measurement], per_run: float = 0.0) -> None:
        self.machine = machine
        self.measurements = tuple(measurements)
        self.per_run = per_run

    @classmethod
    def known(cls) -> tuple[str, ...]:
        """Returns the runtimes that have a packaged table."""
        return tuple(sorted({path.stem.partition(".")[0] for path in _FOLDER.glob("*.json")}))

    @classmethod
    def load(cls, runtime: str) -> CostTable:
        """Returns the packaged table of a runtime, on every processor the same one.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        if runtime not in cls.known():
            raise ConfigError(
                f"there is no cost table for {runtime!r}; known: {', '.join(cls.known())}. Measure one with "
                f"`python -m benchmarks.kernels --runtime {runtime}` in a checkout."
            )
        return _read_packaged(runtime)

    @classmethod
    def packaged(cls, runtime: str) -> Mapping[str, CostTable]:
        """Returns all packaged tables of a runtime by name: the one of `load`, and other processors'.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        first = cls.load(runtime)
        others = sorted(path.stem for path in _FOLDER.glob(f"{runtime}.*.json"))
        return {runtime: first, **{name: _read_packaged(name) for name in others}}

    @classmethod
    def nearest(cls, runtime: str, flags: Sequence[str]) -> str:
        """Returns the name of the packaged table of the processor whose instruction sets differ least.

        Args:
            runtime: the runtime.
            flags: the instruction sets of the processor.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        tables = cls.packaged(runtime)
        return min(tables, key=lambda name: len({*tables[name].machine.flags} ^ {*flags}))

    @classmethod
    def for_machine(cls, here: Machine) -> CostTable:
        """Returns the packaged table of a processor like ``here``, else the table of `load`.

        Raises:
            ConfigError: when the runtime lacks a packaged table.
        """
        tables = tuple(cls.packaged(here.runtime).values())
        alike = [t for t in tables if (t.machine.processor, t.machine.flags) == (here.processor, here.flags)]
        same = [t for t in alike if t.machine.runs_like(here)]
        return (*same, *alike, *tables)[0]

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """Reads a table that `to_json` wrote.

        Raises:
            ConfigError: when the file is missing, damaged or of another kind.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the cost table {path} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the cost table {path} is damaged: {error}; measure it again.") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ConfigError(f"{path} is no cost table: its schema is not {SCHEMA!r}.")
        try:
            machine = Machine(**{**data["machine"], "flags": tuple(data["machine"]["flags"])})
            measurements = [_read_measurement(entry) for entry in data["measurements"]]
            return cls(machine, measurements, _positive(data["per_run"], 0.0))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the cost table {path} is damaged ({reason}); measure it again.") from error

    def to_json(self) -> str:
        """Returns the table as a JSON document, one measurement a line."""
        head = {"schema": SCHEMA, "machine": asdict(self.machine), "per_run": self.per_run}
        lines = [
            json.dumps({**m.op.to_dict(), "form": m.form, "seconds": float(f"{m.seconds:.4g}")})
            for m in self.measurements
        ]
        body = ",\n".join(lines)
        return f'{json.dumps(head, indent=1)[:-2]},\n "measurements": [\n{body}\n]}}\n'

    def forms(self, kind: str) -> tuple[str, ...]:
        """Returns the forms that the table knows for a kind, in the order of `FORMS`."""
        return tuple(form for form in FORMS if self._measured_kind(kind, form) is not None)

    def seconds(self, op: OpShape, form: str) -> float | None:
        """Returns the time of an op in a form; None if the table knows nothing of that kind in that form.

        The time is the measured one at measured points. Elsewhere it is interpolated inside the family of
        kernels that computes the op, and grows with every size.
        """
        kind = self._measured_kind(op.kind, form)
        if kind is None:
            return None
        grids = self._grids[kind, form]
        for family in families(replace(op, kind=kind)):
            grid = grids.get((family.name, len(family.at)))
            if grid is not None:
                return grid.seconds(family.at)
        return None

    def _measured_kind(self, kind: str, form: str) -> str | None:
        """Returns the kind whose measured times hold for ``kind``; None without one."""
        names = [kind, ALIKE.get(kind)]
        if form == FLOAT:
            names += [ALIKE_IN_FLOAT.get(name) for name in names if name is not None]
        return next((name for name in names if name is not None and (name, form) in self._grids), None)

    @functools.cached_property
    def _grids(self) -> Mapping[tuple[str, str], Mapping[tuple[str, int], MonotoneGrid]]:
        """(kind, form) -> (family, number of coordinates) -> times over the coordinates."""
        points: dict[tuple[str, str], dict[tuple[str, int], dict[tuple[float, ...], float]]] = {}
        for measurement in self.measurements:
            family = families(measurement.op)[0]
            by_family = points.setdefault((measurement.op.kind, measurement.form), {})
            times = by_family.setdefault((family.name, len(family.at)), {})
            times[family.at] = min(measurement.seconds, times.get(family.at, measurement.seconds))
        return {
            key: {family: MonotoneGrid(times) for family, times in by_family.items()}
            for key, by_family in points.items()
        }


@functools.cache
def _read_packaged(name: str) -> CostTable:
    return CostTable.read(_FOLDER / f"{name}.json")


def _read_measurement(entry: dict[str, Any]) -> Measurement:
    if entry["form"] not in FORMS:
        raise ValueError(f"unknown form {entry['form']!r}")
    op = OpShape.from_dict(entry)
    if not op.inputs or not op.outputs:
        raise ValueError(f"{op.kind} without inputs or outputs")
    if not families(op):
        raise ValueError(f"{op.kind} of shapes that it cannot have")
    return Measurement(op, entry["form"], _positive(entry["seconds"]))


def _positive(value: Any, minimum: float = 1e-12) -> float:
    if type(value) not in (int, float) or not minimum <= value < 1e6:
        raise ValueError(f"{value!r} is no time in seconds")
    return float(value)
