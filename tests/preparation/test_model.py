"""`QuantizedModel`: sites as objects of the graph, from a record that is parsed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.extras.finetune import FinetuneSettings
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.fakequant.following.bn_fold import BnFold
from qtrace.graph.failures import from_json
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import owner
from qtrace.preparation.model import QuantizedModel, write_record
from tests.nets import images

X = images(2, 3, 6, 6)


class _Net(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = M.Conv2d(3, 4, 3)
        self.bn = M.BatchNorm2d(4)
        self.fc = M.Linear(64, 5)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.fc(F.flatten(F.relu(self.bn(self.conv(x))), 1))


def _traced() -> TracedModule:
    mge.random.seed(0)
    return qtrace.trace(_Net(), mge.Tensor(X), check=False)


def _prepared() -> TracedModule:
    return qtrace.prepare(_traced())


@pytest.fixture(scope="module")
def calibrated() -> TracedModule:
    return qtrace.calibrate(_prepared(), [X], progress=False, engine="megengine")


def test_sites_hold_nodes_readers_and_fake_quants_of_the_graph(calibrated: TracedModule) -> None:
    for module in (calibrated, qtrace.convert(calibrated)):
        model = QuantizedModel(module)
        assert [site.decision for site in model.sites] == list(model.annotation.sites)
        assert {site.sort for site in model.sites} == {"activation", "weight", "bias"}
        for site in model.sites:
            assert site.value is not None
            call = site.value.expr
            assert owner(call) is site.fake_quant
            assert call.args[1] is site.node
            assert site.consumers or site.value in module.graph.outputs
            assert all(site.value in reader.inputs for reader in site.consumers)
            assert model.rounded[site.value.name] is site
            assert model.unrounded_name(site.value) == model.unrounded_name(site.node) == site.node.name
            assert site in model.groups[site.group]
            if site.sort == "bias":
                assert isinstance(site.fake_quant, BiasQuant)
                assert site.plan is None
            else:
                assert isinstance(site.fake_quant, FakeQuant)
                assert site.plan is not None
                assert site.qparams == model.fake_quants[site.group].qparams()
                assert site.qparams.scheme == site.plan.scheme


def test_what_the_record_says_is_on_the_view(calibrated: TracedModule) -> None:
    model = QuantizedModel(calibrated, "prepared")
    converted = QuantizedModel(qtrace.convert(calibrated))
    assert (model.stage, converted.stage) == ("prepared", "converted")
    assert model.config == qtrace.load_recipe("onnxruntime")
    assert model.log == converted.log
    assert any("Conv2d" in line or "conv" in line for line in model.log)
    assert sum(map(len, model.groups.values())) == len(model.sites)
    assert model.fake_quants.keys() == {s.group for s in model.sites if s.sort != "bias"}
    assert all(isinstance(module, BiasQuant) for module in model.followers)
    assert set(model.carried_qparams()) == set(model.annotation.carried) != set()
    names = [name for name, _ in model.float_tensors()]
    assert names == sorted(names)
    assert {"fc.weight", "fc.bias"} <= set(names)
    assert len(names) < len(list(calibrated.named_tensors()))


def test_the_weight_of_a_layer_whose_batch_norm_trains_on_is_read_by_the_folded_layer() -> None:
    model = QuantizedModel(qtrace.prepare(_traced(), {"ptq": [], "qat": {"bn": {}}}))
    assert any(isinstance(module, BnFold) for module in model.followers)
    (site,) = (site for site in model.sites if site.value is None)
    assert site.sort == "weight"
    assert [type(owner(reader)) for reader in site.consumers] == [BnFold]
    assert site.node in site.consumers[0].inputs


def test_a_view_of_a_copy_has_the_nodes_of_the_copy(calibrated: TracedModule) -> None:
    model, copy = QuantizedModel(calibrated), qtrace.graph.flatten(calibrated)
    other = model.view(copy)
    assert other.record is model.record
    assert [site.decision for site in other.sites] == [site.decision for site in model.sites]
    assert not {site.node for site in other.sites} & {site.node for site in model.sites}
    assert QuantizedModel.of(model) is model


def test_added_reports_are_in_the_view_and_in_the_module() -> None:
    model = QuantizedModel(_prepared())
    count = len(model.ptq)
    model.add_reports({"algorithm": "mine", "changed": ["w"]})
    assert len(model.ptq) == count + 1
    assert QuantizedModel(model.module).ptq == model.ptq


def test_a_module_at_another_stage_is_refused(calibrated: TracedModule) -> None:
    with pytest.raises(qtrace.errors.GraphError, match="is not a prepared module: call qtrace.prepare"):
        QuantizedModel(_traced())
    with pytest.raises(qtrace.errors.GraphError, match="is not a converted module"):
        QuantizedModel(_Net(), "converted")
    with pytest.raises(qtrace.errors.GraphError, match="the module is prepared, not converted"):
        QuantizedModel(calibrated, "converted")


class _TwoInputs(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = M.Linear(4, 4), M.Linear(4, 4)

    def forward(self, x: mge.Tensor, x_q: mge.Tensor) -> mge.Tensor:
        return self.a(x) + self.b(x_q)


class _ModuleNames(_TwoInputs):
    def forward(self, children: mge.Tensor, training: mge.Tensor) -> mge.Tensor:
        return self.a(children) + self.b(training)


@pytest.mark.parametrize("network", [_TwoInputs, _ModuleNames])
def test_a_node_may_have_the_name_of_a_rounded_node_or_of_an_attribute(
    network: type[M.Module], tmp_path: Path
) -> None:
    batch = tuple(np.random.RandomState(i).randn(4, 4).astype("float32") for i in range(2))
    prepared = qtrace.prepare(qtrace.trace(network(), *batch, check=False))
    qtrace.calibrate(prepared, [batch], progress=False, engine="megengine")
    converted = qtrace.convert(prepared)
    for site in QuantizedModel(converted).sites:
        assert owner(site.value.expr) is site.fake_quant
        assert site.node.name == site.decision.node
    qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(tmp_path / "m.onnx", converted, [batch]).passed


def test_a_record_of_another_graph_is_reported() -> None:
    model, other = QuantizedModel(_prepared()), qtrace.prepare(_other())
    write_record(other, model.record)
    with pytest.raises(qtrace.errors.GraphError, match="the graph does not match its quantization record"):
        _ = QuantizedModel(other).sites


def _other() -> TracedModule:
    return qtrace.trace(M.Linear(6, 2), mge.Tensor(X[0, 0]), check=False)


def _verify(prepared: TracedModule, folder: Path, run: Callable[..., Any]) -> Callable[[], Any]:
    converted = qtrace.convert(prepared)
    qtrace.export(converted, folder / "m.onnx")
    return lambda: run(folder / "m.onnx", converted, [X])


def _export(prepared: TracedModule, path: Path, format: str | None) -> Callable[[], Any]:
    converted = qtrace.convert(prepared)
    return lambda: qtrace.export(converted, path, format)


CALLS: dict[str, Callable[[TracedModule, Path], Callable[[], Any]]] = {
    "set_phase": lambda m, _: lambda: qtrace.set_phase(m, "quantize"),
    "calibrate": lambda m, _: lambda: qtrace.calibrate(m, [X], progress=False, engine="megengine"),
    "convert": lambda m, _: lambda: qtrace.convert(m),
    "explain": lambda m, _: lambda: qtrace.explain(m).to_dict(),
    "compare": lambda m, _: lambda: qtrace.compare(m, [X]),
    "verify": lambda m, folder: _verify(m, folder, qtrace.verify),
    "bisect": lambda m, folder: _verify(m, folder, qtrace.bisect),
    "analyze": lambda m, _: lambda: qtrace.sensitivity.analyze(m, [X]),
    "export": lambda m, folder: _export(m, folder / "m.onnx", None),
    "export as dot": lambda m, folder: _export(m, folder / "m.dot", None),
    "export in float": lambda m, folder: _export(m, folder / "m.onnx", "onnx_float"),
    "finetune": lambda m, _: (
        lambda: qtrace.finetune(m, [X], FinetuneSettings(steps=2, batch_size=1), progress=False)
    ),
    "oscillations": lambda m, _: lambda: qtrace.qat.Oscillations(m),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_public_function_parses_the_record_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"ptq": ["fuse_bn", "bias_correction"]}
    prepared = qtrace.prepare(_traced(), recipe if name == "calibrate" else None)
    if name != "calibrate":
        qtrace.calibrate(prepared, [X], progress=False, engine="megengine")
    call = CALLS[name](prepared, tmp_path)
    parsed, parse = [], from_json
    record = "qtrace.preparation.model.from_json"
    monkeypatch.setattr(record, lambda kind, text: parsed.append(text) or parse(kind, text))
    call()
    assert len(parsed) == 1


def test_a_view_changes_no_value(calibrated: TracedModule) -> None:
    before = calibrated(mge.Tensor(X)).numpy()
    assert QuantizedModel(calibrated).sites
    np.testing.assert_array_equal(calibrated(mge.Tensor(X)).numpy(), before)
