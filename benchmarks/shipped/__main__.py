"""Measures networks in the runtimes that they ship with: ``python -m benchmarks.shipped``.

Each network becomes a file by qtrace's default for the target, and by the runtime's own quantizer: those of
onnxruntime, NNCF for OpenVINO, ai-edge-quantizer for LiteRT. ncnn has float files with and without 16 bits.
All files run in one interpreter (``--runtime-python``), on one thread, in turns, and are loaded
anew ``--starts`` times. The docs' own build puts the stored rows on the page ``docs/measured/runtimes.md``;
``--table`` prints them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

import qtrace

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from benchmarks import machine  # noqa: E402
from benchmarks.deployed import networks  # noqa: E402
from benchmarks.shipped.files import Made, make_float, make_others  # noqa: E402
from benchmarks.shipped.rows import (  # noqa: E402
    FLOAT,
    NETS,
    OWN,
    RESULTS,
    RUNTIMES,
    ShippedRow,
    merged,
    read,
    store,
    summary,
    table,
)
from benchmarks.shipped.sides import Side, load, take_rounds  # noqa: E402
from qtrace.benchmarking.files import Speed, summarize  # noqa: E402
from qtrace.comparing.groups import find_groups  # noqa: E402
from qtrace.comparing.sums import GroupedErrors  # noqa: E402
from qtrace.runtimes.host import RuntimeHost  # noqa: E402

__all__ = ["main", "measure"]

_TURNS, _STARTS, _TESTED = 15, 6, 24
_NO_ERROR_DB = 300.0  # JSON has no infinity


def measure(
    name: str,
    runtime: str,
    peer: str | None,
    host: RuntimeHost | None,
    turns: int = _TURNS,
    starts: int = _STARTS,
) -> list[ShippedRow]:
    """Returns the rows of a network in a runtime.

    Args:
        name: the network.
        runtime: the runtime.
        peer: an interpreter that has the runtime's peer; None for none.
        host: the interpreter that has the runtime; None for this one.
        turns: how often each file runs in turn after a start.
        starts: how often all files are loaded anew in processes of their own.
    """
    network, busy = networks.load(name), machine.load()
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            exact = make_float(network, runtime, folder)
        except qtrace.QtraceError as error:
            return [ShippedRow(name, runtime, FLOAT, reason=" ".join(str(error).split())[:160], measured=day)]
        made = [Made(FLOAT, exact), *make_others(network, runtime, exact, folder, peer, host)]
        rows = {each.variant: _row(name, runtime, each) for each in made}
        sides: dict[str, Side] = {}
        openers: dict[str, Callable[[], Side]] = {}
        for each in made:
            plain = runtime == "ncnn" and each.variant == FLOAT
            try:
                if each.file is not None:
                    openers[each.variant] = partial(load, runtime, each.file, exact, host, plain)
                    sides[each.variant] = openers[each.variant]()
                    sides[each.variant].run(network.test[:1])
            except qtrace.QtraceError as error:
                sides.pop(each.variant, None)
                text = " ".join(f"its file does not run: {error}".split())[:160]
                rows[each.variant] = dataclasses.replace(rows[each.variant], reason=text)
        _judge(network, sides, rows)
        for side in sides.values():
            side.close()
        rounds = take_rounds([openers[variant] for variant in sides], network.test[:1], turns, starts)
        _add_times(list(sides), rounds, rows)
    return [dataclasses.replace(row, load=busy, measured=day) for row in rows.values()]


def _row(name: str, runtime: str, made: Made) -> ShippedRow:
    size = None if made.file is None else made.file.stat().st_size / 1000
    if made.file is not None and made.file.suffix == ".param":
        size = (size or 0.0) + made.file.with_suffix(".bin").stat().st_size / 1000
    return ShippedRow(
        name,
        runtime,
        made.variant,
        made.version,
        kilobytes=size,
        on_integers=made.on_integers,
        reason=made.reason,
    )


def _judge(network: networks.Network, sides: dict[str, Side], rows: dict[str, ShippedRow]) -> None:
    """Adds versions, noise by group, and the task's metrics to the rows."""
    test = [network.test[i : i + 1] for i in range(min(_TESTED, len(network.test)))]
    exact = [sides[FLOAT].run(batch) for batch in test]
    groups = find_groups(network.traced, exact)

    def by_single(side: Side) -> networks.Run:
        return lambda batch: [
            np.concatenate(v) for v in zip(*(side.run(x[None]) for x in batch), strict=True)
        ]

    for variant, side in sides.items():
        errors = GroupedErrors(groups)
        for batch, reference in zip(test, exact, strict=True):
            shaped = zip(side.run(batch), reference, strict=True)
            errors.add(reference, [value.reshape(other.shape) for value, other in shaped])
        figures = {e.group.name: min(e.sqnr_db, _NO_ERROR_DB) for e in errors.errors()}
        tool = rows[variant].version
        rows[variant] = dataclasses.replace(
            rows[variant],
            version=f"{side.version}, {tool}" if tool else side.version,
            processor=side.processor,
            db=figures,
            metrics=network.metrics(by_single(side), by_single(sides[FLOAT])),
        )


def _add_times(names: list[str], rounds: list[list[list[float]]], rows: dict[str, ShippedRow]) -> None:
    """Adds times to the rows, and the peers' beside qtrace's own."""

    def beside(other: str, name: str) -> Speed:
        pair = names.index(other), names.index(name)
        return summarize([[times[index] for index in pair] for times in rounds])[1]

    for name in names:
        own = beside(FLOAT, name)
        against = {}
        if name == OWN:
            against = {o: _three(beside(o, OWN)) for o in names if o not in (FLOAT, OWN)}
        rows[name] = dataclasses.replace(
            rows[name], milliseconds=1e3 * own.seconds, speed=_three(own), against=against
        )


def _three(speed: Speed) -> tuple[float, float, float]:
    return speed.ratio, speed.low, speed.high


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, stores and prints rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped", description=__doc__)
    parser.add_argument("--net", action="append", choices=NETS, help="one network; may be repeated")
    parser.add_argument("--runtime", action="append", choices=tuple(RUNTIMES), help="one runtime")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has the runtime's peer")
    parser.add_argument("--runtime-python", metavar="PYTHON", help="the interpreter that has the runtime")
    parser.add_argument("--turns", type=int, default=_TURNS, help=f"runs of each file a start ({_TURNS})")
    parser.add_argument("--starts", type=int, default=_STARTS, help=f"how often files load anew ({_STARTS})")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are kept")
    parser.add_argument("--table", action="store_true", help="only print the stored rows")
    options = parser.parse_args(arguments)
    host = RuntimeHost(python=options.runtime_python) if options.runtime_python else None
    chosen = options.runtime or list(RUNTIMES)
    if not options.table:
        for runtime in chosen:
            for net in options.net or NETS:
                print(f"{net}: {runtime}", file=sys.stderr, flush=True)
                new = measure(net, runtime, options.peer, host, options.turns, options.starts)
                store(options.json, merged(read(options.json), new))
    rows = [row for row in read(options.json) if row.runtime in chosen]
    print(table([row for row in rows if not options.net or row.net in options.net]))
    for runtime in chosen:
        print(f"{runtime}: {summary(rows, runtime)}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
