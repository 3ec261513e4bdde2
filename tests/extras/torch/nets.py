"""Small networks of torch."""

from __future__ import annotations

import torch

__all__ = ["Block", "Branching", "Detector", "Encoder", "Sorted", "Tables", "Tied"]


class Block(torch.nn.Module):
    """A convolution with BatchNorm, a branch, and a linear layer."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        conv = torch.nn.Conv2d(3, 8, 3, padding=1, bias=bias)
        self.stem = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8, eps=1e-3), torch.nn.ReLU())
        self.conv = torch.nn.Conv2d(8, 8, 1)
        self.fc = torch.nn.Linear(8, 5)
        settle(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.conv(x)
        return self.fc(x.mean((2, 3)))


class Encoder(torch.nn.Module):
    """An attention layer of torch's own, behind a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Parameter(torch.zeros(1, 6, 16))
        self.norm = torch.nn.LayerNorm(16)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc = torch.nn.Linear(16, 16)
        settle(self)

    def forward(self, tokens: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        x = self.norm(tokens + self.places)
        x = tokens + self.attention(x, x, x, need_weights=False)[0]
        return self.fc(x) * gain


class Tied(torch.nn.Module):
    """A model of words whose output layer has the weight of its embedding."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)
        self.fc = torch.nn.Linear(8, 8)
        self.out = torch.nn.Linear(8, 11, bias=bias)
        self.out.weight = self.words.weight
        settle(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.fc(self.words(ids))))


class Tables(torch.nn.Module):
    """A norm that torch's exporter writes in pieces, a table read at places, and a standardized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(1, 8)
        self.conv = torch.nn.Conv2d(8, 8, 1)
        self.biases = torch.nn.Parameter(torch.zeros(8, 9))
        self.shift = torch.nn.Parameter(torch.zeros(1, 1, 8, 8))
        self.gain = torch.nn.Parameter(torch.zeros(8, 1, 1, 1))
        self.last = torch.nn.Conv2d(8, 8, 1)
        self.register_buffer("places", torch.arange(64).reshape(8, 8) % 9, persistent=False)
        self.kept: torch.Tensor | None = None
        settle(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.biases[:, self.places] if self.kept is None else self.kept
        x = self.conv(self.norm(x)) + table[None] + self.shift.expand(1, 8, 8, 8)
        weight = self.last.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) * self.gain
        return torch.nn.functional.conv2d(x, weight, self.last.bias)

    def keep(self) -> None:
        """Keeps the table as read, as timm's LeViT does once it has run."""
        self.kept = self.biases[:, self.places].detach()


class Branching(torch.nn.Module):
    """Reads a value of the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1:  # the line that the refusal names
            return x * 2
        return x


class Decomposing(torch.nn.Module):
    """Has an op of which torch's exporter knows no form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x.mean((0, 1)))[0]  # the line that the refusal names


class Sorted(torch.nn.Module):
    """Has an op that MegEngine has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x).sum(1)


class Detector(torch.nn.Module):
    """Selects boxes by their scores, in one of two ways that depend on their number, as torchvision does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.head = torch.nn.Conv2d(8, 5, 1)
        settle(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.head(torch.relu(self.body(x))).permute(0, 2, 3, 1).reshape(-1, 5)
        scores, boxes = rows[:, 4].sigmoid(), rows[:, :4]
        kept = torch.where(scores > 0.5)[0]
        scores, boxes = scores[kept], boxes[kept]
        if boxes.numel() > 8:
            order = scores.argsort(descending=True)
            return scores[order], boxes[order]
        return scores, boxes


def settle(module: torch.nn.Module) -> None:
    """Draws all parameters and statistics, so that no two are equal."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(drawn + 0.5 if name.endswith("var") else drawn - 0.5)
