"""The held-back error of a run: which state is the best, and when the run returns to it or ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from qtrace.extras.finetune.data import Batch, Samples
from qtrace.extras.finetune.evaluation import BestState, EvaluationFigures, evaluate
from qtrace.extras.finetune.pacing import RunSchedule
from qtrace.extras.finetune.retreating import Retreats
from qtrace.extras.finetune.training import Trainer

__all__ = ["Monitor"]

_LOG = logging.getLogger("qtrace")


class Monitor:
    """Evaluates a run on held-back data.

    Args:
        trainer: the run, before its first step.
        unseen: the samples to evaluate the outputs on.
        schedule: when evaluations are due.
        batches: the batches whose loss at the start tells a divergence.

    Attributes:
        start: the error and the outputs before the first step.
        stopped: why the run ended before its last step; "" if it did not.
    """

    def __init__(
        self, trainer: Trainer, unseen: Samples, schedule: RunSchedule, batches: Sequence[Batch]
    ) -> None:
        self._trainer, self._unseen, self._schedule = trainer, unseen, schedule
        self.start = self.evaluate()
        self.best = BestState(trainer.model, self.start.error)
        losses = [trainer.twins.loss(batch, trainer.compared, trainer.settings) for batch in batches]
        self.retreats = Retreats(self.start.error, losses)
        self.stopped = ""

    def evaluate(self) -> EvaluationFigures:
        """Compares the outputs of both graphs on the held-back data."""
        trainer, pace = self._trainer, self._schedule.pace
        start, size = pace.seconds, 4 * trainer.settings.batch_size
        figures = evaluate(trainer.model, trainer.twins, trainer.compared, self._unseen, size)
        pace.evaluation_seconds = pace.seconds - start
        return figures

    def judge(self, completed: int) -> None:
        """Evaluates when it is due, keeps the best state, and returns to it if the run diverges."""
        trainer, pace = self._trainer, self._schedule.pace
        steps = trainer.settings.steps
        due = completed % self._schedule.interval(steps) == 0
        error = None
        if due or completed == steps or not pace.has_step(1 + due):
            with trainer.watch.settled(), trainer.learner.settled():
                error = self.evaluate().error
                self.best.consider(completed, error)
        if completed == steps:
            return
        if not pace.has_step(1):
            self.stopped = f"max_minutes ({pace.max_minutes:g}) leaves no time for another step"
            return
        reason = self.retreats.reason(completed, [row[0] for row in trainer.curves], error)
        if not reason:
            return
        if self.retreats.exhausted:
            self.stopped = f"{reason}, at the smallest learning rate that is tried"
            return
        retreat = self.retreats.retreat(completed, self.best.best.step, reason)
        _LOG.warning(f"finetune: {retreat}")
        self.best.restore()
        trainer.rewind(retreat)
