"""MegEngine's own dump of a trace: the page of traps says which rounding its optimization loses."""

from __future__ import annotations

import io
from collections.abc import Callable

import megengine as mge
import numpy as np
from megengine.jit import trace
from megengine.utils.comp_graph_tools import GraphInference

from qtrace.fakequant.kernels import Levels, programs
from tests.each import each_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 16)).astype(np.float32)
STEP = 0.043


def dumped(function: Callable[[mge.Tensor], mge.Tensor], optimize: bool) -> np.ndarray:
    traced = trace(function, symbolic=True, capture_as_const=True)
    traced(mge.Tensor(X))
    stream = io.BytesIO()
    traced.dump(stream, arg_names=["x"], optimize_for_inference=optimize)
    (result,) = GraphInference(io.BytesIO(stream.getvalue())).run(inp_dict={"x": X}).values()
    return np.asarray(result)


@each_of("optimize", [True, False])
@each_of("rounding", ["half_even", "half_away", "half_up"])
def test_sums_of_rounded_values_in_a_dump(rounding: str, optimize: bool) -> None:
    scales = [mge.Tensor(np.float32([scale])) for scale in (0.0217, 0.031, STEP)]
    quantize = programs(Levels(-128, 127, rounding, 0), str(scales[0].device)).round
    zero = mge.Tensor(np.float32([0.0]))

    def sums(x: mge.Tensor) -> mge.Tensor:
        one, other = quantize(x, scales[0], zero)[0], quantize(x * 0.7, scales[1], zero)[0]
        return quantize(one + other, scales[2], zero)[0]

    error = np.abs(dumped(sums, optimize) - sums(mge.Tensor(X)).numpy()) / STEP
    if rounding == "half_even":
        assert 0.5 < error.max() < 2.5  # docs/reference/traps.md, "dump"
    else:
        assert error.max() < 0.01
