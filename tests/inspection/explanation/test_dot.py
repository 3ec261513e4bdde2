"""explain --dot: a file that Graphviz reads, with every op, site and edge in it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.config import QConfig
from qtrace.inspection.explanation import Explanation
from qtrace.preparation.annotation import Annotation, ExprNote, Plan, Site
from qtrace.scheme import QScheme
from tests.each import each_of
from tests.nets import ResNet, images, net, randomize

X = images(2, 4, 8, 8)

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*|->|[{}\[\];,=])', re.DOTALL)


@dataclass
class Drawing:
    """What a dot file says."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    clusters: dict[str, list[str]] = field(default_factory=dict)

    def called(self, name: str) -> str:
        """The id of the node with ``name`` on the second line of its label."""
        return next(key for key, a in self.nodes.items() if _lines(a["label"])[1:2] == [name])


def _lines(label: str) -> list[str]:
    """The lines that Graphviz draws for a label."""
    return re.sub(r"\\(.)", lambda m: "\n" if m.group(1) == "n" else m.group(1), label).split("\n")


class Parser:
    """The part of Graphviz's grammar that we write; anything else is a failed assertion."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        end = 0
        text = text.rstrip()
        while end < len(text):
            found = _TOKEN.match(text, end)
            assert found, f"no token of Graphviz: {text[end : end + 40]!r}"
            self.tokens.append(found.group(1))
            end = found.end()
        self.drawing = Drawing()

    def parse(self) -> Drawing:
        assert self._next() == "digraph"
        self._identifier()
        self._block("")
        assert not self.tokens
        drawing = self.drawing
        for first, second, _ in drawing.edges:
            assert {first, second} <= set(drawing.nodes)
        assert all(set(members) <= set(drawing.nodes) for members in drawing.clusters.values())
        return drawing

    def _next(self) -> str:
        return self.tokens.pop(0)

    def _identifier(self) -> str:
        token = self._next()
        assert token[0] == '"' or token[0].isalpha(), token
        return token

    def _block(self, cluster: str) -> None:
        assert self._next() == "{"
        while self.tokens[0] != "}":
            self._statement(cluster)
        self._next()

    def _statement(self, cluster: str) -> None:
        first = self._identifier()
        if first == "subgraph":
            name = self._identifier()
            assert name.startswith("cluster_")
            assert name not in self.drawing.clusters
            self.drawing.clusters[name] = []
            self._block(name)
            return
        if self.tokens[0] == "=":
            self._next()
            self._identifier()
        elif self.tokens[0] == "->":
            self._next()
            second = self._identifier()
            self.drawing.edges.append((first, second, self._attributes()))
        else:
            attributes = self._attributes()
            if first not in ("graph", "node", "edge"):
                assert first not in self.drawing.nodes, f"{first} stands there twice"
                self.drawing.nodes[first] = attributes
                if cluster:
                    self.drawing.clusters[cluster].append(first)
        assert self._next() == ";"

    def _attributes(self) -> dict[str, str]:
        assert self._next() == "["
        found = {}
        while True:
            name = self._identifier()
            assert self._next() == "="
            found[name] = self._identifier()[1:-1]
            if self._next() == "]":
                return found


def _conv(outside: int = 4, **options: Any) -> M.Conv2d:
    return M.Conv2d(4, outside, 3, padding=1, **options)


def _drawn(module: M.Module, rules: list[dict[str, Any]] | None = None, **config: Any) -> tuple[Drawing, str]:
    explanation = qtrace.explain(qtrace.trace(module, X, check=False), QConfig(rules=rules or [], **config))
    text = explanation.dot()
    return Parser(text).parse(), text


def _ends(drawing: Drawing) -> set[tuple[str, str]]:
    def name(key: str) -> str:
        lines = _lines(drawing.nodes[key]["label"])
        tip = drawing.nodes[key].get("tooltip", "")
        return tip.removeprefix("site ") + "!" if tip.startswith("site ") else lines[min(1, len(lines) - 1)]

    return {(name(a), name(b)) for a, b, _ in drawing.edges}


def test_ops_sites_and_edges() -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.max_pool2d(F.relu(self.a(x)), 2)
        return self.b(F.softmax(y, axis=1))

    drawing, text = _drawn(net(forward, a=_conv(), b=_conv()))
    assert _ends(drawing) == {
        ("x", "x!"),
        ("x!", "a_out"),
        ("a_out", "relu_out"),
        ("relu_out", "relu_out!"),
        ("relu_out!", "max_pool2d_out"),
        ("max_pool2d_out", "softmax_out"),
        ("softmax_out", "softmax_out!"),
        ("softmax_out!", "b_out"),
        ("b_out", "b_out!"),
        ("b_out!", "output b_out"),
    }
    fills = {name: drawing.nodes[drawing.called(name)]["fillcolor"] for name in ("a_out", "relu_out")}
    fills |= {
        name: drawing.nodes[drawing.called(name)]["fillcolor"] for name in ("max_pool2d_out", "softmax_out")
    }
    assert len(set(fills.values())) == 4
    kernel = [drawing.called("a_out"), drawing.called("relu_out")]
    assert kernel in drawing.clusters.values()
    assert "float island 1" in drawing.nodes[drawing.called("softmax_out")]["label"]
    styles = {(a, b): attributes for a, b, attributes in drawing.edges}
    carried = styles[drawing.called("max_pool2d_out"), drawing.called("softmax_out")]
    assert carried["label"] == "relu_out"
    assert "style" not in carried
    assert text.endswith("}\n")


def test_readers_with_sites_of_their_own_and_values_rounded_twice() -> None:
    module = net(lambda self, x: (lambda y: self.b(y) + F.exp(y))(self.a(x)), a=_conv(), b=_conv())
    drawing, _ = _drawn(module, [{"match": {"name": "a"}, "output": {"bits": 16}}])
    ends = _ends(drawing)
    assert {("a_out", "a_out!"), ("a_out!", "a_out__b_out!"), ("a_out__b_out!", "b_out")} <= ends
    assert ("a_out!", "exp_out") in ends


def test_groups_are_named_at_their_sites() -> None:
    module = net(lambda self, x: F.concat([self.a(x), self.b(x)], 1), a=_conv(), b=_conv())
    drawing, _ = _drawn(module, backend="megengine")
    labels = [a["label"] for a in drawing.nodes.values() if a.get("shape") == "diamond"]
    assert sum("group a_out" in label for label in labels) == 2


def test_parameters_that_are_rounded_as_activations_are_drawn() -> None:
    module = net(lambda self, x: self.a(x) + self.b * 2.0, a=_conv(), b=mge.Parameter([[[[1.0]]]]))
    drawing, _ = _drawn(module)
    ((name, fixed),) = [(k, a) for k, a in drawing.nodes.items() if k.startswith("fixed")]
    assert fixed["label"] == "mul_out"
    assert any(first == name for first, _, _ in drawing.edges)


@pytest.mark.parametrize("every", [False, True])
def test_whole_nets_are_valid(every: bool) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, ...]:
        one, other = F.split(self.a(x), 2, axis=1)
        return one.reshape(x.shape[0], -1), F.exp(other), x

    for module, x in ((net(forward, a=_conv()), X), (randomize(ResNet(4, (1, 1))), images(1, 3, 32, 32))):
        explanation = qtrace.explain(qtrace.trace(module, x, check=False))
        drawing = Parser(explanation.dot(every=every)).parse()
        shown = [n for n in explanation.annotation.notes if every or n.state != "shape"]
        assert all(drawing.called(n.name) for n in shown)
        assert sum(key.startswith("out") for key in drawing.nodes) == len(explanation.annotation.outputs)


@each_of("name", ['a"b', "a\\", "a\\nb", 'x"]; evil [label="', "a\nb", "größe", "<b>", "\\N", ""])
def test_any_name_is_safe(name: str) -> None:
    plan = Plan(QScheme(), "mse", (), "fixed", ())
    notes = (
        ExprNote("one", "F.x", name, "compute", name, "int", gives=("one",), reads=(name,), output="one"),
        ExprNote(name or "e", name, "", "", name, "float", gives=(name,), reads=("one", name), reason=name),
    )
    sites = (
        Site("one", "activation", "one", None, name, plan),
        Site(name, "activation", "one", (name,), name, plan),
    )
    annotation = Annotation(name, notes, sites, inputs=(name, "in"), outputs=(name,))
    drawing = Parser(Explanation(annotation, QConfig()).dot()).parse()
    assert not any(key.startswith("evil") for key in drawing.nodes)
    for key in ("op0", "op1") if name else ():  # what Graphviz shows first is the kind: here, the name
        assert _lines(drawing.nodes[key]["label"])[0] == name.replace("\n", " ")
