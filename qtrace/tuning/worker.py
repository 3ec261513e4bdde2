"""A process that judges recipes: ``python -m qtrace.tuning.worker`` reads pickled tasks, writes results.

Its parent is the only one that writes to it. The first object is the subject, each further one a task.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading

from qtrace.process import engine

__all__ = ["main"]


def main() -> None:
    """Judges recipes until there are no more."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for the prints of models and metrics
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    engine.quiet()
    from qtrace.errors import QtraceError
    from qtrace.tuning.pool import attempt

    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: object
    try:
        subject = pickle.load(sys.stdin.buffer)
        judge = subject.judge()
    except (AttributeError, ImportError) as error:
        judge, answer = (
            None,
            QtraceError(f"a process that judges recipes cannot import your metric: {error}."),
        )
    while True:
        task = pickle.load(sys.stdin.buffer)
        if judge is not None:
            answer = attempt(judge, subject.parts, task)
        pickle.dump(answer, results)
        results.flush()


def _end_with_parent() -> None:
    """Ends this process when the parent closes its end of stdin, or dies."""
    poll = select.poll()
    poll.register(0, 0)  # a hangup is always reported
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
