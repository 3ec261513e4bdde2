"""Of a batch in memory, the recipe's ``preprocess`` converts the image alone."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.config import Preprocess
from qtrace.data import open_data
from qtrace.errors import DataError
from tests.each import each_of

GREY = Preprocess.model_validate({"size": [1, 4, 4], "mean": [128.0], "std": [50.0]})
COLOUR = Preprocess.model_validate({"size": [3, 4, 4], "mean": [128.0] * 3, "std": [50.0] * 3})


def _pixels(channels: int) -> np.ndarray:
    return np.arange(2 * channels * 16, dtype=np.uint8).reshape(2, channels, 4, 4)


MASK = (_pixels(1) % 2).astype(np.uint8)


@each_of(
    ("preprocess", "batch", "converted"),
    [
        (COLOUR, (_pixels(3), MASK), 0),
        (COLOUR, (MASK, _pixels(3)), 1),
        (GREY, (_pixels(1), MASK), 0),
        (GREY, (_pixels(1).astype(np.float32), MASK), None),  # the image is normalized already
        (COLOUR, (_pixels(3).astype(np.float32), MASK), None),
        (COLOUR, (np.ones((2, 8), np.float32), MASK), None),
    ],
)
@each_of("named", [False, True])
def test_a_mask_beside_an_image_stays_as_it_is(preprocess, batch, converted, named) -> None:
    given = dict(zip("ab", batch, strict=True)) if named else batch
    (read,) = open_data([given], preprocess=preprocess)
    values = list(read.values()) if isinstance(read, dict) else list(read)
    for number, (value, before) in enumerate(zip(values, batch, strict=True)):
        expected = (before.astype(np.float32) - 128) / 50 if number == converted else before
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_an_image_alone_with_other_channels_is_refused() -> None:
    with pytest.raises(DataError, match="preprocess.size has 3 channel"):
        list(open_data([MASK], preprocess=COLOUR))
