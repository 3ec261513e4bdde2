"""CLIP's residual net: blurred strides and attention in the place of the last pool."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

__all__ = ["ClipResNet", "TextImage"]


class Bottleneck(M.Module):
    """All convolutions have stride 1; an average pool follows the second one."""

    def __init__(self, inside: int, middle: int, stride: int) -> None:
        super().__init__()
        outside = 2 * middle
        self.conv1, self.bn1 = M.Conv2d(inside, middle, 1, bias=False), M.BatchNorm2d(middle)
        self.conv2, self.bn2 = M.Conv2d(middle, middle, 3, padding=1, bias=False), M.BatchNorm2d(middle)
        self.avgpool = M.AvgPool2d(stride) if stride > 1 else M.Identity()
        self.conv3, self.bn3 = M.Conv2d(middle, outside, 1, bias=False), M.BatchNorm2d(outside)
        self.relu = M.ReLU()
        self.downsample = None
        if stride > 1 or inside != outside:
            pool = M.AvgPool2d(stride) if stride > 1 else M.Identity()
            layer = M.Conv2d(inside, outside, 1, bias=False)
            self.downsample = M.Sequential(pool, layer, M.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.avgpool(self.relu(self.bn2(self.conv2(out))))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class AttentionPool(M.Module):
    """The mean of a map asks the map."""

    def __init__(self, cells: int, width: int, heads: int, outside: int) -> None:
        super().__init__()
        self.positional_embedding = mge.Parameter(np.zeros((cells + 1, width), np.float32))
        self.q_proj, self.k_proj = M.Linear(width, width), M.Linear(width, width)
        self.v_proj, self.c_proj = M.Linear(width, width), M.Linear(width, outside)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        x = F.transpose(F.flatten(x, 2), (2, 0, 1))  # cells, N, width
        x = F.concat([F.mean(x, axis=0, keepdims=True), x], axis=0)
        x = x + F.expand_dims(self.positional_embedding, 1)
        length, count, width = x.shape
        each = width // self.heads
        q = self.q_proj(x[:1]).reshape(1, -1, each).transpose(1, 0, 2) * each**-0.5
        k = self.k_proj(x).reshape(length, -1, each).transpose(1, 2, 0)
        v = self.v_proj(x).reshape(length, -1, each).transpose(1, 0, 2)
        mixed = F.matmul(F.softmax(F.matmul(q, k), axis=-1), v)
        mixed = mixed.transpose(1, 0, 2).reshape(count, width)
        return self.c_proj(mixed)


class ClipResNet(M.Module):
    """A stem of three layers, three stages, attention pool."""

    def __init__(self, size: int = 32, width: int = 8, outside: int = 8) -> None:
        super().__init__()
        half = width // 2
        self.conv1, self.bn1 = M.Conv2d(3, half, 3, 2, 1, bias=False), M.BatchNorm2d(half)
        self.conv2, self.bn2 = M.Conv2d(half, half, 3, padding=1, bias=False), M.BatchNorm2d(half)
        self.conv3, self.bn3 = M.Conv2d(half, width, 3, padding=1, bias=False), M.BatchNorm2d(width)
        self.avgpool, self.relu = M.AvgPool2d(2), M.ReLU()
        self.layer1 = M.Sequential(Bottleneck(width, width, 1), Bottleneck(2 * width, width, 1))
        self.layer2 = M.Sequential(Bottleneck(2 * width, width, 2))
        self.attnpool = AttentionPool((size // 8) ** 2, 2 * width, 2, outside)

    def forward(self, x: Tensor) -> Tensor:
        for conv, bn in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = self.relu(bn(conv(x)))
        return self.attnpool(self.layer2(self.layer1(self.avgpool(x))))


class TextImage(M.Module):
    """An image and a sentence of token numbers; the similarity of their normed vectors."""

    def __init__(self, vocabulary: int = 20, length: int = 6, width: int = 8) -> None:
        super().__init__()
        self.visual = ClipResNet(outside=width)
        self.token_embedding = mge.Parameter(np.zeros((vocabulary, width), np.float32))
        self.positions = mge.Parameter(np.zeros((length, width), np.float32))
        self.ln_final, self.text_projection = M.LayerNorm(width), M.Linear(width, width, bias=False)
        self.logit_scale = mge.Parameter(np.array([1.0], np.float32))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        image_features = self.visual(image)
        words = self.token_embedding[tokens.reshape(-1)].reshape(*tokens.shape, -1) + self.positions
        text_features = self.text_projection(F.max(self.ln_final(words), axis=1))
        image_features = image_features / F.norm(image_features, axis=1, keepdims=True)
        text_features = text_features / F.sqrt(
            F.sum(text_features * text_features, axis=1, keepdims=True) + 1e-6
        )
        return F.exp(self.logit_scale) * F.matmul(image_features, text_features, transpose_b=True)
