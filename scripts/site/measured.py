"""The tables of the pages on measurements, from the stored JSON in benchmarks/results."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

from benchmarks import torch_files as files_of_torch
from benchmarks.deployed import checks
from benchmarks.deployed import rows as deployed_rows
from benchmarks.deployed import runtimes as other_runtimes
from benchmarks.deployed import tuning as searches
from benchmarks.kept import FILE as KEPT
from benchmarks.kept import KeptRow
from benchmarks.limits import limit
from benchmarks.shipped import rows as shipped_rows
from benchmarks.torch_families import NETWORKS
from examples.ocr import dropin
from scripts import onnx_open_axes as onnx_open_axes_of
from scripts.stored import (
    RESULTS,
    ExportRow,
    FakeQuantRow,
    FamilyRow,
    Float16Row,
    RecipeRow,
    ToolsRow,
    TorchRow,
    load,
    measured_when,
    table,
)

__all__ = [
    "accuracy",
    "calibration",
    "demo",
    "deployed",
    "deployed_checks",
    "detector_demo",
    "exports",
    "fake_quants",
    "families",
    "family_recipes",
    "family_rules",
    "figures",
    "float16",
    "kept",
    "ocr_client",
    "onnx_kinds",
    "onnx_open_axes",
    "onnx_ops",
    "onnx_shares",
    "runtimes",
    "shipped",
    "speed",
    "torch_families",
    "torch_files",
    "transformers",
    "tuned",
]

_LEAST_GAIN = 0.05  # dB: what is less shows as 0.0
_VERDICT = {True: "met", False: "**missed**", None: ""}


def _stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def speed() -> str:
    """One table for each group of benchmarks, with the day and machine that it was measured on."""
    parts = []
    for name, group in _stored("latest.json").items():
        if not group["rows"]:
            continue
        machine = group["machine"]
        place = f"{machine['cores']} cores of {machine['cpu']}, {machine['date']}"
        parts.append(f"### {name.capitalize()}\n\n`python -m benchmarks --only {name}`; {place}.")
        rows = [
            (r["name"], _spread(r), _target(r), _VERDICT[r["met"]], limit(r["name"])) for r in group["rows"]
        ]
        parts.append(_rows(("what", "median (min..max)", "target", "", "limited by"), rows))
    return "\n\n".join(parts)


def _spread(row: dict[str, Any]) -> str:
    value = row["value"]
    return f"{_digits(value['median'])} {row['unit']} ({_digits(value['low'])}..{_digits(value['high'])})"


def _target(row: dict[str, Any]) -> str:
    return "" if row["target"] is None else f"<= {row['target']:.3g} {row['unit']}"


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def accuracy() -> str:
    """One table for each check."""
    checks: dict[str, list[dict[str, Any]]] = {}
    for row in (row for group in _stored("accuracy.json").values() for row in group["rows"]):
        checks.setdefault(row["check"], []).append(row)
    parts = []
    for check, members in checks.items():
        parts.append(f"### {check}")
        cells = [
            (
                row["net"],
                row["method"],
                _number(row["sqnr"], 1),
                _number(row["metric"], 2),
                _number(row["loss"], 2),
                row["target"],
                _VERDICT[row["met"]],
                row["note"],
            )
            for row in members
        ]
        parts.append(_rows(("network", "method", "SQNR dB", "metric", "loss", "target", "", "note"), cells))
    return "\n\n".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def exports() -> str:
    """The table of scripts/verify_networks.py."""
    rows = load(ExportRow)
    return f"{table(rows, ExportRow)}\n\n{measured_when(rows)}"


def float16() -> str:
    """The table of benchmarks/float16.py."""
    rows = load(Float16Row)
    return f"{table(rows, Float16Row)}\n\n{measured_when(rows)}"


def families() -> str:
    """The table of scripts/families.py."""
    rows = load(FamilyRow)
    return f"{table(rows, FamilyRow)}\n\n{measured_when(rows)}"


def torch_families() -> str:
    """The count of whole networks and the table of `python -m benchmarks.torch_families`."""
    rows = load(TorchRow)
    whole, all_networks = sum(row.whole for row in rows), len(NETWORKS)
    counted = f"{whole} of {len(rows)} networks are whole; the benchmark names {all_networks}, of which "
    missing = all_networks - len(rows)
    counted += f"{missing} have not been measured yet." if missing else "all have been measured."
    return f"{counted}\n\n{table(rows, TorchRow)}\n\n{measured_when(rows)}"


def torch_files() -> str:
    """The table of `python -m benchmarks.torch_files`."""
    return files_of_torch.table(files_of_torch.read())


def family_recipes() -> str:
    """The table of `python -m benchmarks.families`."""
    rows = load(RecipeRow)
    return f"{table(rows, RecipeRow)}\n\n{measured_when(rows)}"


def family_rules() -> str:
    """What rules change where everything is rounded, by `python -m benchmarks.families --rounded`."""
    rows = [row for row in load(RecipeRow) if row.rounded_without]
    cells: list[tuple[str, ...]] = []
    idle: dict[str, list[str]] = {}
    for row in rows:
        for rule, without in row.rounded_without.items():
            gains = [own - other for own, other in zip(row.rounded_db, without, strict=True)]
            name = rule.removeprefix("qtrace/recipes/").replace(".yaml:", ":")
            if max(map(abs, gains)) < _LEAST_GAIN:
                idle.setdefault(name, []).append(row.network)
            else:
                shown = " ".join(f"{gain:+.1f}" for gain in gains)
                cells.append((f"`{name}`", row.network, shown, f"{statistics.median(gains):+.1f}"))
    body = _rows(("rule", "network", "gain of three seeds, dB", "median, dB"), sorted(cells))
    lines = "\n".join(f"- `{rule}`: {'; '.join(networks)}" for rule, networks in sorted(idle.items()))
    return f"{body}\n\nMeasured on {len(rows)} networks. Rules without an effect on some of them:\n\n{lines}"


def transformers() -> str:
    """The table of `python -m benchmarks.transformers`."""
    rows = load(ToolsRow)
    return f"{table(rows, ToolsRow)}\n\n{measured_when(rows)}"


def fake_quants() -> str:
    """The table of `python -m benchmarks.fake_quants`."""
    rows = load(FakeQuantRow)
    return f"{table(rows, FakeQuantRow)}\n\n{measured_when(rows)}"


def demo() -> str:
    """The table of `make demo`, and how long it took."""
    stored = _stored("demo.json")
    rows = [
        (
            row["name"],
            f"{row['graph']:.1f} %",
            _percent(row["runtime"]),
            _percent(row["same"]),
            "" if row["worst_lsb"] is None else str(row["worst_lsb"]),
            f"{row['weight_bytes']:,} B",
        )
        for row in stored["variants"]
    ]
    header = (
        "variant",
        "accuracy in the graph",
        "in onnxruntime",
        "same digit",
        "worst LSB",
        "weights, packed",
    )
    return f"{_rows(header, rows)}\n\n{_duration(stored)}"


def _duration(stored: dict[str, Any]) -> str:
    """Says how long a demo took, and where it ran."""
    seconds = f"It took {stored['seconds']:.0f} s"
    machine = stored.get("machine")
    if machine is None:
        return f"{seconds}; the machine is not stored."
    load = f"load {machine['load_before']} before and {machine['load_after']} after"
    return f"{seconds} on {machine['cores']} cores of {machine['cpu']}, {machine['date']}, {load}."


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} %"


def detector_demo() -> str:
    """The table of `make detector-demo`, and how long it took."""
    stored = _stored("detector_demo.json")
    rows = [
        (
            row["name"],
            f"{row['graph']:.2f}",
            _number(row["runtime"], 2),
            "" if row["worst_lsb"] is None else str(row["worst_lsb"]),
        )
        for row in stored["variants"]
    ]
    table_text = _rows(("variant", "mAP in the graph", "in onnxruntime", "worst LSB"), rows)
    return f"{table_text}\n\n{_duration(stored)}"


def ocr_client() -> str:
    """The table of `make ocr-demo ARGS=--only-client`, and how long it took."""
    stored = _stored("ocr_client.json")
    rows = dropin.cells([dropin.from_dict(row) for row in stored["client"]])
    return f"{_rows(dropin.HEADERS, rows)}\n\n{_duration(stored)}"


def deployed() -> str:
    """One table for each network of the benchmark of deployed networks, with its machine."""
    by_net: dict[str, list[deployed_rows.Row]] = {}
    for row in deployed_rows.read(RESULTS / deployed_rows.RESULTS.name):
        by_net.setdefault(row.net, []).append(row)
    parts = []
    for net, rows in by_net.items():
        cells = [deployed_rows.cells(row) for row in rows]
        used = [i for i in range(1, len(deployed_rows.HEADERS)) if any(row[i] for row in cells)]
        header = tuple(deployed_rows.HEADERS[i] for i in used)
        parts.append(f"### {net[0].upper()}{net[1:]}")
        parts.append(_rows(header, [tuple(row[i] for i in used) for row in cells]))
        loads = [row.load for row in rows if row.load is not None]
        before = f"; load average before each row {min(loads):g} to {max(loads):g}" if loads else ""
        parts.append(f"{'; '.join(sorted({row.machine for row in rows}))}{before}.")
    return "\n\n".join(parts)


def deployed_checks() -> str:
    """The targets of the benchmark of deployed networks, with what was measured."""
    verdicts = {checks.MET: "met", checks.MISSED: "**missed**", checks.UNKNOWN: "not measured"}
    results = checks.check(deployed_rows.read(RESULTS / deployed_rows.RESULTS.name))
    rows = [(c.name, c.target, c.measured, verdicts[c.verdict]) for c in results]
    return _rows(("check", "target", "measured", ""), rows)


def runtimes() -> str:
    """The table of files in OpenVINO and LiteRT, with the machine."""
    file = RESULTS / other_runtimes.RESULTS.name
    machine = json.loads(file.read_text(encoding="utf-8"))["machine"]
    rows = [other_runtimes.cells(row) for row in other_runtimes.read(file)]
    head = f"{machine['cores']} cores of {machine['cpu']}, {machine['date']}."
    return f"{head}\n\n{_rows(other_runtimes.HEADERS, rows)}"


def shipped() -> str:
    """One table for each runtime: qtrace's default beside float and the runtime's own quantizer."""
    stored = shipped_rows.read(RESULTS / shipped_rows.RESULTS.name)
    parts = []
    for runtime in shipped_rows.RUNTIMES:
        rows = [row for row in stored if row.runtime == runtime]
        if not rows:
            continue
        own = {row.net: row for row in rows if row.variant == shipped_rows.OWN}
        cells = [shipped_rows.cells(row, own.get(row.net)) for row in rows]
        parts.append(f"## {_TITLES[runtime]}")
        parts.append(f"{_where(rows)} In words: {shipped_rows.summary(rows, runtime)}.")
        parts.append(_rows(shipped_rows.headers(), cells))
    return "\n\n".join(parts)


_TITLES = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO", "litert": "LiteRT", "ncnn": "ncnn"}


def _where(rows: list[shipped_rows.ShippedRow]) -> str:
    """Says the versions, the processors, the days and the loads of rows."""
    facts = [sorted({value for value in values if value}) for values in zip(*map(_facts, rows), strict=True)]
    versions, processors, days = (", ".join(values) for values in facts)
    loads = [row.load for row in rows if row.load is not None]
    load = f"; load average {min(loads):g} to {max(loads):g} beside it" if loads else ""
    return f"Versions: {versions}; {processors}; {days}{load}."


def _facts(row: shipped_rows.ShippedRow) -> tuple[str, str, str]:
    tool = row.version.partition(", ")[2]
    version = row.version.partition(", ")[0]
    return f"{version} with ai-edge-quantizer {tool}" if tool else version, row.processor, row.measured


def tuned() -> str:
    """The table of searches, beside what was measured of recipes by hand, with the machine."""
    file = RESULTS / searches.RESULTS.name
    machine = json.loads(file.read_text(encoding="utf-8"))["machine"]
    measured = deployed_rows.read(RESULTS / deployed_rows.RESULTS.name)
    rows = [searches.cells(row, measured) for row in searches.read(file)]
    head = f"{machine['cores']} cores of {machine['cpu']}, {machine['date']}."
    return f"{head}\n\n{_rows(searches.HEADERS, rows)}"


def calibration() -> str:
    """The table of times of a calibration pass, in MegEngine and in onnxruntime."""
    timed = {row["name"]: row for group in _stored("latest.json").values() for row in group["rows"]}
    rows = []
    for net in ("ResNet-18 8x3x96x96", "MobileNetV2", "CSPDarknet"):
        name = f"{net}: calibration pass / float forward, mse"
        pair = [f"{timed[key]['value']['median']:.2f}" for key in (f"{name}, onnxruntime", name)]
        rows.append((net.partition(" ")[0], *pair))
    return _rows(("network", "by onnxruntime, which `auto` takes", "by MegEngine"), rows)


# Row of a group in latest.json -> how the README calls it.
_FIGURES = {
    "ResNet-18 8x3x96x96: calibrate, 256 images, auto, minmax / onnxruntime.quantization MinMax": (
        "calibration time / onnxruntime.quantization's, 256 images"
    ),
    "ResNet-18 8x3x96x96: QAT step / step of MegEngine's quantize_qat, lsq": (
        "time of a training step, LSQ / MegEngine's `quantize_qat`"
    ),
}
_DEPLOYED = (
    ("recogniser", "PP-OCRv4 text recogniser, int8: speed against float, SQNR"),
    ("detector", "PP-OCRv4 text detector, int8: speed against float, SQNR"),
)
_ACCURACY = (
    ("W8A8 PTQ", "mobilenet", "qtrace, recipe int8", "accuracy, MobileNetV2-like, int8 PTQ"),
    ("W8A8 PTQ", "detector", "qtrace, recipe of its family, ptq of int8", "mAP, FPN detector, int8 PTQ"),
    ("W4A4 QAT", "resnet", "qtrace, lsq, 300 steps", "accuracy, residual network, 4-bit QAT"),
)


# Runtime -> its name; beside the first kind of file of its own quantizer.
_SHIPPED = {
    "onnxruntime": "onnxruntime 1.32",
    "openvino": "OpenVINO",
    "litert": "LiteRT",
}


def figures() -> str:
    """The table of figures in the README."""
    stored = [row for group in _stored("accuracy.json").values() for row in group["rows"]]
    rows = []
    for check, net, method, title in _ACCURACY:
        (measured_row,) = [r for r in stored if (r["check"], r["net"], r["method"]) == (check, net, method)]
        exact = measured_row["metric"] + measured_row["loss"]
        rows.append((title, f"{measured_row['metric']:.1f} % (float: {exact:.1f} %)"))
    rows += [_beside_others(net, title) for net, title in _DEPLOYED]
    rows.append(_in_runtimes())
    exported = load(ExportRow)
    equal = min(row.compared["onnxruntime"][1] for row in exported)
    worst = max(row.compared["onnxruntime"][0] for row in exported)
    rows.append(
        (
            f"integers equal in onnxruntime, op by op, {len(exported)} networks",
            f"{equal:.3%} or more; worst difference {worst:.0f} LSB",
        )
    )
    timed = {row["name"]: row for group in _stored("latest.json").values() for row in group["rows"]}
    rows += [(title, _spread(timed[name]).replace(" x ", " ")) for name, title in _FIGURES.items()]
    return _rows(("what", "measured"), rows)


def _beside_others(net: str, title: str) -> tuple[str, str]:
    """Speed against float and SQNR of the default recipe, and of the best file of each other tool."""
    measured = [row for row in deployed_rows.read(RESULTS / deployed_rows.RESULTS.name) if row.net == net]
    texts = []
    for name, variants in (
        ("", ("balanced",)),
        ("onnxruntime.quantization", deployed_rows.ONNXRUNTIME),
        ("NNCF", deployed_rows.NNCF),
    ):
        best = max((row for row in measured if row.variant in variants), key=lambda row: row.sqnr or 0.0)
        texts.append(f"{name} {best.speed:.2f}x, {best.sqnr:.1f} dB".strip())
    return title, f"{texts[0]} ({'; '.join(texts[1:])})"


def _in_runtimes() -> tuple[str, str]:
    """Speed beside the files of each runtime's own static quantizer, and how much less noise there is."""
    stored = shipped_rows.read(RESULTS / shipped_rows.RESULTS.name)
    rows = {(row.runtime, row.net, row.variant): row for row in stored}
    counts, speeds, less = [], [], []
    for runtime, title in _SHIPPED.items():
        peer = shipped_rows.RUNTIMES[runtime][0]
        pairs = [
            (row, rows[runtime, row.net, peer])
            for row in stored
            if (row.runtime, row.variant) == (runtime, shipped_rows.OWN) and peer in row.against
        ]
        medians = [own.against[peer][0] for own, _ in pairs]
        counts.append(f"{title} ({len(pairs)})")
        speeds.append(f"{min(medians):.2f}x to {max(medians):.2f}x")
        less += [own.db[group] - theirs.db[group] for own, theirs in pairs for group in theirs.db]
    assert min(less) > 0, "the words below say that there is less noise"
    return (
        f"speed next to other tools' files (networks): {', '.join(counts)}",
        f"{', '.join(speeds)}; at least {min(less):.1f} dB better SQNR",
    )


