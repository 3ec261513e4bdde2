"""Adaptive poolings at whose sizes MegEngine's kernel would divide by 0 and end the process."""

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.jit import trace as jit_trace

import qtrace
import qtrace.graph.engine
from qtrace.errors import CalibrationError, GraphError, TraceError
from qtrace.graph.kernels import refuse_divisions_by_zero

POOLS = [F.adaptive_avg_pool2d, F.adaptive_max_pool2d]


class Pooled(M.Module):
    """A convolution and a pooling to (3, 4)."""

    def __init__(self, pool):
        super().__init__()
        self.conv = M.Conv2d(1, 2, 1)
        self.pool = pool

    def forward(self, x):
        return self.pool(self.conv(x))


MODULES = [
    M.AdaptiveAvgPool2d((3, 4)),
    M.AdaptiveMaxPool2d((3, 4)),
    lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    # The tracer does not know a function by another name, and records the op of MegEngine's core.
    lambda x, pool=F.adaptive_avg_pool2d: pool(x, (3, 4)),
    lambda x, pool=F.adaptive_max_pool2d: pool(x, mge.Tensor([3, 4])),
]


def image(height, width):
    return np.random.default_rng(0).random((2, 1, height, width), dtype=np.float32)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("size", [5, (5, 1), (1, 5), [4, 5], np.int32(5), mge.Tensor([4, 5]), mge.Tensor(5)])
def test_a_size_larger_than_the_input_is_refused(pool, size):
    with pytest.raises(ValueError, match=r"of an input of \(4, 4\) to the larger \(.*5.*give an input of"):
        pool(mge.Tensor(image(4, 4)), size)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("size", [0, (0, 2), mge.Tensor([2, 0])])
def test_an_empty_result_is_refused(pool, size):
    with pytest.raises(ValueError, match="has an empty result: give a size of 1 or more"):
        pool(mge.Tensor(image(4, 4)), size)


@pytest.mark.parametrize("symbolic", [None, False, True])
@pytest.mark.parametrize("size", [4, (2, 4), mge.Tensor([2, 4])])
def test_other_sizes_are_pooled_as_before(size, symbolic):
    values = image(4, 8)
    refuse_divisions_by_zero()  # a second call wraps nothing
    x = mge.Tensor(values)
    pool = (lambda x: F.adaptive_avg_pool2d(x, size)) if symbolic is None else None
    pool = pool or jit_trace(symbolic=symbolic)(lambda x: F.adaptive_avg_pool2d(x, size))
    height, width = (4, 4) if isinstance(size, int) else (2, 4)
    wanted = values.reshape(2, 1, height, 4 // height, width, 8 // width).mean((3, 5))
    for _ in range(3):
        np.testing.assert_allclose(pool(x).numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("pool", MODULES)
def test_a_trace_names_the_line_of_the_network(pool):
    with pytest.raises(
        TraceError, match=r"fails on the example \(test_kernels.py:\d+\).* to the larger \(3, 4\)"
    ):
        qtrace.trace(Pooled(pool), image(3, 3))


@pytest.mark.parametrize("pool", MODULES)
def test_another_size_of_inputs_is_refused_at_every_stage(pool):
    traced = qtrace.trace(Pooled(pool), image(6, 8))
    refusal = r"_out \(.*daptive.*, .*test_kernels.py:\d+\) fails on .* to the larger \(3, 4\)"
    small = image(2, 8)
    with pytest.raises(ValueError, match=refusal):
        traced(mge.Tensor(small))
    with pytest.raises(GraphError, match=refusal):
        qtrace.graph.propagate_shapes(traced, mge.Tensor(small))
    prepared = qtrace.prepare(traced)
    with pytest.raises(CalibrationError, match=f"batch 0 .*{refusal}"):
        qtrace.calibrate(prepared, [small])
    qtrace.calibrate(prepared, [image(6, 8)])
    with pytest.raises(CalibrationError, match=f"batch 0 .*{refusal}"):
        qtrace.compare(prepared, [small])
    with pytest.raises(ValueError, match=refusal):
        qtrace.convert(prepared)(mge.Tensor(small))


@pytest.mark.parametrize("pool", MODULES[:4])
def test_verify_refuses_another_size_of_inputs(pool, tmp_path):
    prepared = qtrace.prepare(qtrace.trace(Pooled(pool), image(6, 8)))
    qtrace.calibrate(prepared, [image(6, 8)])
    converted = qtrace.convert(prepared)
    path = tmp_path / "net.onnx"
    qtrace.export(converted, path)
    with pytest.raises(CalibrationError, match=r"batch 0 .* to the larger \(3, 4\)"):
        qtrace.verify(path, converted, [image(2, 8)])
