"""The training loop, the same for the float network and for a prepared graph."""

from __future__ import annotations

from collections.abc import Sequence

import megengine as mge
import megengine.module as M
import numpy as np
from megengine.autodiff import GradManager
from tqdm import tqdm

from examples.detector import data
from examples.detector.adam import Adam
from examples.detector.targets import assign, loss
from qtrace.gradients import fast_gradients

# On CPU, MegEngine 1.13 computes some gradients wrong when several ops are queued.
mge.config.async_level = 0

BATCH = 16

Groups = Sequence[tuple[Sequence[mge.Parameter], float, float]]


def fit(
    model: M.Module,
    groups: Groups,
    part: data.Part,
    *,
    steps: int,
    seed: int,
    title: str,
    warmup: int = 0,
) -> None:
    """Trains with AdamW and a cosine schedule. Nothing is selected on any data.

    Args:
        model: the network; changed in place, its training flags are the caller's.
        groups: parameters, the learning rate that they begin with, and their weight decay.
        part: the training data; every image is shown mirrored, too.
        steps: number of batches.
        seed: seed of the order of the images, and of the choice which are mirrored.
        title: title of the progress bar.
        warmup: number of steps in which the learning rate grows to its value.
    """
    optimizer = Adam(groups)
    manager = GradManager().attach(optimizer.parameters)
    random = np.random.RandomState(seed)
    mean = None
    with tqdm(total=steps, desc=title, unit="step") as bar:
        for step in range(steps):
            share = min(1.0, (step + 1) / max(warmup, 1)) * 0.5 * (1 + np.cos(np.pi * step / steps))
            images, boxes, labels = batch(part, random)
            with fast_gradients(model), manager:
                value = loss(model(mge.Tensor(images)), assign(boxes, labels))
                manager.backward(value)
            optimizer.step(share)
            mean = value.item() if mean is None else 0.98 * mean + 0.02 * value.item()
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            bar.update()


def batch(
    part: data.Part, random: np.random.RandomState
) -> tuple[np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Normalized images drawn at random, half of them mirrored, with boxes and labels."""
    chosen = random.randint(len(part), size=BATCH)
    drawn = [(part.images[i], part.boxes[i]) for i in chosen]
    drawn = [mirror(*pair) if random.randint(2) else pair for pair in drawn]
    images, boxes = zip(*drawn, strict=True)
    return data.normalize(np.stack(images)), boxes, [part.labels[i] for i in chosen]


def mirror(image: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An image with its boxes, left and right exchanged."""
    left, top, right, bottom = boxes.T
    return image[:, :, ::-1], np.stack([data.SIZE - right, top, data.SIZE - left, bottom], axis=1)
