"""Model files of which some fields were edited: a model that works as one, or one sentence; never more.

A real model is pickled with the states of its parts changed: another type, number, name or reference, a
cycle, a part that nests without end or that occurs a million times. Each file is loaded in a process of its
own with limits of time and memory (``loading.py``), so that an abort, a hang and threads are findings too.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import pickletools
import random
import struct
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from hypothesis import strategies as st
from megengine.core._imperative_rt.common import CompNode
from megengine.module import Module
from megengine.traced_module.expr import Expr
from megengine.traced_module.node import Node
from megengine.traced_module.pytree import LeafDef, TreeDef
from megengine.traced_module.serialization import _ModuleState
from megengine.traced_module.traced_module import InternalGraph, NameSpace
from megengine.utils.max_recursion_limit import max_recursion_limit

import qtrace
from qtrace.observers.base import Observer
from qtrace.scheme import QScheme
from tests.fuzz.loading import verdict
from tests.nets import images, net

__all__ = ["check", "edited_file", "opcodes_file"]

X = images(2, 2, 4, 4)
PARTS = (Expr, Node, TreeDef, InternalGraph, NameSpace, Module, _ModuleState, Observer, QScheme, CompNode)
PLAIN = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**32, 2**63, 10**300, 1.5, float("nan"), float("inf")),
    *("", "abc", "a.b", "a\n", "self", "__call__", "forward", "x" * 5000, "1", "cpu0", "multithread100000:0"),
    *(b"x", bytearray(b"x"), (), [], {}, (1, 2), [[]], [None], {"a": 1}, {1: 2}, (("a",),), slice(1, 2, 3)),
    *(
        mge.Tensor,
        int,
        tuple,
        dict,
        str,
        type(None),
        TreeDef,
        LeafDef,
        np.float32,
        Ellipsis,
        set(),
        frozenset(),
    ),
    *(
        np.zeros(3),
        np.float32(1),
        np.int64(2**40),
        np.dtype("int8"),
        np.dtype("U3"),
        {"a": [(1,)]},
        [0] * 300,
    ),
)


def _shared(empty: bytes, levels: int) -> bytes:
    """A container that holds the one before it twice, and so on."""
    opcodes = empty
    for level in range(levels):
        put = b"r" + struct.pack("<I", 10**6 + level) + b"0"
        get = b"j" + struct.pack("<I", 10**6 + level)
        opcodes += put + (get + get + b"\x86" if empty == b")" else b"](" + get + get + b"e")
    return opcodes


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _colliding() -> bytes:
    keys = (b"\x8a\x0c" + ((2**61 - 1) * n).to_bytes(12, "little") + b"N" for n in range(1, 3000))
    return b"}(" + b"".join(keys) + b"u"


COMP_NODE = _name("megengine.core._imperative_rt.common", "CompNode")
SPLICED = {
    "deep tuple": b")" + b"\x85" * 300,
    "very deep tuple": b")" + b"\x85" * 200_000,
    "deep list": b"](" * 300 + b"e" * 300,
    "very deep list": b"](" * 100_000 + b"e" * 100_000,
    "shared tuples": _shared(b")", 40),
    "shared lists": _shared(b"]", 40),
    "surrogate": b"X\x03\0\0\0\xed\xa0\x80",
    "colliding keys": _colliding(),
    "many threads": COMP_NODE + b")\x81X\x13\0\0\0multithread100000:0b",
    "many cores": COMP_NODE + b")\x81X\x0f\0\0\0multithread900:0b",
    "a device without state": COMP_NODE + b")\x81",
    "a bare tree": _name("megengine.traced_module.pytree", "TreeDef") + b")\x81",
    "a bare node": _name("megengine.traced_module.node", "TensorNode") + b")\x81",
    "a bare expr": _name("megengine.traced_module.expr", "Apply") + b")\x81",
    "a bare module": _name("megengine.module.conv", "Conv2d") + b")\x81",
    "system": b"cposix\nsystem\n(X\x0e\0\0\0touch fuzz-rantR",
    "huge integer": b"\x8b" + struct.pack("<I", 100_000) + b"\x7f" * 100_000,
}
OPCODES = [bytes([code]) for code in range(256)]


class _Inner(M.Module):
    """Called twice, with dicts and lists around its values, and with Apply exprs."""

    def forward(self, x: mge.Tensor, more: dict[str, Any]) -> list[mge.Tensor]:
        shape = F.flatten(x, 1).shape[0]
        return [x.reshape(shape, -1)[:, 0:2], F.concat([x, more["y"][0]], axis=1)]


def _with_calls() -> Any:
    def forward(self: Any, x: Any) -> Any:
        first, wide = self.inner(x, {"y": [x]})
        second, _ = self.inner(self.seq(x), {"y": [x]})
        return {"sum": first + second, "wide": F.relu(wide) * self.gain}

    seq = M.Sequential(M.Conv2d(2, 2, 1), M.BatchNorm2d(2), M.ReLU())
    return net(forward, inner=_Inner(), seq=seq, gain=mge.Parameter(np.float32(2.0)))


@lru_cache(maxsize=1)
def _models() -> tuple[Any, ...]:
    """Traced, flat, prepared and converted models."""
    module = net(lambda self, x: F.relu(self.b(self.a(x)) + x), a=M.Conv2d(2, 3, 1), b=M.Conv2d(3, 2, 1))
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced), [X], progress=False, engine="megengine")
    nested = qtrace.trace(_with_calls(), X, check=False)
    return traced, nested, nested.flatten(), prepared, qtrace.convert(prepared)


class _Pickler(pickle.Pickler):
    """Writes the states of a model's parts, in part replaced."""

    def __init__(self, file: Any, replaced: dict[int, Any]) -> None:
        super().__init__(file, 3)  # its memo has numbers, so that opcodes may be put between
        self.states: dict[int, tuple[Any, Any]] = {}
        self._replaced = replaced

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, PARTS) or isinstance(value, type):
            return NotImplemented
        if isinstance(value, CompNode) or hasattr(value, "__getstate__"):
            state = value.__getstate__()
        else:
            state = dict(value.__dict__)
        state = self._replaced.get(id(value), state)
        self.states[id(value)] = (value, state)
        return copyreg.__newobj__, (value.__class__,), state  # not type(): see located_graph.py


