"""Hostile model files: each would run something under ``megengine.load``, and is refused by name by ``load``.

Every attack leaves a sentinel file when it runs. ``megengine.load`` is tried on the same bytes as a control,
so that no attack passes here only because it was built wrongly.
"""

from __future__ import annotations

import sys

import megengine as mge
import pytest
from megengine.core.ops.builtin import GetVarShape
from megengine.traced_module.expr import CallFunction
from megengine.traced_module.pytree import tree_flatten

from qtrace.errors import DataError
from qtrace.graph.files.allowlist import AllowList, LoadBudget
from qtrace.graph.files.rules import Rules
from qtrace.graph.files.unpickle import PickleMachine
from tests.each import each_of
from tests.graph.files.hostile import (
    EXPR,
    GRAPH,
    HEAD,
    NODE,
    OS_SYSTEM,
    STATE,
    STOP,
    build,
    call,
    control,
    dump,
    mapping,
    name,
    net_input,
    new,
    plain,
    refusal,
    replace_strings,
    text,
    text_op,
    touch,
    traced_net,
)

# Names that must never come off the list, called with REDUCE while loading.
CALLS = {
    "posix:system": lambda s: call(OS_SYSTEM, touch(s)),
    "os:system": lambda s: call(name("os", "system"), touch(s)),
    "os:mkdir": lambda s: call(name("os", "mkdir"), plain(str(s))),
    "builtins:eval": lambda s: call(name("builtins", "eval"), plain(f"open({str(s)!r}, 'w').close()")),
    "builtins:exec": lambda s: call(name("builtins", "exec"), plain(f"open({str(s)!r}, 'w').close()")),
    "builtins:open": lambda s: call(name("builtins", "open"), plain(str(s)), plain("w")),
    "builtins:getattr": lambda s: call(
        call(name("builtins", "getattr"), call(name("builtins", "__import__"), plain("os")), plain("system")),
        touch(s),
    ),
    "builtins:__import__": lambda s: call(
        call(name("builtins", "getattr"), call(name("builtins", "__import__"), plain("os")), plain("mkdir")),
        plain(str(s)),
    ),
    "subprocess:check_call": lambda s: call(name("subprocess", "check_call"), plain(["touch", str(s)])),
    "functools:partial": lambda s: call(call(name("functools", "partial"), OS_SYSTEM, touch(s))),
    "operator:methodcaller": lambda s: call(
        call(name("operator", "methodcaller"), plain("system"), touch(s)),
        call(name("importlib", "import_module"), plain("os")),
    ),
    "megengine:load": lambda s: call(name("megengine", "load"), plain(str(s.parent / "inner.mge"))),
    "megengine.serialization:load": lambda s: call(
        name("megengine.serialization", "load"), plain(str(s.parent / "inner.mge"))
    ),
    "megengine.hub:load": lambda s: call(
        name("megengine.hub", "load"), plain("u/r:m"), plain("model"), plain(str(s))
    ),
    "megengine.utils.http_download:download_from_url": lambda s: call(
        name("megengine.utils.http_download", "download_from_url"),
        plain("file:///etc/hostname"),
        plain(str(s)),
    ),
    "numpy:load": lambda s: call(name("numpy", "load"), plain(str(s.parent / "inner.npy"))),
    "numpy:savetxt": lambda s: call(name("numpy", "savetxt"), plain(str(s)), plain([1])),
    "numpy.testing._private.utils:runstring": lambda s: call(
        name("numpy.testing._private.utils", "runstring"), plain(f"open({str(s)!r}, 'w').close()"), plain({})
    ),
    "copyreg:_reconstructor": lambda s: call(
        name("copyreg", "_reconstructor"), name("builtins", "object"), name("builtins", "object"), b"N"
    ),
    "copyreg:add_extension": lambda s: call(
        name("copyreg", "add_extension"), plain("os"), plain("system"), b"K\x07"
    ),
    "megengine.functional.nn:__builtins__": lambda s: call(
        name("megengine.functional.nn", "__builtins__"), touch(s)
    ),
    "megengine.functional.nn:np.f2py.os.system": lambda s: call(
        name("megengine.functional.nn", "np.f2py.os.system"), touch(s)
    ),
    "megengine.tensor:Tensor.__class__": lambda s: call(
        name("megengine.tensor", "Tensor.__class__"), touch(s)
    ),
    "megengine.functional.nn:relu": lambda s: call(name("megengine.functional.nn", "relu"), b"K\x01"),
    "megengine.module.module:Module.load_state_dict": lambda s: call(
        name("megengine.module.module", "Module.load_state_dict"), b"N"
    ),
    "megengine:module": lambda s: call(name("megengine", "module"), touch(s)),
    "megengine.traced_module.expr:import_module": lambda s: call(
        name("megengine.traced_module.expr", "import_module"), plain("this")
    ),
}
# These do their harm in other ways than by leaving the sentinel, or fail for lack of a network.
NO_CONTROL = {
    "megengine.hub:load",
    "megengine.utils.http_download:download_from_url",
    "numpy:load",
    "copyreg:_reconstructor",
    "copyreg:add_extension",
    "megengine.functional.nn:__builtins__",
    "megengine.functional.nn:np.f2py.os.system",
    "megengine.tensor:Tensor.__class__",
    "megengine.functional.nn:relu",
    "megengine.module.module:Module.load_state_dict",
    "megengine:module",
    "megengine.traced_module.expr:import_module",
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # builtins:open
@each_of("target", CALLS)
def test_calls_while_loading_are_refused_by_name(tmp_path, target):
    sentinel, path = tmp_path / "sentinel", tmp_path / "attack.mge"
    (tmp_path / "inner.mge").write_bytes(HEAD + call(OS_SYSTEM, touch(sentinel)) + STOP)
    path.write_bytes(HEAD + CALLS[target](sentinel) + STOP)
    named = "builtins:getattr" if target == "builtins:__import__" else target  # the first one to be named
    refusal(path, named)
    assert not sentinel.exists()
    if target not in NO_CONTROL:
        control(path)
        assert sentinel.exists()


def splice(data, replaced, opcodes):
    """Puts opcodes in the place of a string in a saved model."""
    raw = replaced.encode()
    old = b"\x8c" + bytes([len(raw)]) + raw
    assert data.count(old) == 1
    return data.replace(old, opcodes)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@each_of("target", ["posix:system", "builtins:exec", "builtins:open", "functools:partial"])
def test_a_payload_deep_inside_a_real_model(tmp_path, target):
    sentinel, path = tmp_path / "sentinel", tmp_path / "attack.mge"
    path.write_bytes(splice(dump(traced_net()), "PLACEHOLDER", CALLS[target](sentinel)))
    refusal(path, target)
    assert not sentinel.exists()
    control(path)
    assert sentinel.exists()


@each_of(
    ("module", "function"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("megengine.functional.nn", "__builtins__"),
        ("megengine.functional.nn", "np.f2py.os.system"),
        ("megengine", "load"),
        ("megengine.functional.utils", "np.load"),
        ("megengine.functional", "nn.relu"),
        ("megengine.functional.nn", "relu.__call__"),
        ("megengine.functional.nn", "relu\n"),
        ("", ""),
    ],
)
def test_functions_of_call_functions_are_held_to_the_list(tmp_path, module, function):
    path = tmp_path / "attack.mge"
    data = replace_strings(dump(traced_net()), relu="function_marker")
    data = data.replace(text_op("megengine.functional.nn"), text_op(module))
    path.write_bytes(data.replace(text_op("function_marker"), text_op(function)))
    refusal(path, "would call the function", *([f"{module}:{function}"] if function.isprintable() else []))


def test_a_function_of_a_call_function_runs_under_mge_load(tmp_path):
    """The control of the test above: the strings in the state are enough to run anything."""
    sentinel, path = tmp_path / "sentinel", tmp_path / "attack.mge"
    traced = traced_net()
    command = f"touch '{sentinel}'"
    hostile = CallFunction(next(e.func for e in traced.graph._exprs if type(e) is CallFunction))
    hostile.const_val, hostile.arg_def = [(0, command)], tree_flatten(((command,), {}))[1]
    hostile.out_def, hostile.outputs, hostile.func = tree_flatten([])[1], [], __import__("os").system
    traced.graph._exprs.append(hostile)
    path.write_bytes(dump(traced))
    refusal(path, "would call the function posix:system", "allow=['posix:system']")
    assert not sentinel.exists()
    with pytest.raises(AssertionError):  # after it ran: its result is no tensor
        mge.load(str(path))(net_input())
    assert sentinel.exists()


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module that can be imported but is not, and that leaves the sentinel when it is."""
    sentinel = tmp_path / "sentinel"
    (tmp_path / "evil_plugin.py").write_text(
        f"import megengine.module as M\nopen({str(sentinel)!r}, 'w').close()\n"
        "class Layer(M.Module): pass\ndef f(x): return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield sentinel
    sys.modules.pop("evil_plugin", None)


def module_state_file(module):
    """A saved model whose conv is a _ModuleState of the class named (module, Layer)."""
    data = dump(traced_net())
    assert data.count(text_op("Conv2d")) == 1
    return data.replace(text_op("megengine.module.conv"), text_op(module)).replace(
        text_op("Conv2d"), text_op("Layer")
    )


def module_node_file(module):
    """The bare opcodes: a ModuleNode imports its type as soon as it gets its state."""
    state = mapping(module_type=text(module) + text("Layer") + b"\x86")
    return HEAD + build(new(name(NODE, "ModuleNode")), state) + STOP


def function_file(module):
    state = mapping(func=text(module) + text("f") + b"\x86")
    return HEAD + build(new(name(EXPR, "CallFunction")), state) + STOP


def nested_state_file(module):
    """A Constant that holds a _ModuleState: Constant.__setstate__ makes the module."""
    pair = text(module) + text("Layer") + b"\x86"
    saved = build(new(name(STATE, "_ModuleState")), mapping(module=pair, state=b"}", version=b"N"))
    return HEAD + build(new(name(EXPR, "Constant")), mapping(value=saved)) + STOP


@pytest.mark.parametrize("make", [module_state_file, module_node_file, function_file, nested_state_file])
def test_nothing_is_imported_for_a_string_that_is_not_listed(tmp_path, plugin, make):
    path = tmp_path / "attack.mge"
    path.write_bytes(make("evil_plugin"))
    refusal(path, "evil_plugin:")
    assert "evil_plugin" not in sys.modules
    assert not plugin.exists()
    control(path)
    assert plugin.exists()


@each_of(
    "pair",
    [
        b"]",
        b"K\x01",
        plain(["posix", "system"]),
        plain(("posix",)),
        plain((1, 2)),
        plain("posix:system"),
        b"N",
    ],
)
def test_import_strings_must_be_a_pair_of_strings(tmp_path, pair):
    path = tmp_path / "attack.mge"
    for cls, key in ((name(EXPR, "CallFunction"), "func"), (name(NODE, "ModuleNode"), "module_type")):
        path.write_bytes(HEAD + build(new(cls), mapping(**{key: pair})) + STOP)
        refusal(path, "not a pair of module and name")


@each_of(
    "module_type",
    [("builtins", "dict"), ("megengine.tensor", "Tensor"), (GRAPH, "InternalGraph"), (GRAPH, "TracedModule")],
)
def test_module_states_make_listed_modules_only(tmp_path, module_type):
    path = tmp_path / "attack.mge"
    state = mapping(module=plain(module_type), state=b"}", version=b"N")
    path.write_bytes(HEAD + build(new(name(STATE, "_ModuleState")), state) + STOP)
    refusal(path, "names the module class", ":".join(module_type))


@each_of(
    "op",
    [
        name("subprocess", "Popen"),
        name("megengine.core._imperative_rt.ops", "TensorRTRuntime"),
        name("megengine.core._imperative_rt.ops", "GaussianRNG"),
        name("builtins", "dict"),
        name("megengine.tensor", "Tensor"),
        name(GRAPH, "TracedModule"),
        b"N",
    ],
)
def test_ops_of_an_apply_are_held_to_the_list(tmp_path, op):
    path = tmp_path / "attack.mge"
    state = mapping(opdef_state=mapping(opdef_type=op))
    path.write_bytes(HEAD + build(new(name(EXPR, "Apply")), state) + STOP)
    refusal(path, "not on the allow-list")


def test_an_op_changed_after_its_apply_was_checked_stays_the_checked_one(tmp_path):
    """The state of a BatchNorm op is read again at the end; the file may hold on to the dict until then."""
    path = tmp_path / "attack.mge"
    ops = "megengine.core._imperative_rt.ops"
    state = b"}q\x00" + text("axis") + b"K\x00s" + text("opdef_type") + name(ops, "GetVarShape") + b"s"
    apply = build(new(name(EXPR, "Apply")), b"}" + text("opdef_state") + state + b"s")
    change = b"h\x00" + text("opdef_type") + name("megengine.tensor", "Tensor") + b"s0"
    path.write_bytes(HEAD + apply + change + STOP)
    refusal(path, "holds a Apply", error=DataError)

    expr = PickleMachine(path.read_bytes(), Rules(AllowList(), LoadBudget(0))).run()
    assert expr.opdef_state["opdef_type"] is GetVarShape is type(expr.opdef)


def test_a_users_class_is_made_only_when_listed(tmp_path, plugin):
    path = tmp_path / "attack.mge"
    path.write_bytes(HEAD + call(name("evil_plugin", "f"), b"K\x01") + STOP)
    refusal(path, "evil_plugin:f")
    assert not plugin.exists()
    refusal(path, "calls, while loading, a function", allow=["evil_plugin:f"])  # listed for the graph to call
