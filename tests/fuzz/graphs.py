"""Random networks: flattened, edited, saved, prepared and converted, they compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from hypothesis import strategies as st

import qtrace
from qtrace.graph import GraphEditor, exprs, flatten, lint
from qtrace.graph.types import TensorNode, TracedModule
from tests.nets import images, randomize

SHAPE = (2, 3, 6, 6)
X = images(*SHAPE)
BACKENDS = ("onnxruntime", "openvino", "tensorrt", "generic", "megengine")

# name -> (what it computes, of two values with the same channels)
UNARY = {
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": F.sigmoid,
    "hswish": F.hswish,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "max_pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "scaled": lambda x: x * 0.5,
    "flipped": lambda x: x[:, :, ::-1],
    "turned": lambda x: x.transpose(0, 1, 3, 2),
    "folded": lambda x: F.reshape(F.flatten(x, 1), x.shape),
    "squeezed": lambda x: x - F.mean(x, axis=(2, 3), keepdims=True),
}
BINARY = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "sub": lambda a, b: a - b, "max": F.maximum}
LAYERS = ("conv1", "conv3", "depthwise", "norm")

# A view that was negated twice is none any more: MegEngine's sigmoid has another kernel then, by a bit.
_LAYOUT = 1e-6


class Random(M.Module):
    """A network by a plan: each step is (kind, inputs), an input being the index of a value."""

    def __init__(self, plan: list[tuple[str, tuple[int, ...]]], layers: dict[str, M.Module]) -> None:
        super().__init__()
        self.plan = plan
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Any) -> Any:
        values, read = [x], set()
        for number, (kind, inputs) in enumerate(self.plan):
            given = [values[i] for i in inputs]
            read.update(inputs)
            if kind in LAYERS:
                values.append(getattr(self, f"layer{number}")(given[0]))
            elif kind == "concat":
                values.append(F.concat(given, axis=1))
            else:
                values.append((UNARY[kind] if kind in UNARY else BINARY[kind])(*given))
        return tuple(value for index, value in enumerate(values) if index not in read)


@st.composite
def networks(draw: st.DrawFn) -> M.Module:
    """Up to ten steps on values of 6 x 6 with up to 8 channels, which MegEngine itself can run."""
    plan: list[tuple[str, tuple[int, ...]]] = []
    layers: dict[str, M.Module] = {}
    channels = [SHAPE[1]]
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from((*LAYERS, *LAYERS, *UNARY, *BINARY, *BINARY, "concat")))
        first = draw(st.integers(0, len(channels) - 1))
        width = channels[first]
        inputs: tuple[int, ...] = (first,)
        if kind in BINARY:
            same = [i for i, count in enumerate(channels) if count == width]
            inputs = (first, draw(st.sampled_from(same)))
        elif kind == "concat":
            inputs = (first, draw(st.integers(0, len(channels) - 1)))
            width += channels[inputs[1]]
            if width > 8:
                continue
        elif kind in LAYERS:
            layer, width = _layer(kind, width, draw(st.integers(1, 6)))
            layers[f"layer{len(plan)}"] = layer
        plan.append((kind, inputs))
        channels.append(width)
    network = randomize(Random(plan or [("relu", (0,))], layers), draw(st.integers(0, 3)))
    computed(network)
    return network


def _layer(kind: str, inside: int, outside: int) -> tuple[M.Module, int]:
    if kind == "conv1":
        return M.Conv2d(inside, outside, 1), outside
    if kind == "conv3":
        return M.Conv2d(inside, outside, 3, 1, 1, bias=False), outside
    if kind == "depthwise":
        return M.Conv2d(inside, inside, 3, 1, 1, groups=inside), inside
    return M.BatchNorm2d(inside), inside


def values(model: Any) -> list[np.ndarray]:
    return [np.asarray(value.numpy()) for value in model(mge.Tensor(X))]


def computed(network: M.Module) -> list[np.ndarray]:
    """What the source gives; a network that MegEngine itself cannot run is no example."""
    try:
        return values(network)
    except RuntimeError as error:
        if "is_contiguous" not in str(error):  # pooling of what an index has reversed
            raise
        hypothesis.reject()


def same(model: Any, expected: list[np.ndarray], tolerance: float = 0.0) -> None:
    for found, wanted in zip(values(model), expected, strict=True):
        np.testing.assert_allclose(
            found, wanted, rtol=tolerance, atol=tolerance * max(1.0, np.abs(wanted).max())
        )


def sound(model: TracedModule) -> None:
    assert [str(problem) for problem in lint(model)] == []


def edited(data: st.DataObject, flat: TracedModule) -> bool:
    """Negates a value twice, and may take the two negations away again; tells whether they are left."""
    nodes = [n for e in exprs(flat) for n in e.outputs if isinstance(n, TensorNode)]
    node = data.draw(st.sampled_from(nodes))
    before = len(list(exprs(flat)))
    with GraphEditor(flat) as edit:
        once = edit.call_function(F.neg, node, after=node.expr, like=node)
        edit.replace_uses(node, once)
    with GraphEditor(flat) as edit:
        twice = edit.call_function(F.neg, once, after=once.expr, like=node)
        edit.replace_uses(once, twice)
    sound(flat)
    again_as_it_was = data.draw(st.booleans())
    if again_as_it_was:
        with GraphEditor(flat) as edit:
            edit.replace_uses(twice, node)
            edit.remove(twice.expr)
            edit.remove(once.expr)
        sound(flat)
        assert len(list(exprs(flat))) == before
    return not again_as_it_was


def again(model: TracedModule, folder: Path) -> TracedModule:
    """Saved and loaded."""
    qtrace.save(model, folder / "graph.mge")
    return qtrace.load(folder / "graph.mge")


def check(data: st.DataObject, folder: Path) -> None:
    network = data.draw(networks())
    expected = computed(network)
    traced = qtrace.trace(network, X, check=False)
    same(traced, expected)
    flat = flatten(traced)
    sound(flat)
    same(flat, expected)
    same(flat, expected, _LAYOUT if edited(data, flat) else 0.0)
    same(again(flat, folder), values(flat))
    prepared = qtrace.prepare(traced, f"backend/{data.draw(st.sampled_from(BACKENDS))}")
    sound(prepared)
    qtrace.set_phase(prepared, "float")
    same(prepared, expected, 1e-4)
    qtrace.calibrate(prepared, [X], progress=False, engine="megengine")
    quantized = values(prepared)
    converted = qtrace.convert(prepared)
    sound(converted)
    same(converted, quantized)
    same(again(prepared, folder), quantized)
    loaded = again(converted, folder)
    sound(loaded)
    same(loaded, quantized)
