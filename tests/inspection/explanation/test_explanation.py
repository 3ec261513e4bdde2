"""explain: table, summary and data; what they count, what they show and what they leave out."""

from __future__ import annotations

import json
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.config import QConfig
from qtrace.inspection.explanation import Explanation
from qtrace.preparation.annotation import Annotation, ExprNote, Plan, Site
from qtrace.scheme import QScheme
from tests.growth import assert_linear, calls_of
from tests.nets import ResNet, images, net, randomize

X = images(2, 4, 8, 8)


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _explain(module: M.Module, rules: list[dict[str, Any]] | None = None, **config: Any) -> Explanation:
    return qtrace.explain(qtrace.trace(module, X, check=False), QConfig(rules=rules or [], **config))


def _attention() -> M.Module:
    """Two islands, one op whose shape is computed, a value that two readers want otherwise."""

    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.softmax(F.relu(self.a(x)), axis=1)
        y = F.exp(self.b(y)).reshape(x.shape[0], -1, 8, 8)
        return self.c(y) + self.d(y)

    return net(forward, a=_conv(), b=_conv(), c=_conv(), d=_conv())


def test_summary_counts_ops_sites_and_islands() -> None:
    explanation = _explain(_attention())
    figures = explanation.to_dict()["summary"]
    assert figures["backend"] == "onnxruntime"
    assert figures["ops"] == {"int": 5, "fused": 1, "carried": 1, "float": 2, "shape": 2}
    assert figures["sites"] == {"activation": 8, "weight": 4, "bias": 4}
    assert figures["islands"] == {"softmax": 1, "exp": 1}
    text = explanation.summary(None)
    assert "5 on integers, 1 fused into these, 1 moving integers, 2 in float" in text
    assert "(and 2 on shapes and constants)" in text
    assert "2 between integers: 1 x softmax, 1 x exp" in text
    assert "100 % int8" in text
    assert "rounded twice" not in text


def test_ops_without_any_are_no_division_by_zero() -> None:
    text = _explain(net(lambda self, x: F.exp(x))).summary()
    assert "ops:           1 in float" in text
    assert "MACs:          none" in text
    assert "sites:         none" in text


