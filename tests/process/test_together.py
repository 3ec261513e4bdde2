"""Threads that compute beside the calling one."""

from __future__ import annotations

import threading
import time

import pytest

from qtrace.process.together import Together


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_calls(threads: int) -> None:
    def late(number: int) -> int:
        time.sleep(0.002 * (7 - number))
        return number

    with Together(threads) as together:
        assert together.map(late, range(7)) == list(range(7))
        assert together.map(late, ()) == []


def test_two_threads_compute_at_once() -> None:
    both = threading.Barrier(2)
    with Together(2) as together:
        together.run([lambda: both.wait(10)] * 2)
        together.run([lambda: both.wait(10)] * 6)  # the calling thread takes one after the other, too


def test_nested_calls_never_wait_forever() -> None:
    with Together(2) as together:

        def sums(depth: int) -> int:
            return 1 if depth == 0 else sum(together.map(sums, [depth - 1] * 3))

        assert sums(4) == 81


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_reaches_the_caller(threads: int, failing: int) -> None:
    def fail(number: int) -> int:
        if number == failing:
            raise ValueError(f"call {number}")
        return number

    with Together(threads) as together:
        with pytest.raises(ValueError, match=f"call {failing}"):
            together.map(fail, range(3))
        assert together.map(fail, [5, 6]) == [5, 6]


def test_calls_run_in_order_in_this_thread_outside_of_the_block() -> None:
    assert Together(4).run([threading.get_ident] * 3) == [threading.get_ident()] * 3
