"""Files of which one field was edited: what is not whole is refused when it is read, in one sentence.

Later, when the model is used, the same would be a traceback.
"""

from __future__ import annotations

import copy
import copyreg
import pickle
import struct

import megengine as mge
import megengine.functional as F
import megengine.module as M
import megengine.traced_module as tm
import numpy as np
import pytest
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, GetAttr

import qtrace
from qtrace.errors import DataError, QtraceError, UnsafeFileError
from qtrace.fakequant.base import FakeQuant
from qtrace.graph.files.serialize import SIZE, load, save
from qtrace.scheme import QScheme
from tests.each import each_of
from tests.fuzz.loading import verdict
from tests.graph.files.hostile import net_input, refusal, text, traced_net
from tests.nets import images, net


def expr_of(traced, kind):
    return next(expr for expr in traced.graph._exprs if type(expr) is kind)


def leaves(traced):
    expr_of(traced, CallFunction).arg_def.num_leaves = 5


def outputs(traced):
    traced.graph._outputs.append(traced.graph._outputs[0])


def cycle(traced):
    first, last = traced.graph._exprs[1], traced.graph._exprs[-1]
    first.inputs[1] = last.outputs[0]


def order(traced):
    traced.graph._exprs.reverse()


def shape(traced):
    traced.graph.outputs[0]._shape = "abc"


def negative_shape(traced):
    traced.graph.outputs[0]._shape = (-1, 2)


def dtype(traced):
    traced.graph.outputs[0]._dtype = "float32"


def device(traced):
    traced.graph.outputs[0]._device = "cpu0"


def node_name(traced):
    traced.graph.outputs[0]._name = "a\nb"


def number_for_a_name(traced):
    traced.graph.outputs[0]._name = 3


def unnamed_input(traced):
    traced.graph.inputs[1]._name = None


def graph_name(traced):
    traced.graph._name = 3


def twice(traced):
    expr = expr_of(traced, CallFunction)
    expr.outputs = expr.outputs * 2


def foreign(traced):
    expr_of(traced, CallFunction).inputs[0] = traced_net().graph.outputs[0]


def no_structure(traced):
    expr_of(traced, CallFunction).arg_def = None


def output_type(traced):
    expr_of(traced, CallFunction).out_def.type = (int,)


def constants(traced):
    expr_of(traced, CallFunction).const_val = [(9, 1)]


def hooks(traced):
    traced._forward_hooks[0] = int


def modules(traced):
    traced._modules.append("nothing")


def itself(traced):
    traced.notes = [traced]


def number_for_a_key(traced):
    traced.__dict__["notes"] = {1: M.ReLU()}


def listed_attribute(traced):
    traced.conv._modules = 3


def without_is_qat(traced):
    del traced.__dict__["is_qat"]


def is_qat(traced):
    traced.is_qat = "no"


def without_is_top(traced):
    del traced.__dict__["_is_top"]


def watch_points(traced):
    traced.__dict__["watch_points"] = 3


def end_points(traced):
    traced.end_points = ["conv_out"]


def signature(traced):
    traced.argspec = "x"


EDITS = {
    leaves: "leaves",
    outputs: "the outputs of a graph in it are 2, but 1 in their structure",
    cycle: "which is not computed before it",
    order: "which is not computed before it",
    shape: "the shape of the node reshape_out in it is abc",
    negative_shape: "the shape of the node reshape_out",
    dtype: "the dtype of the node reshape_out",
    device: "the device of the node reshape_out",
    node_name: "a node in it is called",
    number_for_a_name: "a node in it is called 3",
    unnamed_input: "an input of a graph in it lacks a name",
    graph_name: "a graph in it is called 3",
    twice: "is the output of two exprs",
    foreign: "which is not computed before it",
    no_structure: "the structure of the arguments of a CallFunction in it is None",
    output_type: "the outputs of a CallFunction in it do not have the structure",
    constants: "has the constant (9, 1)",
    hooks: "hooks that are no functions of yours",
    modules: "for the names of its modules",
    itself: "a TracedModule in it holds itself",
    number_for_a_key: "its modules cannot be listed",
    listed_attribute: "for the names of its modules",
    without_is_qat: "its module TracedModule, a TracedModule, lacks is_qat",
    is_qat: "has the is_qat no: it must be True or False",
    without_is_top: "lacks _is_top",
    watch_points: "has the watch_points 3: it must be a list",
    end_points: "the end_points of a graph in it holds conv_out",
    signature: "has the argspec x: it must be a signature or None",
}


def write(traced, path):
    """Pickles a model without the checks of its parts that ``save`` makes."""
    path.write_bytes(pickle.dumps(traced, 4))


