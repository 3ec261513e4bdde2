"""The fuzzer: ``python -m tests.fuzz --minutes 60``, or ``make fuzz MINUTES=60``.

Targets take turns until the time is up. Every round has a seed, which is printed before it: a crash of the
process can be repeated with ``--only TARGET --seed SEED``. A hang ends the process with a traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time
import traceback

from tests.fuzz import loading
from tests.fuzz.running import TARGETS, round_of
from tests.fuzz.silent import serving

HANG = 120.0  # seconds for one example on a machine that is busy; a failing round shrinks for up to 300


def main() -> int:
    options = _parse()
    faulthandler.enable()
    start, cpu = time.monotonic(), _cpu_seconds()
    names = options.only or list(TARGETS)
    counts = dict.fromkeys(names, 0)
    failures = 0
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    while not sum(counts.values()) or (time.monotonic() - start < options.minutes * 60 and not failures):
        for name in names:
            print(f"\r{name} --seed {seed}   ", end="", file=sys.stderr, flush=True)
            try:
                round_of(name, seed, options.examples, _watch)
            except Exception:
                traceback.print_exc()
                print(f"\nrepeat it with: python -m tests.fuzz --only {name} --seed {seed} --minutes 0")
                failures += 1
            faulthandler.cancel_dump_traceback_later()
            counts[name] += options.examples
        seed += 1
    print(file=sys.stderr)
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    loading.stop_server()
    serving.stop_server()
    minutes, spent = (time.monotonic() - start) / 60, (_cpu_seconds() - cpu) / 60
    print(f"{minutes:.1f} minutes, {spent:.1f} of them on the CPU; examples: {listed}; {failures} failures")
    return 1 if failures else 0


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and of all child processes that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _watch() -> None:
    """Gives the next example its time."""
    faulthandler.dump_traceback_later(HANG, exit=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="how long; every target runs at least once"
    )
    parser.add_argument("--only", action="append", choices=list(TARGETS), help="one target; may be repeated")
    parser.add_argument("--seed", type=int, help="of the first round; by default, from the clock")
    parser.add_argument("--examples", type=int, default=50, help="examples a round")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
