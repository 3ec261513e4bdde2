"""MegEngine's own quantization configs: the error says what to write, and that is accepted."""

from __future__ import annotations

import ast

import megengine.module as M
import megengine.quantization as native
import numpy as np
import pytest

import qtrace
from qtrace.errors import ConfigError
from qtrace.preparation.model import QuantizedModel
from tests.nets import net

CONFIGS = {name: value for name, value in vars(native).items() if isinstance(value, native.QConfig)}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_error_names_a_config_that_prepare_takes(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(3, 4, 3)), x)
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
