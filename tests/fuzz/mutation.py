"""Bytes with damage: as a broken disk, a cut download or an attacker makes it."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

__all__ = ["mutated", "one_sentence"]

# Numbers at which lengths and signs turn over.
TURNING = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63,
    2**64 - 1,
)


@st.composite
def mutated(draw: st.DrawFn, whole: bytes, most: int = 6) -> bytes:
    """``whole`` after a few changes, each at a place of its own."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, most))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.integers(0, 5))
        length = draw(st.sampled_from((1, 2, 4, 8, 64, 1024)))
        if kind == 0:
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 2:
            size = draw(st.sampled_from((2, 4, 8)))
            value = draw(st.sampled_from(TURNING)) & (256**size - 1)
            order = draw(st.sampled_from("<>"))
            data[at : at + size] = struct.pack(f"{order}{ {2: 'H', 4: 'I', 8: 'Q'}[size] }", value)
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[at : at + length]
        else:
            del data[at:]
    return bytes(data)


def one_sentence(error: Exception) -> None:
    """Asserts that an error can be told in one line."""
    assert str(error).strip()
    assert "\n" not in str(error)
