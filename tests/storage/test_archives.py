"""Archives of arrays: what was packed comes back, and damage is told by one kind of error."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given

from qtrace.storage.checkpoints import pack_arrays, unpack_arrays
from tests.fuzz.mutation import mutated

ARRAYS = {
    "meta": np.frombuffer(b'{"a": 1}', np.uint8),
    "0/lo": np.float32([1.5, -0.0]),
    "0/none": np.zeros((0, 2), np.int64),
    "0/batches": np.array(3),
}
WHOLE = pack_arrays(ARRAYS)


def _same(found: dict[str, np.ndarray]) -> bool:
    return found.keys() == ARRAYS.keys() and all(
        found[key].dtype == value.dtype and found[key].shape == value.shape and (found[key] == value).all()
        for key, value in ARRAYS.items()
    )


def test_round_trip() -> None:
    assert _same(unpack_arrays(WHOLE))


def test_a_member_that_claims_to_be_compressed() -> None:
    """Inflating numbers raises zlib.error, which is no ValueError."""
    data = bytearray(WHOLE)
    for magic, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.find(magic) + method] = zipfile.ZIP_DEFLATED
    with pytest.raises(ValueError, match="BadZipFile"):
        unpack_arrays(bytes(data))


def test_python_objects_and_absurd_shapes() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 2**20)}
    )
    objects = io.BytesIO()
    np.save(objects, np.array([{}], object), allow_pickle=True)
    for content in (header.getvalue(), objects.getvalue(), b"hello"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(ValueError, match=r"ValueError|MemoryError"):
            unpack_arrays(file.getvalue())


@given(mutated(WHOLE))
def test_damaged_bytes_are_refused_or_lose_no_number(data: bytes) -> None:
    """Names and the directory have no checksum: a member may be renamed or lost, its numbers not changed."""
    try:
        found = unpack_arrays(data)
    except ValueError:
        return
    known = [(value.dtype, value.shape, value.tobytes()) for value in ARRAYS.values()]
    assert all((value.dtype, value.shape, value.tobytes()) in known for value in found.values())
