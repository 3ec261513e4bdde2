"""Workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qtrace.errors import ConfigError, QtraceError, install
from qtrace.workers.job import Job, News, Outcome, attempt

__all__ = ["RayTasks"]


class RayTasks:
    """Tasks on a Ray cluster. Each opens its data anew, so that paths must exist on every node.

    Args:
        job: what a task does; it is stored in the cluster once.
        count: the number of tasks at a time.
        address: the address of the cluster; "" for a local one.

    Raises:
        ConfigError: when Ray is not installed or does not answer.
    """

    def __init__(self, job: Job, count: int, address: str) -> None:
        self.count, self._job, self._address = count, job, address

    def __enter__(self) -> RayTasks:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray needs the package ray: run {install('ray')}.") from error
        try:
            ray.init(address=self._address or None, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise ConfigError(
                f"the Ray cluster {self._address!r} does not answer: {_first_line(error)}"
            ) from error
        return self

    def __exit__(self, *error: Any) -> None:
        import ray

        ray.shutdown()

    def run(self, tasks: Sequence[Any], news: News = lambda item: None) -> Iterator[Outcome]:
        """Does tasks; see `qtrace.workers.job.Pool`. The news of a task come at its end."""
        import ray

        stored = ray.put(self._job)
        # A Python worker runs one task at a time: MegEngine stays on that process's main thread.
        remote = ray.remote(num_cpus=1, max_retries=2)(do_elsewhere)
        for number, waiting in enumerate([remote.remote(stored, task) for task in tasks]):
            try:
                ended, messages = ray.get(waiting)
            except ray.exceptions.RayError as error:
                line = self._job.describe_failure(number, _first_line(error))
                yield Outcome(problem=(QtraceError.__name__, line))
                continue
            for item in messages:
                news(item)
            yield ended


def do_elsewhere(job: Job, task: Any) -> tuple[Outcome, list[Any]]:
    """Does a task on a node of the cluster; returns its end and its news."""
    messages: list[Any] = []
    return attempt(lambda: job.open()(task, messages.append)), messages


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
