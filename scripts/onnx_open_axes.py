"""Imports ONNX's node tests with open axes, and counts which of them stay open, for the page on ONNX ops.

    python -m scripts.onnx_open_axes                # all ops: some minutes
    python -m scripts.onnx_open_axes Conv Resize    # the tests of some ops
    python -m scripts.onnx_open_axes --write        # all, stored in benchmarks/results/open_axes.json

The bodies of functions (`..._expanded`) are left out. Of a test that comes in, each axis of an input that is
longer than 1 gets a name instead of its size; axes of equal size share the name, as ops may need.
What is imported then must give the same outputs, and `qtrace.from_onnx` proves it at two other sizes in
onnxruntime. The exit code is 1 if an output differs.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import qtrace
from qtrace.errors import QtraceError
from qtrace.graph.open_axes import read_open_axes
from scripts.onnx_coverage import FILE as CONFORMANCE
from scripts.onnx_coverage import short_reason
from scripts.stored import RESULTS, today
from tests.importing.onnx.binding import bind
from tests.importing.onnx.cases import Case, load_cases
from tests.importing.onnx.judging import first_problem, run_imported

__all__ = ["FILE", "Count", "count", "main", "opened", "summarize"]

FILE = RESULTS / "open_axes.json"
_SHOWN_REASONS = 3


@dataclass(frozen=True)
class Count:
    """What became of the open axes of one test.

    Attributes:
        case: the name of the test.
        op: the op that it is about.
        axes: how many axes were open in the file.
        kept: how many of them are open in the graph.
        reasons: why the others are fixed; or why the file was refused, or its output differs.
        problem: ``refused``, ``wrong``, or "" for a test that gives its outputs.
    """

    case: str
    op: str
    axes: int
    kept: int = 0
    reasons: tuple[str, ...] = field(default=())
    problem: str = ""


def opened(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """Returns a copy of a model whose inputs name their sizes, and how many axes got a name."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    stored = {tensor.name for tensor in copy.graph.initializer}
    axes = 0
    for value in copy.graph.input:
        if value.name in stored or not value.type.HasField("tensor_type"):
            continue
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_value > 1:
                axis.dim_param = f"size_{axis.dim_value}"  # replaces the number: they are one field
                axes += 1
    for value in (*copy.graph.output, *copy.graph.value_info):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return copy, axes


def count(case: Case, folder: Path) -> Count | None:
    """Imports a test with open axes; returns None if it has none."""
    model, values = bind(case)
    model, axes = opened(model)
    if axes == 0:
        return None
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    inputs = {name: value for name, value in values.items() if value is not None}
    try:
        traced = qtrace.from_onnx(path, shapes={name: value.shape for name, value in inputs.items()})
        results = run_imported(traced, inputs)
    except QtraceError as error:
        return Count(case.name, case.op, axes, 0, (short_reason(str(error)),), "refused")
    except RuntimeError as error:  # of MegEngine, which the graph should not reach
        return Count(case.name, case.op, axes, 0, (short_reason(str(error)),), "wrong")
    if problem := first_problem(results, case.outputs, model, inputs):
        return Count(case.name, case.op, axes, 0, (problem,), "wrong")
    record = read_open_axes(traced)
    if record is None:
        return Count(case.name, case.op, axes)
    reasons = tuple(dict.fromkeys(short_reason(axis.reason) for axis in record.fixed))
    return Count(case.name, case.op, axes, axes - len(record.fixed), reasons)


def count_all(names: Iterable[str] = ()) -> list[Count]:
    """Counts the axes of the node tests that `scripts.onnx_coverage` finds equal.

    Args:
        names: the ops; none for all.
    """
    chosen = set(names)
    stored = json.loads(CONFORMANCE.read_text(encoding="utf-8"))["kinds"]["node"]
    equal = {name for op in stored.values() for name in op["equal"]}
    counts = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for case in load_cases("node"):
            if case.name in equal and "_expanded" not in case.name and (not chosen or case.op in chosen):
                counts.append(count(case, Path(folder)))
    return [result for result in counts if result is not None]


def summarize(counts: Sequence[Count]) -> dict[str, Any]:
    """Builds what the file stores: by op, the number of tests and axes, and why some are not open."""
    ops: dict[str, dict[str, Any]] = {}
    for result in sorted(counts, key=lambda c: (c.op.lower(), c.case)):
        op = ops.setdefault(result.op, {"tests": 0, "axes": 0, "kept": 0})
        op["tests"] += 1
        op["axes"] += result.axes
        op["kept"] += result.kept
        for reason in result.reasons:
            text = f"{result.problem}: {reason}" if result.problem else reason
            op.setdefault("reasons", {}).setdefault(_general(text), []).append(result.case)
    return {"onnx": onnx.__version__, "measured": today(), "ops": ops}


# What a reason says of one test alone: names, shapes, the axis, and messages of MegEngine and onnxruntime.
_SPECIAL = (
    (r" '[^']*'", ""),
    (r" (\w+\.\w+) fails on .*", r" \1 fails at another size"),
    (r":? \(?\[ONNXRuntimeError\].*", ""),
    (r", of which axis \d+ is open", ", of which an axis is open"),
)


def _general(reason: str) -> str:
    """Returns a reason without what it says of one test alone."""
    for pattern, text in _SPECIAL:
        reason = re.sub(pattern, text, reason)
    return reason


def rows(ops: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns a row for each op that does not keep all axes open, and one for the others together.

    An op with many reasons shows those of most tests.
    """
    whole = [op for op in ops.values() if op["kept"] == op["axes"]]
    listed = [
        (f"`{name}`", str(op["tests"]), f"{op['kept']} of {op['axes']}", _most(op.get("reasons", {})))
        for name, op in ops.items()
        if op["kept"] < op["axes"]
    ]
    total = sum(op["axes"] for op in whole)
    tests = str(sum(op["tests"] for op in whole))
    return [(f"{len(whole)} other ops", tests, f"{total} of {total}", ""), *listed]


def _most(reasons: Mapping[str, Sequence[str]]) -> str:
    ranked = sorted(reasons, key=lambda reason: -len(reasons[reason]))  # stable: in the order of the tests
    more = len(ranked) - _SHOWN_REASONS
    return "; ".join((*ranked[:_SHOWN_REASONS], *([f"{more} more"] if more > 0 else [])))


def main(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    names = [name for name in arguments if name != "--write"]
    if names and "--write" in arguments:
        print("--write stores all tests: name no op with it.", file=sys.stderr)
        return 2
    counts = count_all(names)
    if not counts:
        print(f"no test that comes in is about {', '.join(names)}.", file=sys.stderr)
        return 2
    for result in counts:
        if result.problem or (names and result.kept < result.axes):
            print(f"{result.problem or 'fixed'}: {result.case}: {'; '.join(result.reasons)}")
    kept, axes = sum(c.kept for c in counts), sum(c.axes for c in counts)
    problems = Counter(c.problem for c in counts if c.problem)
    print(f"{len(counts)} tests: {kept} of {axes} axes stay open; {dict(problems)}")
    if "--write" in arguments:
        FILE.write_text(json.dumps(summarize(counts), indent=1) + "\n", encoding="utf-8")
    return int("wrong" in problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
