"""Kills commands, and takes disk, handles and rights away from them: ``python -m benchmarks.faults``.

After each fault an output is what it was before or what it was to become, byte for byte; a killed
calibration, resumed, gives the same bytes as one that was left alone. Commands run in children of a process
that has imported everything and used nothing, so that most of their time is work.

Commands are killed, and interrupted twice, at changes of files: before each name changes, and before the
change behind that. These instants are the same in every run (`changes.py`). ``--kills`` adds random ones.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.changes import read_changes, record_changes, signal_before, turning_points

CAPABILITY_VERSION_3, CAP_DAC_OVERRIDE = 0x20080522, 1
PATIENCE = 300.0  # seconds until a command counts as hanging

SETUP = """
import megengine.module as M, megengine.functional as F
class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = M.Conv2d(3, 8, 3), M.Conv2d(8, 8, 3)
        for layer in (self.a, self.b):
            shape = layer.weight.shape
            layer.weight[:] = F.reshape(F.linspace(-0.2, 0.3, layer.weight.size), shape)
    def forward(self, x):
        return self.b(F.relu(self.a(x)))
"""


@dataclass(frozen=True)
class Work:
    """A command and its output.

    Attributes:
        name: the name of the command, as it is printed.
        args: the arguments of `qtrace`.
        target: the output, a file or a folder.
        old: a copy of the output before the command.
        new: a copy of the output after the command.
        again: the arguments that go on after a kill.
        changes: the changes of files that it makes, in order.
    """

    name: str
    args: tuple[str, ...]
    target: Path
    old: Path
    new: Path
    again: tuple[str, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code (negative for a signal), its output, and its time in seconds."""

    code: int
    output: str
    seconds: float


def command(
    args: tuple[str, ...],
    *,
    before: Callable[[], None] | None = None,
    hit: Callable[[int], None] | None = None,
) -> Ended:
    """Runs a command in a child.

    Args:
        args: the arguments of `qtrace`.
        before: called in the child before the command, to limit its resources.
        hit: called in this process with the child's id, to disturb it.
    """
    output = Path("said.txt")
    start = time.monotonic()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    if not child:
        _child(args, output, before)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hit is not None:
        hit(child)
    while True:
        ended_child, status = os.waitpid(child, os.WNOHANG)
        if ended_child:
            break
        if time.monotonic() - start > PATIENCE:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise SystemExit(f"{' '.join(args)} hangs: {output.read_text()}")
        time.sleep(0.002)
    return Ended(os.waitstatus_to_exitcode(status), output.read_text(), time.monotonic() - start)


def _child(args: tuple[str, ...], output: Path, before: Callable[[], None] | None) -> None:
    code: object = 70
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the child ends
        if before is not None:
            before()
        from qtrace.cli import program

        _begin(program, args)
    except SystemExit as end:
        code = end.code
    except BaseException:  # it shows in what was said
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)


def _begin(program: Any, args: tuple[str, ...]) -> None:
    """Runs main, which reads Ctrl-C as it does where a shell starts it."""
    real = program._run

    def run(args: tuple[str, ...]) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code: int = real(args)
        return code

    program._run = run
    program.main(args)


