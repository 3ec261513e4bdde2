"""Hostile states: what a file gives to listed objects, and what a loaded graph would call when it runs."""

from __future__ import annotations

import megengine as mge
import megengine.module as M
import pytest
from megengine.traced_module.expr import CallMethod, Constant, GetAttr
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import LeafDef, TreeDef, tree_flatten

from qtrace.errors import DataError, QtraceError
from qtrace.graph.files.allowlist import AllowList, LoadBudget
from qtrace.graph.files.rules import Rules
from qtrace.graph.files.serialize import load
from qtrace.graph.files.unpickle import PickleMachine
from tests.each import each_of
from tests.graph.files.hostile import (
    EXPR,
    HEAD,
    OS_SYSTEM,
    STOP,
    build,
    call,
    dump,
    mapping,
    name,
    new,
    plain,
    refusal,
    text,
    touch,
    traced_net,
)

TREE = name("megengine.traced_module.pytree", "TreeDef")
LEAF = name("megengine.traced_module.pytree", "LeafDef")
DEEP = b")" + b"\x85" * 1_000_000
INTEGER = name("builtins", "int")
LEAF_STATE = {"type": INTEGER + b"\x85", "children_defs": b"]", "num_leaves": b"K\x01"}
TREE_STATE = {"type": name("builtins", "list"), "children_defs": b"]", "num_leaves": b"K\x00"}
BUILDS = {
    "slots on a class": build(TREE, b"N" + mapping(unflatten=name("builtins", "dict")) + b"\x86"),
    "dict on a class": build(TREE, mapping(unflatten=name("builtins", "dict"))),
    "slots on an instance": build(new(TREE), b"N" + mapping(__class__=LEAF) + b"\x86"),
    "class of a leaf": build(new(LEAF), mapping(__class__=TREE)),
    "state on a type": build(name("megengine.tensor", "Tensor"), mapping(numpy=name("builtins", "dict"))),
    "state on a tensor class": build(
        name("megengine.tensor", "Tensor"), b"N" + mapping(_qparams=b"N") + b"\x86"
    ),
    "unknown field": build(new(TREE), mapping(unflatten=name("builtins", "dict"))),
    "method of a module": build(
        new(name("megengine.module.conv", "Conv2d")), mapping(forward=name("builtins", "dict"))
    ),
    "class of a module": build(new(name("megengine.module.conv", "Conv2d")), mapping(__class__=TREE)),
    "attribute of a dtype meta": build(
        new(
            name("megengine.core.tensor.dtype", "QuantDtypeMeta"),
            plain("qint8"),
            plain("QuantizedS8"),
            plain("int8"),
            plain(-128),
            plain(127),
            b"\x89",
        ),
        mapping(scale=b"N"),
    ),
    "state of a list": build(b"]", mapping(append=b"N")),
    "items into a tensor": new(name(EXPR, "Apply")) + b"K\x00K\x01s",
    "append to an object": new(name(EXPR, "Apply")) + b"K\x00a",
    "getattr of a dunder": build(new(name(EXPR, "GetAttr")), mapping(name=plain("conv.__class__"))),
    "getattr of globals": build(new(name(EXPR, "GetAttr")), mapping(name=plain("__init__"))),
    "device": build(new(name("megengine.core._imperative_rt.common", "CompNode")), plain("cpu0\n:../x")),
    "instance of a type": new(name("builtins", "dict")),
    "instance of type": new(name("builtins", "type"), plain("A"), b")", b"}"),
    "a class made by type": call(name("builtins", "type"), plain("A"), b")", b"}"),
    "defaultdict with a factory": call(
        name("collections", "defaultdict"), name("megengine.tensor", "Tensor")
    ),
    "tensor of an object": new(name("megengine.tensor", "Tensor"), new(TREE), b"N", plain("cpu0")),
    "no class": new(plain("os")),
    "call of a string": call(plain("os")),
}


@each_of("attack", BUILDS)
def test_load_refuses_state_on_unexpected_objects(tmp_path, attack):
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + BUILDS[attack] + STOP)
    before = {cls: set(vars(cls)) for cls in (TreeDef, LeafDef, mge.Tensor, M.Conv2d)}
    refusal(path)
    assert {cls: set(vars(cls)) for cls in before} == before


def test_a_class_attribute_can_be_set_under_mge_load(tmp_path):
    """The control: Python's unpickler lets a file replace the methods of a class for the whole process."""
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + build(TREE, b"N" + mapping(qtrace_was_here=b"K\x01") + b"\x86") + STOP)
    refusal(path)
    assert not hasattr(TreeDef, "qtrace_was_here")
    mge.load(str(path))
    assert TreeDef.qtrace_was_here == 1
    del TreeDef.qtrace_was_here


DTYPE, RECONSTRUCT = name("numpy", "dtype"), name("numpy.core.multiarray", "_reconstruct")


