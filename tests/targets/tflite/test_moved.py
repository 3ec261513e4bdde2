"""Moves that are put off: chains of reshapes and transposes against numpy, in any order of axes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qtrace.targets.tflite.layout import CHANNELS_LAST, Moved, moves_values, window_pads
from tests.each import each_of


def _value(moved: Moved, stored: np.ndarray) -> np.ndarray:
    """Applies ``moved`` to a tensor of the file, by numpy."""
    cut = stored.reshape([moved.size(a) for a in moved.file_atoms])
    places = [moved.file_atoms.index(a) for axis in moved.axes for a in axis]
    return cut.transpose(places).reshape(moved.shape)


def _divisions(size: int) -> list[tuple[int, ...]]:
    divisions = [(size,)]
    divisions += [(size // d, d) for d in range(2, size) if size % d == 0]
    return divisions


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_chains_give_what_numpy_gives(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=4)))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    value = np.arange(math.prod(shape)).reshape(shape)
    stored = value.transpose(order)
    moved = Moved.of(shape, order)
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()) and value.ndim:
            pattern = data.draw(st.permutations(range(value.ndim)))
            value, moved = value.transpose(pattern), moved.transposed(pattern)
            continue
        target = [n for size in value.shape for n in data.draw(st.sampled_from(_divisions(size)))]
        while len(target) > 1 and data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(target) - 2))
            target[place : place + 2] = [target[place] * target[place + 1]]
        reshaped = moved.reshaped(target)
        if reshaped is None:
            continue
        value, moved = value.reshape(target), reshaped
    assert moved.shape == value.shape
    np.testing.assert_array_equal(_value(moved, stored), value)
    assert sorted(moved.nearest()) == list(range(value.ndim))


def test_a_channel_shuffle_moves_once() -> None:
    moved = Moved.of((2, 8, 5, 5), CHANNELS_LAST)
    apart = moved.reshaped((2, 2, 4, 5, 5))
    assert apart is not None
    joined = apart.transposed((0, 2, 1, 3, 4)).reshaped((2, 8, 5, 5))
    assert joined is not None
    assert joined.nearest() == CHANNELS_LAST
    assert [a for a in joined.file_atoms if joined.wide(a)] == [(0, 0), (2, 0), (3, 0), (1, 0), (1, 1)]
    assert joined.axes[1] == ((1, 1), (1, 0))


def test_the_batch_is_never_cut() -> None:
    moved = Moved.of((4, 3), (0, 1))
    assert moved.reshaped((2, 2, 3)) is None
    assert moved.reshaped((12,)) is not None


def test_a_flattened_map_is_shuffled_and_not_moved() -> None:
    moved = Moved.of((2, 3, 4, 5), CHANNELS_LAST).reshaped((2, 60))
    assert moved is not None
    shuffle = moved.shuffle()
    assert shuffle is not None
    order, places = shuffle
    assert order == (0, 1)
    value = np.arange(120).reshape(2, 3, 4, 5)
    stored = value.transpose(CHANNELS_LAST).reshape(2, 60)
    np.testing.assert_array_equal(stored, value.reshape(2, 60)[:, places])
    rows = Moved.of((2, 3, 4, 5), CHANNELS_LAST).reshaped((6, 20))
    assert rows is not None
    assert rows.shuffle() is None


def test_axes_of_one_move_for_nothing_but_the_first_does_not() -> None:
    assert not moves_values((2, 8, 1, 1), CHANNELS_LAST, (0, 1, 2, 3))
    assert moves_values((2, 8, 4, 1), CHANNELS_LAST, (0, 1, 2, 3))
    assert moves_values((1, 8, 4), (1, 0, 2), (0, 1, 2))


@each_of(
    ("size", "kernel", "stride", "padding", "dilation", "expected"),
    [
        (8, 3, 1, 1, 1, ("SAME", (1, 1))),
        (8, 1, 1, 0, 1, ("VALID", (0, 0))),
        (8, 3, 2, 1, 1, ("", (1, 0))),  # SAME would add the column behind
        (7, 3, 2, 1, 1, ("SAME", (1, 1))),
        (8, 1, 2, 0, 1, ("VALID", (0, 0))),
        (8, 7, 2, 3, 1, ("", (3, 2))),
        (8, 3, 1, 2, 2, ("SAME", (2, 2))),
        (8, 3, 1, 0, 1, ("VALID", (0, 0))),
        (9, 2, 2, 1, 1, ("", (1, 0))),
    ],
)
def test_padding(size: int, kernel: int, stride: int, padding: int, dilation: int, expected: object) -> None:
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    assert window_pads(size, out, kernel, stride, padding, dilation) == expected
