""".npy and .npz files: batches that are whole and of a dtype that MegEngine has, or a DataError."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from qtrace.data import open_data
from qtrace.errors import DataError
from tests.fuzz.mutation import mutated, one_sentence

DESCR = (
    "<f4",
    ">f8",
    "|u1",
    "<i8",
    "<f2",
    "|O",
    "<c8",
    "<U3",
    "|b1",
    "<M8[s]",
    "<f4000",
    "V8",
    ",",
    "f4,f4",
    "",
    "x",
)
DIMENSION = st.one_of(st.integers(-2, 9), st.sampled_from((2**31, 2**32, 2**62, 2**63, 10**30)))


@lru_cache(maxsize=1)
def _seeds() -> tuple[tuple[str, bytes], ...]:
    generator = np.random.default_rng(0)
    one = generator.standard_normal((5, 2, 3), np.float32)
    two = {"x": one, "mask": one > 0, "labels": np.arange(5)}
    seeds = []
    for suffix, write in (
        (".npy", lambda stream: np.save(stream, one)),
        (".npy", lambda stream: np.save(stream, np.asfortranarray(one))),
        (".npz", lambda stream: np.savez(stream, **two)),
        (".npz", lambda stream: np.savez_compressed(stream, **two)),
    ):
        stream = io.BytesIO()
        write(stream)
        seeds.append((suffix, stream.getvalue()))
    return tuple(seeds)


@st.composite
def _headers(draw: st.DrawFn) -> tuple[str, bytes]:
    """An array whose header is made up."""
    shape = tuple(draw(st.lists(DIMENSION, max_size=4)))
    text = repr({"descr": draw(st.sampled_from(DESCR)), "fortran_order": draw(st.booleans()), "shape": shape})
    if draw(st.booleans()):
        text = draw(mutated(text.encode(), most=2)).decode("latin-1")
    head = text.encode("latin-1").ljust(118) + b"\n"
    version = draw(st.sampled_from((b"\x01\0", b"\x02\0", b"\x03\0", b"\xff\xff")))
    size = len(head).to_bytes(2 if version[0] == 1 else 4, "little")
    array = b"\x93NUMPY" + version + size + head + bytes(draw(st.integers(0, 300)))
    if draw(st.booleans()):
        return ".npy", array
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    ) as file:
        file.writestr(draw(st.sampled_from(("x.npy", "x", "../x.npy", "é.npy", ".npy"))), array)
    return ".npz", stream.getvalue()


def check(data: st.DataObject, folder: Path) -> None:
    if data.draw(st.booleans()):
        suffix, content = data.draw(_headers())
    else:
        suffix, whole = data.draw(st.sampled_from(_seeds()))
        content = data.draw(mutated(whole))
    path = folder / f"x{suffix}"
    path.write_bytes(content)
    try:
        source = open_data(str(path), batch_size=data.draw(st.integers(1, 7)))
        batches = list(source)
    except DataError as error:
        one_sentence(error)
        return
    assert len(batches) == len(source)
    for batch in batches:
        for array in batch.values() if isinstance(batch, dict) else batch:
            assert array.size
            assert array.dtype.kind in "fib"
            assert array.dtype.itemsize <= 4