def dtype(code="f4", state=(3, "<", None, None, None, -1, -1, 0)):
    return build(call(DTYPE, plain(code), b"\x89", b"\x88"), plain(state))


def array(shape=(1,), kind=None, raw=b"\0\0\0\0", version=1):
    begun = call(RECONSTRUCT, name("numpy", "ndarray"), plain((0,)), plain(b"b"))
    return build(
        begun,
        plain(version).join([b"(", b""]) + plain(shape) + (kind or dtype()) + b"\x89" + plain(raw) + b"t",
    )


NUMPY = {
    "object array": array(kind=dtype("O8", (3, "|", None, None, None, -1, -1, 63)), raw=[1]),
    "object by flags": array(kind=dtype("i8", (3, "<", None, None, None, 8, 8, 63)), raw=[1]),
    "structured": array(kind=dtype("V8", (3, "|", None, ("a",), {"a": 1}, 8, 1, 0)), raw=b"\0" * 8),
    "subarray": dtype("f4", (3, "<", ("f4", (2,)), None, None, -1, -1, 0)),
    "metadata": dtype("i1", (4, "|", None, None, None, -1, -1, 0, {"x": 1})),
    "hostile metadata": dtype("i1", (4, "|", None, None, None, -1, -1, 0, {"mgb_dtype": {"name": []}})),
    "short data": array(shape=(1000000,)),
    "long data": array(raw=b"\0" * 400),
    "negative shape": array(shape=(-1,)),
    "huge shape": array(shape=(2**62, 4), raw=b""),
    "wrong shape type": array(shape=[1]),
    "another class": call(RECONSTRUCT, name("megengine.tensor", "Tensor"), plain((0,)), plain(b"b")),
    "memmap": call(RECONSTRUCT, name("numpy", "memmap"), plain((0,)), plain(b"b")),
    "object scalar": call(
        name("numpy.core.multiarray", "scalar"), dtype("O8", (3, "|", None, None, None, 8, 8, 63)), b"N"
    ),
    "short scalar": call(name("numpy.core.multiarray", "scalar"), dtype(), plain(b"\0")),
    "dtype of a name": call(DTYPE, plain("numpy.random"), b"\x89", b"\x88"),
    "dtype of a class": call(DTYPE, name("megengine.tensor", "Tensor"), b"\x89", b"\x88"),
    "recarray": call(name("numpy.core.records", "recarray"), plain((1,))),
}


@each_of("attack", NUMPY)
def test_numpy_gets_plain_numbers_only(tmp_path, attack):
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + NUMPY[attack] + STOP)
    refusal(path)


def test_the_numpy_opcodes_of_these_tests_are_right(tmp_path):
    path = tmp_path / "array.mge"
    path.write_bytes(HEAD + array() + STOP)
    assert mge.load(str(path)).tolist() == [0.0]
    refusal(path, "holds a ndarray", error=DataError)


OPCODES = {
    "persistent id": b"N" + b"Q",
    "extension": b"\x82\x07",
    "extension 4": b"\x84\x07\0\0\0",
    "inst": b"(" + b"ios\nsystem\n",
    "obj": b"(" + OS_SYSTEM + b"o",
    "newobj_ex": b"N)}\x92",
    "out-of-band buffer": b"\x97",
    "text int": b"I01\n",
    "text string": b"S'a'\n",
    "dup": b"N2",
}


@each_of("attack", OPCODES)
def test_opcodes_that_no_saved_model_has_are_refused(tmp_path, attack):
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + OPCODES[attack] + STOP)
    with pytest.raises(QtraceError):
        load(path)


def test_global_opcode_is_held_to_the_list_too(tmp_path):
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + b"cos\nsystem\n(" + touch(tmp_path / "s") + b"tR" + STOP)
    refusal(path, "os:system")
    path.write_bytes(HEAD + b"]" + text("system") + b"\x93" + STOP)
    refusal(path, "not strings")


def tampered(change):
    traced = traced_net()
    change(traced)
    return dump(traced)


def expr_of(traced, kind):
    return next(expr for expr in traced.graph._exprs if type(expr) is kind)


def method(value):
    def change(traced):
        next(e for e in traced.graph._exprs if type(e) is CallMethod and e.method == "reshape").method = value

    return change


def module_method(traced):
    next(
        e for e in traced.graph._exprs if type(e) is CallMethod and e.method == "__call__"
    ).method = "load_state_dict"


def read_method(traced):
    expr_of(traced, GetAttr).name = "load_state_dict"


def read_string(traced):
    expr_of(traced, GetAttr).name = "conv.conv_mode"


def string_receiver(traced):
    expr = next(e for e in traced.graph._exprs if type(e) is CallMethod and e.method == "reshape")
    args = ("{0.__class__}", expr.inputs[0])
    expr.method, expr.inputs, expr.const_val = "format", expr.inputs[:1], [(0, args[0])]
    expr.arg_def = tree_flatten((args, {}))[1]


