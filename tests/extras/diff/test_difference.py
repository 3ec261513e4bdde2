"""What differs between two quantized modules or two configs, against changes that are made on purpose."""

from __future__ import annotations

import copy
import json
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import CalibrationError, GraphError
from qtrace.extras.diff import Difference, compare_configs, compare_models
from qtrace.preparation.model import QuantizedModel
from qtrace.scheme import QParams
from tests.nets import images, net

CONFIG = {"backend": "generic", "observers": {"activation": "minmax", "weight": "minmax"}}
X = images(4, 3, 8, 8)


def traced() -> Any:
    def forward(self: Any, x: Any) -> Any:
        return self.second(F.relu(self.first(x)))

    children = {"first": M.Conv2d(3, 4, 3, padding=1), "second": M.Conv2d(4, 2, 1)}
    return qtrace.trace(net(forward, **children), X)


def quantized(config: dict[str, Any] = CONFIG, network: Any = None) -> Any:
    network = traced() if network is None else network
    return qtrace.calibrate(qtrace.prepare(network, config), [X], progress=False)


def site(difference: Difference, name: str) -> Any:
    return next(change for change in difference.scales if change.site == name)


def test_the_same_model_has_no_difference() -> None:
    model = quantized()
    for other in (copy.deepcopy(model), qtrace.convert(model)):
        difference = compare_models(model, other)
        assert difference.empty
        assert "config, ops, sites, scales and integers are the same" in difference.table()
        assert difference.to_dict()["same"] is True
    assert [pair.ratio for pair in difference.figures if pair.first] == [1.0] * len(
        [pair for pair in difference.figures if pair.first]
    )


def test_a_scale_that_moved_is_reported_in_steps_of_the_first_model() -> None:
    first, second = quantized(), quantized()
    name = "x"
    fake_quant = QuantizedModel(second).fake_quants[name]
    before = fake_quant.qparams()
    assert before.scheme.qmax == 255
    fake_quant.set_qparams(QParams(before.scheme, before.scale * np.float32(1.01), before.zero_point))
    change = site(compare_models(first, second), name)
    # The ends of the range are (qmin - z) s and (qmax - z) s; each moves by 1 % of itself.
    zero = int(before.zero_point)
    assert change.lsb == pytest.approx(0.01 * max(zero, 255 - zero), rel=1e-3)
    assert change.second / change.first == pytest.approx(1.01, rel=1e-5)
    assert (change.zero_point, change.channels, change.of) == (0, 1, 1)


def test_a_zero_point_that_moved() -> None:
    first, second = quantized(), quantized()
    fake_quant = QuantizedModel(second).fake_quants["x"]
    before = fake_quant.qparams()
    fake_quant.set_qparams(QParams(before.scheme, before.scale, before.zero_point + 3))
    change = site(compare_models(first, second), "x")
    assert change.lsb == pytest.approx(3)
    assert change.zero_point == 3


def test_one_channel_of_a_weight_and_its_integers() -> None:
    network = traced()
    changed = copy.deepcopy(network)
    weight = changed.first.weight.numpy().copy()
    weight[2] *= 2.0  # the scale of the channel doubles, its integers stay
    weight[1, 0, 0, 0] = 0.5 * weight[1, 0, 0, 0]
    changed.first.weight._reset(mge.Parameter(weight))
    difference = compare_models(quantized(network=network), quantized(network=changed))
    change = site(difference, "first_weight")
    assert (change.channels, change.of) in ((1, 4), (2, 4))
    assert change.lsb == pytest.approx(127.5, abs=1)
    integers = next(i for i in difference.integers if i.site == "first_weight")
    assert integers.of == weight.size
    assert 1 <= integers.count <= 27  # of channel 1 alone
    assert integers.largest is not None
    table = difference.table()
    assert "scales that moved" in table
    assert "first_weight" in table


def test_sites_ops_schemes_and_config() -> None:
    rules = [
        {"match": {"name": "second_out"}, "quantize": False},
        {"match": {"name": "first_out"}, "weight": {"bits": 4}},
    ]
    difference = compare_models(quantized(), quantized({**CONFIG, "rules": rules}))
    assert [(op.op, op.first, op.second) for op in difference.ops] == [("second_out", "int", "float")]
    assert "second_weight" in difference.gone
    assert difference.come == ()
    assert [(s.site, s.first[:4], s.second[:4]) for s in difference.schemes] == [
        ("first_weight", "int8", "int4")
    ]
    assert "first_weight" not in [change.site for change in difference.scales]
    assert [(c.key, c.first) for c in difference.config] == [("rules", None), ("rules", None)]
    back = compare_models(quantized({**CONFIG, "rules": rules}), quantized())
    assert (back.gone, back.come) == (difference.come, difference.gone)
    figures = {pair.name: pair for pair in difference.figures}
    assert figures["MACs on integers"].second < figures["MACs on integers"].first
    assert figures["MACs"].ratio == 1.0


def test_long_tables_are_cut_and_say_so() -> None:
    rules = [{"match": {"name": f"layer{i}"}, "quantize": False, "optional": True} for i in range(30)]
    first, second = qtrace.QConfig(backend="generic"), qtrace.QConfig(backend="generic", rules=rules)
    difference = Difference(config=compare_configs(first, second))
    assert "... and 10 more" in difference.table(None, 20)
    assert difference.table(None, None).count("layer") == 30
    assert len(json.loads(json.dumps(difference.to_dict()))["config"]) == 30


def test_configs_key_by_key() -> None:
    first = qtrace.QConfig(
        backend="generic", observers={"activation": {"percentile": {"percentile": 99.9}}}, ptq=["fuse_bn"]
    )
    second = qtrace.QConfig(
        backend="generic", observers={"activation": {"percentile": {"percentile": 99.5}}, "weight": "mse"}
    )
    changes = {change.key: (change.first, change.second) for change in compare_configs(first, second)}
    assert changes == {
        "observers.activation.percentile.percentile": (99.9, 99.5),
        "observers.weight": (None, "mse"),
        "ptq": (["fuse_bn"], None),
    }
    assert compare_configs(first, first) == ()


def test_a_rule_that_moved_went_and_came() -> None:
    a, b = ({"match": {"op": op}, "quantize": False} for op in ("conv2d", "linear"))
    first, second = (qtrace.QConfig(backend="generic", rules=rules) for rules in ([a, b], [b, a]))
    changes = compare_configs(first, second)
    assert [(c.first is None, c.second is None) for c in changes].count((True, False)) == 1
    assert [(c.first is None, c.second is None) for c in changes].count((False, True)) == 1


def test_other_networks_and_wrong_stages() -> None:
    wide = net(
        lambda self, x: self.second(F.relu(self.first(x))),
        first=M.Conv2d(3, 6, 3, padding=1),
        second=M.Conv2d(6, 2, 1),
    )
    difference = compare_models(quantized(), quantized(network=qtrace.trace(wide, X, check=False)))
    assert next(i for i in difference.integers if i.site == "first_weight").largest is None
    with pytest.raises(GraphError):
        compare_models(quantized(), traced())
    with pytest.raises(CalibrationError, match="calibrate"):
        compare_models(quantized(), qtrace.prepare(traced(), CONFIG))
