"""Measurements of networks, as they are stored in benchmarks/results.

The scripts that measure write these files, the docs site reads them; neither table is typed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "RESULTS",
    "ExportRow",
    "FakeQuantRow",
    "FamilyRow",
    "Float16Row",
    "RecipeRow",
    "ToolFile",
    "ToolsRow",
    "TorchRow",
    "load",
    "measured_when",
    "store",
    "table",
    "today",
]

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@dataclass(frozen=True)
class FamilyRow:
    """One network of the zoo, prepared by the recipe of its family.

    Attributes:
        share: the part of the whole graph's MACs on integers.
        sqnr: SQNR of the worst output, in dB.
        islands: kinds of ops -> the number of float islands between integers that consist of them.
        measured: the day of the measurement; "" in rows that were stored without it.
    """

    family: str
    recipe: str
    network: str
    share: float
    sqnr: float
    islands: dict[str, int]
    measured: str = ""

    HEADER = ("family", "recipe", "network", "MACs on integers", "SQNR in dB", "float islands")
    FILE = "families.json"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        islands = ", ".join(f"{n} x {kinds}" for kinds, n in self.islands.items())
        share, recipe = f"{100 * self.share:.1f} %", f"`{self.recipe}`"
        return self.family, recipe, self.network, share, f"{self.sqnr:.1f}", islands or "none"


@dataclass(frozen=True)
class Float16Row:
    """A file whose floats are in float16, beside that in float32.

    Attributes:
        network: the network, and what of it is on integers.
        halves: the number of ops in float16.
        floats: the number of ops that stay float.
        float32_bytes: the size of the file in float32.
        float16_bytes: the size of the file in float16.
        db: the ratio of the outputs in float32 to what float16 changes, of the weakest output, in dB.
        passed: whether `qtrace.verify` passed.
        measured: the day.
    """

    network: str
    halves: int
    floats: int
    float32_bytes: int
    float16_bytes: int
    db: float
    passed: bool
    measured: str = ""

    HEADER = ("network", "ops in float16", "float32, kB", "float16, kB", "dB", "verify")
    FILE = "float16.json"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        sizes = (f"{size / 1000:.0f}" for size in (self.float32_bytes, self.float16_bytes))
        ratio = "equal" if self.db == float("inf") else f"{self.db:.1f}"
        counts = f"{self.halves} of {self.floats}"
        return self.network, counts, *sizes, ratio, "passed" if self.passed else "**failed**"


@dataclass(frozen=True)
class RecipeRow:
    """A family's recipe beside the default.

    Attributes:
        recipe: the recipe.
        network: the network.
        size: height and width of the images.
        everywhere: whether both round everything, because integers gain no time on so few channels.
        db: the SQNR of the worst group of columns by the recipe, for each seed.
        default_db: the same by the default.
        milliseconds: the predicted time by the recipe, for each seed.
        default_milliseconds: the same by the default.
        samples: the number of images to calibrate on, and of others to measure.
        without: a file of rules, or a rule as FILE:LINE -> the medians of dB and milliseconds without it.
        rounded_db: the SQNR by the recipe for each seed where everything is rounded, without a placement.
        rounded_without: a rule as FILE:LINE -> the same without it.
        measured: the day.
    """

    recipe: str
    network: str
    size: int
    everywhere: bool
    db: list[float]
    default_db: list[float]
    milliseconds: list[float]
    default_milliseconds: list[float]
    samples: int
    without: dict[str, list[float]] = field(default_factory=dict)
    rounded_db: list[float] = field(default_factory=list)
    rounded_without: dict[str, list[float]] = field(default_factory=dict)
    measured: str = ""

    HEADER = ("family", "network", "pixels", "recipe, dB", "default, dB", "recipe, ms", "default, ms", "")
    FILE = "family_recipes.json"

    @property
    def gain(self) -> float:
        """How much higher the recipe's median SQNR is than the default's, in dB."""
        return statistics.median(self.db) - statistics.median(self.default_db)

    @property
    def time_share(self) -> float:
        """The recipe's median time as a share of the default's."""
        return statistics.median(self.milliseconds) / statistics.median(self.default_milliseconds)

    @property
    def met(self) -> bool:
        """Whether the recipe is no worse than the default, in medians."""
        return self.gain >= -0.3 and self.time_share <= 1.001

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        note = "rounded everywhere" if self.everywhere else ""
        numbers = [f"{statistics.median(v):.1f}" for v in (self.db, self.default_db)]
        times = [f"{statistics.median(v):.3g}" for v in (self.milliseconds, self.default_milliseconds)]
        verdict = "" if self.met else f"{self.gain:+.1f} dB in {self.time_share:.3f} of the time"
        return (
            f"`{self.recipe}`",
            self.network,
            str(self.size),
            *numbers,
            *times,
            ", ".join(filter(None, (note, verdict))),
        )


@dataclass(frozen=True)
class FakeQuantRow:
    """A network of digits, trained at 4 bits by one fake quant.

    Attributes:
        network: the fake quant.
        steps: the number of batches.
        floats: loss and accuracy in percent of the float network.
        start: loss and accuracy of the calibrated network.
        losses: the loss after training, for each order of the images.
        accuracies: the accuracy after training, for each order.
        measured: the day.
    """

    network: str
    steps: int
    floats: tuple[float, float]
    start: tuple[float, float]
    losses: list[float]
    accuracies: list[float]
    measured: str = ""

    HEADER = ("fake quant", "loss: start", "trained (three runs)", "accuracy: start", "trained", "float")
    FILE = "fake_quants.json"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        loss, accuracy = statistics.median(self.losses), statistics.median(self.accuracies)
        return (
            f"`{self.network}`",
            f"{self.start[0]:.3f}",
            f"{loss:.3f} ({min(self.losses):.3f} to {max(self.losses):.3f})",
            f"{self.start[1]:.1f} %",
            f"{accuracy:.1f} %",
            f"{self.floats[0]:.3f}, {self.floats[1]:.1f} %",
        )


@dataclass(frozen=True)
class ExportRow:
    """The files of one network, verified in their runtimes.

    Attributes:
        agreement: share of equal predictions in onnxruntime, as deployed.
        sqnr: SQNR of the outputs there, in dB; None where all are equal bit for bit.
        integer: number of ops that run on onnxruntime's integer kernels.
        counted: number of ops that could.
        ends: number of the other ops whose results the recipe leaves in float.
        compared: runtime -> the largest difference of an integer in LSB, op by op, and the share of equal
            integers.
        measured: the day of the measurement; "" in rows that were stored without it.
    """

    network: str
    agreement: float
    sqnr: float | None
    integer: int
    counted: int
    ends: int
    compared: dict[str, list[float]] = field(default_factory=dict)
    measured: str = ""

    HEADER = (
        "network",
        "ops off: worst LSB, equal",
        "fused: same prediction",
        "fused: SQNR dB",
        "integer kernels",
        "OpenVINO",
        "LiteRT",
        "ncnn",
        "MegEngine",
    )
    FILE = "exports.json"
    OTHERS = ("openvino", "litert", "ncnn", "megengine")

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        ends = f", {self.ends} end in float" if self.ends else ""
        share = f"{self.integer / max(self.counted, 1):.0%}"
        return (
            self.network,
            self._compared("onnxruntime"),
            f"{self.agreement:.1%}",
            "exact" if self.sqnr is None else f"{self.sqnr:.1f}",
            f"{self.integer} of {self.counted} ({share}{ends})",
            *(self._compared(runtime) for runtime in self.OTHERS),
        )

    def _compared(self, runtime: str) -> str:
        if runtime not in self.compared:
            return ""
        worst, equal = self.compared[runtime]
        return f"{worst:.0f}, {equal:.3%}"


@dataclass(frozen=True)
class TorchRow:
    """A network of torchvision or timm, taken in by `qtrace.from_torch`.

    Attributes:
        package: ``torchvision`` or ``timm``.
        network: the name in the package.
        size: height and width of the images.
        opened: whether the batch stays open.
        error: the largest difference to torch, of the largest value of the outputs; None if not imported.
        spread: the largest difference between the outputs of two images, of the same value.
        converted: whether it was calibrated and converted.
        verified: whether onnxruntime computes the integers of the graph.
        returned: whether the converted graph gives back every tensor of the module's state.
        absent: the tensors that it does not give back, or the sentence by which it refuses the state.
        refusal: why a step failed; "" if none did.
        seconds: the time of all steps, with torch's export.
        measured: the day of the measurement.
    """

    package: str
    network: str
    size: int
    opened: bool = False
    error: float | None = None
    spread: float = 0.0
    converted: bool = False
    verified: bool = False
    returned: bool = False
    absent: Sequence[str] = ()
    refusal: str = ""
    seconds: int = 0
    measured: str = ""

    HEADER = ("package", "network", "pixels", "batch", "difference to torch", "verified", "state", "refusal")
    FILE = "torch_families.json"

    @property
    def whole(self) -> bool:
        """Whether import, conversion and verification succeeded, with outputs equal to 1e-4."""
        return self.verified and self.difference is not None and self.difference <= 1e-4

    @property
    def difference(self) -> float | None:
        """The largest difference to torch, of that between the outputs of two images; None if not imported.

        Outputs that hardly depend on the image agree whatever the network in between computes.
        """
        if self.error is None:
            return None
        return self.error / self.spread if self.spread else float("inf")

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        refusal = self.refusal.replace("|", "/").replace("\n", " ")
        return (
            self.package,
            self.network,
            str(self.size),
            "" if self.error is None else "open" if self.opened else "fixed",
            "" if self.difference is None else f"{self.difference:.1e}",
            "yes" if self.verified else "no",
            "whole" if self.returned else f"all but {len(self.absent)}" if self.absent else "",
            f"{refusal[:120]}..." if len(refusal) > 120 else refusal,
        )


@dataclass(frozen=True)
class ToolFile:
    """The file of one tool for one network.

    Attributes:
        db: SQNR of the worst output, in dB, of matched rows where the network selects; None without a file.
        rows: the share of selected rows that are float's; None where nothing is selected.
        speed: processor time of float / that of the file; None without a file.
        share: the share of MACs on integers; None for other tools.
        note: why there is no file; "" if there is one.
    """

    db: float | None = None
    rows: float | None = None
    speed: float | None = None
    share: float | None = None
    note: str = ""

    def cell(self) -> str:
        """The file as text."""
        if self.db is None or self.speed is None:
            return self.note or "not run"
        parts = ["float" if self.share == 0 else f"{self.db:.1f} dB"]
        parts += [] if self.rows is None else [f"{self.rows:.0%} of rows"]
        parts += [f"{self.speed:.2f}x"]
        return ", ".join([*parts, *([f"{self.share:.0%} of MACs"] if self.share else [])])


@dataclass(frozen=True)
class ToolsRow:
    """A network by qtrace's default and by other tools.

    Attributes:
        network: the network.
        files: name of a tool -> the fields of its `ToolFile`.
        measured: the day.
    """

    network: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    measured: str = ""

    TOOLS = ("qtrace", "everything", "onnxruntime", "nncf")
    HEADER = (
        "network",
        "qtrace, default",
        "qtrace, everything",
        "onnxruntime.quantization",
        "NNCF, transformer",
    )
    FILE = "transformers.json"

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return self.network, *(ToolFile(**self.files.get(tool, {})).cell() for tool in self.TOOLS)


_R = TypeVar("_R", FamilyRow, RecipeRow, FakeQuantRow, ExportRow, TorchRow, ToolsRow)


def table(rows: Iterable[_R], kind: type[_R]) -> str:
    """Rows as a Markdown table."""
    lines = [kind.HEADER, ("---",) * len(kind.HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def load(kind: type[_R], folder: Path = RESULTS) -> list[_R]:
    """Reads the stored rows."""
    rows: list[dict[str, Any]] = json.loads((folder / kind.FILE).read_text(encoding="utf-8"))
    return [kind(**row) for row in rows]


def store(rows: Iterable[_R], kind: type[_R], folder: Path = RESULTS) -> None:
    """Replaces the stored rows of the same networks, and adds those of others at the end."""
    path = folder / kind.FILE
    by_network = {row.network: row for row in (load(kind, folder) if path.exists() else ())}
    by_network.update({row.network: row for row in rows})
    data = [dataclasses.asdict(row) for row in by_network.values()]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def today() -> str:
    """The present day (UTC), as rows store it."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def measured_when(rows: Iterable[_R]) -> str:
    """Says in a sentence on which days the rows of a table were measured."""
    days = [row.measured for row in rows]
    known = sorted({day for day in days if day})
    older = days.count("")
    if not known:
        return "The day of these measurements is not stored."
    span = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
    return f"Measured {span}{f'; older rows: {older} of {len(days)}' if older else ''}."