def onnx_kinds() -> str:
    """The number of ONNX's conformance tests by kind and verdict."""
    stored = _stored("onnx.json")
    rows = []
    for kind, ops in sorted(stored["kinds"].items(), key=lambda item: _KINDS.index(item[0])):
        equal, refused, wrong = (sum(_count(op, verdict) for op in ops.values()) for verdict in _VERDICTS)
        rows.append((kind, str(equal + refused + wrong), str(equal), str(refused), str(wrong)))
    heading = _rows(("tests", "number", "equal", "refused", "wrong"), rows)
    return f"{heading}\n\nTests of onnx {stored['onnx']}, measured {stored['measured']}."


def onnx_shares() -> str:
    """The share of MACs on integers of the light networks."""
    rows = [
        (f"`{name.removeprefix('light_')}`", f"`{share['recipe']}`", f"{100 * share['integers']:.1f} %")
        for name, share in _stored("onnx.json")["shares"].items()
    ]
    return _rows(("network", "recipe", "MACs on integers"), rows)


_KINDS = ("node", "pytorch-operator", "pytorch-converted", "simple", "light")
_LONGEST_REASON = 72  # characters of a reason in the table of ONNX ops
_VERDICTS = (("equal",), ("refused",), ("wrong", "crashed"))


def _count(op: dict[str, Any], verdicts: tuple[str, ...]) -> int:
    cases: list[Any] = []
    for verdict in verdicts:
        group = op.get(verdict, [])
        cases += group if isinstance(group, list) else [case for part in group.values() for case in part]
    return len(cases)


