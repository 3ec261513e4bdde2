"""Transformers without windows: ViT, ResMLP, UniFormer."""

from __future__ import annotations

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

__all__ = ["Mlp", "ResMlp", "SelfAttention", "UniFormer", "Vit"]


def zeros(*shape: int) -> mge.Parameter:
    return mge.Parameter(np.zeros(shape, np.float32))


class Mlp(M.Module):
    """Two linear layers with GELU and dropout."""

    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = (
            M.Linear(width, factor * width),
            M.GELU(),
            M.Linear(factor * width, width),
        )
        self.drop = M.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SelfAttention(M.Module):
    """Queries, keys and values from one layer, cut apart by indexing."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = M.Linear(width, 3 * width), M.Linear(width, width)
        self.softmax = M.Softmax(axis=-1)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        qkv = self.qkv(x).reshape(count, length, 3, self.heads, width // self.heads)
        qkv = qkv.transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weight = self.softmax(F.matmul(q, k.transpose(0, 1, 3, 2)) * self.scale)
        mixed = F.matmul(weight, v).transpose(0, 2, 1, 3).reshape(count, length, width)
        return self.proj(mixed)


class Block(M.Module):
    """Norm, attention, norm, perceptron; each on a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = M.LayerNorm(width), SelfAttention(width, heads)
        self.drop_path = M.Identity()
        self.norm2, self.mlp = M.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Patches(M.Module):
    """A strided convolution whose cells become tokens."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = M.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return F.transpose(F.flatten(self.proj(x), 2), (0, 2, 1))


class Vit(M.Module):
    """ViT: a class token and a table of positions before the blocks."""

    def __init__(
        self, size: int = 32, patch: int = 8, width: int = 16, depth: int = 2, classes: int = 5
    ) -> None:
        super().__init__()
        self.patch_embed = Patches(width, patch)
        self.cls_token = zeros(1, 1, width)
        self.pos_embed = zeros(1, (size // patch) ** 2 + 1, width)
        self.pos_drop = M.Dropout(0.1)
        self.blocks = M.Sequential(*(Block(width, 2) for _ in range(depth)))
        self.norm, self.head = M.LayerNorm(width), M.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        token = F.broadcast_to(self.cls_token, (x.shape[0], 1, x.shape[2]))
        x = self.pos_drop(F.concat((token, x), axis=1) + self.pos_embed)
        return self.head(self.norm(self.blocks(x))[:, 0])


# -- ResMLP --------------------------------------------------------------------------------------------


class Affine(M.Module):
    """A factor and a shift for each channel, in the place of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = mge.Parameter(np.ones(width, np.float32))
        self.beta = zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.beta


class Mixer(M.Module):
    """A linear layer across tokens, then a perceptron; both scaled by learned vectors."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Affine(width), Affine(width)
        self.attn, self.mlp = M.Linear(tokens, tokens), Mlp(width)
        self.gamma_1 = mge.Parameter(np.full(width, 0.5, np.float32))
        self.gamma_2 = mge.Parameter(np.full(width, 0.5, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        across = self.attn(self.norm1(x).transpose(0, 2, 1)).transpose(0, 2, 1)
        x = x + self.gamma_1 * across
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class ResMlp(M.Module):
    """ResMLP: no attention, no norms with statistics."""

    def __init__(self, size: int = 32, patch: int = 8, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.patch_embed = Patches(width, patch)
        self.blocks = [Mixer(width, (size // patch) ** 2) for _ in range(2)]
        self.norm, self.head = Affine(width), M.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1).reshape(x.shape[0], -1))


# -- UniFormer -----------------------------------------------------------------------------------------


class Local(M.Module):
    """A depthwise convolution where attention would stand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pos_embed = M.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm1, self.norm2 = M.BatchNorm2d(width), M.BatchNorm2d(width)
        self.conv1, self.conv2 = M.Conv2d(width, width, 1), M.Conv2d(width, width, 1)
        self.attn = M.Conv2d(width, width, 5, padding=2, groups=width)
        self.fc1, self.act, self.fc2 = M.Conv2d(width, 2 * width, 1), M.GELU(), M.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pos_embed(x)
        x = x + self.conv2(self.attn(self.conv1(self.norm1(x))))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Global(M.Module):
    """A ViT block on a map, with the position added by a depthwise convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pos_embed = M.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm1, self.attn = M.LayerNorm(width), SelfAttention(width, 2)
        self.norm2, self.mlp = M.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pos_embed(x)
        count, width, height, length = x.shape
        x = F.flatten(x, 2).transpose(0, 2, 1)
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x.transpose(0, 2, 1).reshape(count, width, height, length)


class UniFormer(M.Module):
    """Local blocks on a fine map, global ones on a coarse map."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.patch_embed1, self.norm1 = M.Conv2d(3, 8, 4, 4), M.LayerNorm(8)
        self.blocks1 = M.Sequential(Local(8), Local(8))
        self.patch_embed2 = M.Conv2d(8, 16, 2, 2)
        self.blocks2 = M.Sequential(Global(16))
        self.norm, self.head = M.BatchNorm2d(16), M.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed1(x)
        x = self.norm1(F.transpose(x, (0, 2, 3, 1))).transpose(0, 3, 1, 2)
        x = self.blocks2(self.patch_embed2(self.blocks1(x)))
        return self.head(F.flatten(self.norm(x), 2).mean(-1))
