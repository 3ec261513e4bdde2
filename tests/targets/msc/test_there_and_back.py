"""A document of ours runs again: the same bits, the same parameters, the same document a second time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import GraphError
from qtrace.graph import MSCGraph, from_msc, to_traced
from qtrace.graph.lint import lint
from qtrace.graph.types import TracedModule
from tests.each import each_of
from tests.nets import images, net
from tests.zoo.catalog import CNN
from tests.zoo.checks import equal, leaves, run
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.quick import parameters
from tests.zoo.transformers.entries import TRANSFORMERS, USER_NETS

X = images(2, 4, 8, 8)


def _there_and_back(module: TracedModule, folder: Path) -> tuple[MSCGraph, TracedModule]:
    graph = from_msc(qtrace.export(module, folder / "g.json", format="msc"))
    return graph, to_traced(graph)


def _flat(args: Any) -> tuple[Any, ...]:
    return tuple(t.numpy() for t in leaves(tuple(_tensor(a) for a in args)))


def _tensor(value: Any) -> Any:
    return {k: mge.Tensor(v) for k, v in value.items()} if isinstance(value, dict) else mge.Tensor(value)


def _in_order(value: Any) -> list[mge.Tensor]:
    """The tensors of a result in the order of the graph's outputs, which is that of its dicts."""
    if isinstance(value, mge.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in _in_order(part)]


# One of each structure.
_NAMES = frozenset(
    (
        *(
            "mobilenet_v3",
            "shufflenet_v2",
            "hrnet",
            "convnext",
            "densenet",
            "vit",
            "swin",
            "clip",
            "uniformer",
        ),
        *("CalledTwice", "SharedNorm", "DictInput", "NestedOutput", "resmlp", "fcos:infer", "yolox", "detr"),
    )
)
NETWORKS = [e for e in (*CNN, *TRANSFORMERS, *USER_NETS, *DETECTORS) if e.name in _NAMES]
QUICK = ("SharedNorm", "resmlp")


@pytest.mark.quick(1)
@pytest.mark.parametrize("entry", parameters(NETWORKS, QUICK))
def test_networks_give_the_same_bits(entry: Any, tmp_path: Path) -> None:
    traced = qtrace.trace(entry.build(), *entry.example(), check=False)
    graph, back = _there_and_back(traced, tmp_path)
    expected = _in_order(traced(*map(_tensor, entry.example())))
    equal([t.numpy() for t in expected], run(back, _flat(entry.example())))
    before, after = (dict(module.state_dict()) for module in (traced, back))
    assert set(after) <= set(before)
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name])
    assert lint(back) == []
    again, _ = _there_and_back(back, tmp_path)
    assert again.to_json() == graph.to_json()


def _forward(self: Any, x: Any) -> Any:
    y = F.relu(self.conv(x))
    y = self.group(self.prelu(y) + self.table) * self.gain
    y = F.nn.interpolate(self.bn(y), scale_factor=2, mode="nearest")
    a, b = F.split(self.bn(y), 2, axis=1)
    y = F.concat([b, a[:, ::-1].reshape(y.shape[0], 2, -1, 16)], axis=1)
    y[:, 1] = 0.5
    return self.norm(F.flatten(y.mean(axis=3), 1)), self.words(F.argmax(y, axis=1))


def _net() -> M.Module:
    table = mge.Tensor(np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8))
    module = net(
        _forward,
        conv=M.Conv2d(4, 4, 3, padding=1, groups=2),
        group=M.GroupNorm(2, 4),
        prelu=M.PReLU(4),
        bn=M.BatchNorm2d(4),
        norm=M.LayerNorm(64),
        words=M.Embedding(4, 3),
        table=table,
        gain=mge.Parameter(np.float32([0.5])),
    )
    generator = np.random.default_rng(0)
    for _, tensor in module.named_tensors():
        tensor[...] = mge.Tensor(generator.uniform(0.2, 1, tuple(tensor.shape)).astype(np.float32))
    return module


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return qtrace.trace(_net(), X, check=False)


@pytest.fixture(scope="module")
def converted(traced: TracedModule) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X], progress=False))


