"""Quantizes trained networks with qtrace and with other tools and prints one table.

``python -m benchmarks.accuracy`` runs everything; ``--only`` and ``--net`` a part, whose rows replace the old
ones in benchmarks/results/accuracy.json. ``--table`` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qtrace import process

# MegEngine sets the processor to flush subnormals, of which numpy warns.
warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
process.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from benchmarks import machine  # noqa: E402
from benchmarks.accuracy import (  # noqa: E402
    eight_bits,
    finetuning,
    four_bits,
    imbalance,
    mixed_precision,
    qat,
    reconstruction_time,
)
from benchmarks.accuracy.networks import CLASSIFIERS  # noqa: E402
from benchmarks.accuracy.rows import Row, markdown  # noqa: E402
from benchmarks.accuracy.subjects import NAMES, Subject, subject  # noqa: E402
from benchmarks.accuracy.training import train  # noqa: E402

RESULTS = Path(__file__).parent.parent / "results" / "accuracy.json"

# group -> the networks that it is for
GROUPS: dict[str, tuple[str, ...]] = {
    "w8a8": NAMES,
    "imbalance": ("mobilenet",),
    "w4": NAMES,
    "qat": tuple(CLASSIFIERS),
    "finetune": NAMES,
    "mixed": ("detector",),
    "time": ("mobilenet",),
}


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parse(arguments)
    stored = _stored(options.json)
    if options.table:
        print(markdown(_rows(stored)))
        return 0
    for name in options.net if options.retrain else ():
        if name in CLASSIFIERS:
            print(name, train(name), file=sys.stderr)
    for group in options.only:
        for name in GROUPS[group]:
            if name in options.net:
                stored[f"{group} {name}"] = _measure(group, name, options)
                if options.json is not None:
                    _write(options.json, stored)
    print(markdown(_rows(stored)))
    missed = [row for row in _rows(stored) if row.met is False]
    if missed:
        print(f"{len(missed)} of the targets missed", file=sys.stderr)
    return 1 if missed and options.check else 0


def _measure(group: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    print(f"{group} {name} ...", file=sys.stderr, flush=True)
    facts, started = machine.facts(), time.monotonic()
    rows = [row.to_dict() for row in _runs(options)[group](subject(name, options.quick))]
    facts.update(load_after=machine.load(), seconds=round(time.monotonic() - started))
    return {"machine": facts, "rows": rows}


def _runs(options: argparse.Namespace) -> dict[str, Callable[[Subject], Iterator[Row]]]:
    """group -> what measures it."""
    steps = 2 if options.quick else options.steps
    return {
        "w8a8": lambda s: eight_bits.run(s, options.peers_python),
        "imbalance": imbalance.run,
        "w4": lambda s: four_bits.run(s, steps),
        "qat": lambda s: qat.run(s, steps),
        "finetune": lambda s: finetuning.run(s, steps),
        "mixed": lambda s: mixed_precision.run(s, options.quick),
        "time": lambda s: reconstruction_time.run(s, steps),
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=GROUPS, help="one group; may be repeated")
    parser.add_argument("--net", action="append", choices=NAMES, help="one network; may be repeated")
    parser.add_argument(
        "--peers-python", metavar="PATH", help="an interpreter that has NNCF 3.4; else this one"
    )
    parser.add_argument("--retrain", action="store_true", help="train the float classifiers anew, first")
    parser.add_argument(
        "--quick", action="store_true", help="little data, few steps: the figures mean nothing"
    )
    parser.add_argument(
        "--json", type=Path, help=f"where to keep the rows; {RESULTS.name}, or nowhere with --quick"
    )
    parser.add_argument(
        "--table", action="store_true", help="print what was measured before, and nothing else"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument(
        "--steps", type=int, help="of QAT and fine-tuning, or of each block, where there is little time"
    )
    options = parser.parse_args(arguments)
    options.only, options.net = options.only or list(GROUPS), options.net or list(NAMES)
    if options.json is None and not options.quick:
        options.json = RESULTS
    return options


def _stored(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def _rows(stored: dict[str, Any]) -> list[Row]:
    """All rows, in the order of the groups."""
    keys = [f"{group} {name}" for group, names in GROUPS.items() for name in names]
    return [Row(**row) for key in keys if key in stored for row in stored[key]["rows"]]


def _write(path: Path, stored: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
