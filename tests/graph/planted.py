"""What the tests of tracing build their models from, and how they ask for an error."""

from __future__ import annotations

import megengine as mge
import megengine.module as M
import numpy as np
import pytest
from megengine.autodiff import Function
from megengine.core._imperative_rt.core2 import Tensor as RawTensor
from megengine.core._imperative_rt.core2 import is_tracing_module
from megengine.core._trace_option import use_symbolic_shape
from megengine.traced_module import tm_config
from megengine.traced_module.module_tracer import active_module_tracer
from megengine.utils.naming import AutoNaming

from qtrace.errors import TraceError
from qtrace.graph.tracing.trace import trace

RNG = np.random.default_rng(7)
ROWS = RNG.standard_normal((2, 4)).astype("float32")
IMAGE = RNG.standard_normal((2, 3, 8, 8)).astype("float32")
GLOBAL = mge.Tensor(np.full(4, 2, "float32"))


def peek(tensor: mge.Tensor) -> np.ndarray:
    """The value of a tensor, read past the methods that `trace` watches."""
    return RawTensor.numpy(tensor)


def parameter() -> mge.Parameter:
    return mge.Parameter(np.linspace(1, 2, 4, dtype="float32"))


def buffer() -> mge.Tensor:
    return mge.Tensor(np.zeros(4, "float32"))


def net(forward, **attributes):
    """A module of class ``Net`` with this forward and these attributes."""

    def init(self):
        M.Module.__init__(self)
        for name, value in attributes.items():
            setattr(self, name, value)

    return type("Net", (M.Module,), {"__init__": init, "forward": forward})()


def holder(inner):
    """``inner`` at the path ``body.part``."""
    body = net(lambda self, x: self.part(x) * 2, part=inner)
    return net(lambda self, x: self.body(x) + 1, body=body)


class Two(M.Module):
    def forward(self, x, y=None):
        return x if y is None else x + y


def use_global(self, x):
    return x * GLOBAL


def write_slice(self, x):
    self.buf[...] = self.buf + x.mean()
    return x + self.buf


def assert_clean_trace():
    model = net(use_global)
    np.testing.assert_array_equal(
        trace(model, ROWS)(mge.Tensor(ROWS)).numpy(), model(mge.Tensor(ROWS)).numpy()
    )


def engine() -> tuple:
    """Everything global that a trace touches."""
    scopes = len(AutoNaming.scopes)
    options = (mge.config.async_level, use_symbolic_shape(), tm_config._enable_default_checker)
    return (*options, is_tracing_module(), active_module_tracer(), scopes, Function.__call__)


def failure(model, *example, check=True) -> str:
    """The message of the error; afterwards MegEngine is as it was and a clean model traces."""
    before = engine()
    with pytest.raises(TraceError) as caught:
        trace(model, *example, check=check)
    assert engine() == before
    assert_clean_trace()
    return str(caught.value)
