"""MegEngine's own quantization configs: the error says what to write, and that computes the same."""

from __future__ import annotations

import ast
import itertools
from functools import partial
from typing import Any

import megengine as mge
import megengine.module as M
import megengine.quantization as native
import numpy as np
import pytest
from megengine.quantization import fake_quant, observer
from megengine.quantization.utils import QuantMode

import qtrace
from qtrace.config.recipe import describe_equivalent
from qtrace.errors import ConfigError
from qtrace.preparation.model import QuantizedModel
from tests.each import each_of
from tests.nets import net

CONFIGS = {name: value for name, value in vars(native).items() if isinstance(value, native.QConfig)}
DTYPES = ("quint8", "qint8", "qint8_narrow", "quint4", "qint4", "quint2", "qint2", "qint1", "qint32")
MOVING = {"momentum": 0.5}
OBSERVERS: tuple[Any, ...] = (
    observer.MinMaxObserver,
    observer.SyncMinMaxObserver,
    observer.ExponentialMovingAverageObserver,
    partial(observer.SyncExponentialMovingAverageObserver, **MOVING),
    observer.HistogramObserver,
    observer.PassiveObserver,
    None,
)
FAKE_QUANTS = (None, fake_quant.FakeQuantize, fake_quant.TQT, fake_quant.LSQ)
RNG = np.random.default_rng(0)
BATCHES = [(RNG.standard_normal((4, 3, 6, 6)) * size + 0.2).astype(np.float32) for size in (1.0, 2.0)]


def _sides(step: int) -> list[tuple[Any, Any]]:
    """Observers with modes, types and fake quants of MegEngine's, as parts of a config: each ``step``-th."""
    sides = []
    for make, mode, dtype, fake in itertools.product(OBSERVERS, QuantMode, DTYPES, FAKE_QUANTS):
        options = {} if make is observer.PassiveObserver else {"mode": mode}
        sides.append(
            (
                None if make is None else partial(make, dtype=dtype, **options),
                None if fake is None else partial(fake, dtype=dtype),
            )
        )
    return sides[::step]


def _config(activation: tuple[Any, Any], weight: tuple[Any, Any]) -> native.QConfig:
    return native.QConfig(weight[0], activation[0], weight[1], activation[1])


def _native_sites(config: native.QConfig) -> dict[str, tuple[Any, ...]]:
    """The scale, zero point, integers and fake quant of the parts of a layer that MegEngine quantizes."""
    module = native.quantize_qat(_layer(), qconfig=config)
    native.disable_fake_quant(module)
    module.train()
    for batch in BATCHES:
        module(mge.Tensor(batch))
    layer, sites = module.c, {}
    for side, observed, fake in (
        ("activation", layer.act_observer, layer.act_fake_quant),
        ("weight", layer.weight_observer, layer.weight_fake_quant),
    ):
        if observed is not None:
            q = observed.get_qparams()
            zero = 0.0 if q.zero_point is None else float(q.zero_point.numpy())
            kind = "lsq" if isinstance(fake, fake_quant.LSQ) else "fixed"
            sites[side] = (kind, float(q.scale.numpy()), zero, q.dtype_meta.qmin, q.dtype_meta.qmax)
    return sites


def _own_sites(fields: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    traced = qtrace.trace(_layer(), BATCHES[0], check=False)
    prepared = qtrace.prepare(traced, {**fields, "placement": "everything"}, progress=False)
    qtrace.calibrate(prepared, BATCHES, progress=False, engine="megengine")
    sites = {}
    for site in QuantizedModel(prepared).sites:
        if site.node.name == "c_out" or site.sort == "weight":
            q = site.qparams
            kind, zero = site.plan.fakequant, float(q.zero_point)
            sites[site.sort] = (kind, float(q.scale), zero, q.scheme.qmin, q.scheme.qmax)
    return sites


def _layer() -> M.Module:
    module = net(lambda self, x: self.c(x), c=M.Conv2d(3, 4, 3))
    module.c.weight[...] = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)
    return module


