"""Judges cases in a process of its own, which may crash: ``python -m tests.fuzz.silent.serving``.

Reads the path of a pickled case from each line of stdin, and writes a line about it: what `judge` returns, or
"finding: " and what happened.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

from tests.fuzz.silent.cases import Case

__all__ = ["answer", "stop_server"]

PATIENCE = 600.0  # seconds for one case, however busy the machine is: a case that hangs never answers
LIFETIME = 200  # cases for one process: MegEngine and the runtimes keep memory


class _Server:
    """The process, which is started again after it has ended."""

    process: subprocess.Popen[str] | None = None
    cases = 0

    def ask(self, path: Path) -> str:
        """Sends a case; returns the answer, which a process that ends or hangs gives, too."""
        if self.cases >= LIFETIME:
            self.stop()
        process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self.cases += 1
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        line = process.stdout.readline().rstrip("\n") if ready else ""
        if line:
            return line
        if not ready:
            process.kill()
        process.wait()
        ending = process.returncode
        self.process = None
        if not ready:
            return f"finding: no answer after {PATIENCE:g} s"
        return (
            f"finding: ended by {signal.Signals(-ending).name}"
            if ending < 0
            else f"finding: exit code {ending}"
        )

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.silent.serving"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.cases = 0
        atexit.register(self.process.kill)
        return self.process

    def stop(self) -> None:
        """Ends the process, so that its CPU time counts as that of this process's children."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            self.process = None


_SERVER = _Server()
stop_server = _SERVER.stop


def answer(case: Case, folder: Path) -> str:
    """Says what became of a case: what `judge` returns, or "finding: " and what happened."""
    path = folder / "case.pickle"
    path.write_bytes(pickle.dumps(case))
    return _SERVER.ask(path)


def judge_file(path: Path) -> str:
    """Judges the case in a file of `answer`."""
    from tests.fuzz.silent.judging import judge  # MegEngine is not for the process that asks

    case = pickle.loads(path.read_bytes())
    try:
        with tempfile.TemporaryDirectory() as folder:
            return judge(case, Path(folder))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return f"finding: {type(error).__name__}: {str(error)[:600]} ({where})"


def main() -> None:
    """Answers until stdin ends; what libraries print goes to stderr."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(" ".join(judge_file(Path(line.rstrip("\n"))).split()), file=said, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
