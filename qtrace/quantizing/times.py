"""Measured times as a file, by which another machine takes the same decisions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from qtrace.benchmarking.turns import Speed
from qtrace.errors import ConfigError
from qtrace.storage.files import replacing

__all__ = ["SCHEMA", "MeasuredLabelling", "Times"]

SCHEMA = "qtrace-times/1"


@dataclass(frozen=True)
class MeasuredLabelling:
    """One labelling as it was measured.

    Attributes:
        name: how it came into question: ``predicted``, ``fastest``, ``between`` or ``float``.
        integers: the ops on integers.
        predicted_seconds: the time that the cost table predicts.
        predicted_db: the predicted SQNR of the outputs, a sum over single roundings.
        speed: its speed beside the predicted choice.
        noise: for each half of the samples, the noise power at the outputs relative to theirs.
    """

    name: str
    integers: tuple[str, ...]
    predicted_seconds: float
    predicted_db: float
    speed: Speed
    noise: tuple[float, ...]


@dataclass
class Times:
    """What was measured, or is to be taken as measured.

    Attributes:
        path: the file; None if nothing is written.
        labellings: the labellings of the placement.
        files: the speed of the float file and of the quantized one; () if they were not measured.
        fixed: whether the times were read, so that nothing is measured.
    """

    path: Path | None = None
    labellings: tuple[MeasuredLabelling, ...] = ()
    files: tuple[Speed, ...] = ()
    fixed: bool = field(default=False)

    @classmethod
    def open(cls, path: Path | None) -> Times:
        """Reads ``path`` if it exists; else the times are measured, and `write` writes them there.

        Raises:
            ConfigError: when the file cannot be read, or holds no times.
        """
        if path is None or not path.exists():
            return cls(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            labellings = tuple(
                MeasuredLabelling(
                    **{
                        **entry,
                        "speed": Speed(**entry["speed"]),
                        "integers": tuple(map(str, entry["integers"])),
                        "noise": tuple(map(float, entry["noise"])),
                    }
                )
                for entry in data["labellings"]
            )
            return cls(path, labellings, tuple(Speed(**entry) for entry in data["files"]), fixed=True)
        except OSError as error:
            raise ConfigError(f"the times {path} cannot be read: {error.strerror}.") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path} holds no times that qtrace has measured ({error}): give the name of a new file to "
                "measure them."
            ) from error

    def check(self, units: Iterable[str]) -> None:
        """Refuses times of another network.

        Raises:
            ConfigError: when an op of a labelling is not among ``units``.
        """
        known = set(units)
        for labelling in self.labellings:
            for name in labelling.integers:
                if name not in known:
                    raise ConfigError(
                        f"{self.path} has the times of another network, with the op {name}: give the name of "
                        "a new file to measure them."
                    )

    def write(self) -> None:
        """Writes the file, if there is one and it was not read.

        Raises:
            ConfigError: when it cannot be written.
        """
        if self.path is None or self.fixed or not (self.labellings or self.files):
            return
        data = {
            "schema": SCHEMA,
            "labellings": [asdict(labelling) for labelling in self.labellings],
            "files": [asdict(speed) for speed in self.files],
        }
        try:
            with replacing(self.path) as (stream,):
                stream.write((json.dumps(data, indent=1) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"the times {self.path} cannot be written: {error.strerror}.") from error