# 11 has no divisor with the numbers of observers, modes, types and fake quants: each is met with others.
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_the_named_config_rounds_as_the_given_one_or_says_what_has_no_equal(step: int) -> None:
    """Each combination of MegEngine's parts is said; those that have an equal are compared site by site."""
    plain = (
        partial(observer.MinMaxObserver, dtype="qint8_narrow"),
        partial(fake_quant.FakeQuantize, dtype="qint8_narrow"),
    )
    exact: dict[str, tuple[native.QConfig, dict[str, Any]]] = {}
    for parts in _sides(step):
        for config in (_config(parts, plain), _config(plain, parts), _config(parts, parts)):
            fields, lost = describe_equivalent(config)
            qtrace.QConfig.model_validate(fields)
            if not lost:
                exact[str(fields)] = config, fields
    assert len(exact) >= 30 / step
    for config, fields in exact.values():
        own, expected = _own_sites(fields), _native_sites(config)
        assert own.keys() == expected.keys(), fields
        for side, (kind, *numbers) in expected.items():
            assert own[side][0] == kind, (side, fields)
            np.testing.assert_allclose(own[side][1:], numbers, rtol=1e-5, err_msg=f"{side} of {fields}")


@each_of(
    ("activation", "weight", "lost"),
    [
        (("quint8", "ASYMMERTIC", "FakeQuantize"), ("qint8_narrow", "SYMMERTIC", "FakeQuantize"), []),
        (("quint8", "ASYMMERTIC", "LSQ"), ("qint8_narrow", "SYMMERTIC", "LSQ"), []),
        (
            ("quint8", "ASYMMERTIC", "LSQ"),
            ("qint8_narrow", "SYMMERTIC", "FakeQuantize"),
            ["lsq of activations only"],
        ),
        (
            ("quint8", "ASYMMERTIC", "FakeQuantize"),
            ("qint8_narrow", "SYMMERTIC", "TQT"),
            ["tqt of weights only"],
        ),
        (
            ("quint8", "SYMMERTIC", "FakeQuantize"),
            ("qint8_narrow", "SYMMERTIC", "FakeQuantize"),
            ["activations whose zero point is 0"],
        ),
        (
            ("qint8", "SYMMERTIC", "FakeQuantize"),
            ("qint1", "ASYMMERTIC", "FakeQuantize"),
            ["127.5", "weights with integers from 0 to 1"],
        ),
    ],
)
def test_what_has_no_equal_is_said(activation: Any, weight: Any, lost: list[str]) -> None:
    def side(dtype: str, mode: str, kind: str) -> tuple[Any, Any]:
        made = partial(observer.MinMaxObserver, dtype=dtype, mode=QuantMode[mode])
        return made, partial(getattr(fake_quant, kind), dtype=dtype)

    config = _config(side(*activation), side(*weight))
    with pytest.raises(ConfigError) as error:
        qtrace.prepare(qtrace.trace(_layer(), BATCHES[0], check=False), config)
    text = str(error.value)
    assert ("the nearest in its words is {" if lost else "the same in its words is {") in text
    assert ("It has no equal of" in text) == bool(lost)
    assert all(clause in text for clause in lost), text


def test_parts_that_do_not_fit_each_other_or_fail_are_said() -> None:
    """An observer of another type than its fake quant, a least scale of one's own, parts that fail."""
    narrow = {"dtype": "qint8_narrow"}
    lsq, minmax = partial(fake_quant.LSQ, **narrow), partial(observer.MinMaxObserver, **narrow)
    for make, clause in (
        (partial(observer.MinMaxObserver, dtype="qint8"), "observed as qint8 and rounded as qint8_narrow"),
        (partial(observer.MinMaxObserver, eps=0.2, **narrow), "the least scale of weights, 0.2"),
    ):
        _, lost = describe_equivalent(native.QConfig(make, minmax, lsq, lsq))
        assert any(clause in text for text in lost), lost
    for make in (fake_quant.LSQ, "lsq", lsq()):  # without its dtype, a name, and an object instead of a class
        with pytest.raises(ConfigError, match="MegEngine's QConfig has parts of weights that fail: "):
            qtrace.prepare(qtrace.trace(_layer(), BATCHES[0]), native.QConfig(minmax, minmax, make, lsq))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_error_names_a_config_that_prepare_takes(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(3, 4, 3)), x, check=False)
    with pytest.raises(ConfigError, match="not one of MegEngine's own") as error:
        qtrace.prepare(traced, CONFIGS[name])
    text = str(error.value)
    fields = ast.literal_eval(text[text.index("{") : text.rindex("}") + 1])
    sites = QuantizedModel(qtrace.prepare(traced, {**fields, "placement": "everything"})).sites
    bits = {site.sort: site.plan.scheme.bits for site in sites if site.plan is not None}
    assert bits == dict.fromkeys(("activation", "weight"), 4 if "lowbit" in name else 8)
    assert all(site.plan.scheme.symmetric for site in sites if site.plan is not None)
    if "ema" in name:
        assert {s.plan.observer for s in sites if s.sort == "activation" and s.plan} == {"moving_average"}
