"""A ``state_dict`` of another config is refused in a sentence that names the sites."""

from __future__ import annotations

import megengine as mge
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ConfigError
from qtrace.qat import load_state
from tests.each import each_of
from tests.nets import images

X = images(4, 3, 8, 8)


@pytest.fixture(scope="module")
def traced():
    layers = (M.Conv2d(3, 8, 3, padding=1), M.BatchNorm2d(8), M.ReLU(), M.Conv2d(8, 4, 1))
    return qtrace.trace(M.Sequential(*layers), X, check=False)


def _prepare(traced, **config):
    return qtrace.prepare(traced, {"backend": "onnxruntime", **config})


def test_a_state_of_the_same_config_is_loaded(traced):
    first = qtrace.calibrate(_prepare(traced, fakequant="lsq"), [X], progress=False)
    second = _prepare(traced, fakequant="lsq")
    load_state(second, first.state_dict())
    for name, value in first.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[name], value)


@each_of(
    "average",
    [
        lambda value: 0.3 * value + 0.7 * value,  # which makes scalars of arrays without axes
        lambda value: np.float64(0.999) * value + 0.001 * value,
        lambda value: value.tolist(),
        mge.tensor,
    ],
    ids=["float32", "float64", "numbers", "tensors"],
)
@each_of("fakequant", ["lsq", "lsq_plus", "learned_range", "tqt"])
def test_an_average_of_states_in_numpy_is_loaded(traced, average, fakequant):
    config = {"fakequant": fakequant, "backend": "generic"}
    if fakequant == "tqt":
        config |= {"weight": {"power_of_two": True}, "activation": {"power_of_two": True}}
    first = qtrace.calibrate(_prepare(traced, **config), [X], progress=False)
    state = first.state_dict()
    second = _prepare(traced, **config)
    load_state(second, {name: average(value) for name, value in state.items()})
    for name, value in second.state_dict().items():
        assert (value.dtype, value.shape) == (state[name].dtype, state[name].shape)
        np.testing.assert_allclose(value, state[name], rtol=1e-6, atol=1e-7)
        if name.endswith(".zero_point"):
            np.testing.assert_array_equal(value, state[name])
    qtrace.set_phase(second, "quantize")
    qtrace.convert(second)


@pytest.mark.parametrize("observer", ["mse", "percentile", "kl"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_other_observers_brings_its_ranges(traced, observer, strict):
    first = qtrace.calibrate(_prepare(traced, observers={"activation": "minmax"}), [X], progress=False)
    second = _prepare(traced, observers={"activation": observer})
    second.load_state_dict(first.state_dict(), strict=strict)
    third = _prepare(traced, observers={"activation": observer})
    load_state(third, first.state_dict())
    for module in (second, third):
        qtrace.set_phase(module, "quantize")
        np.testing.assert_array_equal(module(mge.tensor(X)).numpy(), first(mge.tensor(X)).numpy())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rules": [{"match": {"position": "last"}, "quantize": False}]},
            "it has sites that this graph does not",
        ),
        (
            {"qat": {"bn": {"fold": False}}},
            r"it has no 1\.\w+.* 1\.weight\..*such as qat\.bn\.fold",
        ),
        ({"fakequant": "learned_range"}, r"other fake quants stood at .*\(scale, zero_point instead of "),
        ({"weight": {"axis": None}}, r"other shapes qsites\._0_weight\.scale 8x1x1x1 instead of"),
    ],
    ids=["rule", "fold", "fakequant", "per tensor"],
)
def test_a_state_of_another_config_is_refused_by_its_sites(traced, config, message):
    state = qtrace.calibrate(_prepare(traced), [X], progress=False).state_dict()
    other = _prepare(traced, **config)
    before = other.state_dict()
    with pytest.raises(ConfigError, match=message) as caught:
        load_state(other, state)
    assert len(str(caught.value)) < 600
    for name, value in before.items():
        np.testing.assert_array_equal(other.state_dict()[name], value)


def test_a_float_state_lacks_the_sites(traced):
    with pytest.raises(ConfigError, match="it has no values for the sites .* more"):
        load_state(_prepare(traced), traced.state_dict())