def module_as_tensor(traced):
    getter = expr_of(traced, GetAttr)
    node = TensorNode(getter, "conv", "Net.conv")
    node.users, getter.outputs = getter.outputs[0].users, [node]
    for user in node.users:
        user.inputs = [node if isinstance(n, ModuleNode) else n for n in user.inputs]


GRAPHS = {
    "numpy": (method("numpy"), "numpy"),
    "reduce": (method("__reduce_ex__"), "__reduce_ex__"),
    "getattribute": (method("__getattribute__"), "__getattribute__"),
    "init": (method("__init__"), "__init__"),
    "set_value": (method("set_value"), "set_value"),
    "no string": (method("__call__"), "__call__"),
    "method of a module": (module_method, "load_state_dict"),
    "getattr of a method": (read_method, "load_state_dict"),
    "getattr of a string": (read_string, "conv_mode"),
    "method of a string": (string_receiver, "format"),
    "module as tensor": (module_as_tensor, "__call__"),
}


@each_of("attack", GRAPHS)
def test_running_a_loaded_graph_calls_listed_things_only(tmp_path, attack):
    change, named = GRAPHS[attack]
    path = tmp_path / "attack.mge"
    path.write_bytes(tampered(change))
    with pytest.raises(QtraceError, match=named):
        load(path)


def test_constants_hold_tensors_or_modules(tmp_path):
    path = tmp_path / "attack.mge"
    path.write_bytes(
        HEAD + build(new(name(EXPR, "Constant")), mapping(value=name("builtins", "dict"))) + STOP
    )
    refusal(path, "a Constant in it holds")


def test_load_refuses_regular_expressions_as_graph_names(tmp_path):
    """MegEngine makes regular expressions of them; some of those never end."""
    traced = traced_net()
    traced.graph._namespace.qualname = "(a+)+$"
    path = tmp_path / "attack.mge"
    path.write_bytes(dump(traced))
    refusal(path, "is called (a+)+$")


def test_graphs_are_made_of_megengines_own_parts(tmp_path):
    path = tmp_path / "attack.mge"
    for attribute, value in (("_exprs", ["x"]), ("_inputs", [mge.Tensor(1.0)]), ("_outputs", "none")):
        traced = traced_net()
        setattr(traced.graph, attribute, value)
        path.write_bytes(dump(traced))
        with pytest.raises(QtraceError):
            load(path)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (b"}" + DEEP + b"Ns", "levels deep"),
        (b"}(" + DEEP + b"Nu", "levels deep"),
        (b"\x8f(" + DEEP + b"\x90", "levels deep"),
        (b"(" + DEEP + b"\x91", "levels deep"),
        (build(new(LEAF), mapping(**LEAF_STATE, const_val=DEEP)), "a constant argument in it is a tuple"),
        (build(new(TREE), mapping(**TREE_STATE, aux_data=DEEP)), "levels deep"),
    ],
)
def test_load_refuses_deeply_nested_keys(tmp_path, key, reason):
    """Hashing a million nested tuples ends the process; ``megengine.load`` does so, hence no control here."""
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + key + STOP)
    refusal(path, reason)


def test_memo_and_constants_hold_no_callable_classes(tmp_path):
    """What the unpickler keeps for a listed class is inert: as data it is no class and cannot be called."""

    (value,) = PickleMachine(
        HEAD + b"]" + name(EXPR, "Constant") + b"a" + STOP, Rules(AllowList(), LoadBudget(0))
    ).run()
    assert value is not Constant
    assert not callable(value)
    assert not hasattr(value, "__dict__")


STORED, AGAIN = b"q\0" + b"0", b"h\0"  # kept in the memo and taken off the stack; taken from the memo
MANY = mapping(_name=b"N", **{f"a{i}": b"N" for i in range(10_000)})
AMPLIFIED = {
    "arrays": (plain(bytes(2**20)), array(shape=(2**18,)).replace(plain(b"\0\0\0\0"), AGAIN)),
    "bytearrays": (plain(bytes(2**20)), call(name("builtins", "bytearray"), AGAIN)),
    "tensors": (
        array(shape=(2**18,), raw=bytes(2**20)),
        new(name("megengine.tensor", "Tensor"), AGAIN, dtype(), plain("xpux")),
    ),
    "states": (MANY, build(new(name("megengine.module.identity", "Identity")), AGAIN)),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", AMPLIFIED)
def test_a_file_cannot_make_much_more_than_it_is_long(tmp_path, kind):
    stored, again = AMPLIFIED[kind]
    path = tmp_path / "bomb.mge"
    few, many = (HEAD + stored + STORED + b"](" + again * count + b"e" + STOP for count in (2, 1000))
    path.write_bytes(few)
    refusal(path, "holds a list", error=DataError)  # so few are no attack
    path.write_bytes(many)
    refusal(path, "would take far more memory than the file is long")