def _pickled(model: Any, replaced: dict[int, Any]) -> tuple[bytes, dict[int, tuple[Any, Any]]]:
    file = io.BytesIO()
    pickler = _Pickler(file, replaced)
    with max_recursion_limit():
        pickler.dump(model)
    return file.getvalue(), pickler.states


@functools.cache
def _parts(index: int) -> tuple[tuple[Any, Any], ...]:
    """The parts of a model that have a dict for a state, and these."""
    states = _pickled(_models()[index], {})[1].values()
    return tuple((part, state) for part, state in states if type(state) is dict and state)


class _Edit:
    """One file's edits; all choices come from ``rng``.

    Args:
        rng: makes the choices.
        others: parts of the model, for references to wrong ones.
    """

    def __init__(self, rng: random.Random, others: tuple[Any, ...]) -> None:
        self._rng, self._others = rng, others
        self.splices: dict[str, bytes] = {}

    def state(self, state: dict[Any, Any], part: Any) -> dict[Any, Any]:
        """A copy of a state with one field changed, perhaps deep within."""
        state = dict(state)
        key, kind = self._rng.choice(sorted(state, key=str)), self._rng.random()
        if kind < 0.1:
            del state[key]
        elif kind < 0.13:
            state[self._rng.choice(("other", "__class__", "forward", 3, "users"))] = state[key]
        else:
            state[key] = self._value(state[key], part)
        return state

    def _value(self, old: Any, part: Any) -> Any:
        kind = self._rng.random()
        if kind < 0.4 and type(old) in (list, tuple) and old:
            items, index, change = list(old), self._rng.randrange(len(old)), self._rng.random()
            if change < 0.2:
                del items[index]
            elif change < 0.4:
                items.insert(index, self._rng.choice(items))
            else:
                items[index] = self._value(items[index], part)
            return type(old)(items)
        if kind < 0.5 and type(old) is dict and old:
            return self.state(old, part)
        if kind < 0.6:
            return self._rng.choice(self._others)
        if kind < 0.65:
            return self._rng.choice((part, [part], (part,), {"a": part}))
        if kind < 0.75:
            mark = f"<splice {len(self.splices)}>"
            self.splices[mark] = SPLICED[self._rng.choice(sorted(SPLICED))]
            return mark
        if kind < 0.85 and type(old) in (int, float, str):
            return self._like(old)
        return self._rng.choice(PLAIN)

    def _like(self, old: Any) -> Any:
        """Another value of the same type."""
        if type(old) is str:
            cut = self._rng.randrange(len(old) + 1)
            return self._rng.choice(
                (old[:cut], old + "_1", old[:cut] + self._rng.choice(".[]\n%_9") + old[cut:])
            )
        return self._rng.choice((old + 1, old - 1, -old, old * 1000, old + 2**31))


