"""A worker process: ``python -m qtrace.calibration.worker`` reads a job on stdin, writes events to stdout."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from typing import Any, NoReturn

from qtrace.errors import Terminated
from qtrace.process import engine

__all__ = ["main"]

_POLL_SECONDS = 0.2


def main() -> NoReturn:
    """Runs one job. Exit code 0 for success, 2 for an error of the user, else a fault of qtrace."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for the prints of models and loaders
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def send(**event: Any) -> None:
        results.write(json.dumps(event) + "\n")

    engine.quiet()  # MegEngine loads while the parent prepares the job
    from qtrace.calibration.jobs import WorkerJob, run_job
    from qtrace.errors import QtraceError

    # A signal that wakes a stopped process may reach another thread: it does not interrupt this one.
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        pass
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_job(WorkerJob.from_json(line), lambda number: send(batch=number))
        engine.synchronize()
    except QtraceError as error:
        send(error=str(error), kind=type(error).__name__)
        results.close()
        os._exit(2)
    results.close()
    os._exit(0)  # without waiting for the threads of runtimes


def _end_with_parent() -> None:
    """Ends this process when the parent closes its end of stdin, or dies."""
    while os.read(0, 1):  # not sys.stdin: a thread that waits there blocks an exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate(number: int, _: Any) -> NoReturn:
    raise Terminated(number)


if __name__ == "__main__":
    main()
