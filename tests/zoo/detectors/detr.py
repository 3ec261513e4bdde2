"""DETR: a residual net, then a transformer over its last map."""

from __future__ import annotations

import math
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine import Tensor

from tests.zoo.detectors.blocks import Backbone

__all__ = ["Attention", "Detr"]


class Attention(M.Module):
    """Attention of several heads, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q_proj, self.k_proj = M.Linear(width, width), M.Linear(width, width)
        self.v_proj, self.out_proj = M.Linear(width, width), M.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        return x.reshape(count, length, self.heads, -1).transpose(0, 2, 1, 3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        weight = F.softmax(F.matmul(q * self.scale, k.transpose(0, 1, 3, 2)), axis=-1)
        mixed = F.matmul(weight, v).transpose(0, 2, 1, 3)
        return self.out_proj(F.flatten(mixed, 2))


class Forward(M.Module):
    """Two linear layers between two norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = M.Linear(width, 2 * width), M.Linear(2 * width, width)
        self.dropout = M.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.relu(self.linear1(x))))


class EncoderLayer(M.Module):
    """Self-attention with positions in queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.ffn = Attention(width, heads), Forward(width)
        self.norm1, self.norm2 = M.LayerNorm(width), M.LayerNorm(width)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query = x + position
        x = self.norm1(x + self.self_attn(query, query, x))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(M.Module):
    """Self-attention of the queries, then attention to the memory."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = Attention(width, heads), Attention(width, heads)
        self.ffn = Forward(width)
        self.norm1, self.norm2, self.norm3 = (M.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, position: Tensor, query: Tensor) -> Tensor:
        placed = x + query
        x = self.norm1(x + self.self_attn(placed, placed, x))
        x = self.norm2(x + self.cross_attn(x + query, memory + position, memory))
        return self.norm3(x + self.ffn(x))


def sine_positions(x: Tensor, width: int) -> Tensor:
    """Sine codes of the cells of ``x`` (N, C, H, W): (N, H * W, width)."""
    ones = F.ones_like(x[:, 0])
    column, row = F.cumsum(ones, 1), F.cumsum(ones, 2)
    column = column / (column[:, -1:, :] + 1e-6) * (2 * math.pi)
    row = row / (row[:, :, -1:] + 1e-6) * (2 * math.pi)
    steps = F.arange(width // 4, dtype="float32")
    rates = 100.0 ** (steps * 4 / width)
    codes = []
    for value in (column, row):
        angle = F.expand_dims(value, 3) / rates
        codes.append(F.flatten(F.stack([F.sin(angle), F.cos(angle)], axis=4), 3))
    return F.flatten(F.concat(codes, axis=3), 1, 2)


class Detr(M.Module):
    """Learned queries ask an encoded image for boxes; every decoder layer answers."""

    def __init__(self, width: int = 16, heads: int = 2, queries: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.width = width
        self.backbone = Backbone()
        self.input_proj = M.Conv2d(self.backbone.channels["res5"], width, 1)
        self.query_embed = mge.Parameter(np.zeros((queries, width), np.float32))
        self.encoder = [EncoderLayer(width, heads)]
        self.decoder = [DecoderLayer(width, heads) for _ in range(2)]
        self.norm = M.LayerNorm(width)
        self.class_embed = M.Linear(width, classes)
        self.bbox_embed = M.Sequential(M.Linear(width, width), M.ReLU(), M.Linear(width, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.input_proj(self.backbone(x))
        position = sine_positions(features, self.width)
        memory = F.flatten(features, 2).transpose(0, 2, 1)
        for layer in self.encoder:
            memory = layer(memory, position)
        shape = (x.shape[0], *self.query_embed.shape)
        query = F.broadcast_to(F.expand_dims(self.query_embed, 0), shape)
        target = F.zeros_like(query)
        answers = []
        for layer in self.decoder:
            target = layer(target, memory, position, query)
            hidden = self.norm(target)
            boxes = F.sigmoid(self.bbox_embed(hidden))
            answers.append({"pred_logits": self.class_embed(hidden), "pred_boxes": boxes})
        return {**answers[-1], "aux_outputs": answers[:-1]}
