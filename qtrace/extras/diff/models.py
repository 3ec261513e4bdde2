"""What differs between two modules or recipes, as a report; modules are compared site by site."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Union

import numpy as np
from megengine.module import Module

from qtrace.config import QConfig
from qtrace.config.recipe import is_recipe_file, load_recipe, recipe_names
from qtrace.display import Displayed, format_table
from qtrace.errors import ConfigError, GraphError, QtraceError
from qtrace.extras.diff.onnx_files import FileDifference, compare_files
from qtrace.graph.files.serialize import load
from qtrace.graph.interpreter import evaluate_fixed
from qtrace.graph.types import TracedModule
from qtrace.plugins.options import check_arguments
from qtrace.preparation.figures import read_figures
from qtrace.preparation.model import QuantizedModel, QuantizedSite, check_quantized
from qtrace.process import on_engine_thread
from qtrace.quantizing.reporting import QUANTIZED, VERDICT
from qtrace.scheme import QParams
from qtrace.storage.files import parse_document

_RULES = "rules"


@dataclass(frozen=True)
class ConfigChange:
    """A key with two values, or a rule that only one config has.

    Attributes:
        key: the dotted key, such as ``observers.activation``; ``rules`` for each rule.
        first: the value of the first config as plain data; None if there is none.
        second: the value of the second config.
    """

    key: str
    first: Any
    second: Any


def compare_configs(first: QConfig, second: QConfig) -> tuple[ConfigChange, ...]:
    """Returns the keys whose values differ, in the order of the first config, and then of the second one.

    Rules are compared in order, since the last one that matches wins: a rule that moved is in the result
    twice, as one that went and one that came.
    """
    a, b = first.to_dict(), second.to_dict()
    rules = _rules(a.pop(_RULES, None) or (), b.pop(_RULES, None) or ())
    return (*_changes("", a, b), *rules)


def _changes(key: str, first: Any, second: Any) -> Iterator[ConfigChange]:
    """Yields the differing values below ``key``, as deep as both sides are mappings."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in dict.fromkeys((*first, *second)):
            yield from _changes(f"{key}.{name}" if key else name, first.get(name), second.get(name))
    elif first != second:
        yield ConfigChange(key, first, second)


def _rules(first: Sequence[Any], second: Sequence[Any]) -> Iterator[ConfigChange]:
    a, b = ([json.dumps(rule, sort_keys=True) for rule in rules] for rules in (first, second))
    for tag, i, j, k, m in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from (ConfigChange(_RULES, rule, None) for rule in first[i:j])
            yield from (ConfigChange(_RULES, None, rule) for rule in second[k:m])


@dataclass(frozen=True)
class OpChange:
    """An op that runs in another way.

    Attributes:
        op: the name of its first output.
        kind: its op kind.
        first: how the first module runs it: int, fused, carried, float or shape.
        second: how the second module runs it.
        reason: why it is in float, where it is.
    """

    op: str
    kind: str
    first: str
    second: str
    reason: str


@dataclass(frozen=True)
class SchemeChange:
    """A site with another scheme, in words."""

    site: str
    sort: str
    first: str
    second: str


@dataclass(frozen=True)
class ScaleChange:
    """A site whose scale or zero point differs; sites that share them are named by the first one.

    Attributes:
        site: the site.
        sort: activation or weight.
        lsb: the largest distance that an end of a channel's range moved, in steps (LSB) of the first module.
        first: the first module's scale, of the channel that moved most.
        second: the second module's scale of that channel.
        zero_point: how far the zero point of that channel moved.
        channels: the number of channels that differ.
        of: the number of channels.
    """

    site: str
    sort: str
    lsb: float
    first: float
    second: float
    zero_point: int
    channels: int
    of: int


@dataclass(frozen=True)
class IntegerChange:
    """A weight or bias whose integers differ.

    Attributes:
        site: the site.
        sort: weight, bias, or activation for another stored value.
        count: how many integers differ.
        of: how many there are.
        largest: the largest difference; None if the shapes differ.
    """

    site: str
    sort: str
    count: int
    of: int
    largest: int | None


@dataclass(frozen=True)
class FigurePair:
    """A figure of both modules; None where one lacks it."""

    name: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """The second figure over the first one."""
        return (
            None if self.first is None or self.second is None or not self.first else self.second / self.first
        )


