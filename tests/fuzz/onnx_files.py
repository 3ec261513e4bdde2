"""Target: ONNX files with fields changed are imported, or refused in a sentence."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from onnx import helper

from tests.fuzz.loading import verdict
from tests.importing.onnx.networks import conv_bn, model, node, weights

__all__ = ["check"]

_NUMBERS = (0, 1, -1, 2, 3, 7, 100, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 3e38, float("inf"), float("nan"))
_STRINGS = (
    "",
    "x",
    "y",
    "\n",
    "a/b:0",
    "..",
    "/etc/passwd",
    "é" * 5,
    "SAME_UPPER",
    "linear",
    "Conv",
    "If",
    "Loop",
)


def _shapes() -> onnx.ModelProto:
    """Sizes read from shapes, as exporters write a reshape, and a slice, a split and a resize."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Unsqueeze", "n zeros", "n1"),
        node("Concat", "n1 rest", "target", axis=0),
        node("Reshape", "x target", "r"),
        node("Slice", "r zeros ones axis", "sliced"),
        node("Split", "r", "left right", axis=1),
        node("MatMul", "left w", "m"),
        node("Resize", "x _ scales", "big", mode="nearest", nearest_mode="floor"),
        node("Pad", "big pads", "padded"),
        node("ReduceMean", "padded", "mean", axes=[2, 3], keepdims=0),
    ]
    stored = {
        "zero": np.array(0),
        "zeros": np.array([0]),
        "ones": np.array([1]),
        "axis": np.array([1]),
        "rest": np.array([4, 6]),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "w": weights(6, 3),
    }
    return model(nodes, {"x": ["n", 2, 3, 4]}, ["m", "mean", "sliced", "right"], stored)


def _control_flow() -> onnx.ModelProto:
    """A loop and a branch with constant conditions, and a function of the file's own."""
    value = helper.make_tensor_value_info
    steps = [
        node("Add", "state step", "next"),
        node("Identity", "going", "still"),
        node("Twice", "next", "kept", domain="local"),
    ]
    body = helper.make_graph(
        steps,
        "body",
        [value("i", 7, []), value("going", 9, []), value("state", 1, [2])],
        [value("still", 9, []), value("next", 1, [2]), value("kept", 1, [2])],
    )
    branches = {
        name: helper.make_graph([node(op, "last", name)], name, [], [value(name, 1, [2])])
        for name, op in (("then_branch", "Relu"), ("else_branch", "Neg"))
    }
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [node("Mul", "a a", "b")], [helper.make_opsetid("", 17)]
    )
    nodes = [node("Loop", "count yes x", "last all", body=body), node("If", "yes", "y", **branches)]
    stored = {"count": np.array(3), "yes": np.array(True), "step": weights(2)}
    return model(nodes, {"x": [2]}, ["y", "all"], stored, functions=[function])


_MODELS: Sequence[Callable[[], onnx.ModelProto]] = (conv_bn, _shapes, _control_flow)


@lru_cache(maxsize=8)
def _stored(index: int) -> bytes:
    return _MODELS[index]().SerializeToString()


def _places(message: Message) -> list[tuple[Message, Any]]:
    """Lists every field that is set, with the message that holds it."""
    places, pending = [], [message]
    while pending:
        current = pending.pop()
        for field, value in current.ListFields():
            places.append((current, field))
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                pending.extend(value if field.is_repeated else [value])
    return places


def _change(rng: random.Random, message: Message, field: Any, places: list[tuple[Message, Any]]) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        _change_message(rng, message, field, places)
        return
    old = getattr(message, field.name)
    if not field.is_repeated:
        setattr(message, field.name, _value(rng, field, old))
        return
    items = list(old)
    kind, index = rng.random(), rng.randrange(len(items))
    if kind < 0.2:
        del items[index]
    elif kind < 0.4:
        items.insert(index, rng.choice(items))
    else:
        items[index] = _value(rng, field, items[index])
    del old[:]
    old.extend(items)


def _change_message(
    rng: random.Random, message: Message, field: Any, places: list[tuple[Message, Any]]
) -> None:
    similar = [m for m, _ in places if m.DESCRIPTOR is field.message_type]
    if not field.is_repeated:
        if rng.random() < 0.5 or not similar:
            message.ClearField(field.name)
        else:
            copied = type(rng.choice(similar))()
            copied.CopyFrom(rng.choice(similar))
            getattr(message, field.name).CopyFrom(copied)
        return
    items = getattr(message, field.name)
    index, kind = rng.randrange(len(items)), rng.random()
    if kind < 0.3:
        del items[index]
    elif kind < 0.5 and similar:
        items[index].CopyFrom(rng.choice(similar))
    else:
        other = rng.randrange(len(items))
        first, second = type(items[0])(), type(items[0])()
        first.CopyFrom(items[index])
        second.CopyFrom(items[other])
        items[index].CopyFrom(second)
        items[other].CopyFrom(first)


def _value(rng: random.Random, field: Any, old: Any) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        chosen = rng.choice((*_NUMBERS, old + 1, old - 1, old * 1000))
        low, high = (-(2**31), 2**31 - 1) if field.cpp_type in (1, 8) else (-(2**63), 2**63 - 1)
        return min(max(chosen, low), high)
    if isinstance(old, float):
        return rng.choice(_FLOATS)
    if isinstance(old, bytes):
        cut = rng.randrange(len(old) + 1)
        return rng.choice(
            (old[:cut], old + b"\0", b"", old[:cut] + rng.randbytes(3) + old[cut:], b"SAME_UPPER")
        )
    return rng.choice((*_STRINGS, old + "1", old[: len(old) // 2]))


def edited_file(rng: random.Random) -> bytes:
    """A small model with one to three fields changed, or with bytes changed."""
    data = _stored(rng.randrange(len(_MODELS)))
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.randrange(4)) + data[at + rng.randrange(4) :]
    proto = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(proto)
        message, field = rng.choice(places)
        try:
            _change(rng, message, field, places)
        except (TypeError, ValueError):  # the field takes no such value
            continue
    return proto.SerializeToString()


def check(data: st.DataObject, folder: Path) -> None:
    """Imports an edited file in a process of its own."""
    whole = edited_file(random.Random(data.draw(st.integers(0, 2**64 - 1))))
    path = folder / "model.onnx"
    path.write_bytes(whole)
    answer = verdict(path)
    if not answer or answer.startswith("finding"):
        with tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".onnx", delete=False) as kept:
            kept.write(whole)
        raise AssertionError(f"{answer or 'the server ended'} ({kept.name})")
