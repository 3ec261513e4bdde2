"""A drawing of the stages as SVG: what each public function takes and gives, from the functions."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from scripts.site import api, docstrings, source
from scripts.site.plugins import algorithms

__all__ = ["STAGES", "Stage", "drawing", "others"]


@dataclass(frozen=True)
class Stage:
    """A step of the way from a model to a runtime.

    ``function`` is a public name of qtrace, ``gives`` what the next stage gets, and ``optional`` says that
    the way may leave the stage out.
    """

    function: str
    gives: str
    optional: bool = False


STAGES = (
    Stage("trace", "traced module"),
    Stage("prepare", "prepared module, phase float"),
    Stage("calibrate", "calibrated module, phase quantize"),
    Stage("finetune", "the same, trained", optional=True),
    Stage("convert", "converted module"),
    Stage("export", "file"),
    Stage("verify", "report"),
)

_WIDTH, _BOX, _STEP = 760, 58, 96


def others() -> dict[str, str]:
    """Stage -> the text beside it in the drawing: the choices that the code lists."""
    by_name, phases, formats = algorithms(), source.find("PHASES"), source.room("export").formats
    stages: dict[str, list[str]] = {}
    for name, cls in by_name.items():
        stages.setdefault(cls.stage, []).append(name)  # type: ignore[attr-defined]
    return {
        "prepare": "ptq: " + ", ".join(stages["float"]),
        "calibrate": "ptq: " + ", ".join(stages["calibrated"]),
        "finetune": "or a loop of your own: set_phase " + " | ".join(phases),
        "export": ", ".join(formats()),
    }


def drawing() -> str:
    """The drawing, with the colours of the page."""
    import qtrace

    beside = others()
    height = _STEP * len(STAGES) - (_STEP - _BOX) + 64
    parts = [
        f'<svg class="stages" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="The stages of qtrace" '
        'xmlns="http://www.w3.org/2000/svg">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        f'<text class="given" x="{_WIDTH / 2}" y="14">Module</text>',
        _arrow(20, 44),
    ]
    for index, stage in enumerate(STAGES):
        top = 48 + index * _STEP
        summary = docstrings.summary(api.public(qtrace, stage.function).__doc__)
        parts.append(_box(stage, top, summary, beside.get(stage.function, "")))
        if index + 1 < len(STAGES):
            parts.append(_arrow(top + _BOX, top + _STEP - 4))
            x, y = _WIDTH / 2 + 10, top + _BOX + 24
            parts.append(
                f'<text class="given" style="text-anchor:start" x="{x}" y="{y}">{stage.gives}</text>'
            )
    return "\n".join([*parts, "</svg>"])


def _box(stage: Stage, top: int, summary: str, beside: str) -> str:
    kind = "stage optional" if stage.optional else "stage"
    text = _short(summary.replace("``", "").replace("`", ""), 92)
    lines = [
        f'<a href="../../reference/api/qtrace/#qtrace.{stage.function}">',
        f'<rect class="{kind}" x="20" y="{top}" width="{_WIDTH - 40}" height="{_BOX}" rx="6"/>',
        f'<text class="name" x="34" y="{top + 22}">qtrace.{stage.function}</text>',
    ]
    if beside:
        lines.append(
            f'<text class="beside" x="{_WIDTH - 34}" y="{top + 22}">{escape(_short(beside, 78))}</text>'
        )
    lines.append(f'<text class="what" x="34" y="{top + 44}">{escape(text)}</text></a>')
    return "".join(lines)


def _short(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return text[:length].rpartition(" ")[0].rstrip(",;:") + " ..."


def _arrow(start: float, end: float) -> str:
    return f'<path class="way" d="M{_WIDTH / 2},{start} V{end}" marker-end="url(#tip)"/>'
