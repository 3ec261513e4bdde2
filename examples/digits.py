"""The part of a user: data, a network and a training loop, all plain MegEngine.

Nothing here knows of qtrace. The loop trains the float network and, unchanged, the 4-bit one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import megengine.optimizer as optim
import numpy as np
from megengine.autodiff import GradManager
from tqdm import tqdm

# On CPU, MegEngine 1.13 computes some gradients wrong when several ops are queued (about one backward pass in
# twenty, whatever the model): without a queue they are right, and a run can be repeated.
mge.config.async_level = 0

CALIBRATION, TEST = 100, 500
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Part:
    """Images (N x 1 x 8 x 8, float32, 0 to 1) and their labels (N, int32)."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Digits:
    """Three parts without a common image: 1,197 to train, 100 to calibrate, 500 to test."""

    train: Part
    calibration: Part
    test: Part


def load(split_seed: int = _SPLIT_SEED) -> Digits:
    """The handwritten digits bundled with scikit-learn, split the same way on every machine."""
    from sklearn.datasets import load_digits  # takes a second, and who loads the network needs no data

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    # RandomState, not default_rng: its streams are frozen for good.
    order = np.random.RandomState(split_seed).permutation(len(images))
    parts = np.split(order, [len(order) - CALIBRATION - TEST, len(order) - TEST])
    train, calibration, test = (Part(images[p], labels[p].astype(np.int32)) for p in parts)
    return Digits(train, calibration, test)


class Block(M.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = M.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = M.BatchNorm2d(channels)
        self.conv2 = M.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = M.BatchNorm2d(channels)
        self.shortcut: M.Module = M.Identity()
        if stride != 1 or channels_in != channels:
            conv = M.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = M.Sequential(conv, M.BatchNorm2d(channels))

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        """Computes N x channels x H/stride x W/stride features."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Net(M.Module):
    """A residual network of about 5,000 parameters: small enough to lose something at 4 bits."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = M.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn = M.BatchNorm2d(width)
        self.block1 = Block(width, width, 1)
        self.block2 = Block(width, 2 * width, 2)
        self.block3 = Block(2 * width, 4 * width, 2)
        self.fc = M.Linear(4 * width, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        """Computes the logits, N x 10."""
        x = F.relu(self.bn(self.stem(x)))
        x = self.block3(self.block2(self.block1(x)))
        return self.fc(F.flatten(F.avg_pool2d(x, 2), 1))


def fit(
    model: M.Module,
    groups: list[dict[str, Any]],
    part: Part,
    *,
    epochs: int,
    lr: float,
    seed: int,
    title: str,
    batch_size: int = 64,
    weight_decay: float = 5e-4,
) -> None:
    """Trains with SGD, momentum and a cosine schedule. No early stop: nothing is selected on any data.

    Args:
        model: the network; changed in place, its training flags are the caller's.
        groups: the optimizer's parameter groups; a group's own ``lr`` is scheduled in proportion.
        part: the training data.
        epochs: number of passes over the training data.
        lr: learning rate at the start; it ends at 0.
        seed: seed of the order of the images.
        title: title of the progress bar.
        batch_size: images in a step.
        weight_decay: weight decay of groups that set none.
    """
    optimizer = optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=weight_decay)
    rates = [group["lr"] for group in optimizer.param_groups]
    manager = GradManager().attach([p for group in groups for p in group["params"]])
    order = np.random.default_rng(seed)
    steps = len(part.images) // batch_size
    with tqdm(total=epochs * steps, desc=title, unit="step") as bar:
        for epoch in range(epochs):
            for chosen in np.array_split(order.permutation(len(part.images))[: steps * batch_size], steps):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * 0.5 * (1 + np.cos(np.pi * bar.n / bar.total))
                with manager:
                    logits = model(mge.Tensor(part.images[chosen]))
                    loss = F.nn.cross_entropy(logits, mge.Tensor(part.labels[chosen]))
                    manager.backward(loss)
                optimizer.step().clear_grad()
                bar.update()
            bar.set_postfix(epoch=f"{epoch + 1}/{epochs}", loss=f"{loss.item():.4f}")


def predict(model: Callable[[mge.Tensor], mge.Tensor], images: np.ndarray) -> np.ndarray:
    """The digit that ``model`` gives for each image."""
    return model(mge.Tensor(images)).numpy().argmax(axis=1)
