"""A trace has the parameter names of its source, and returns dicts in the order of its source."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.graph.lint import lint
from tests.nets import images, net


class Pair(M.Module):
    """Two layers, the second of which is both an item of a list and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [M.Conv2d(4, 4, 1), M.Conv2d(4, 4, 1)]
        self.first = self.layers[0]

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.layers[1](F.relu(self.layers[0](x)))


class Pyramid(M.Module):
    """Blocks, layers and a tensor under two names each; ``forward`` goes through the later ones, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[M.Module] = []
        for index in range(3):
            block = Pair()
            setattr(self, f"block{index}", block)
            self.stages.insert(0, block)
        self.towers = {"box": self.stages[0]}
        self.convs = [M.Conv2d(4, 4, 3, padding=1)]
        self.top = self.convs[0]
        self.weight = mge.Parameter(np.ones((1, 4, 1, 1), np.float32))
        self.gain = self.weight

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        for block in self.stages:
            x = block(x)
        return self.top(self.block1(x) + self.towers["box"](x)) * self.weight


@pytest.mark.filterwarnings("ignore")
def test_state_dict_of_the_source_fits(tmp_path: Path) -> None:
    model = Pyramid()
    x = images(2, 4, 6, 6)
    traced = qtrace.trace(model, x)
    state = {
        name: np.random.default_rng(0).normal(size=v.shape).astype("f4")
        for name, v in model.state_dict().items()
    }
    assert sorted(traced.state_dict()) == sorted(state)
    assert [n for n, _ in traced.named_parameters()] == [n for n, _ in model.named_parameters()]
    for module in (model, traced):
        module.load_state_dict(state)
    want = model(mge.Tensor(x)).numpy()
    qtrace.save(traced, tmp_path / "t.mge")
    flat = qtrace.graph.flatten(traced)
    for module in (traced, flat, qtrace.load(tmp_path / "t.mge")):
        np.testing.assert_array_equal(module(mge.Tensor(x)).numpy(), want)
        assert sorted(module.state_dict()) == sorted(state)
    assert lint(traced) == [] == lint(flat)
    prepared = qtrace.prepare(traced, {"rules": [{"match": {"name": "block2.first"}, "quantize": False}]})
    notes = {n.name: n.state for n in qtrace.explain(prepared).annotation.notes}
    assert notes["convs_0_out"] == "int"
    assert [name for name, state in notes.items() if state == "float" and name.startswith("block2")]


def test_a_module_under_two_names_with_different_calls_keeps_both() -> None:
    inner = net(
        lambda self, x, y=None: self.conv(x) if y is None else self.conv(x) + y, conv=M.Conv2d(4, 4, 1)
    )
    model = net(lambda self, x: self.late(x) + self.early(x, x), early=inner, late=inner)
    x = images(2, 4, 5, 5)
    traced = qtrace.trace(model, x)
    np.testing.assert_array_equal(traced(mge.Tensor(x)).numpy(), model(mge.Tensor(x)).numpy())
    assert len({id(p) for p in traced.parameters()}) == 2


def _keys(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _keys(v)) for key, v in value.items()]
    return [_keys(v) for v in value] if isinstance(value, (list, tuple)) else None


def _nested(x: mge.Tensor) -> dict[str, Any]:
    ordered = OrderedDict([("z", {"q": x + 4, "p": x + 5}), ("y", x + 6)])
    return {"late": x, "early": [x + 1, {"b": x + 2, "a": x + 3}], "middle": (ordered, x + 7)}


def test_dicts_come_back_in_the_order_of_the_source(tmp_path: Path) -> None:
    model = net(lambda self, x: _nested(self.conv(x)), conv=M.Conv2d(3, 2, 1))
    x = images(2, 3, 4, 4)
    traced = qtrace.trace(model, x)
    expected = model(mge.Tensor(x))
    qtrace.save(traced, tmp_path / "t.mge")
    prepared = qtrace.prepare(traced)
    for module in (traced, qtrace.load(tmp_path / "t.mge"), prepared):
        output = module(mge.Tensor(x))
        assert _keys(output) == _keys(expected)
        np.testing.assert_array_equal(output["early"][1]["b"].numpy(), expected["early"][1]["b"].numpy())
        np.testing.assert_array_equal(
            output["middle"][0]["z"]["p"].numpy(), expected["middle"][0]["z"]["p"].numpy()
        )


def test_a_dict_of_a_submodule_keeps_its_meaning() -> None:
    inner = net(lambda self, x: {"b": self.conv(x), "a": x}, conv=M.Conv2d(3, 3, 1))
    model = net(lambda self, x: {"y": self.inner(x)["b"], "x": self.inner(x)["a"]}, inner=inner)
    x = images(1, 3, 4, 4)
    output, expected = qtrace.trace(model, x)(mge.Tensor(x)), model(mge.Tensor(x))
    assert list(output) == ["y", "x"]
    for key in output:
        np.testing.assert_array_equal(output[key].numpy(), expected[key].numpy())


class Frozen(M.BatchNorm2d):
    """Fills in an argument."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, freeze=True)

    @classmethod
    def convert(cls, module: M.Module) -> M.Module:
        """Nothing that forward knows."""
        return module


class Halved(M.Conv2d):
    """Computes something else."""

    def calc_conv(self, inp: Any, weight: Any, bias: Any) -> Any:
        return super().calc_conv(inp, weight, bias) * 0.5


class Scaled(M.Conv2d):
    """Its weight is not the Parameter that its base made."""

    @property
    def weight(self) -> mge.Tensor:
        return self.direction * 2.0

    @weight.setter
    def weight(self, value: mge.Tensor) -> None:
        self.direction = value


class Patched(M.Conv2d):
    """Replaces a method of its base where only the object shows it."""

    def __init__(self, inside: int, outside: int, kernel: int) -> None:
        super().__init__(inside, outside, kernel)
        plain = self.calc_conv
        self.calc_conv = lambda inp, weight, bias: plain(inp, weight, bias) * 0.5


def test_a_layer_with_a_replaced_method_keeps_it() -> None:
    model = net(lambda self, x: F.relu(self.conv(x)), conv=Patched(3, 4, 1))
    x = images(2, 3, 6, 6)
    prepared = qtrace.prepare(qtrace.trace(model, x))
    np.testing.assert_allclose(prepared(mge.Tensor(x)).numpy(), model(mge.Tensor(x)).numpy(), atol=1e-6)


def test_a_subclass_that_only_fills_in_arguments_is_its_base() -> None:
    conv = M.Conv2d(3, 4, 3, padding=1, bias=False)
    layers = {"conv": conv, "norm": Frozen(4), "half": Halved(4, 4, 1), "scaled": Scaled(4, 4, 1)}
    model = net(lambda self, x: self.scaled(self.half(F.relu(self.norm(self.conv(x))))), **layers)
    x = images(2, 3, 6, 6)
    traced = qtrace.trace(model, x)
    assert type(model.norm) is Frozen
    assert type(traced.norm) is M.BatchNorm2d
    state = model.state_dict()
    assert {n: v.shape for n, v in traced.state_dict().items()} == {n: v.shape for n, v in state.items()}
    traced.load_state_dict(state)
    want = model(mge.Tensor(x)).numpy()
    np.testing.assert_array_equal(traced(mge.Tensor(x)).numpy(), want)
    prepared = qtrace.prepare(traced)
    np.testing.assert_allclose(prepared(mge.Tensor(x)).numpy(), want, rtol=1e-5, atol=1e-6)
    assert "norm.weight" not in dict(prepared.named_parameters())