@pytest.mark.parametrize(
    ("rules", "shares"),
    [
        ([{"match": {"name": "a"}, "activation": {"bits": 16}}], {"int8": 3, "int16": 1}),
        ([{"match": {"name": ["a", "b"]}, "weight": {"bits": 4}}], {"int8": 4}),
        ([{"match": {}, "weight": {"bits": 4}, "activation": {"bits": 4}}], {"int4": 4}),
        ([{"match": {"name": "d"}, "quantize": False}], {"int8": 3, "float": 1}),
    ],
)
def test_macs_count_by_the_widest_operand(rules: list[dict[str, Any]], shares: dict[str, int]) -> None:
    macs = _explain(_attention(), rules).to_dict()["summary"]["macs"]
    one = 2 * 4 * 8 * 8 * 4 * 9
    assert {kind: count // one for kind, count in macs.items() if count} == shares


def test_shares_of_macs_are_whole_only_when_they_are() -> None:
    module = net(lambda self, x: self.b(self.a(x)), a=_conv(), b=M.Conv2d(4, 1, 1))
    text = _explain(module, [{"match": {"name": "b"}, "quantize": False}]).summary()
    assert "97.3 % int8, 2.7 % float" in text
    big = Annotation("onnxruntime", (_note("a", macs=10**9), _note("b", state="float", macs=1)), ())
    assert "99.9 % int8, 0.1 % float" in Explanation(big, QConfig()).summary()


def test_values_that_are_rounded_twice_are_named() -> None:
    module = net(lambda self, x: self.b(F.flatten(self.a(x), 1)), a=_conv(), b=M.Linear(256, 3))
    explanation = _explain(module, [{"match": {"name": "a"}, "output": {"bits": 16}}])
    assert explanation.to_dict()["summary"]["requantized"] == ["a_out__flatten_out"]
    assert (
        "rounded twice: 1 site on values that are quantized already (a_out__flatten_out)"
        in explanation.summary()
    )
    twice = net(lambda self, x: (lambda y: self.b(y) + self.c(y))(self.a(x)), a=_conv(), b=_conv(), c=_conv())
    apart = _explain(twice, [{"match": {"name": "c"}, "activation": {"bits": 4}}])
    assert apart.to_dict()["summary"]["requantized"] == []  # each of the readers rounds the float value


def test_shared_parameters_are_listed() -> None:
    module = net(lambda self, x: F.concat([self.a(x), self.b(x)], 1), a=_conv(), b=_conv())
    explanation = _explain(module, backend="megengine")
    shared = explanation.to_dict()["summary"]["shared"]
    assert shared == {"a_out": ["a_out", "b_out"]}
    assert "shared:        parameters of a_out (2 sites)" in explanation.summary()
    rows = {line.split()[0]: line for line in explanation.table(None).splitlines() if line}
    assert "a_out" in rows["b_out"].split()
    assert "own" not in rows["a_out"].split()


def test_the_table_has_a_row_for_each_op_and_says_what_it_hides() -> None:
    explanation = _explain(_attention(), [{"match": {"name": "a"}, "weight": {"bits": 4}}])
    text = explanation.table(None)
    rows = {line.split("  ")[0]: line for line in text.splitlines()[2:] if line}
    shown = [n for n in explanation.annotation.notes if n.state != "shape"]
    assert {n.name for n in shown} <= set(rows)
    assert "(2 ops on shapes and constants are not shown; --all shows them)" in text
    assert len(explanation.table(None, every=True).splitlines()) == len(text.splitlines()) + 2 - 1
    for header in (
        "expr",
        "op",
        "role",
        "scheme",
        "group",
        "fused with",
        "config rules",
        "reason",
        "op rule",
    ):
        assert header in text.splitlines()[0]
    assert "int4 sym per-channel(0) narrow" in rows["a_out"]
    assert "rules[0]" in rows["a_out"]
    assert "relu_out" in rows["a_out"]
    assert "its output spans orders of magnitude" in rows["exp_out"]
    assert "elementwise.py:" in rows["exp_out"] or "functions.py:" in rows["exp_out"]


def test_the_table_has_the_predicted_times_of_a_placement() -> None:
    module = net(lambda self, x: F.exp(F.relu(self.a(x))), a=_conv())
    explanation = _explain(module, placement="fastest", backend="onnxruntime")
    placement = explanation.annotation.placement
    assert placement is not None
    lines = explanation.table(None).splitlines()
    at = lines[0].index("ms float / int")
    rows = {line.split()[0]: line[at:].split("  ")[0] for line in lines[2:] if line}
    in_float, on_integers = placement.times["a_out"]
    assert on_integers is not None
    assert rows["a_out"] == f"{in_float:.3g} / {on_integers:.3g}"
    assert rows["exp_out"].endswith("/ -")  # onnxruntime computes exp in float
    assert "ms float" not in _explain(module).table(None)


def test_a_result_that_stays_float_and_one_inside_of_a_kernel() -> None:
    module = net(lambda self, x: self.b(F.relu(self.a(x))), a=_conv(), b=_conv())
    text = _explain(module, [{"match": {"name": "b"}, "quantize_output": False}]).table(None)
    cells = {line.split()[0]: line.split()[4] for line in text.splitlines()[2:5]}
    assert cells == {"a_out": "int8", "relu_out": "uint8", "b_out": "float"}  # of a_out, the weight's


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    traced = qtrace.trace(randomize(ResNet(4, (1, 1, 1, 1))), images(1, 3, 32, 32), check=False)
    for explanation in (qtrace.explain(traced), _explain(_attention())):
        text = explanation.table(width)
        rows = text.split("\n\n")[0].splitlines()
        assert max(map(len, (row for row in rows if not row.startswith("(")))) <= width
        assert rows[0].startswith("expr")
        assert "state" in rows[0]
        if width <= 80:
            assert "(no room for: op rule, role" in text
        else:  # a sentence tells more than other columns, which go first
            reasons = [note.reason for note in explanation.annotation.notes if note.state != "shape"]
            assert len(rows[1].split()[-1]) >= min(30, max(map(len, reasons)))


def test_names_are_not_cut_where_there_is_room() -> None:
    name = "backbone_stages_3_blocks_11_attention_projection_out"
    annotation = Annotation("onnxruntime", (_note(name, reason="a reason " * 30),), ())
    explanation = Explanation(annotation, QConfig())
    assert name in explanation.table(120)
    assert name not in explanation.table(60)


def test_colours_tell_states_and_change_no_text() -> None:
    explanation = _explain(_attention())
    plain, coloured = explanation.table(120), explanation.table(120, colour=True)
    assert "\x1b" not in plain
    assert any(line.startswith("\x1b[33m") and "softmax" in line for line in coloured.splitlines())
    stripped = coloured
    for code in ("\x1b[33m", "\x1b[2m", "\x1b[0m"):
        stripped = stripped.replace(code, "")
    assert stripped == plain


def test_data_is_complete_and_plain() -> None:
    module = net(lambda self, x: self.b(F.softmax(self.a(x), axis=1)), a=_conv(), b=_conv())
    rules = [{"match": {"name": "b"}, "weight": {"bits": 4}}]
    traced = qtrace.trace(module, X, check=False)
    prepared = qtrace.prepare(traced, {"rules": rules})
    before = qtrace.explain(prepared).to_dict()
    assert all(site["qparams"] is None for site in before["sites"])
    qtrace.calibrate(prepared, [X], progress=False)
    for model in (prepared, qtrace.convert(prepared)):
        explanation = qtrace.explain(model)
        data = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
        notes = {note["name"]: note for note in data["notes"]}
        assert set(notes["softmax_out"]) == set(ExprNote.__dataclass_fields__)
        assert data["rules"] == [{"origin": "rules[0]", "comment": "", **rules[0]}]
        assert data["summary"]["floats"][0]["proposal"]["rule"]["match"] == {"op": "softmax"}
        sites = {site["name"]: site for site in data["sites"]}
        own = model.qsites.a_out.qparams()
        assert sites["a_out"]["qparams"]["scale"] == float(own.scale)
        low, high = sites["a_out"]["qparams"]["range"]
        assert np.isclose(high - low, 255 * float(own.scale))
        scales = model.qsites.a_weight.qparams().scale * model.qsites.x.qparams().scale
        np.testing.assert_array_equal(sites["a_bias"]["qparams"]["scale"], scales)


def _note(name: str, **values: Any) -> ExprNote:
    known = {
        "op": "F.conv2d",
        "kind": "conv2d",
        "role": "compute",
        "path": "",
        "state": "int",
        "gives": (name,),
    }
    return ExprNote(name, **{**known, **values})


def _long(count: int) -> Explanation:
    """A chain of ``count`` convs, every third in float and every fifth read by two."""
    plan = Plan(QScheme(), "mse", (), "fixed", ())
    notes, sites = [], []
    for index in range(count):
        name, before = f"n{index}", f"n{index - 1}"
        reads = (before, f"n{index - 5}") if index % 5 == 0 and index > 5 else (before,)
        if index % 3:
            notes.append(
                _note(name, reads=reads, inputs=tuple(before for _ in reads), output=name, asks="uint8")
            )
            sites.append(Site(name, "activation", name, None, name, plan))
        else:
            options = {"role": "float", "kind": "softmax", "causes": ("role",), "island": 1 + index // 3}
            notes.append(_note(name, state="float", reads=reads, reason="it is steep", **options))
    return Explanation(Annotation("onnxruntime", tuple(notes), tuple(sites), inputs=("n-1",)), QConfig())


def test_work_grows_with_the_graph_and_not_with_its_square() -> None:
    def explain_all(explanation: Explanation) -> None:
        explanation.table(120)
        explanation.to_dict()
        explanation.dot()
        explanation.why("n7*")

    explain_all(_long(10))
    assert_linear({count: calls_of(lambda n=count: explain_all(_long(n))) for count in (200, 800)})
