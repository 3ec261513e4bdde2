"""Files that would abort, hang or fill the process: each is refused in one sentence, in reasonable time.

What a broken ``load`` does here cannot be caught (it ends the process), so the worst of them are loaded in a
process of their own.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest
from megengine.traced_module.expr import Apply, CallFunction
from megengine.traced_module.pytree import LeafDef, TreeDef, _leaf_type

import qtrace
from qtrace.errors import UnsafeFileError
from qtrace.graph.files import allowlist
from qtrace.graph.files.allowlist import AllowList, LoadBudget, RefusedError, resolve
from qtrace.graph.files.plain_values import make_op, op_state
from qtrace.graph.files.rules import Rules
from qtrace.graph.files.serialize import load, save
from tests.each import each_of
from tests.fuzz.loading import verdict
from tests.graph.files.hostile import (
    EXPR,
    HEAD,
    STOP,
    build,
    call,
    dump,
    mapping,
    name,
    net_input,
    new,
    plain,
    refusal,
    text,
    text_op,
    traced_net,
)
from tests.growth import assert_linear, calls_of
from tests.nets import net

OPS = "megengine.core._imperative_rt.ops"
TREE = name("megengine.traced_module.pytree", "TreeDef")
LEAF = name("megengine.traced_module.pytree", "LeafDef")
COMP_NODE = name("megengine.core._imperative_rt.common", "CompNode")
WRONG = (
    *(None, True, -1, 0, 2**31, 2**32, 2**64, 2**80, 1.5, float("nan"), float("inf"), "x", b"x", (), [], {}),
    *(("x",), ["x"], [None], [2**40], [(1,)], [(0, 1, 1, 1, 1)], [(2**40, True, True, True, True)]),
    *([(1, 2, 3)], ("HEURISTIC", "x"), ((),), np.float32(1), np.dtype("U3"), Ellipsis, int, slice(1)),
)


def apply_file(path, op, **state):
    """The bare opcodes of an Apply."""
    saved = mapping(opdef_type=name(OPS, op), **{key: plain(value) for key, value in state.items()})
    path.write_bytes(HEAD + build(new(name(EXPR, "Apply")), mapping(opdef_state=saved)) + STOP)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("op", "field", "value"),
    [
        ("Reduce", "axis", "x"),
        ("Elemwise", "mode", 3),
        ("Pooling", "strategy", ()),
        ("Concat", "comp_node", 1),
    ],
)
def test_a_wrong_value_of_an_op_does_not_abort(tmp_path, op, field, value):
    path = tmp_path / "op.mge"
    apply_file(path, op, **{field: value})
    message = verdict(path)
    assert message.startswith("refused")
    assert f"gives the op {op} the {field}" in message


def every_op():
    """Tries each wrong value of each field of each op, and each right one; an abort ends the process."""
    tried = 0
    for key in sorted(allowlist.OPDEFS):
        cls = resolve(key)
        good = cls().__getstate__()
        right = {k: v for k, v in good.items() if k != "comp_node"}
        assert make_op(cls, op_state(cls, right)).__getstate__().keys() == good.keys()
        for field, example in good.items():
            for value in WRONG:
                tried += 1
                try:
                    op = make_op(cls, op_state(cls, {**right, field: value}))
                except RefusedError:
                    continue
                hash(op), repr(op), op.__getstate__()
                assert type(value) is type(example) or field == "dtype" or type(value) in (int, tuple), (
                    key,
                    field,
                )
    print(tried)


def test_no_wrong_value_of_any_op_aborts():
    script = "from tests.graph.files.test_serialize_limits import every_op; every_op()"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-600:]
    assert len(allowlist.OPDEFS) == 95
    assert int(run.stdout) > 5000


def test_ops_come_back_as_they_were(tmp_path):
    """Apply exprs of real graphs, with states that are not those of a new op."""
    x = mge.Tensor(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    module = net(lambda self, x: F.flatten(x, 1).reshape(x.shape[0], -1)[:, 0 : x.shape[1]])
    traced = qtrace.trace(module, x, check=False)
    save(traced, tmp_path / "net.mge")
    loaded = load(tmp_path / "net.mge")
    applied = [[e.opdef for e in t.graph._exprs if type(e) is Apply] for t in (traced, loaded)]
    assert applied[0]
    assert applied[0] == applied[1]
    np.testing.assert_array_equal(loaded(x).numpy(), traced(x).numpy())


def threads():
    return len(os.listdir("/proc/self/task"))


def with_device(path, device):
    traced = traced_net()
    data = dump(traced)
    assert text_op("xpux:0") in data
    path.write_bytes(
        data.replace(text_op("xpux:0"), text_op(device)).replace(text_op("xpux"), text_op(device))
    )


@each_of("device", ["multithread500:0", "cpu7:0", "multithread100000:0"])
def test_a_file_starts_no_threads(tmp_path, device):
    path = tmp_path / "net.mge"
    with_device(path, device)
    before = threads()
    loaded = load(path)
    assert threads() < before + 20
    assert {str(tensor.device) for tensor in loaded.tensors()} == {"xpux:0"}
    np.testing.assert_array_equal(loaded(net_input()).shape, traced_net()(net_input()).shape)


def test_devices_of_a_file_are_kept_when_asked_for(tmp_path):
    path = tmp_path / "net.mge"
    with_device(path, "cpu0:1")
    assert {str(tensor.device) for tensor in load(path, keep_devices=True).tensors()} == {"cpu0:1"}
    with_device(path, "multithread100000:0")
    with pytest.raises(UnsafeFileError, match="names the device multithread100000:0"):
        load(path, keep_devices=True)


DEEP = b")" + b"\x85" * 1_000_000
INT = name("builtins", "int")


def leaf_def(kinds=INT + b"\x85", value=b"N"):
    state = mapping(type=kinds, aux_data=b"N", children_defs=b"]", num_leaves=b"K\x01", const_val=value)
    return build(new(LEAF), state)


LIST = name("builtins", "list")


def tree_def(children=b"]", leaves=b"K\x00", kind=LIST, aux=b"N"):
    return build(new(TREE), mapping(type=kind, aux_data=aux, children_defs=children, num_leaves=leaves))


def chain_of_trees(levels):
    tree = tree_def()
    for _ in range(levels):
        tree = tree_def(b"](" + tree + b"e")
    return tree


def shared_trees(levels):
    """Each has the one before it for two children, so that the last one has 2**levels parts."""
    data = tree_def(b"](" + leaf_def() + b"e", b"K\x01") + b"q\x00"
    for level in range(1, levels + 1):
        leaves = b"\x8a\x08" + struct.pack("<q", 2**level)
        data += b"0" + tree_def(b"](h\x00h\x00e", leaves) + b"q\x00"
    return data


def shared(levels, pair=b"](h\x00h\x00e"):
    return b"]q\x00" + (b"0" + pair + b"q\x00") * levels


SPEC = name("inspect", "FullArgSpec")
KEYS = {
    "signature": (b"}" + new(SPEC, DEEP, b"N", b"N", b"N", b")", b"N", b")") + b"Ns", "levels deep"),
    "types of a leaf": (b"}" + leaf_def(kinds=DEEP) + b"Ns", "has the types"),
    "type of a tree": (b"}" + tree_def(kind=DEEP) + b"Ns", "has the type"),
    "names of a tree": (tree_def(kind=name("builtins", "dict"), aux=DEEP), "levels deep"),
    "trees in trees": (b"}" + chain_of_trees(300) + b"Ns", "levels deep"),
    "a million tuples": (b"}" + DEEP + b"Ns", "levels deep"),
    "shared children": (b"}" + shared_trees(40) + b"Ns", "far more work"),
    "a tree in itself": (
        new(TREE) + b"q\x00" + mapping(children_defs=b"](h\x00e", num_leaves=b"K\x00", type=INT) + b"b",
        "before that is whole",
    ),
    "a tree that is changed": (tree_def() + mapping(children_defs=b"]") + b"b", "has its state already"),
    "a wrong number of leaves": (tree_def(leaves=b"K\x05"), "says 5 leaves, not 0"),
    "a huge integer": (b"\x8b" + struct.pack("<I", 10**6) + b"\x7f" * 10**6, "integer of 1000000 bytes"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("attack", KEYS)
def test_load_refuses_endless_nesting(tmp_path, attack):
    opcodes, reason = KEYS[attack]
    path = tmp_path / "deep.mge"
    path.write_bytes(HEAD + opcodes + STOP)
    message = verdict(path)
    assert message.startswith("refused")
    assert reason in message


def test_large_integers_are_no_keys(tmp_path):
    """The hashes of these are all equal, so that each would be compared with all others."""
    equal = (b"\x8a\x0c" + ((2**61 - 1) * n).to_bytes(12, "little") + b"N" for n in range(1, 60_000))
    path = tmp_path / "keys.mge"
    path.write_bytes(HEAD + b"}(" + b"".join(equal) + b"u" + STOP)
    assert "more than 64 bits as a key" in verdict(path)


def test_equal_hashes_count_against_the_load_budget():
    rules = Rules(AllowList(), LoadBudget(0))

    class Same(tuple):
        def __hash__(self):
            return 1

    def look_up_all():
        for n in range(10_000):
            rules.keys.check(Same((n,)), rules)

    with pytest.raises(RefusedError, match="far more work"):
        look_up_all()


@pytest.mark.parametrize("shape", [(2**62, 2**62), (10**60,) * 30, (2**50, 0)])
def test_sizes_of_arrays_are_bounded(tmp_path, shape):
    begun = call(
        name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), plain((0,)), plain(b"b")
    )
    kind = build(
        call(name("numpy", "dtype"), plain("f4"), b"\x89", b"\x88"),
        plain((3, "<", None, None, None, -1, -1, 0)),
    )
    path = tmp_path / "array.mge"
    path.write_bytes(HEAD + build(begun, b"(K\x01" + plain(shape) + kind + b"\x89C\x00t") + STOP)
    refusal(path, "lacks a plain shape")


def test_a_quantized_dtype_without_a_name_does_not_crash(tmp_path):
    kind = build(
        call(name("numpy", "dtype"), plain("i1"), b"\x89", b"\x88"),
        plain((4, "|", None, None, None, -1, -1, 0, {"mgb_dtype": {"scale": 0.1}})),
    )
    data = call(name("numpy.core.numeric", "_frombuffer"), plain(b"\1"), kind, plain((1,)), plain("C"))
    path = tmp_path / "dtype.mge"
    path.write_bytes(HEAD + new(name("megengine.tensor", "Tensor"), data, kind, plain("cpu0")) + STOP)
    assert "has the metadata" in verdict(path)


def tampered(path, change):
    traced = traced_net()
    change(traced)
    path.write_bytes(dump(traced))


def call_of(traced):
    return next(expr for expr in traced.graph._exprs if type(expr) is CallFunction)


class Recorder:
    """Has what a tree has, and notes whether it was asked for it."""

    asked = False
    num_leaves = 1

    @classmethod
    def unflatten(cls, leaves):
        cls.asked = True
        return tuple(leaves), {}


def test_load_refuses_other_classes_as_argument_trees(tmp_path):
    """A class of the allow-list in the place of a tree would have its attribute called."""
    path = tmp_path / "net.mge"

    def change(traced):
        call_of(traced).arg_def = "PLACEHOLDER2"

    tampered(path, change)
    key = "tests.graph.files.test_serialize_limits:Recorder"
    data = path.read_bytes()
    path.write_bytes(data.replace(text_op("PLACEHOLDER2"), name(*key.split(":"))))
    refusal(path, "the structure of the arguments of a CallFunction", allow=[key])
    assert not Recorder.asked


@pytest.mark.parametrize("where", ["constant", "leaf", "attribute"])
def test_shared_lists_are_refused_where_they_would_be_printed(tmp_path, where):
    def change(traced):
        if where == "constant":
            call_of(traced).const_val = [(1, "PLACEHOLDER2")]
        elif where == "leaf":
            call_of(traced).arg_def.children_defs[0].children_defs[0].const_val = "PLACEHOLDER2"
        else:
            traced.notes = "PLACEHOLDER2"

    path = tmp_path / "net.mge"
    traced = traced_net()
    change(traced)
    data = pickle.dumps(traced, 3)
    mark = text("PLACEHOLDER2")
    assert data.count(mark) == 1
    lists = b"]r\x40\x42\x0f\0" + b"0](j\x40\x42\x0f\0j\x40\x42\x0f\0er\x40\x42\x0f\0" * 50
    path.write_bytes(data.replace(mark, lists))
    message = verdict(path)
    assert message.startswith("refused")
    assert "far more work" in message or "constant argument in it is a list" in message


@pytest.mark.slow
def test_many_inputs_are_read_in_linear_time(tmp_path):
    """Each expr's reads are counted once, not once for each node."""
    counts = {
        count: calls_of(lambda n=count: load_wide(tmp_path / f"{n}.mge", n)) for count in (20_000, 40_000)
    }
    assert_linear(counts)


def load_wide(path, count):
    """Fails to load a call that reads one node ``count`` times."""
    traced = traced_net()
    graph, wide = traced.graph, call_of(traced)
    node = wide.inputs[0]
    wide.inputs = [node] * count
    wide.arg_def = TreeDef(
        tuple, None, [TreeDef(tuple, None, [leaf_like(node) for _ in range(count)]), TreeDef(dict, (), [])]
    )
    node.users = [user for user in node.users if user is not wide] + [wide] * count
    assert graph._exprs
    path.write_bytes(pickle.dumps(traced, 4))
    with pytest.raises(UnsafeFileError, match="far more work"):
        load(path)


def leaf_like(node):
    return LeafDef(_leaf_type(node))
