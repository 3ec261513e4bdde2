"""A worker process: ``python -m qtrace.calibration.worker`` reads a job from stdin and tells on stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from qtrace.errors import Terminated
from qtrace.process import engine

__all__ = ["main"]


def main() -> NoReturn:
    """Does one job. Exit code 0 when it is done, 2 for a mistake of the user's, else a fault."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what models and loaders print
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def tell(**event: Any) -> None:
        results.write(json.dumps(event) + "\n")

    engine.quiet()  # MegEngine loads while the parent prepares the job
    from qtrace.calibration.jobs import Job, run_job
    from qtrace.errors import QtraceError

    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_job(Job.from_json(line), lambda number: tell(batch=number))
        engine.synchronize()
    except QtraceError as error:
        tell(error=str(error), kind=type(error).__name__)
        results.close()
        os._exit(2)
    results.close()
    os._exit(0)  # threads of runtimes have nothing to say any more


def _end_with_parent() -> None:
    """Ends this process when the parent closes its end of stdin, or dies."""
    while os.read(0, 1):  # not sys.stdin: a thread that waits there stands in the way of an exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate(number: int, _: Any) -> NoReturn:
    raise Terminated(number)


if __name__ == "__main__":
    main()
