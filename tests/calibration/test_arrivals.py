"""Values that are awaited: the same as `Tensor.numpy`'s, while other threads and MegEngine go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest

from qtrace.calibration import arrivals
from qtrace.calibration.arrivals import Arrival, Arrivals
from tests.each import each_of
from tests.nets import images

Op = Callable[[mge.Tensor], mge.Tensor]

_OPS: dict[str, Op] = {
    "a sum": lambda x: x + 1,
    "a scalar": lambda x: x.sum(),
    "another order": lambda x: F.transpose(x, (0, 2, 3, 1)),
    "every other row": lambda x: x[:, :, ::2],
    "one row many times": lambda x: F.broadcast_to(x[:, :, :1], x.shape),
    "nothing": lambda x: x[0:0],
    "backwards": lambda x: x[:, ::-1],
    "one of two": lambda x: F.split(x, 2, axis=1)[1],
    "a constant": lambda x: F.full(x.shape, 3.0),
    "channels last": lambda x: mge.Tensor(x.numpy(), format="nhwc") + 1,
    "half precision": lambda x: x.astype("float16"),
    "integers": lambda x: x.astype("int32"),
    "another device": lambda x: x.to("multithread2:0") * 2,
    "no queue": lambda x: mge.Tensor(x.numpy(), device="cpu:default") * 2,
}


def _slow(x: mge.Tensor) -> mge.Tensor:
    """Some tenths of a second of work."""
    weight = mge.Tensor(images(32, 32, 3, 3))
    for _ in range(4):
        x = F.conv2d(x, weight, padding=1) * 0.1
    return x


@each_of("op", _OPS)
def test_arrivals_equal_numpy_values(op: str) -> None:
    asked = Arrivals()
    x = mge.Tensor(images(4, 32, 48, 48))
    for k in range(3):
        value = _OPS[op](x + k)
        arrival = asked.expect(value)
        behind = _slow(x)  # what is copied late is copied behind this
        arrived = arrival.wait().copy()
        expected = value.numpy()
        assert arrived.dtype == expected.dtype
        assert arrived.shape == value.shape
        np.testing.assert_array_equal(arrived, expected)
        del behind


def test_many_values_arrive_in_any_order_while_more_are_computed() -> None:
    asked, x = Arrivals(), mge.Tensor(images(4, 32, 32, 32))
    tensors = [_slow(x * k) for k in range(5)]
    waiting = [asked.expect(t) for t in tensors]
    arrived = [waiting[k].wait() for k in (4, 0, 2, 1, 3)]
    for k, value in zip((4, 0, 2, 1, 3), arrived, strict=True):
        np.testing.assert_array_equal(value, tensors[k].numpy())


def test_other_threads_run_while_a_value_is_awaited() -> None:
    memory, marked = np.zeros(3, np.float32), np.ones(4, np.int32)
    arrival = Arrival(mge.Tensor(memory), (memory, mge.Tensor(np.zeros(4, np.int32)), marked))

    def work() -> None:
        time.sleep(0.01)
        marked[:] = 0  # what the mark holds: without a turn of this thread's, nothing arrives

    thread = threading.Thread(target=work)
    thread.start()
    assert arrival.wait() is memory
    thread.join()


def test_memory_holds_a_value_that_was_changed_in_place_since() -> None:
    asked, x = Arrivals(), mge.Tensor(images(2, 3, 8, 8))
    value = x + 1
    expected = value.numpy().copy()
    arrival = asked.expect(value)
    value += 5
    value[0] = 7
    np.testing.assert_array_equal(arrival.wait(), expected)


def test_arrival_keeps_the_memory_of_its_value() -> None:
    asked, x = Arrivals(), mge.Tensor(images(2, 3, 64, 64))
    arrived = asked.expect(x * 3).wait()
    for k in range(20):
        (x + k).numpy()  # takes memory that is free
    np.testing.assert_array_equal(arrived, (x * 3).numpy())


def test_arrival_times_out_on_a_missing_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_TIMEOUT_SECONDS", 0.01)
    value = mge.Tensor(images(2, 3, 4, 4))
    never = mge.Tensor(np.zeros(4, np.int32)), np.ones(4, np.int32)
    lost = Arrival(value, (np.zeros(0), *never))
    np.testing.assert_array_equal(lost.wait(), value.numpy())