def edited_file(rng: random.Random) -> bytes:
    """A file of a real model with one to three fields changed."""
    index = rng.randrange(len(_models()))
    parts = _parts(index)
    kinds = sorted({type(part).__name__ for part, _ in parts})
    edit = _Edit(rng, tuple(part for part, _ in parts))
    replaced: dict[int, Any] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.choice(kinds)
        part, state = rng.choice([pair for pair in parts if type(pair[0]).__name__ == kind])
        replaced[id(part)] = edit.state(replaced.get(id(part)) or state, part)
    try:
        data, _ = _pickled(_models()[index], replaced)
    except (TypeError, pickle.PicklingError, RecursionError):  # this one cannot be written
        return b"\x80\x04N."
    for mark, opcodes in edit.splices.items():
        raw = mark.encode()
        data = data.replace(b"X" + struct.pack("<I", len(raw)) + raw, opcodes)
    return data


def opcodes_file(rng: random.Random) -> bytes:
    """A program of any opcodes, between those of a real model or by itself."""
    data = _pickled(_models()[rng.randrange(3)], {})[0]
    pieces = [*(v for v in SPLICED.values() if len(v) < 2000), COMP_NODE, *(b"}", b"]", b"(", b")", b"N")]
    noise = [
        rng.choice((rng.choice(OPCODES), rng.choice(pieces), rng.randbytes(rng.randrange(5))))
        for _ in range(rng.randrange(1, 30))
    ]
    if rng.random() < 0.3:
        return b"\x80\x03" + b"".join(noise) + b"."
    cuts = _cuts(data)
    for _ in range(rng.randrange(3)):
        first = rng.randrange(1, len(cuts) - 2)
        noise.append(data[cuts[first] : cuts[first + 1]])
    at = rng.choice(cuts[1:])
    return data[:at] + b"".join(noise[: rng.randrange(1, 4)]) + data[at + rng.choice((0, 0, 1)) :]


@lru_cache(maxsize=4)
def _cuts(data: bytes) -> tuple[int, ...]:
    return tuple(position for _, _, position in pickletools.genops(data))


def check(data: st.DataObject, folder: Path) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**64 - 1)))
    whole = rng.choice((edited_file, edited_file, opcodes_file))(rng)
    path = folder / "model.mge"
    path.write_bytes(whole)
    said = verdict(path)
    if not said or said.startswith("finding"):
        with tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".mge", delete=False) as kept:
            kept.write(whole)
        raise AssertionError(f"{said or 'the server ended'} ({kept.name})")
