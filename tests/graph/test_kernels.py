"""Calls at which a kernel of MegEngine's, or of onnxruntime's, would divide by 0 and end the process."""

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.jit import trace as jit_trace

import qtrace
import qtrace.graph.kernels
from qtrace.errors import CalibrationError, GraphError, TraceError
from qtrace.graph.kernels import refuse_divisions_by_zero
from tests.each import each_of

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


@each_of("pool", POOLS)
@each_of("size", [5, (5, 1), (1, 5), [4, 5], np.int32(5), mge.Tensor([4, 5]), mge.Tensor(5)])
def test_a_size_larger_than_the_input_is_refused(pool, size):
    with pytest.raises(ValueError, match=r"of an input of \(4, 4\) to the larger \(.*5.*give a larger input"):
        pool(mge.Tensor(image(4, 4)), size)


@each_of("pool", POOLS)
@each_of("size", [0, (0, 2), mge.Tensor([2, 0])])
def test_an_empty_result_is_refused(pool, size):
    with pytest.raises(ValueError, match="has an empty result: give a size of 1 or more"):
        pool(mge.Tensor(image(4, 4)), size)


@each_of("symbolic", [None, False, True])
@each_of("size", [4, (2, 4), mge.Tensor([2, 4])])
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


@each_of("pool", MODULES)
def test_a_trace_names_the_line_of_the_network(pool):
    with pytest.raises(
        TraceError, match=r"fails on the example \(test_kernels.py:\d+\).* to the larger \(3, 4\)"
    ):
        qtrace.trace(Pooled(pool), image(3, 3), check=False)


@pytest.mark.quick(2)
@pytest.mark.parametrize("pool", MODULES)
def test_another_size_of_inputs_is_refused_at_every_stage(pool):
    traced = qtrace.trace(Pooled(pool), image(6, 8), check=False)
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
    prepared = qtrace.prepare(qtrace.trace(Pooled(pool), image(6, 8), check=False))
    qtrace.calibrate(prepared, [image(6, 8)])
    converted = qtrace.convert(prepared)
    path = tmp_path / "net.onnx"
    qtrace.export(converted, path)
    with pytest.raises(CalibrationError, match=r"batch 0 .* to the larger \(3, 4\)"):
        qtrace.verify(path, converted, [image(2, 8)])


def ones(*shape):
    return mge.Tensor(np.ones(shape, np.float32))


def integers(*values, dtype=np.int32):
    return mge.Tensor(np.array(values, dtype))


STRIDES = [
    lambda: F.conv1d(ones(1, 4, 8), ones(4, 4, 3), stride=0),
    lambda: F.conv2d(ones(1, 4, 8, 8), ones(4, 4, 3, 3), stride=(1, 0)),
    lambda: F.conv3d(ones(1, 4, 8, 8, 8), ones(4, 4, 3, 3, 3), stride=0),
    lambda: F.conv_transpose2d(ones(1, 4, 8, 8), ones(4, 4, 3, 3), stride=0),
    lambda: F.conv_transpose3d(ones(1, 4, 8, 8, 8), ones(4, 4, 3, 3, 3), stride=0),
    lambda: F.deformable_conv2d(
        ones(1, 4, 8, 8), ones(4, 4, 3, 3), ones(1, 18, 6, 6), ones(1, 9, 6, 6), stride=0
    ),
    lambda: F.local_conv2d(ones(1, 4, 8, 8), ones(1, 6, 6, 4, 3, 3, 4), stride=0),
    lambda: F.max_pool2d(ones(1, 4, 8, 8), 2, 0),
    lambda: F.avg_pool2d(ones(1, 4, 8, 8), 0),
    lambda: F.sliding_window(ones(1, 4, 8, 8), 2, stride=0),
    lambda: F.vision.correlation(ones(1, 4, 8, 8), ones(1, 4, 8, 8), 1, 4, 1, 0, 4),
]


@each_of("call", STRIDES)
def test_a_stride_of_0_is_refused(call):
    with pytest.raises(ValueError, match=r"with the strides \([\d, ]*0.*: give strides of 1 or more"):
        call()


DIVISIONS = [
    lambda x, y: x // y,
    lambda x, y: x % y,
    lambda x, y: F.floor_div(x, y),
    lambda x, y: F.mod(x, y),
    lambda x, y: x.numpy().tolist() // y if y.ndim == 0 else 7 // y,
    lambda x, y: 7 % y,
    lambda x, y: x // y.numpy().tolist(),
    lambda x, y: x % y.numpy(),
]


@each_of("divide", DIVISIONS)
@each_of("dtype", [np.int32, np.int16, np.int8, np.uint8])
def test_a_division_of_integers_by_0_is_refused(divide, dtype):
    with pytest.raises(ValueError, match=r"a division of integers \((//|%)\) by 0: keep 0 out"):
        divide(integers(5, 6, dtype=dtype), integers(1, 0, dtype=dtype))


@each_of("divide", DIVISIONS[:4])
def test_a_quotient_beyond_32_bits_is_refused(divide):
    with pytest.raises(
        ValueError, match=r"a division of -2147483648 \((//|%)\) by -1, which exceeds 32 bits"
    ):
        divide(integers(5, -(2**31)), integers(2, -1))


