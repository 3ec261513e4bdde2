"""Runs ONNX's conformance tests through `qtrace.from_onnx`, for the docs' page on ONNX ops.

    python -m scripts.onnx_coverage                 # all tests: some minutes
    python -m scripts.onnx_coverage Conv Resize     # the tests of some ops
    python -m scripts.onnx_coverage --write         # all tests, stored in benchmarks/results/onnx.json

``--write`` also prepares the light networks and stores the share of their MACs that is on integers.

A test is equal, refused by name, wrong or crashed; see tests/importing/onnx/judging.py. The exit code is 1 if
one is wrong or crashed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx

import qtrace
from scripts.stored import RESULTS, today
from tests.importing.onnx.cases import KINDS, LIGHT, Case, load_cases, load_light_networks
from tests.importing.onnx.judging import Verdict, judge_all
from tests.zoo.shares import whole_share

__all__ = ["FILE", "main", "measure", "measure_shares", "summarize"]

FILE = RESULTS / "onnx.json"
_LIGHT = "light"  # the kind of the light networks


def measure(names: Iterable[str] = ()) -> list[Verdict]:
    """Judges the cases of all kinds.

    Args:
        names: kinds, ops or cases; none for all. Names of kinds alone load no other kind.
    """
    chosen, kinds = set(names), (*KINDS, _LIGHT)
    if chosen and chosen <= {*kinds}:
        kinds = tuple(kind for kind in kinds if kind in chosen)
    verdicts: list[Verdict] = []
    for cases in (load_light_networks() if kind == _LIGHT else load_cases(kind) for kind in kinds):
        wanted = [case for case in cases if not chosen or {case.op, case.name, case.kind} & chosen]
        verdicts += _judge(wanted, cases)
    return verdicts


# Light network -> the recipe of its family; the others take the default.
RECIPES = {
    "light_densenet121": "densenet",
    "light_resnet50": "resnet50",
    "light_shufflenet": "shufflenet_v1",
    "light_vgg19": "vgg",
}


def measure_shares(names: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Imports and prepares the light networks.

    Args:
        names: the networks; none for all nine.

    Returns:
        Network -> its recipe, and the share of its MACs that is computed on integers if all that can be is.
    """
    chosen = set(names)
    shares = {}
    for path in sorted(LIGHT.glob("*.onnx")):
        if chosen and path.stem not in chosen:
            continue
        recipe = RECIPES.get(path.stem, "common/default")
        config = qtrace.load_recipe(recipe).without_placement()
        prepared = qtrace.prepare(qtrace.from_onnx(path), config)
        shares[path.stem] = {"recipe": recipe, "integers": whole_share(prepared)}
    return shares


def _judge(wanted: list[Case], cases: Iterable[Case]) -> list[Verdict]:
    bases = {case.name.partition("_expanded")[0] for case in wanted}
    needed = [case for case in cases if case in wanted or case.name in bases]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {case.name for case in wanted}
        return [v for v in judge_all(needed, Path(folder)) if v.case in names]


def summarize(verdicts: Iterable[Verdict], shares: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Builds what the file stores: by kind and op, the cases that are equal, and the others by reason.

    Args:
        verdicts: the verdicts.
        shares: see `measure_shares`.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for verdict in sorted(verdicts, key=lambda v: (v.op.lower(), v.case)):
        op = kinds.setdefault(verdict.kind, {}).setdefault(verdict.op, {"equal": []})
        if verdict.verdict == "equal":
            op["equal"].append(verdict.case)
        else:
            reason = short_reason(verdict.reason)
            op.setdefault(verdict.verdict, {}).setdefault(reason, []).append(verdict.case)
    return {"onnx": onnx.__version__, "measured": today(), "kinds": kinds, "shares": dict(shares or {})}


def short_reason(reason: str) -> str:
    """Returns a reason without the path of the file and the names of its nodes."""
    text = re.sub(r"\S*model\.onnx:?\s*", "", " ".join(reason.split()))
    return re.sub(r"(?<=\w) '[^']*'", "", text, count=1)[:200].strip()


def main(arguments: list[str]) -> int:
    """The command; returns the exit code."""
    # MegEngine sets the processor to flush subnormals, of which numpy warns.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    names = [name for name in arguments if name != "--write"]
    if names and "--write" in arguments:
        print("--write stores all tests: name no op with it.", file=sys.stderr)
        return 2
    verdicts = measure(names)
    if not verdicts:
        print(f"no test is about {', '.join(names)}.", file=sys.stderr)
        return 2
    for verdict in verdicts:
        if verdict.verdict in ("wrong", "crashed") or (names and verdict.verdict == "refused"):
            print(f"{verdict.verdict}: {verdict.kind} {verdict.case}: {verdict.reason}")
    for kind in dict.fromkeys(v.kind for v in verdicts):
        counts = Counter(v.verdict for v in verdicts if v.kind == kind)
        print(kind, ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())))
    if "--write" in arguments:
        FILE.write_text(json.dumps(summarize(verdicts, measure_shares()), indent=1) + "\n", encoding="utf-8")
    return int(any(v.verdict in ("wrong", "crashed") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