@each_of("change", EDITS, ids=lambda change: change.__name__)
def test_an_edited_field_is_refused_by_load(tmp_path, change):
    traced = traced_net()
    change(traced)
    path = tmp_path / "edited.mge"
    write(traced, path)
    with pytest.raises((UnsafeFileError, DataError)) as caught:
        load(path)
    assert EDITS[change] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_surrogate_in_a_name_is_refused(tmp_path):
    traced = traced_net()
    traced.notes = "PLACEHOLDER2"
    path = tmp_path / "edited.mge"
    path.write_bytes(pickle.dumps(traced, 3).replace(text("PLACEHOLDER2"), b"X\x03\0\0\0\xed\xa0\x80"))
    refusal(path, "not UTF-8", error=DataError)


def test_nested_modules_have_a_limit(tmp_path):
    module = M.Identity()
    for _ in range(300):
        module = M.Sequential(module)
    traced = traced_net()
    traced.extra = module
    path = tmp_path / "nested.mge"
    write(traced, path)
    message = verdict(path)
    assert message.startswith("refused")
    assert "nests modules more than 100 levels deep" in message


def test_shared_modules_are_visited_as_often_as_the_file_is_long(tmp_path):
    """Each module calls two of the next level, which both levels share: 2**30 paths."""

    class Pair(M.Module):
        def __init__(self, child):
            super().__init__()
            self.left = self.right = child

        def forward(self, x):
            return self.left(x) + self.right(x) if self.left is not None else x

    x = mge.Tensor(np.ones((1, 2), np.float32))
    traced = tm.trace_module(Pair(Pair(None)), x)
    inner = traced.left
    assert isinstance(inner, tm.TracedModule)
    leaf, level = inner, traced
    for _ in range(30):
        above = tm.trace_module(Pair(Pair(None)), x)
        below = level
        for expr in above.graph._exprs:
            if type(expr) is GetAttr:
                setattr(above, expr.name, below)
        level = above
    assert leaf is not level
    path = tmp_path / "shared.mge"
    write(level, path)
    message = verdict(path)
    assert message.startswith("refused")
    assert "far more work" in message


@pytest.mark.parametrize("name", ["argdef_graph_map", "argdef_outdef_map"])
def test_shared_pairs_in_the_place_of_graphs_are_not_opened(tmp_path, name):
    """MegEngine opens containers in attributes of modules however often they share a part: 2**30 times."""
    traced = tm.trace_module(net(lambda self, x: F.relu(x)), mge.Tensor(np.ones((1, 2), np.float32)))
    (key,) = getattr(traced, name)
    getattr(traced, name)[key] = "mark"
    # Each tuple holds the one before twice: it is kept under a number and read back.
    pairs = b"".join(b"r%sj%s\x86" % (struct.pack("<I", n), struct.pack("<I", n)) for n in range(9000, 9030))
    mark = b"X\x04\0\0\0mark"
    path = tmp_path / "pairs.mge"
    path.write_bytes(pickle.dumps(traced, 3).replace(mark, b"]" + pairs))
    message = verdict(path)
    assert message.startswith("refused")
    assert f"something other than graphs in its {name}" in message


def test_a_call_has_a_graph_for_its_arguments(tmp_path):
    x = mge.Tensor(np.ones((1, 2), np.float32))

    class Inner(M.Module):
        def forward(self, x, y):
            return x + y

    module = net(lambda self, x: self.inner(x, x), inner=Inner())
    traced = tm.trace_module(module, x)
    call = expr_of(traced, CallMethod)
    call.arg_def = expr_of(tm.trace_module(net(lambda self, x: F.relu(x)), x), CallFunction).arg_def
    path = tmp_path / "call.mge"
    write(traced, path)
    with pytest.raises(QtraceError, match="the arguments of a CallMethod in it are"):
        load(path)
    traced = tm.trace_module(module, x)
    inner = traced.inner.graph
    inner._inputs.append(inner._inputs[1])
    write(traced, path)
    with pytest.raises(QtraceError, match="output of two exprs"):
        load(path)


def scheme_of_many_bits():
    scheme = copy.copy(QScheme())
    object.__setattr__(scheme, "bits", "many")
    return scheme


QUANTIZATION = {
    "bits": (lambda quant: setattr(quant, "scheme", scheme_of_many_bits()), "a QScheme in it is not one"),
    "scale": (lambda quant: setattr(quant, "scale", "large"), "has the scale large: it must be a Tensor"),
    "phase": (lambda quant: setattr(quant, "phase", "sleep"), "has the phase sleep: it must be one of"),
    "shape": (lambda quant: setattr(quant, "shape", (7,)), "has a scale of the shape"),
    "no scheme": (lambda quant: delattr(quant, "scheme"), ", lacks scheme"),
}


# Fifty lists, each of which holds the one before it twice.
SHARED_LISTS = b"]r\x40\x42\x0f\0" + b"0](j\x40\x42\x0f\0j\x40\x42\x0f\0er\x40\x42\x0f\0" * 50


