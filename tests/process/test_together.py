"""Threads that compute beside the calling one, and ahead of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from qtrace.process import Together, prefetch, prefetch_map
from tests.each import each_of


@each_of("threads", [1, 2, 5])
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


@each_of("failing", [0, 1, 2])
@each_of("threads", [1, 3])
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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_that_was_begun_gives_its_result_or_its_error(threads: int) -> None:
    def fail() -> int:
        raise ValueError("a call")

    with Together(threads) as together:
        begun, failing = together.begin(threading.get_ident), together.begin(fail)
        assert (begun() == threading.get_ident()) == (threads == 1)
        with pytest.raises(ValueError, match="a call"):
            failing()


@each_of(
    ("count", "expected"),
    [
        (0, ["begin 0", "take 0", "begin 1", "take 1", "begin 2", "take 2"]),
        (1, ["begin 0", "begin 1", "take 0", "begin 2", "take 1", "take 2"]),
        (2, ["begin 0", "begin 1", "begin 2", "take 0", "take 1", "take 2"]),
        (3, ["begin 0", "begin 1", "begin 2", "take 0", "take 1", "take 2"]),
    ],
)
def test_the_next_items_begin_before_one_is_taken_and_an_error_comes_in_its_turn(
    count: int, expected: list[str]
) -> None:
    events: list[str] = []

    def items() -> Iterator[int]:
        yield from (0, 1, 2)
        raise ValueError("no fourth item")

    def begin(item: int) -> int:
        events.append(f"begin {item}")
        return item

    taken = (events.append(f"take {item}") for item in prefetch(items(), begin, count))
    with pytest.raises(ValueError, match="no fourth item"):
        list(taken)
    assert events == expected
    assert list(prefetch([], begin)) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order(threads: int) -> None:
    assert list(prefetch_map(lambda n: n * n, range(20), threads)) == [n * n for n in range(20)]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_a_result_comes_in_its_turn(threads: int) -> None:
    results = prefetch_map(lambda n: 6 // (3 - n), range(9), threads)
    assert [next(results) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_results_are_computed_at_once_and_one_thread_computes_what_is_taken() -> None:
    both = threading.Barrier(2)
    list(prefetch_map(lambda _: both.wait(10), range(4), 2))
    computed: list[int] = []
    assert next(prefetch_map(lambda n: computed.append(n) or n, range(4), 1)) == 0
    assert computed == [0]
