"""Ops that leave the device are counted, and those that are rounded again to another width."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import onnx
import pytest

import qtrace
from qtrace.extras.contracts import ContractReport, check_contract
from qtrace.extras.contracts.base import CPU
from tests.nets import images, net

X = images(2, 3, 16, 16)


def _ranked(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return F.topk(F.flatten(F.exp(self.b(F.relu(self.a(x)))), 1), 3)[0]


def _chain(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    return self.b(F.relu(self.a(x)))


def _check(tmp_path: Path, target: str, config: Mapping[str, object] | str, forward=_chain) -> ContractReport:
    module = net(forward, a=M.Conv2d(3, 16, 3), b=M.Conv2d(16, 16, 3))
    prepared = qtrace.prepare(qtrace.trace(module, X[:1], check=False), config)
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    return check_contract(Path(qtrace.export(converted, tmp_path / "net.onnx")), target)


def test_what_the_device_does_not_take_falls_back(tmp_path: Path) -> None:
    report = _check(tmp_path, "ryzenai", "backend/ryzenai", _ranked)
    assert report.fallback["TopK"] == 1
    assert report.fallback["Exp"] == 1
    assert "Conv" not in report.fallback
    assert "TopK" in report.text()
    assert f"[runs on {CPU}]" in report.text()
    assert f"{sum(report.fallback.values())} ops leave the device for the CPU" in report.text()
    assert report.to_dict()["fallback"] == report.fallback
    assert report.price is not None
    assert set(report.price.products) == {"8"}
    # An exp reads and writes 16 x 12 x 12 floats, and the top-k behind a reshape reads them.
    assert report.price.copied_bytes >= 4 * 3 * 16 * 12 * 12
    assert "between the device and the CPU" in report.text()


def test_a_device_with_floats_keeps_what_its_provider_lists(tmp_path: Path) -> None:
    report = _check(tmp_path, "qnn", "backend/qnn", _ranked)
    assert {op.op for op in report.floats} >= {"TopK", "Exp"}
    assert not report.fallback
    assert all("16-bit floats" in op.runs_on for op in report.floats)


def test_report_without_fallback_mentions_none(tmp_path: Path) -> None:
    report = _check(tmp_path, "ryzenai", "backend/ryzenai")
    floats = {op.op for op in report.floats}
    assert not floats
    assert "fallback" not in report.text()
    assert "conversions" not in report.text()


@pytest.mark.parametrize("target", ["qnn", "ryzenai"])
def test_tensors_that_are_rounded_to_another_width_are_counted(tmp_path: Path, target: str) -> None:
    config = {
        **qtrace.load_recipe(f"backend/{target}").to_dict(),
        "rules": [
            {"match": {"name": "relu_out"}, "output": {"bits": 8}},
            {"match": {"name": "b_out"}, "activation": {"bits": 16}},
        ],
    }
    report = _check(tmp_path, target, config)
    assert report.conversions == 1
    assert "conversions: 1 tensor is rounded again" in report.text()
    assert report.to_dict()["conversions"] == 1
    # Of 8 bits 14 x 14 results of 27 products for 16 channels; behind them, of 16 bits, 12 x 12 of 144.
    assert report.price is not None
    assert dict(report.price.products) == {"8": 16 * 14 * 14 * 27, "16": 16 * 12 * 12 * 144}
    assert report.price.converted_bytes == 16 * 14 * 14 * 2
    assert report.price.copied_bytes == report.price.unknown == 0
    assert "0.0847 M of 8 bits (20%), 0.332 M of 16 bits (80%); 6.1 kB rounded again" in report.text()
    assert report.to_dict()["price"]["converted_bytes"] == 16 * 14 * 14 * 2


@pytest.mark.parametrize("target", ["qnn", "ryzenai"])
def test_16_bits_for_the_whole_graph_have_a_short_name(tmp_path: Path, target: str) -> None:
    report = _check(tmp_path, target, f"w8a16+{target}")
    assert report.passed
    assert not report.conversions
    assert not report.fallback


def test_sizes_that_a_file_leaves_open_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    _check(tmp_path, "qnn", "backend/qnn")
    model = onnx.load(str(path))
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = f"size{axis}"
    onnx.save(model, str(path))
    report = check_contract(path, "qnn")
    assert report.price is not None
    assert (dict(report.price.products), report.price.unknown) == ({}, 2)
    assert "products: none; not counted, for want of sizes in the file: 2" in report.text()
    here = check_contract(Path(_export_here(tmp_path)), "onnxruntime")
    assert here.price is None  # times are measured there
    assert here.to_dict()["price"] is None


def _export_here(tmp_path: Path) -> str:
    module = net(_chain, a=M.Conv2d(3, 16, 3), b=M.Conv2d(16, 16, 3))
    prepared = qtrace.prepare(qtrace.trace(module, X[:1], check=False), "backend/onnxruntime")
    converted = qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))
    return str(qtrace.export(converted, tmp_path / "here.onnx"))


@pytest.mark.parametrize(("target", "said"), [("ryzenai", True), ("qnn", True), ("onnxruntime", False)])
def test_ops_that_leave_the_device_are_named_before_calibration(target: str, said: bool, caplog) -> None:
    module = net(_ranked, a=M.Conv2d(3, 16, 3), b=M.Conv2d(16, 16, 3))
    traced = qtrace.trace(module, X[:1], check=False)
    qtrace.prepare(traced, f"backend/{target}")
    lines = [record.getMessage() for record in caplog.records if "stay in float on" in record.getMessage()]
    assert len(lines) == int(said)
    assert not said or all(f"1 {kind}" in lines[0] for kind in ("exp", "topk"))


def test_fallback_ignores_ops_kept_in_float_by_a_rule(caplog) -> None:
    traced = qtrace.trace(net(_chain, a=M.Conv2d(3, 16, 3), b=M.Conv2d(16, 16, 3)), X[:1], check=False)
    recipe = qtrace.load_recipe("backend/ryzenai").to_dict()
    recipe["rules"] = [*recipe.get("rules", ()), {"match": {"name": "b_out"}, "quantize": False}]
    qtrace.prepare(traced, recipe)
    assert not [record for record in caplog.records if "stay in float on" in record.getMessage()]
