"""Model files: a traced module, or one sentence; nothing runs, nothing crashes."""

from __future__ import annotations

import pickletools
import tempfile
from functools import lru_cache
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
from hypothesis import strategies as st

import qtrace
from qtrace.errors import QtraceError
from qtrace.graph.files.allowlist import FUNCTIONS, MODULES, OBJECTS, OPDEFS, REDUCERS, TYPES
from qtrace.graph.types import TracedModule
from qtrace.process import paused_collector
from tests.fuzz.mutation import mutated, one_sentence
from tests.nets import images, net

LISTED = sorted(FUNCTIONS | MODULES | OBJECTS | OPDEFS | REDUCERS | TYPES)
RAN = "fuzz-ran"  # what the attack below would make
X = images(2, 2, 4, 4)


@lru_cache(maxsize=1)
def _seeds() -> tuple[bytes, ...]:
    """A float model, the prepared and the converted one."""
    module = net(lambda self, x: F.relu(self.b(self.a(x)) + x), a=M.Conv2d(2, 3, 1), b=M.Conv2d(3, 2, 1))
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced), [X], progress=False, engine="megengine")
    return tuple(_bytes(model) for model in (traced, prepared, qtrace.convert(prepared)))


def _bytes(model: TracedModule) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.mge"
        mge.save(model, str(path))  # without a checksum, which would keep all damage from being read
        return path.read_bytes()


@lru_cache(maxsize=4)
def _cuts(whole: bytes) -> tuple[int, ...]:
    """Where opcodes begin; frames are left out, since their lengths are hints only."""
    return tuple(position for _, _, position in pickletools.genops(whole))


def _name(key: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in key.split(":")) + b"\x93"


@st.composite
def _programs(draw: st.DrawFn, whole: bytes) -> bytes:
    """A pickle with opcodes moved, doubled, removed, or others put between."""
    cuts = _cuts(whole)
    data, shift = bytearray(whole), 0
    for index in sorted(draw(st.lists(st.integers(1, len(cuts) - 2), min_size=1, max_size=5))):
        start, end = cuts[index] + shift, cuts[index + 1] + shift
        other = draw(st.integers(1, len(cuts) - 2))
        new = draw(
            st.one_of(
                st.just(b""),
                st.just(bytes(whole[cuts[other] : cuts[other + 1]])),
                st.just(bytes(data[start:end]) * 2),
                st.sampled_from(LISTED).map(_name),
                st.sampled_from(
                    [b"0", b"N", b")", b"(", b"t", b"R", b"b", b"\x81", b"h\x05", b"u", b"e", b"}"]
                ),
                st.just(b"cposix\nsystem\n(X\x0e\0\0\0touch fuzz-rantR"),
            )
        )
        data[start:end] = new
        shift += len(new) - (end - start)
    return bytes(data)


def check(data: st.DataObject, folder: Path) -> None:
    whole = data.draw(st.sampled_from(_seeds()))
    path = folder / "model.mge"
    path.write_bytes(data.draw(_programs(whole) if data.draw(st.booleans()) else mutated(whole)))
    try:
        with paused_collector():
            model = qtrace.load(path)
    except QtraceError as error:
        one_sentence(error)
    else:
        assert type(model) is TracedModule
    assert not Path(RAN).exists()
    assert not (folder / RAN).exists()
