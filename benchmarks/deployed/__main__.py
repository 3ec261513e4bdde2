"""Measures networks where they run: ``python -m benchmarks.deployed``.

The trained networks of PP-OCRv4 (``make ocr-demo`` installs them), trained networks of this repository, and
networks with random weights become int8 by qtrace's placements and by other tools, from the same images. All
files are judged in onnxruntime with all optimizations: outputs on images in fonts that nothing was chosen on,
and the time of a run beside the faster float file's, in turns. ``--net`` and ``--only`` measure a part, whose
rows replace the stored ones; ``--missing`` leaves out stored ones. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import qtrace

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

from benchmarks import machine  # noqa: E402
from benchmarks.deployed import checks, judging, networks, quantizing  # noqa: E402
from benchmarks.deployed.judging import File  # noqa: E402
from benchmarks.deployed.rows import (  # noqa: E402
    FLOAT,
    NNCF,
    OWN_TIMES,
    PEERS,
    RESULTS,
    TIMED,
    TRAINED_NETS,
    VARIANTS,
    Row,
    merged,
    read,
    store,
    table,
)


@dataclasses.dataclass(frozen=True)
class Tools:
    """What some variants need.

    Attributes:
        nncf: an interpreter that has NNCF; None for none.
        cost_table: the times of this machine; None for none.
    """

    nncf: str | None = None
    cost_table: Path | None = None


def measure(name: str, variants: Sequence[str], tools: Tools, keep: Callable[[Row], None]) -> None:
    """Quantizes a network by ``variants`` and measures the files.

    Args:
        name: the network.
        variants: the variants to measure.
        tools: what some variants need.
        keep: gets each row as soon as it is measured.
    """
    network = networks.load(name)
    with tempfile.TemporaryDirectory() as folder:
        exported = File(qtrace.export(network.traced, Path(folder) / "float.onnx"))
        originals = [] if network.original is None else [File(network.original)]
        exact = judging.faster([exported, *originals], network.test[:1]) if originals else exported
        for variant in variants:
            print(f"{name}: {variant}", file=sys.stderr, flush=True)
            load = machine.load()
            row = _measure_variant(network, exported, exact, variant, Path(folder), tools)
            keep(dataclasses.replace(row, load=load))


def _measure_variant(
    network: networks.Network, exported: File, exact: File, variant: str, folder: Path, tools: Tools
) -> Row:
    """Measures one file."""
    row = Row(network.name, variant)
    if variant == FLOAT:
        return _judge(row, network, exact, exact)
    if variant in PEERS:
        peer = quantizing.quantize_by_peer(network, exported.path, variant, folder, tools.nncf)
        if peer.file is None:
            return dataclasses.replace(row, reason=peer.reason)
        try:
            row = _judge(dataclasses.replace(row, seconds=peer.seconds), network, exact, File(peer.file))
        except qtrace.QtraceError as error:
            return dataclasses.replace(row, reason=f"its file does not run: {error}")
        return row
    own = tools.cost_table if variant in OWN_TIMES else None
    made = quantizing.quantize(network, variant, folder / "int8.onnx", own)
    worst, equal = judging.judge_parity(made.file, made.converted, network.test)
    row = dataclasses.replace(row, seconds=made.seconds, mode=made.mode, worst_lsb=worst, equal=equal)
    return _judge(row, network, exact, File(made.file), own)


def _judge(
    row: Row, network: networks.Network, exact: File, file: File, cost_table: Path | None = None
) -> Row:
    """Adds to a row what is measured of any file."""
    sample = network.test[:1]
    one, two = (judging.measure_speed(exact, file, sample, threads) for threads in (1, 2))
    return dataclasses.replace(
        row,
        sqnr=None if file is exact else judging.measure_noise(exact, file, network.test),
        speed=one.ratio[0],
        low=one.ratio[1],
        high=one.ratio[2],
        two_threads=two.ratio,
        milliseconds=one.milliseconds,
        # A table prices what qtrace writes; other tools store no shapes for it to read.
        predicted=None
        if row.variant in PEERS
        else judging.predict_milliseconds(file.path, sample, cost_table),
        metrics=network.metrics(file, exact),
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployed", description=__doc__)
    nets = (*TRAINED_NETS, *TIMED)
    parser.add_argument("--net", action="append", choices=nets, help="one network; may be repeated")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="one variant; may be repeated")
    parser.add_argument("--missing", action="store_true", help="measure only what is not stored")
    parser.add_argument(
        "--nncf", metavar="PYTHON", help="an interpreter that has NNCF; its rows are left out otherwise"
    )
    parser.add_argument(
        "--cost-table",
        metavar="FILE",
        type=Path,
        help="times of this machine, by qtrace bench --kernels -o FILE; without it, no rows of own times",
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are kept")
    parser.add_argument("--table", action="store_true", help="only print the stored rows and checks")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parse(arguments)
    rows = read(options.json)
    if not options.table:
        facts = machine.facts()

        def keep(row: Row) -> None:
            measured = dataclasses.replace(row, machine=f"{facts['cpu']}, {facts['date'][:10]}")
            rows[:] = merged(rows, [measured])
            store(options.json, facts, rows)

        for name in options.net or (*TRAINED_NETS, *TIMED):
            stored = {row.variant for row in rows if row.net == name} if options.missing else set()
            chosen = [v for v in networks.variants_of(name) if not options.only or v in options.only]
            chosen = [v for v in chosen if options.nncf or v not in NNCF]
            chosen = [v for v in chosen if options.cost_table or v not in OWN_TIMES]
            if wanted := [v for v in chosen if v not in stored]:
                measure(name, wanted, Tools(options.nncf, options.cost_table), keep)
    results = checks.check(rows)
    print(f"{table(rows)}\n\n{checks.render(results)}")
    if options.table:
        return 0
    failing = {checks.MISSED} if options.net or options.only else {checks.MISSED, checks.UNKNOWN}
    return int(any(result.verdict in failing for result in results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
