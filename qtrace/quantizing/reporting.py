"""What a call writes next to its result, and what it says."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from qtrace.process import return_free_memory

# The folder of a calibrated graph: both models, the report, the explanation, the verdict and its cure.

QUANTIZED = "quantized.mge"
"""The converted graph, to be exported."""
FILES = ("prepared.mge", QUANTIZED, "report.json", "explain.txt")
"""The files of every calibrated or fine-tuned graph."""
CURE = "cure.yaml"
"""The recipe that cures what the verdict found."""
VERDICT = "verdict.json"
"""The verdict, its causes and the figures."""


def write_folder(folder: Path, prepared: Any, summary: dict[str, Any]) -> None:
    """Writes `FILES` of a calibrated graph.

    Args:
        folder: the folder to write into.
        prepared: the calibrated graph.
        summary: the first entries of report.json.
    """
    from qtrace.graph.files.serialize import save
    from qtrace.inspection.explanation import explain
    from qtrace.preparation.passes.convert import convert

    quantized = convert(prepared)
    explanation = explain(prepared)
    report = {
        "qtrace": version("qtrace"),
        **summary,
        "ptq": list(explanation.ptq),
        "sites": _sites(prepared),
    }
    save(prepared, folder / "prepared.mge")
    save(quantized, folder / "quantized.mge")
    (folder / "report.json").write_text(
        json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    (folder / "explain.txt").write_text(explanation.table(None) + "\n", encoding="utf-8")


def _sites(prepared: Any) -> list[dict[str, Any]]:
    """Lists all sites with scheme, scale and zero point, which are null at a site that saw no data."""
    from qtrace.preparation.model import fake_quants, read_record

    native, sites = read_record(prepared).native, []
    for site in fake_quants(prepared):
        numbers = site.qparams().to_dict() if site.calibrated else {"scale": None, "zero_point": None}
        own = {"native": native[site.site].origin} if site.site in native else {}
        sites.append({"site": site.site, "scheme": site.scheme.to_dict(), **numbers, **own})
    return sites


# Where the stages of a run report to, and the time of each stage.

NOTES = "qtrace.notes"
"""The logger of what a run tells its user; commands show it."""
_LOG = logging.getLogger("qtrace")
_NOTES = logging.getLogger(NOTES)


class Reporter(Protocol):
    """What takes the notes and warnings of a run."""

    @property
    def progress(self) -> bool:
        """Whether to show progress bars."""

    def note(self, text: str) -> None:
        """Takes a note."""

    def warn(self, text: str) -> None:
        """Takes a warning."""


@dataclass(frozen=True)
class LogReporter:
    """Writes notes (INFO) and warnings to the logger ``qtrace.notes``.

    Attributes:
        progress: whether to show progress bars on stderr.
    """

    progress: bool = True

    def note(self, text: str) -> None:
        """Logs a note."""
        _NOTES.info("%s", text)

    def warn(self, text: str) -> None:
        """Logs a warning."""
        _NOTES.warning("%s", text)


class StageTimes:
    """Measures the stages of a run; a stage that runs again adds to its time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> Mapping[str, float]:
        """Name of a stage -> its time in seconds, in the order in which the stages began."""
        return dict(self._seconds)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measures the block, and writes its time and its processor time to the log (INFO).

        What it has freed goes back to the system if it succeeds.

        Args:
            stage: the name of the stage.
        """
        start, processor = time.perf_counter(), time.process_time()
        self._seconds.setdefault(stage, 0.0)
        try:
            yield
            return_free_memory()
        finally:
            seconds = time.perf_counter() - start
            self._seconds[stage] += seconds
            busy = time.process_time() - processor
            _LOG.info("%s took %.1f s, %.1f s of processor time", stage, seconds, busy)