def test_other_divisions_are_computed_as_before():
    assert (integers(7, -7) // integers(2, 2)).numpy().tolist() == [3, -4]
    assert (integers(7, -(2**31)) % integers(-1, 3)).numpy().tolist() == [0, 1]
    assert (integers(-128, dtype=np.int8) // integers(-1, dtype=np.int8)).numpy().tolist() == [-128]
    assert np.isinf((ones(2) // 0).numpy()).all()
    assert np.isnan((ones(2) % 0).numpy()).all()
    assert (integers()[:0] // 0).shape == (0,)


@each_of(
    "reshape",
    [
        lambda x: x.reshape(0, -1),
        lambda x: x.reshape((0, -1)),
        lambda x: F.reshape(x, (0, -1)),
        lambda x: F.reshape(x, mge.Tensor([0, -1])),
        lambda x: F.flatten(x, 1),
        lambda x: x.flatten(1),
    ],
)
def test_a_size_that_nothing_decides_is_refused(reshape):
    with pytest.raises(ValueError, match=r"a reshape to \(0, -1\), where any size fits the -1 next to 0"):
        reshape(ones(0, 3))
    assert ones(0, 3).reshape(-1, 3).shape == (0, 3)


def test_an_interpolation_without_pixels_is_refused():
    with pytest.raises(ValueError, match=r"of an empty map of shape \(1, 4, 0, 4\): give one with pixels"):
        F.vision.interpolate(ones(1, 4, 0, 4), size=(3, 4))


class Divided(M.Module):
    """A convolution, and integers that are divided by those of an input."""

    def __init__(self, divide):
        super().__init__()
        self.conv = M.Conv2d(1, 2, 1)
        self.divide = divide

    def forward(self, x, n):
        return self.conv(x), self.divide(F.full_like(n, 7), n)


@pytest.mark.parametrize("divide", DIVISIONS[:4])
@pytest.mark.parametrize("engine", ["auto", "megengine", "onnxruntime"])
def test_data_that_divide_by_0_are_refused_at_every_stage(divide, engine, tmp_path):
    good, bad = (image(6, 8), np.int32([2, 3])), (image(6, 8), np.int32([2, 0]))
    traced = qtrace.trace(Divided(divide), *good, check=False)
    qtrace.save(traced, tmp_path / "net.mge")
    loaded = qtrace.load(tmp_path / "net.mge")
    refusal = r"by 0: keep 0 out of the divisor"
    with pytest.raises(ValueError, match=refusal):
        loaded(*map(mge.Tensor, bad))
    prepared = qtrace.prepare(loaded)
    if engine == "onnxruntime":  # which would end the process
        with pytest.raises(CalibrationError, match="it divides by integers.*use engine megengine"):
            qtrace.calibrate(prepared, [good, bad], engine=engine)
        return
    with pytest.raises(CalibrationError, match=f"batch 1 .*{refusal}"):
        qtrace.calibrate(prepared, [good, bad] + 20 * [good], engine=engine)


@each_of("divide", DIVISIONS[:4])
def test_a_trace_that_divides_by_0_names_the_line(divide):
    with pytest.raises(TraceError, match=r"fails on the example \(test_kernels.py:\d+\).* by 0: keep 0 out"):
        qtrace.trace(Divided(divide), image(6, 8), np.int32([2, 0]), check=False)


class Strided(M.Module):
    def __init__(self, stride):
        super().__init__()
        self.conv = M.Conv2d(1, 2, 3)
        self.stride = stride

    def forward(self, x):
        return F.max_pool2d(self.conv(x), 2, self.stride)


def test_a_layer_without_strides_is_refused_at_every_stage():
    with pytest.raises(
        TraceError, match=r"fails on the example .*strides \(0, 0\): give strides of 1 or more"
    ):
        qtrace.trace(Strided(0), image(6, 8), check=False)
    traced = qtrace.trace(Strided(1), image(6, 8), check=False)
    traced.conv.stride = (0, 0)  # as a file may say
    refusal = r"strides \(0, 0\): give strides of 1 or more"
    with pytest.raises(ValueError, match=refusal):
        traced(mge.Tensor(image(6, 8)))
    with pytest.raises(GraphError, match=refusal):
        qtrace.graph.propagate_shapes(traced, mge.Tensor(image(6, 8)))
    with pytest.raises(GraphError, match=refusal):
        qtrace.prepare(traced)


def test_shapes_of_a_division_by_one_integer_are_inferred():
    """Its divisor is of shape (1,), at which shapes are inferred on values."""

    class Net(M.Module):
        def forward(self, x, n):
            return x + F.full_like(n, 7) // n

    traced = qtrace.trace(Net(), np.float32([1]), np.int32([2]), check=False)
    qtrace.graph.propagate_shapes(traced, mge.Tensor(np.float32([1])), mge.Tensor(np.int32([2])))
    assert qtrace.prepare(traced) is not None


@pytest.mark.quick(2)
@pytest.mark.parametrize("divide", DIVISIONS[:4])
def test_generated_inputs_do_not_divide_by_0(divide):
    """`prepare` measures noise on them, and their integers are 0 else."""
    network = Divided(divide)
    network.conv = M.Sequential(M.Conv2d(16, 16, 3), M.ReLU(), M.Conv2d(16, 16, 3))
    traced = qtrace.trace(network, np.ones((2, 16, 32, 32), np.float32), np.int32([2, 3]), check=False)
    assert "int8" in str(qtrace.explain(qtrace.prepare(traced, {"placement": "balanced"})))