@dataclass(frozen=True, repr=False)
class Difference(Displayed):
    """What differs between two quantized modules.

    Attributes:
        config: the keys of the config that differ.
        ops: the ops that run in another way.
        gone: the sites of only the first module.
        come: the sites of only the second module.
        schemes: the sites with another scheme.
        scales: the sites with another scale or zero point, the one that moved most first.
        integers: the weights and biases with other integers.
        figures: size, MACs, predicted time and other figures, whether they differ or not.
    """

    config: tuple[ConfigChange, ...] = ()
    ops: tuple[OpChange, ...] = ()
    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    schemes: tuple[SchemeChange, ...] = ()
    scales: tuple[ScaleChange, ...] = ()
    integers: tuple[IntegerChange, ...] = ()
    figures: tuple[FigurePair, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether config, ops, sites, scales and integers are the same."""
        parts = (self.ops, self.gone, self.come, self.schemes, self.scales, self.integers)
        return not self.config and not any(parts)

    def with_figures(self, figures: Sequence[FigurePair]) -> Difference:
        """Returns the difference with more figures, such as a verdict's."""
        return replace(self, figures=(*self.figures, *figures))

    def table(self, max_width: int | None = 140, limit: int | None = 20) -> str:
        """Returns a text: a table for each sort of difference, with at most ``limit`` rows; None for all."""
        parts = [
            *_part(
                "config", ("key", "A", "B"), [(c.key, _show(c.first), _show(c.second)) for c in self.config]
            ),
            *_part(
                "ops that run in another way",
                ("op", "kind", "A", "B", "reason"),
                [(o.op, o.kind, o.first, o.second, o.reason) for o in self.ops],
            ),
            *_part("sites of A alone", ("site",), [(name,) for name in self.gone]),
            *_part("sites of B alone", ("site",), [(name,) for name in self.come]),
            *_part("schemes", ("site", "A", "B"), [(s.site, s.first, s.second) for s in self.schemes]),
            *_part(
                "scales that moved, in steps (LSB) of A",
                ("site", "LSB", "scale of A", "scale of B", "zero point", "channels"),
                [_scale_row(s) for s in self.scales],
            ),
            *_part(
                "integers that differ",
                ("site", "differ", "of", "share", "by at most"),
                [_integer_row(i) for i in self.integers],
            ),
        ]
        texts = [_cut(*part, max_width, limit) for part in parts]
        if self.empty:
            texts.append("config, ops, sites, scales and integers are the same")
        rows = [(f.name, _number(f.first), _number(f.second), _times(f.ratio)) for f in self.figures]
        if rows:
            texts.append("figures\n" + format_table(("figure", "A", "B", "B / A"), rows, max_width))
        return "\n\n".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as plain data."""
        return {"same": self.empty, **asdict(self)}


_Rows = list[tuple[Any, ...]]


def _part(title: str, headers: tuple[str, ...], rows: _Rows) -> Iterator[tuple[str, tuple[str, ...], _Rows]]:
    if rows:
        yield title, headers, rows


def _cut(title: str, headers: tuple[str, ...], rows: _Rows, max_width: int | None, limit: int | None) -> str:
    text = f"{title}: {len(rows)}\n{format_table(headers, rows[:limit], max_width)}"
    left = 0 if limit is None else len(rows) - limit
    return f"{text}\n... and {left} more" if left > 0 else text


def _scale_row(change: ScaleChange) -> tuple[Any, ...]:
    channels = f"{change.channels} of {change.of}" if change.of > 1 else ""
    zero = f"{change.zero_point:+d}" if change.zero_point else ""
    return change.site, f"{change.lsb:.3g}", f"{change.first:.6g}", f"{change.second:.6g}", zero, channels


def _integer_row(change: IntegerChange) -> tuple[Any, ...]:
    largest = "other shape" if change.largest is None else change.largest
    return change.site, change.count, change.of, f"{change.count / max(change.of, 1):.1%}", largest


def _show(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}x"


_FIGURES = {
    "parameter bytes": "bytes",
    "parameter bytes in float": "float_bytes",
    "MACs": "macs",
    "MACs on integers": "integer_macs",
}
_TIMES = {"predicted ms": "milliseconds", "predicted ms in float": "float_milliseconds"}

Pair = tuple[QuantizedSite, QuantizedSite]


def compare_models(first: Module | QuantizedModel, second: Module | QuantizedModel) -> Difference:
    """Compares two calibrated prepared modules, or converted ones; sites and ops are paired by name.

    Args:
        first: the first module.
        second: the second module.

    Raises:
        GraphError: when a module is not quantized.
        CalibrationError: when a site was never calibrated.
    """
    a, b = QuantizedModel.of(first), QuantizedModel.of(second)
    mine, others = ({site.name: site for site in view.sites} for view in (a, b))
    pairs = [(site, others[name]) for name, site in mine.items() if name in others]
    return Difference(
        config=compare_configs(a.config, b.config),
        ops=tuple(_ops(a, b)),
        gone=tuple(name for name in mine if name not in others),
        come=tuple(name for name in others if name not in mine),
        schemes=tuple(_schemes(pairs)),
        scales=tuple(sorted(_scales(pairs), key=lambda change: -change.lsb)),
        integers=tuple(_integers(a, b, pairs)),
        figures=tuple(_figures(a, b)),
    )


def _ops(a: QuantizedModel, b: QuantizedModel) -> Iterator[OpChange]:
    """Yields the ops that run in another way."""
    others = {note.name: note for note in b.annotation.notes}
    for note in a.annotation.notes:
        other = others.get(note.name)
        if other is not None and other.state != note.state:
            reason = other.reason if other.state == "float" else note.reason
            yield OpChange(note.name, note.kind or note.op, note.state, other.state, reason)


def _schemes(pairs: list[Pair]) -> Iterator[SchemeChange]:
    for a, b in pairs:
        if a.plan is not None and b.plan is not None and a.plan.scheme != b.plan.scheme:
            yield SchemeChange(a.name, a.sort, a.plan.scheme.describe(), b.plan.scheme.describe())


def _scales(pairs: list[Pair]) -> Iterator[ScaleChange]:
    """Yields the groups of sites with one scheme whose scale or zero point differs."""
    seen = set()
    for a, b in pairs:
        if (
            a.plan is None or b.plan is None or (a.group, b.group) in seen
        ):  # the scale of a bias follows others
            continue
        seen.add((a.group, b.group))
        change = _scale(a, a.qparams, b.qparams)
        if change is not None:
            yield change


def _scale(site: QuantizedSite, a: QParams, b: QParams) -> ScaleChange | None:
    if a.scheme != b.scheme or a.scale.shape != b.scale.shape or a == b:
        return None
    size = np.atleast_1d(a.scale).astype(np.float64)
    borders = (_borders(a) - _borders(b)) / size
    moved = np.abs(borders).max(axis=0)
    worst = int(moved.argmax())
    differing = (a.scale != b.scale) | (a.zero_point != b.zero_point)
    return ScaleChange(
        site=site.name,
        sort=site.sort,
        lsb=float(moved[worst]),
        first=float(size[worst]),
        second=float(np.atleast_1d(b.scale)[worst]),
        zero_point=int(np.atleast_1d(b.zero_point - a.zero_point)[worst]),
        channels=int(np.count_nonzero(differing)),
        of=size.size,
    )


def _borders(qparams: QParams) -> np.ndarray:
    """Returns the ends of the range of each channel, float64 of shape (2, channels)."""
    ends = np.array([[qparams.scheme.qmin], [qparams.scheme.qmax]], np.float64)
    return (ends - np.atleast_1d(qparams.zero_point)) * np.atleast_1d(qparams.scale).astype(np.float64)


def _integers(a: QuantizedModel, b: QuantizedModel, pairs: list[Pair]) -> Iterator[IntegerChange]:
    """Yields the weights and biases whose integers differ."""
    stored = [pair for pair in pairs if all(site.static or site.sort != "activation" for site in pair)]
    values = [evaluate_fixed(v.module, (pair[i].node for pair in stored)) for i, v in enumerate((a, b))]
    for pair in stored:
        x, y = (_grid(site, values[i]) for i, site in enumerate(pair))
        if x.shape != y.shape:
            yield IntegerChange(pair[0].name, pair[0].sort, x.size, x.size, None)
        elif not np.array_equal(x, y):
            apart = np.abs(x.astype(np.int64) - y)
            count = int(np.count_nonzero(apart))
            yield IntegerChange(pair[0].name, pair[0].sort, count, apart.size, int(apart.max()))


def _grid(site: QuantizedSite, values: dict[Any, Any]) -> np.ndarray:
    return site.integers(values[site.node].numpy())


def _figures(a: QuantizedModel, b: QuantizedModel) -> Iterator[FigurePair]:
    first, second = read_figures(a.module), read_figures(b.module)
    for name, attribute in _FIGURES.items():
        yield FigurePair(name, getattr(first, attribute), getattr(second, attribute))
    if first.placement is None and second.placement is None:
        return
    for name, attribute in _TIMES.items():
        times = [None if p is None else getattr(p, attribute) for p in (first.placement, second.placement)]
        yield FigurePair(name, times[0], times[1])


_VERDICT_FIGURES = {
    "sqnr_db": "output SQNR in dB",
    "agreement": "same prediction",
    "metric": "metric",
}  # in verdicts

Side = Union[QConfig, TracedModule, str, "os.PathLike[str]"]


@check_arguments
@on_engine_thread
def diff(
    a: Side, b: Side, *, allow: Sequence[str] = (), allow_code: bool = False
) -> Difference | FileDifference:
    """Shows what differs between two recipes, two models or two ONNX files, as ``qtrace diff`` does.

    Two models are compared by config, ops, sites, scales, integers of weights and biases, and figures; two
    folders by the figures of their verdicts, too. Sites are paired by name. Nodes of ONNX files are paired by
    name or result.

    Args:
        a: a recipe (`QConfig`, name or file), a prepared or converted module, its file, a folder of ``qtrace
            calibrate``, or an ONNX file.
        b: another one of the same kind.
        allow: the user's own classes that the files of models may name.
        allow_code: whether recipes may name code of the user's.

    Returns:
        The differences; ``empty`` where there are none.

    Raises:
        ConfigError: for two things of unlike kinds.
        GraphError: for a model that is not quantized, or a file or folder that holds none.
    """
    kinds = [_kind(side) for side in (a, b)]
    if kinds[0] != kinds[1]:
        raise ConfigError(_unlike(dict(zip(kinds, (a, b), strict=True))))
    if kinds[0] == "file":
        return compare_files(_path(a), _path(b))
    if kinds[0] == "recipe":
        first, second = (_recipe(side, allow_code) for side in (a, b))
        return Difference(config=compare_configs(first, second))
    models = [_model(side, allow) for side in (a, b)]
    return compare_models(*models).with_figures(_verdicts(a, b))


def _path(side: Side) -> Path:
    return Path(os.fspath(side))  # type: ignore[arg-type]


def _kind(side: Side) -> str:
    """Returns ``recipe``, ``model`` or ``file``, for an ONNX file."""
    if isinstance(side, QConfig):
        return "recipe"
    if isinstance(side, TracedModule):
        return "model"
    if not isinstance(side, (str, os.PathLike)):
        raise ConfigError(f"diff takes recipes, modules and paths, not {type(side).__name__}.")
    path = _path(side)
    if path.suffix.lower() == ".onnx":
        return "file"
    if is_recipe_file(path.name) or (not path.exists() and str(side) in recipe_names()):
        return "recipe"
    return "model"


def _unlike(sides: dict[str, Side]) -> str:
    """Says what the two are, and what to give instead."""
    names = {kind: _name(side) for kind, side in sides.items()}
    if "file" in names:
        other = next(name for kind, name in names.items() if kind != "file")
        return (
            f"{names['file']} is an ONNX file and {other} is not: give two ONNX files, or export the "
            "other one."
        )
    return (
        f"{names['recipe']} is a recipe and {names['model']} a model: give two recipes, or two models or "
        "folders."
    )


def _name(side: Side) -> str:
    if isinstance(side, QConfig):
        return "the QConfig"
    return "the module" if isinstance(side, TracedModule) else os.fspath(side)


def _recipe(side: Any, allow_code: bool) -> QConfig:
    return side if isinstance(side, QConfig) else load_recipe(side, allow_code=allow_code)


def _model(side: Any, allow: Sequence[str]) -> TracedModule:
    """Loads a quantized model.

    Raises:
        GraphError: for a folder without one, or a model that is not quantized.
    """
    model, name = side, _name(side)
    if not isinstance(side, TracedModule):
        path = _path(side)
        if path.is_dir() and not (path / QUANTIZED).exists():
            raise GraphError(
                f"{name} is a folder without {QUANTIZED}: give a file, or a folder that `qtrace calibrate` "
                "has written."
            )
        model = load(path / QUANTIZED if path.is_dir() else path, allow=allow)
    check_quantized(model, name)
    return model


def _verdicts(a: Side, b: Side) -> list[FigurePair]:
    """Returns the measured figures of the verdicts of two folders, as far as they have any."""
    first, second = (_read_verdict(side) for side in (a, b))
    return [FigurePair(name, first.get(name), second.get(name)) for name in {**first, **second}]


def _read_verdict(side: Side) -> dict[str, float]:
    """Returns the figures of a folder's verdict by their names in texts, column groups included."""
    file = None if isinstance(side, (QConfig, TracedModule)) else _path(side) / VERDICT
    if file is None or not file.parent.is_dir() or not file.exists():
        return {}
    try:
        verdict = parse_document(file.read_bytes())["verdict"]
        groups = verdict.get("groups", ())
        figures = {text: verdict.get(key) for key, text in _VERDICT_FIGURES.items()}
        if len(groups) > 1:
            figures |= {f"SQNR in dB of {group['name']}": group["sqnr_db"] for group in groups}
        return {k: v for k, v in figures.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise QtraceError(f"{file} cannot be read ({error}): calibrate again, or delete it.") from error
