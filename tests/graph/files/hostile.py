"""Pickle opcodes by hand, a small model, and what the tests of hostile files ask of ``load``."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import struct

import megengine as mge
import megengine.functional as F
import megengine.module as M
import megengine.traced_module as tm
import numpy as np
import pytest

from qtrace.errors import UnsafeFileError
from qtrace.graph.files.serialize import load

HEAD, STOP = b"\x80\x04", b"."


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module, qualname):
    return text(module) + text(qualname) + b"\x93"


def call(function, *args):
    return function + b"(" + b"".join(args) + b"tR"


def new(cls, *args):
    return cls + b"(" + b"".join(args) + b"t\x81"


def build(instance, state):
    return instance + state + b"b"


def plain(value):
    """The opcodes of plain data."""
    return b"".join(_bodies(pickle.dumps(value, 4)))


def _bodies(data):
    ops = list(pickletools.genops(data))
    for (op, _, position), (_, _, end) in itertools.pairwise(ops):
        if op.name not in ("PROTO", "FRAME", "MEMOIZE"):
            yield data[position:end]


def mapping(**items):
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def touch(path):
    return plain(f"touch '{path}'")


EXPR, NODE = "megengine.traced_module.expr", "megengine.traced_module.node"
GRAPH, STATE = "megengine.traced_module.traced_module", "megengine.traced_module.serialization"
OS_SYSTEM = name("posix", "system")


def refusal(path, *named, error=UnsafeFileError, allow=()):
    with pytest.raises(error) as caught:
        load(path, allow=allow)
    for part in (str(path), *named):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def control(path):
    """Loads as MegEngine does; attacks may also raise after they ran."""
    try:
        return mge.load(str(path))
    except Exception:
        return None


class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.conv = M.Conv2d(1, 2, 3)

    def forward(self, x):
        return F.relu(self.conv(x)).reshape(x.shape[0], -1)


def net_input():
    return mge.Tensor(np.ones((1, 1, 4, 4), np.float32))


def traced_net():
    traced = tm.trace_module(Net(), net_input())
    traced.notes = ["PLACEHOLDER"]
    return traced


def dump(traced):
    """A saved model without frames, so that opcodes of any length may be put into it."""
    data = pickle.dumps(traced, 4)
    ops = [(op.name, position) for op, _, position in pickletools.genops(data)]
    for op, position in reversed(ops):
        if op == "FRAME":
            data = data[:position] + data[position + 9 :]
    return data


def text_op(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def replace_strings(data, **pairs):
    for old, replacement in pairs.items():
        assert data.count(text_op(old)) >= 1, old
        data = data.replace(text_op(old), text_op(replacement))
    return data
