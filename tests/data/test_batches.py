"""A batch as arguments, and a part of it."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import numpy as np
import pytest
from megengine import Tensor

import qtrace
from qtrace.data.base import to_input
from qtrace.data.batches import as_arguments, count_samples, first_samples
from qtrace.errors import CalibrationError
from qtrace.preparation.faithfulness import first_calls
from tests.each import each_of
from tests.nets import net


def _tensor(*shape: int) -> Tensor:
    return Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def test_the_first_samples_of_every_tensor_of_a_batch() -> None:
    x, y, z = _tensor(4, 3), _tensor(4), _tensor(4, 1, 2)
    few = first_samples(((x, [y]), {"more": {"z": z}, "scale": Tensor(3.0)}), 2)
    assert few is not None
    (first, second), named = few
    assert isinstance(second, list)
    for part, whole in ((first, x), (second[0], y), (named["more"]["z"], z)):
        np.testing.assert_array_equal(part.numpy(), whole.numpy()[:2])
    assert named["scale"].item() == 3  # a setting


@each_of(
    "arguments",
    [
        ((_tensor(2, 3),), {}),  # has no more
        ((_tensor(4, 3), _tensor(5, 3)), {}),
        ((), {"scale": Tensor(1.0)}),
        ((), {}),
    ],
)
def test_no_samples_where_they_are_not_told_apart(arguments: Any) -> None:
    assert first_samples(arguments, 2) is None


_FIXED = {
    "reshape": lambda self, x: F.reshape(x, (3, 8)) * 2,
    "broadcast": lambda self, x: x + F.broadcast_to(x[:1, :, :1], (3, 2, 4)),
    "constant": lambda self, x: x * Tensor(np.ones((3, 2, 4), np.float32)),
}


@each_of("forward", _FIXED.values(), ids=_FIXED)
def test_no_samples_of_a_batch_whose_size_the_model_fixes(forward: Any) -> None:
    x = _tensor(3, 2, 4)
    fixed = qtrace.trace(net(forward), x, check=False)
    free = qtrace.trace(net(lambda self, x: F.flatten(x, 1) * 2), x, check=False)
    assert first_samples(((x,), {}), 2, fixed) is None
    samples = first_samples(((x,), {}), 2, free)
    assert samples is not None
    assert samples[0][0].shape == (2, 2, 4)


@each_of("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_integers_of_32_bits_are_taken_and_larger_ones_refused(dtype: Any) -> None:
    module = net(lambda self, x: x + 1)
    traced = qtrace.trace(module, Tensor(np.zeros(2, np.int32)), check=False)
    values = np.array([0, 2**31 - 1], dtype)
    ((taken,), _) = as_arguments(values, traced)
    np.testing.assert_array_equal(taken.numpy(), values)
    np.testing.assert_array_equal(to_input(values, "x"), values)
    if dtype is np.int64:
        lowest = np.array([-(2**31)], dtype)
        np.testing.assert_array_equal(to_input(lowest, "x"), lowest)
    if dtype is not np.int32:
        with pytest.raises(CalibrationError, match="batch 3 holds the integer 2147483648, and MegEngine"):
            as_arguments(np.array([0, 2**31], dtype), traced, 3)
    if dtype is np.int64:
        with pytest.raises(CalibrationError, match="holds the integer -2147483649, "):
            as_arguments(np.array([0, -(2**31) - 1], dtype), traced)


@each_of(
    ("arguments", "count"),
    [
        (((_tensor(4, 3),), {}), 4),
        ((({"a": _tensor(4, 3), "b": _tensor(4)},), {}), 4),
        (([_tensor(), (_tensor(5), _tensor(2))], {}), 5),
        (((), {"x": {"inner": [{"a": _tensor(6, 1)}]}}), 6),
        (((1, None, {"a": 2}), {"flag": True}), 1),
        (((_tensor(), {"a": _tensor()}), {}), 1),
    ],
)
def test_samples_in_dicts_and_lists_are_counted(arguments: Any, count: int) -> None:
    assert count_samples(arguments) == count


def test_no_more_batches_of_dicts_are_read_than_needed() -> None:
    traced = qtrace.trace(net(lambda self, x: F.relu(x["a"]) + x["b"]), _named(4, 0)[0][0], check=False)
    calls = first_calls([_named(4, seed) for seed in range(5)], 8, traced)
    assert [count_samples(call) for call in calls] == [4, 4]


def _named(samples: int, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return ({name: Tensor(rng.normal(size=(samples, 3)).astype(np.float32)) for name in "ab"},), {}