def test_shared_lists_in_a_scheme_are_not_printed(tmp_path):
    traced = traced_net()
    traced.scheme = copy.copy(QScheme())
    object.__setattr__(traced.scheme, "rounding", "PLACEHOLDER2")
    path = tmp_path / "scheme.mge"
    path.write_bytes(pickle.dumps(traced, 3).replace(text("PLACEHOLDER2"), SHARED_LISTS))
    assert "far more work" in verdict(path)


@each_of("edit", QUANTIZATION)
def test_quantization_of_a_prepared_model_is_checked(tmp_path, edit):
    x = images(2, 2, 4, 4)
    prepared = qtrace.prepare(
        qtrace.trace(net(lambda self, x: self.conv(x), conv=M.Conv2d(2, 2, 1)), x, check=False)
    )
    change, reason = QUANTIZATION[edit]
    change(next(m for m in prepared.modules() if isinstance(m, FakeQuant)))
    path = tmp_path / "prepared.mge"
    mge.save(prepared, str(path))
    refusal(path, reason)


def test_a_flipped_bit_in_the_head_is_damage(tmp_path):
    """Were a damaged head taken for none, the damage behind it would not be noticed."""
    path = tmp_path / "net.mge"
    save(traced_net(), path)
    whole = path.read_bytes()
    for bit in range(8 * SIZE):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError):
            load(path)


def test_files_of_earlier_versions_load(tmp_path):
    """MegEngine 1.6 wrote no version, and no note on removing."""
    traced = traced_net()
    for expr in traced.graph._exprs:
        del expr.__dict__["_disable_remove"]
    path = tmp_path / "old.mge"

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if type(value) in (GetAttr, CallFunction, CallMethod, Apply):
                left_out = ("_top_graph", "version", "opdef")
                state = {k: v for k, v in value.__dict__.items() if k not in left_out}
                if type(value) is CallFunction:
                    state["func"] = (value.func.__module__, value.func.__qualname__)
                if type(value) is Apply:
                    state["opdef_state"] = {**value.opdef.__getstate__(), "opdef_type": type(value.opdef)}
                return copyreg.__newobj__, (type(value),), state
            return NotImplemented

    with open(path, "wb") as file:
        Pickler(file, 4).dump(traced)
    x = net_input()
    np.testing.assert_array_equal(load(path)(x).numpy(), traced(x).numpy())


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["node", "graph"])
def test_a_name_that_stands_for_what_the_graph_does_not_have_is_forgotten(kind, tmp_path):
    """Such a part is not checked: lists within lists in it would keep `save` busy for years."""
    traced, other = traced_net(), traced_net()
    other.graph._exprs[-1]._id = "PLACEHOLDER2"
    traced.graph._namespace._used_names["ghost"] = other.graph.outputs[0] if kind == "node" else other.graph
    path = tmp_path / "ghost.mge"
    data = pickle.dumps(traced, 3)
    assert text("PLACEHOLDER2") in data
    path.write_bytes(data.replace(text("PLACEHOLDER2"), SHARED_LISTS))
    assert verdict(path) == "loaded"
    assert load(path).graph._namespace._used_names["ghost"] is None


@each_of("owner", ["root", "conv"])
@each_of("missing", [("name",), ("_name",), ("name", "_name"), ("quantize_disabled",)])
def test_a_module_without_what_later_versions_write_runs(owner, missing, tmp_path):
    traced = traced_net()
    expected = traced(net_input()).numpy()
    for name in missing:
        del (traced if owner == "root" else traced.conv).__dict__[name]
    write(traced, tmp_path / "old.mge")
    loaded = load(tmp_path / "old.mge")
    np.testing.assert_array_equal(loaded(net_input()).numpy(), expected)
    assert qtrace.prepare(loaded)(net_input()).numpy().shape == expected.shape


def test_a_file_does_not_keep_watch_points(tmp_path):
    """MegEngine saves them without what was watched: the model that it loads cannot run."""
    traced = traced_net()
    expected = traced(net_input()).numpy()
    traced.set_watch_points([traced.graph.outputs[0]])
    write(traced, tmp_path / "watched.mge")
    loaded = load(tmp_path / "watched.mge")
    assert (loaded.watch_points, loaded.watch_node_value) == ([], {})
    np.testing.assert_array_equal(loaded(net_input()).numpy(), expected)


def test_load_cuts_long_class_names_in_errors(tmp_path):
    traced = traced_net()
    path = tmp_path / "long.mge"
    data, long = pickle.dumps(traced, 3), "x" * 5000
    assert text("Conv2d") in data
    path.write_bytes(data.replace(text("Conv2d"), text(long)))
    with pytest.raises(UnsafeFileError, match="which is not on the allow-list") as caught:
        load(path)
    assert len(str(caught.value)) < 500
