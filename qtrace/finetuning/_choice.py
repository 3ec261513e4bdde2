"""The choice of the engine that computes the steps of a fine-tuning."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.errors import TrainingError, install
from qtrace.finetuning._data import Batch, Samples
from qtrace.finetuning._engines import MegEngineEngine, TrainingEngine
from qtrace.finetuning._twins import Twins
from qtrace.graph.types import TracedModule

if TYPE_CHECKING:
    from qtrace.finetuning._torch import TorchEngine

__all__ = ["choose_engine"]

# The engines agree when no float value differs by more than this share of the largest one of its node.
_TOLERANCE = 1e-3
_COMPARED_SAMPLES = 2


class _RefusedError(Exception):
    """The engine torch does not apply; the text is a clause with the reason."""


def choose_engine(
    requested: str,
    student: TracedModule,
    teacher: TracedModule,
    samples: Samples,
    blocks: Sequence[str],
    jit: bool,
) -> tuple[TrainingEngine, str]:
    """Chooses the engine, and gives the reason as a clause.

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
    megengine = MegEngineEngine(Twins(student, teacher, samples.form, blocks), jit)
    if requested == "megengine":
        return megengine, "as requested"
    try:
        torch = _torch(student, teacher, samples.form, blocks)
        _compare(torch, megengine, _first_samples(samples))
    except _RefusedError as error:
        if requested == "torch":
            raise TrainingError(
                f"finetune: the engine torch does not apply: {error}; use the engine megengine, or auto."
            ) from error
        return megengine, f"torch does not apply: {error}"
    return torch, "as requested" if requested == "torch" else "torch has a form of every op"


def _torch(student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str]) -> TorchEngine:
    if importlib.util.find_spec("torch") is None:
        raise _RefusedError(f"it is not installed ({install('torch')})")
    from qtrace.finetuning._torch import TorchEngine
    from qtrace.ptq.torch.graph import UnsupportedError

    try:
        return TorchEngine(student, teacher, form, blocks)
    except UnsupportedError as error:
        raise _RefusedError(str(error)) from error


def _first_samples(samples: Samples) -> Batch:
    """Returns a batch with as few samples as the data can be divided into."""
    batch = samples.batches[0]
    if not samples.joined:
        return batch
    return Batch(batch.number, [leaf[:_COMPARED_SAMPLES] for leaf in batch.leaves])


def _compare(torch: TorchEngine, megengine: TrainingEngine, batch: Batch) -> None:
    """Refuses torch if a node of the float graph has other values than in MegEngine."""
    from qtrace.ptq.torch.graph import UnsupportedError

    outputs, blocks = megengine.run_teacher(batch)
    try:
        fast_outputs, fast_blocks = torch.run_teacher(batch)
    except UnsupportedError as error:
        raise _RefusedError(str(error)) from error
    named = {f"output {index}": value for index, value in enumerate(outputs)} | blocks
    fast = {f"output {index}": value for index, value in enumerate(fast_outputs)} | fast_blocks
    for name, value in named.items():
        if not _agree(value, fast.get(name)):
            raise _RefusedError(f"its float values differ from those of MegEngine at {name}")


def _agree(value: np.ndarray, fast: np.ndarray | None) -> bool:
    if fast is None or fast.shape != value.shape:
        return False
    if value.dtype.kind != "f" or not value.size:
        return True  # integers and selections may turn on the last bit of a float
    bound = _TOLERANCE * float(np.max(np.abs(value), initial=0.0))
    return bool(np.all((np.abs(fast - value) <= bound) | ~np.isfinite(value)))
