"""torch.ao's FX quantization of ResNet-18: calibration and QAT steps. Stands alone, needs torch only.

python torch_ao.py SHAPE BATCHES ROUNDS    for example (8,3,96,96) 32 3

prints one JSON object: name -> seconds of each round.
"""

from __future__ import annotations

import ast
import json
import sys
import time
import warnings
from collections.abc import Callable

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping  # noqa: E402
from torch.ao.quantization.observer import MinMaxObserver, default_per_channel_weight_observer  # noqa: E402
from torch.ao.quantization.qconfig import QConfig  # noqa: E402
from torch.ao.quantization.qconfig_mapping import QConfigMapping  # noqa: E402
from torch.ao.quantization.quantize_fx import prepare_fx, prepare_qat_fx  # noqa: E402


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.down(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage in range(4):
        for i in range(2):
            layers.append(Block(inputs, 64 << stage, 2 if stage and not i else 1))
            inputs = 64 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def main(shape: tuple[int, ...], batches: int, rounds: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(shape, generator=generator) for _ in range(batches)]
    net = resnet18().eval()
    minmax = QConfig(
        activation=MinMaxObserver.with_args(quant_min=0, quant_max=255),
        weight=default_per_channel_weight_observer,
    )
    histogram = get_default_qconfig_mapping("x86")
    sides: dict[str, Callable[[], None]] = {
        "forward": lambda: _forward(net, data),
        "minmax": lambda: _forward(prepare_fx(net, QConfigMapping().set_global(minmax), (data[0],)), data),
        "histogram": lambda: _forward(prepare_fx(net, histogram, (data[0],)), data),
        "step": _step(resnet18(), data[0]),
        "qat step": _step(
            prepare_qat_fx(resnet18().train(), get_default_qat_qconfig_mapping("x86"), (data[0],)), data[0]
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _forward(net: nn.Module, data: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for batch in data:
            net(batch)


def _step(net: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    labels = torch.arange(len(batch))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    print(json.dumps(main(ast.literal_eval(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
