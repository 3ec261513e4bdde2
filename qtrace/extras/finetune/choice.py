"""The choice of the engine that computes the steps of a fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qtrace.errors import TrainingError
from qtrace.extras.finetune.data import Batch, Samples
from qtrace.extras.finetune.twins import MegEngineTwins, Twins
from qtrace.graph.types import TracedModule
from qtrace.learning.choice import try_torch
from qtrace.learning.engine import UnsupportedError

__all__ = ["choose_twins"]

# The engines agree when no float value differs by more than this share of the largest one of its node.
_TOLERANCE = 1e-3
_COMPARED_SAMPLES = 2


def choose_twins(
    requested: str,
    student: TracedModule,
    teacher: TracedModule,
    samples: Samples,
    blocks: Sequence[str],
    jit: bool,
) -> tuple[Twins, str]:
    """Builds both graphs in the chosen engine, and gives the reason of the choice as a clause.

    ``auto`` takes torch if it is installed, every op of both graphs has a form in torch, and torch and
    MegEngine agree on the float graph of some samples.

    Args:
        requested: ``auto``, ``megengine`` or ``torch``.
        student: the prepared graph, in eval mode.
        teacher: the float graph.
        samples: the samples to learn from.
        blocks: names of the nodes whose values are compared.
        jit: whether the steps of MegEngine run under ``jit.trace``.

    Raises:
        TrainingError: when torch is requested and does not apply.
    """
    megengine = MegEngineTwins(student, teacher, samples.form, blocks, jit)
    if requested == "megengine":
        return megengine, "as requested"

    def build() -> Twins:
        from qtrace.extras.finetune.torch_twins import TorchTwins

        twins = TorchTwins(student, teacher, samples.form, blocks)
        _compare(twins, megengine, _first_samples(samples))
        return twins

    torch, reason = try_torch(build)
    if torch is not None:
        return torch, "as requested" if requested == "torch" else "torch has a form of every op"
    if requested == "torch":
        raise TrainingError(
            f"finetune: the engine torch does not apply: {reason}; use the engine megengine, or auto."
        )
    return megengine, f"torch does not apply: {reason}"


def _first_samples(samples: Samples) -> Batch:
    """Returns a batch with as few samples as the data can be divided into."""
    batch = samples.batches[0]
    if not samples.joined:
        return batch
    return Batch(batch.number, [leaf[:_COMPARED_SAMPLES] for leaf in batch.leaves])


def _compare(torch: Twins, megengine: Twins, batch: Batch) -> None:
    """Refuses torch if a node of the float graph has other values than in MegEngine."""
    values, fast_values = (
        {f"output {index}": value for index, value in enumerate(outputs)} | blocks
        for outputs, blocks in (twins.run_teacher(batch) for twins in (megengine, torch))
    )
    for name, value in values.items():
        if not _agree(value, fast_values.get(name)):
            raise UnsupportedError(f"its float values differ from MegEngine's at {name}")


def _agree(value: np.ndarray, fast: np.ndarray | None) -> bool:
    if fast is None or fast.shape != value.shape:
        return False
    if value.dtype.kind != "f" or not value.size:
        return True  # integers and selections may turn on the last bit of a float
    bound = _TOLERANCE * float(np.max(np.abs(value), initial=0.0))
    return bool(np.all((np.abs(fast - value) <= bound) | ~np.isfinite(value)))
