"""The training loop: the same for float networks, prepared graphs and MegEngine's own QAT modules."""

from __future__ import annotations

from collections.abc import Sequence

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.autodiff import GradManager
from megengine.jit import trace
from tqdm import tqdm

from examples.detector.adam import Adam
from examples.digits import Part
from qtrace.gradients import fast_gradients

__all__ = ["fit"]

BATCH = 64

# Parameters, the learning rate that they begin with, and their weight decay.
Groups = Sequence[tuple[Sequence[mge.Parameter], float, float]]


def fit(model: M.Module, groups: Groups, part: Part, *, steps: int, seed: int, title: str) -> None:
    """Trains with AdamW and a cosine schedule, the step under ``jit.trace``. Nothing is selected on any data.

    Args:
        model: the network; changed in place, its training flags are the caller's.
        groups: the parameters that are trained.
        part: the training data.
        steps: number of batches.
        seed: seed of the order of the images.
        title: title of the progress bar.
    """
    mge.config.async_level = 0  # on CPU, MegEngine 1.13 computes some gradients wrong when ops are queued
    optimizer = Adam(groups)
    parameters = optimizer.parameters
    manager = GradManager().attach(parameters)

    @trace(symbolic=True)
    def backward(images: mge.Tensor, labels: mge.Tensor) -> list[mge.Tensor]:
        with manager:
            loss = F.nn.cross_entropy(model(images), labels)
            manager.backward(loss)
        return [loss, *(p.grad for p in parameters)]

    order = np.random.RandomState(seed)
    waiting = np.zeros(0, np.int64)
    with fast_gradients(model), tqdm(total=steps, desc=title, unit="step") as bar:
        for step in range(steps):
            if len(waiting) < BATCH:
                waiting = order.permutation(len(part.images))
            chosen, waiting = waiting[:BATCH], waiting[BATCH:]
            loss, *grads = backward(mge.Tensor(part.images[chosen]), mge.Tensor(part.labels[chosen]))
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            optimizer.step(0.5 * (1 + np.cos(np.pi * step / steps)))
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
