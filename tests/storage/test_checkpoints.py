"""Checkpoints come back as they were packed, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qtrace.errors import QtraceError
from qtrace.storage.checkpoints import Checkpoint, OtherIdentityError, pack, pack_arrays, unpack, write
from tests.each import each_of

ARRAYS = {"a": np.float32([1, 2]), "b/c": np.zeros((0, 2), np.int64)}


def test_facts_and_arrays_come_back() -> None:
    facts, arrays = unpack(pack("mine", ARRAYS, groups=["x"]), "mine")
    assert facts == {"identity": "mine", "groups": ["x"]}
    assert arrays.keys() == ARRAYS.keys()
    assert all((arrays[name] == value).all() for name, value in ARRAYS.items())


def test_another_identity_is_refused() -> None:
    with pytest.raises(OtherIdentityError):
        unpack(pack("mine", ARRAYS), "yours")


@each_of(
    ("data", "error"),
    [
        (b"", ValueError),
        (pack("mine", ARRAYS)[:-30], ValueError),
        (pack_arrays(ARRAYS), KeyError),
        (pack_arrays({"meta": np.frombuffer(b"{", np.uint8)}), ValueError),
        (pack_arrays({"meta": np.frombuffer(b"{}", np.uint8)}), KeyError),
        (pack_arrays({"meta": np.frombuffer(b"[]", np.uint8)}), TypeError),
    ],
)
def test_damage_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        unpack(data, "mine")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "x.npz"
    with pytest.raises(QtraceError) as caught:
        write(path, b"")
    assert str(caught.value) == f"the checkpoint {path} cannot be written: No such file or directory."


def test_a_block_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    blocks = Checkpoint(tmp_path)
    blocks.save("key", ARRAYS)
    loaded = blocks.load("key")
    assert loaded is not None
    assert loaded.keys() == ARRAYS.keys()
    assert blocks.load("other") is None
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"cut")
    assert blocks.load("key") is None