def state(path: Path) -> dict[str, str]:
    """The files of an output with their hashes; checkpoints of what goes on are left out."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    names = {file: str(file.relative_to(path)) for file in files}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file, name in names.items()
        if not name.startswith(".calibration")
    }


def _copy(source: Path, target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _must(*args: str, before: Callable[[], None] | None = None) -> None:
    ended = command(args, before=before)
    if ended.code:
        raise SystemExit(f"{' '.join(args)} ended with {ended.code}: {ended.output}")


def prepare() -> list[Work]:
    """Makes a model, data and the outputs of every command, in the current folder."""
    import numpy as np

    Path("faults_net.py").write_text(SETUP)
    generator = np.random.default_rng(0)
    for name, scale in (("x", 1.0), ("y", 3.0)):
        np.save(f"{name}.npy", (scale * generator.standard_normal((12, 3, 12, 12))).astype(np.float32))
    trace = ("trace", "faults_net:Net", "-q", "--no-check", "--shape")
    options = "-q --batch-size 2 --checkpoint-batches 1 --force -r w8a8"
    calibrate = ("calibrate", "net.mge", *options.split())
    export = ("export", "model.mge", "-q", "-o", "net.onnx")
    _must(*trace, "2x3x12x12", "-o", "net.mge")
    _must(*calibrate, "-d", "x.npy", "-o", "first")
    shutil.copyfile("first/quantized.mge", "model.mge")
    calibrate = (*calibrate, "-o", "int8")
    trace = (*trace[:-1], "-o", "traced.mge", "--shape")
    works = []
    for name, target, old, new, more in (
        ("save", "traced.mge", (*trace, "1x3x9x9"), (*trace, "2x3x12x12"), ()),
        ("calibrate", "int8", (*calibrate, "-d", "y.npy"), (*calibrate, "-d", "x.npy"), ("--resume",)),
        ("export", "net.onnx", export, (*export, "-f", "onnx_float"), ()),
    ):
        for kind, args in (("old", old), ("new", new)):
            _must(*args, before=record_changes)
            _copy(Path(target), Path(f"{kind}-{target}"))
        copies = Path(f"old-{target}"), Path(f"new-{target}")
        works.append(Work(name, new, Path(target), *copies, (*new, *more), read_changes()))
        if state(works[-1].old) == state(works[-1].new):
            raise SystemExit(f"{name}: both states are the same, so that nothing could be seen")
    return works


def _check(work: Work, fault: str) -> str:
    """Says in which state the output is: old or new."""
    present = state(work.target)
    for name, copy in (("old", work.old), ("new", work.new)):
        if present == state(copy):
            return name
    new = state(work.new)
    other = [name for name in {**present, **new} if present.get(name) != new.get(name)]
    raise SystemExit(
        f"{work.name}, {fault}: the output is neither old nor new, for {', '.join(other)} is not"
    )


def _clean(work: Work, fault: str) -> None:
    """Nothing of a command may lie beside its output, nor in it."""
    left = [p for p in Path().iterdir() if p.name.startswith(f".{work.target.name}.")]
    left += [work.target / ".calibration"] if (work.target / ".calibration").exists() else []
    if left:
        raise SystemExit(f"{work.name}, {fault}: left behind: {', '.join(map(str, left))}")


def kills(works: list[Work], count: int, rng: random.Random) -> Counter[str]:
    """Kills ``count`` commands at random instants of their work; then runs them to their end."""
    counts: Counter[str] = Counter()
    lasts: dict[str, float] = {}
    for number in itertools.takewhile(lambda _: counts["killed"] < count, itertools.count()):
        work = works[min(number % 4, 2) if number % 4 != 3 else 1]  # calibrate half of the time
        _copy(work.old, work.target)
        if work.name not in lasts:
            lasts[work.name] = command(work.args).seconds
            _copy(work.old, work.target)
        wait = rng.uniform(0, 1.05 * lasts[work.name])

        def hit(child: int, wait: float = wait) -> None:
            time.sleep(wait)
            os.kill(child, signal.SIGKILL)

        ended = command(work.args, hit=hit)
        outcome = _check(work, f"killed after {wait:.3f} s")
        if ended.code == 0:  # the machine has become faster
            lasts[work.name] = ended.seconds
            counts["ended before it was killed"] += 1
        else:
            if ended.code != -signal.SIGKILL:
                raise SystemExit(f"{work.name}: exit code {ended.code} before it was killed: {ended.output}")
            counts["killed"] += 1
            counts[f"{work.name} killed: {outcome}"] += 1
        _resume(work, f"killed after {wait:.3f} s")
        if ended.code and counts["killed"] % 20 == 0:
            print(f"{counts['killed']} kills", file=sys.stderr, flush=True)
    return counts


def kills_at_changes(works: list[Work]) -> Counter[str]:
    """Kills each command at the turning points of its files; then runs it to its end."""
    counts: Counter[str] = Counter()
    for work in works:
        for number in turning_points(work.changes):
            fault = f"killed before change {number}, {work.changes[number]}"
            _copy(work.old, work.target)
            ended = command(work.args, before=signal_before([number], signal.SIGKILL))
            if ended.code != -signal.SIGKILL:
                raise SystemExit(f"{work.name}: not {fault}, but ended with {ended.code}: {ended.output}")
            counts[f"{work.name} killed at a change: {_check(work, fault)}"] += 1
            _resume(work, fault)
    return counts


def _resume(work: Work, fault: str) -> None:
    """Runs a killed command to its end, and removes what an end by force may leave."""
    again = command(work.again)
    if again.code or _check(work, f"{fault}, resumed") != "new":
        raise SystemExit(f"{work.name}, {fault}: resuming ended with {again.code}: {again.output}")
    if work.name == "calibrate":
        _clean(work, f"{fault}, resumed")
    for left in Path().glob(".*.tmp"):
        shutil.rmtree(left)


def _refused(work: Work, fault: str, ended: Ended, codes: tuple[int, ...] = (2,)) -> str:
    lines = [line for line in ended.output.splitlines() if line]
    # Where Ctrl-C hits a callback of Python's own imports, Python says so, and the next one ends the command.
    wordy = ended.code == 2 and len(lines) > 1
    if ended.code not in codes or wordy or "fault in qtrace" in ended.output:
        raise SystemExit(f"{work.name}, {fault}: exit code {ended.code}: {ended.output}")
    outcome = _check(work, fault)
    if outcome != ("new" if ended.code == 0 else "old") and ended.code != 130:
        raise SystemExit(f"{work.name}, {fault}: exit code {ended.code}, but the output is {outcome}")
    return outcome


def others(works: list[Work], rounds: int, rng: random.Random) -> Counter[str]:
    """A full disk, too few handles, a folder without rights, and Ctrl-C twice."""
    counts: Counter[str] = Counter()
    for work in works * rounds:
        largest = max(p.stat().st_size for p in (work.new.rglob("*") if work.new.is_dir() else [work.new]))
        size, handles = rng.randrange(largest), rng.randrange(4, 40)
        number = rng.choice(turning_points(work.changes))
        for fault, before, codes in (
            (f"files of at most {size} bytes", lambda s=size: _limit(resource.RLIMIT_FSIZE, s), (2,)),
            (f"{handles} handles", lambda n=handles: _limit(resource.RLIMIT_NOFILE, n), (0, 2)),
            ("a folder that is read-only", _read_only, (2,)),
            ("Ctrl-C twice", signal_before([number, number + 1], signal.SIGINT), (0, 130)),
        ):
            _copy(work.old, work.target)
            with _lent() if before is _read_only else contextlib.nullcontext():
                ended = command(work.args, before=before)
            outcome = _refused(work, fault, ended, codes)
            kind = fault if not fault[0].isdigit() and not fault.startswith("files") else fault.split()[-1]
            counts[f"{work.name}, {kind}: {outcome}"] += 1
            shutil.rmtree(work.target / ".calibration", ignore_errors=True)
            _clean(work, fault)
    return counts


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


@contextlib.contextmanager
def _lent() -> Iterator[None]:
    """Lets everybody read the current folder, and nobody write to it."""
    current = Path()
    Path("said.txt").touch()
    for path in (current, *current.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    Path("said.txt").chmod(0o666)
    yield
    for path in (current, *current.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _read_only() -> None:
    """Gives up the one right of root's that makes every folder writable (capabilities(7))."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(head, sets)
    sets[0] &= ~(1 << CAP_DAC_OVERRIDE)  # the effective set
    libc.capset(head, sets)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kill -9 at so many random instants, too")
    parser.add_argument("--rounds", type=int, default=5, help="so many rounds of the other faults")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    options = parser.parse_args(arguments)
    _import_all()
    # MegEngine's CUDA stub writes to file descriptor 2 at every fork; Python's stderr goes on as it was.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    rng = random.Random(options.seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.chdir(folder)
        works = prepare()
        at_changes = kills_at_changes(works)
        _print_counts(at_changes)
        _print_counts(kills(works, options.kills, rng))
        _print_counts(others(works, options.rounds, rng))
        os.chdir("/")
    print(
        f"{options.kills + at_changes.total()} kills and {4 * len(works) * options.rounds} other faults in "
        f"{time.monotonic() - start:.0f} s: every output old or new, every killed command run to the same end"
    )
    return 0


def _print_counts(counts: Counter[str]) -> None:
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}", flush=True)


def _import_all() -> None:
    """Imports the modules that the commands use, so that no child waits for them."""
    import cv2  # noqa: F401
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401

    import qtrace

    for name in (*qtrace.__all__, "__version__"):
        getattr(qtrace, name)


if __name__ == "__main__":
    sys.exit(main())
