"""The folder of a calibrated graph: both models, the report, the explanation, the verdict and its cure."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["CURE", "FILES", "QUANTIZED", "VERDICT", "write_folder"]

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
