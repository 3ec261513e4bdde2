"""A worker process: ``python -m qtrace.workers`` reads a job and tasks on stdin, answers on stdout.

Its parent is the only one that writes to it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import partial
from typing import Any, NoReturn

from qtrace import process
from qtrace.errors import Terminated
from qtrace.workers import attempt, read_message, write_message

_POLL_SECONDS = 0.2


def main() -> NoReturn:
    """Does tasks until there are no more. An error of the user is an answer; any other ends the process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # for the prints of models, loaders and metrics
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    process.quiet()  # MegEngine loads while the parent prepares the job
    tasks = os.fdopen(0, "rb", buffering=0, closefd=False)  # what is buffered cannot be waited for
    try:
        job = _next_message(tasks)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        opened = attempt(job.open)
        while True:
            task = _next_message(tasks)
            ended = opened
            if opened.problem is None:
                ended = attempt(partial(opened.value, task, partial(write_message, answers)))
            process.synchronize()
            write_message(answers, ended)
    except EOFError:
        os._exit(0)  # without waiting for the threads of runtimes
    except Terminated as terminated:
        os._exit(int(terminated.code or 0))


def _next_message(stream: Any) -> Any:
    """Waits for a message, awake at times: a signal that ends a stop may reach another thread."""
    while not select.select([stream], [], [], _POLL_SECONDS)[0]:
        pass
    return read_message(stream)


def _end_with_parent() -> None:
    """Ends this process when the parent closes its end of stdin, or dies."""
    poll = select.poll()
    poll.register(0, 0)  # a hangup is always reported
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate(number: int, _: Any) -> NoReturn:
    raise Terminated(number)


if __name__ == "__main__":
    main()