def test_every_layer_has_its_weights_by_type(traced: TracedModule, tmp_path: Path) -> None:
    graph, _ = _there_and_back(traced, tmp_path)
    kinds = {node.optype: node.weights for node in graph.get_nodes() if node.weights}
    types = {optype: list(weights) for optype, weights in kinds.items()}
    norm = ["gamma", "beta"]
    assert types == {
        "msc.conv2d_bias": ["weight", "bias"],
        "nn.prelu": ["weight"],
        "constant": ["const"],
        "nn.group_norm": norm,
        "nn.batch_norm": [*norm, "mean", "var"],
        "nn.layer_norm": norm,
        "msc.embedding": ["weight"],
    }
    sources = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}
    for optype, path in (("nn.batch_norm", "bn"), ("nn.group_norm", "group"), ("nn.layer_norm", "norm")):
        for kind, tensor in kinds[optype].items():
            value = getattr(getattr(traced, path), sources[kind]).numpy()
            assert (tensor.name, tensor.layout) == (f"{path}_{sources[kind]}", "O")
            np.testing.assert_array_equal(graph.values[tensor.name], value.reshape(-1))
    assert kinds["msc.embedding"]["weight"].shape == (4, 3)


@pytest.mark.parametrize("stage", ["traced", "converted"])
def test_shared_batch_norms_refer_to_the_first(
    stage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    graph, _ = _there_and_back(request.getfixturevalue(stage), tmp_path)
    first, second = (node for node in graph.get_nodes() if node.optype == "nn.batch_norm")
    assert (first.shared_ref, second.shared_ref) == ("", first.name)
    assert f"N_{second.index} {second.name}(M: {first.name}) <PARENTS" in str(second)
    assert list(second.weights) == ["gamma", "beta", "mean", "var"]
    assert graph.find_consumers("bn_weight") == (first, second)


def test_functions_with_parameters_have_weights_by_type(tmp_path: Path) -> None:
    stats = [mge.Parameter(np.linspace(0.5, 1, 4, dtype="f").reshape(1, 4, 1, 1)) for _ in range(4)]

    def forward(self: Any, x: Any) -> Any:
        return F.nn.batch_norm(x, self.m, self.v, self.g, self.b)

    module = net(forward, **dict(zip("mvgb", stats, strict=True)))
    graph, back = _there_and_back(qtrace.trace(module, X, check=False), tmp_path)
    (norm,) = (node for node in graph.get_nodes() if node.optype == "nn.batch_norm")
    assert {k: t.name for k, t in norm.weights.items()} == {
        "gamma": "g",
        "beta": "b",
        "mean": "m",
        "var": "v",
    }
    equal(run(module, (X,)), run(back, (X,)))


@pytest.mark.parametrize("stage", ["traced", "converted"])
def test_a_network_of_many_ops_gives_the_same_bits(
    stage: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    module = request.getfixturevalue(stage)
    graph, back = _there_and_back(module, tmp_path)
    for seed in (1, 2):
        x = images(2, 4, 8, 8, seed=seed)
        equal(run(module, (x,)), run(back, (x,)))
    assert not back.training
    text = MSCGraph.from_json(graph.to_json(), graph.values)
    equal(run(module, (X,)), run(to_traced(text), (X,)))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "recipe", ["backend/onnxruntime", "backend/ncnn", "backend/esp_dl_s3", "backend/megengine"]
)
def test_quantized_networks_round_as_they_did(recipe: str, tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = F.relu(self.bn(self.conv(x)))
        return self.fc(F.flatten(y + self.up(self.down(y)), 1)), y

    module = net(
        forward,
        conv=M.Conv2d(4, 4, 3, padding=1, groups=2),
        bn=M.BatchNorm2d(4),
        down=M.Conv2d(4, 6, 2, 2),
        up=M.ConvTranspose2d(6, 4, 2, 2),
        fc=M.Linear(256, 3),
    )
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    _, back = _there_and_back(converted, tmp_path)
    for seed in (1, 2):
        x = images(2, 4, 8, 8, seed=seed)
        equal(run(converted, (x,)), run(back, (x,)))


def _edit_of(document: str, optype: str, edit: Callable[[Any], None], values: Any) -> MSCGraph:
    data = json.loads(document)
    edit(next(node for node in data["nodes"] if node["optype"] == optype))
    return MSCGraph.from_json(json.dumps(data), values)


def _set_attr(key: str, value: str) -> Callable[[Any], None]:
    return lambda node: node["attrs"].update({key: value})


EDITED = {
    "another type": ("nn.softmax", lambda node: node.update(optype="nn.relu")),
    "another attribute": ("nn.softmax", _set_attr("axis", "2")),
    "an attribute more": ("nn.softmax", _set_attr("strides", "2,2")),
    "another number of a layer": ("nn.batch_norm", _set_attr("epsilon", "0.5")),
}


def _called(folder: Path) -> tuple[M.Module, MSCGraph]:
    """A module, and its graph with a call at each node: documents count axes from the first."""
    module = net(
        lambda self, x: F.softmax(self.bn(self.conv(x)), -3), conv=M.Conv2d(4, 4, 1), bn=M.BatchNorm2d(4)
    )
    traced = qtrace.trace(module, X, check=False)
    return module, from_msc(qtrace.export(traced, folder / "g.json", format="msc"))


@each_of("case", EDITED)
def test_an_edit_that_the_call_does_not_follow_is_refused(case: str, tmp_path: Path) -> None:
    optype, edit = EDITED[case]
    _, graph = _called(tmp_path)
    edited = _edit_of(graph.to_json(), optype, edit, graph.values)
    with pytest.raises(GraphError, match="were edited, but not its attribute 'call': remove 'call'"):
        to_traced(edited)


def _to_relu(node: Any) -> None:
    node["optype"] = "nn.relu"
    del node["attrs"]["call"]


def _to_tanh(node: Any) -> None:
    node["optype"] = "tanh"
    call = {"function": "megengine.functional.elemwise:tanh", "args": [{"ref": "input_0"}]}
    node["attrs"]["call"] = json.dumps(call)


@pytest.mark.parametrize(("edit", "function"), [(_to_relu, F.relu), (_to_tanh, F.tanh)])
def test_an_edit_that_the_call_follows_is_taken(
    edit: Callable[[Any], None], function: Callable[[Any], Any], tmp_path: Path
) -> None:
    module, graph = _called(tmp_path)
    edited = to_traced(_edit_of(graph.to_json(), "nn.softmax", edit, graph.values))
    expected = function(module.bn(module.conv(mge.Tensor(X)))).numpy()
    np.testing.assert_array_equal(edited(mge.Tensor(X)).numpy(), expected)


class Doubled(M.Module):
    """A layer of a user's own."""

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return x * 2


def test_layers_of_ones_own_are_called_if_they_are_allowed(tmp_path: Path) -> None:
    traced = qtrace.trace(net(lambda self, x: self.d(x), d=Doubled()), X, check=False, leaves=[Doubled])
    graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
    name = f"{Doubled.__module__}:Doubled"
    with pytest.raises(GraphError, match=f"names the module class {name}, which is not on the allow-list"):
        to_traced(graph)
    equal(run(traced, (X,)), run(to_traced(graph, allow=[name]), (X,)))


def _lstm() -> tuple[M.Module, np.ndarray]:
    return net(lambda self, x: self.rnn(x)[0], rnn=M.LSTM(3, 4)), images(2, 5, 3)


def test_a_recurrent_layer_comes_back(tmp_path: Path) -> None:
    module, x = _lstm()
    traced = qtrace.trace(module, x, check=False)
    graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
    back, expected = (run(module, (x,)) for module in (to_traced(graph), traced))
    for mine, theirs in zip(back, expected, strict=True):  # by numpy, not by MegEngine's kernel
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_values_are_needed(traced: TracedModule, tmp_path: Path) -> None:
    graph = from_msc(qtrace.export(traced, tmp_path / "g.json", format="msc"))
    with pytest.raises(
        GraphError, match="its weight conv_weight lacks a value: read the document with its .npz"
    ):
        to_traced(MSCGraph.from_json(graph.to_json()))
    with pytest.raises(GraphError, match="takes an MSCGraph, not a str"):
        to_traced(graph.to_json())  # type: ignore[arg-type]
