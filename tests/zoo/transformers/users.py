"""Modules as users write them: shared and repeated parts, containers in and out, parts without gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import megengine.functional as F
import megengine.module as M
from megengine import Tensor

from tests.zoo.transformers.vit import SelfAttention

__all__ = ["USERS", "Boxed", "Boxes"]


class CalledTwice(M.Module):
    """One convolution, one norm and one linear layer, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = M.Conv2d(3, 8, 3, 2, 1)
        self.body = M.Sequential(M.Conv2d(8, 8, 3, padding=1), M.ReLU())
        self.fc = M.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.body(F.relu(self.stem(x))))
        x = F.mean(x, axis=[2, 3])
        return self.fc(F.relu(self.fc(x)))


class SharedNorm(M.Module):
    """A convolution shared by three levels, with a norm for each level."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = M.Conv2d(3, 6, 3, 2, 1)
        self.tower = M.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norms = [M.BatchNorm2d(6) for _ in range(3)]

    def forward(self, x: Tensor) -> list[Tensor]:
        x, levels = self.stem(x), []
        for norm in self.norms:
            levels.append(F.relu(norm(self.tower(x))))
            x = F.avg_pool2d(x, 2)
        return levels


class DictInput(M.Module):
    """A dict of an image and a mask in, a list out."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.mask = M.Conv2d(3, 6, 3, 2, 1), M.Conv2d(1, 6, 3, 2, 1)

    def forward(self, data: dict[str, Tensor]) -> list[Tensor]:
        image, mask = self.image(data["image"]), self.mask(data["mask"])
        return [F.relu(image) * F.sigmoid(mask), F.relu(image - mask)]


class NestedOutput(M.Module):
    """Dicts in dicts, with tuples and an input that is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = M.Sequential(M.Conv2d(3, 6, 3, 2, 1), M.BatchNorm2d(6), M.ReLU())
        self.up, self.head = M.Conv2d(6, 4, 1), M.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.stem(x)
        vector = F.mean(y, axis=(2, 3))
        large = F.vision.interpolate(self.up(y), scale_factor=2, mode="bilinear")
        return {"maps": {"small": y, "large": (large, large[:, :2])}, "class": [self.head(vector)], "in": x}


class SeveralInputs(M.Module):
    """An image, a vector and an optional bias, which may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector = M.Conv2d(3, 6, 3, 2, 1), M.Linear(4, 6)
        self.head = M.Linear(12, 3)

    def forward(self, image: Tensor, vector: Tensor, bias: Tensor | None = None) -> Tensor:
        image = F.adaptive_avg_pool2d(F.relu(self.image(image)), (1, 1))
        both = F.concat([F.squeeze(image, axis=(2, 3)), F.relu(self.vector(vector))], axis=1)
        out = self.head(both)
        return out if bias is None else out + bias


class Frozen(M.Module):
    """A backbone whose gradient is cut off, and a head that trains on it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = M.Sequential(M.Conv2d(3, 8, 3, 2, 1), M.BatchNorm2d(8), M.ReLU())
        self.head = M.Conv2d(8, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x).detach()
        return self.head(features)


class Idle(M.Module):
    """Identity, dropout as a module and as a function, and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle, self.unused = M.Conv2d(3, 8, 3, 2, 1), M.Identity(), M.Linear(2, 2)
        self.drop, self.fc = M.Dropout(0.5), M.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.idle(F.relu(self.conv(x))))
        x = F.dropout(F.mean(x, (2, 3)), 0.2, training=self.training)
        return self.idle(self.fc(x))


class SqueezeExcite(M.Module):
    """Channels weighted by a gate of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = M.Conv2d(3, 8, 3, 2, 1, bias=False), M.BatchNorm2d(8)
        self.down, self.up = M.Linear(8, 4), M.Linear(4, 8)
        self.last = M.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn(self.conv(x)))
        gate = F.sigmoid(self.up(F.relu(self.down(x.mean(axis=3).mean(axis=2)))))
        x *= gate.reshape(-1, 8, 1, 1)
        return self.last(x)


class MapAttention(M.Module):
    """Attention between the cells of a map, added to the map by a learned factor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attn = M.Conv2d(3, 8, 8, 8), SelfAttention(8, 2)
        self.norm, self.last = M.GroupNorm(2, 8), M.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        tokens = F.flatten(x, 2).transpose(0, 2, 1)
        mixed = self.attn(tokens).transpose(0, 2, 1).reshape(x.shape)
        return self.last(x + 0.5 * mixed)


@dataclass
class Boxes:
    """An output of the user's own class, which a trace does not know."""

    boxes: Tensor
    scores: Tensor


class Boxed(M.Module):
    """``forward`` returns a class of its own; ``raw`` returns the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = M.Conv2d(3, 8, 3, 2, 1), M.Conv2d(8, 6, 3, 2, 1)

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.head(F.relu(self.stem(x)))
        return F.relu(x[:, :4]), F.sigmoid(x[:, 4:])

    def forward(self, x: Tensor) -> Boxes:
        return Boxes(*self.raw(x))


USERS = (
    CalledTwice,
    SharedNorm,
    DictInput,
    NestedOutput,
    SeveralInputs,
    Frozen,
    Idle,
    SqueezeExcite,
    MapAttention,
)
