"""Image files: pixels of the size that was asked for, or a DataError."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from hypothesis import strategies as st

from qtrace.config import Preprocess
from qtrace.data.images import SUFFIXES, decode, fit
from qtrace.errors import DataError
from tests.fuzz.mutation import mutated, one_sentence


@lru_cache(maxsize=1)
def _seeds() -> tuple[tuple[str, bytes], ...]:
    image = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    kinds = [(suffix, image) for suffix in SUFFIXES]
    kinds += [(".png", image[..., 0]), (".png", np.dstack([image, image[..., :1]])), (".pgm", image[..., 0])]
    return tuple((suffix, cv2.imencode(suffix, pixels)[1].tobytes()) for suffix, pixels in kinds)


def check(data: st.DataObject, folder: Path) -> None:
    suffix, whole = data.draw(st.sampled_from(_seeds()))
    path = folder / f"a{suffix}"
    path.write_bytes(data.draw(mutated(whole)))
    channels = data.draw(st.sampled_from((1, 3)))
    try:
        image = decode(path, channels)
    except DataError as error:
        one_sentence(error)
        return
    assert image.dtype == np.uint8
    assert image.shape[2] == channels
    resize = data.draw(st.sampled_from(("stretch", "center_crop")))
    values = [0.0] * channels
    how = Preprocess(size=(channels, 5, 7), mean=values, std=[1.0] * channels, resize=resize)
    assert fit(image, how).shape == (5, 7, channels)