def onnx_open_axes() -> str:
    """The table of the node tests whose axes are open."""
    stored = _stored(onnx_open_axes_of.FILE.name)
    header = ("op", "tests", "axes that stay open", "why others do not")
    when = f"onnx {stored['onnx']}, {stored['measured']}."
    return f"{_rows(header, onnx_open_axes_of.rows(stored['ops']))}\n\n{when}"


def kept() -> str:
    """The table of what quantized files keep of their own."""
    rows = [KeptRow(**row) for row in _stored(KEPT.name)]
    return _rows(KeptRow.HEADER, [row.cells() for row in rows])


def onnx_ops() -> str:
    """The node tests by op: how many are equal, and why the others are refused."""
    rows = []
    for name, op in _stored("onnx.json")["kinds"]["node"].items():
        total = sum(_count(op, verdicts) for verdicts in _VERDICTS)
        reasons = sorted(op.get("refused", {}).items(), key=lambda item: -len(item[1]))
        text = "; ".join(f"{_shortened(reason, name)} ({len(cases)})" for reason, cases in reasons[:2])
        others = sum(len(cases) for _, cases in reasons[2:])
        more = f"; other reasons ({others})" if others else ""
        rows.append((f"`{name}`", f"{len(op['equal'])} of {total}", f"{text}{more}"))
    return _rows(("op", "equal", "refused, number of tests"), rows)


_COMMON = re.compile(
    r"^(a node has|\d+ nodes have) no equal in a traced graph: |: convert the network to .*$|\.$"
)


def _shortened(reason: str, op: str) -> str:
    """Returns a reason without what all of them say, for a cell of a table."""
    text = _COMMON.sub("", _COMMON.sub("", reason)).removeprefix(f"{op} ")
    text = text.replace("|", "/").replace("<", "&lt;").replace("*", "")
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3].rstrip()}..."
