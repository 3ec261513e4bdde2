"""The order of the axes in dumped tensors: channels last, or in blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from qtrace.errors import ConfigError

__all__ = ["DeviceLayout"]

_BLOCKS = re.compile(r"nc(?P<block>\d+)hw(?P=block)")


@dataclass(frozen=True)
class DeviceLayout:
    """The order in which a device stores tensors of four axes; others are stored in the graph's order.

    Attributes:
        name: ``nchw``, the graph's own; ``nhwc``; or ``nc4hw4``, ``nc32hw32`` ...: blocks of so many
            channels, each with its channels innermost, the last one filled up.

    Raises:
        ConfigError: for another name.
    """

    name: str = "nchw"

    def __post_init__(self) -> None:
        if self.name not in ("nchw", "nhwc") and not self.block:
            raise ConfigError(f"unknown layout {self.name!r}: it is nchw, nhwc, or such as nc4hw4.")

    @property
    def block(self) -> int:
        """The channels of a block; 0 for layouts without blocks."""
        match = _BLOCKS.fullmatch(self.name)
        return int(match["block"]) if match else 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which the device stores a tensor of ``shape``."""
        if len(shape) != 4 or self.name == "nchw":
            return shape
        n, c, h, w = shape
        return (n, -(-c // self.block), h, w, self.block) if self.block else (n, h, w, c)

    def to_graph(self, value: np.ndarray, channels: int) -> np.ndarray:
        """Returns a stored tensor with the graph's order of axes.

        Args:
            value: a tensor in its stored shape.
            channels: the channels of the tensor, without those that fill up a block.
        """
        if self.block and value.ndim == 5:
            n, blocks, h, w, block = value.shape
            return value.transpose(0, 1, 4, 2, 3).reshape(n, blocks * block, h, w)[:, :channels]
        return value.transpose(0, 3, 1, 2) if self.name == "nhwc" and value.ndim == 4 else value
