"""Results show themselves: at most a screen as repr, tables as HTML in a notebook."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qtrace
from qtrace.cli.console import Console
from qtrace.display import Displayed, format_table, progress_bar, shorten_modules
from qtrace.extras.tune import TuneSettings
from qtrace.graph.edit import RECORD_ATTRIBUTE
from qtrace.inspection.analysis import describe_graph
from scripts.site import api
from tests.each import each_of

CELL = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=9)


@dataclass(frozen=True, repr=False)
class _Shown(Displayed):
    text: str

    def table(self) -> str:
        return self.text


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def _rows(shown: Displayed) -> list[list[str]]:
    parser = _Cells()
    parser.feed(shown._repr_html_())
    parser.close()
    assert not parser.open
    return parser.rows


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=2)))
def test_html_has_the_cells_of_the_text(rows: list[list[str]]) -> None:
    text = f"before <b>\n\n{format_table(rows[0], rows[1:], None)}\n\nafter"
    shown = _Shown(text)
    assert _rows(shown) == rows
    assert "before &lt;b&gt;" in shown._repr_html_()


def test_sentences_right_behind_a_table_are_no_rows() -> None:
    table = format_table(("site", "values", "equal"), [("x_q", 384, "100.0%"), ("y_q", "", "inf")], None)
    shown = _Shown(f"{table}\nop by op: worst 0 LSB, all equal over 2 sites\npassed")
    assert _rows(shown) == [["site", "values", "equal"], ["x_q", "384", "100.0%"], ["y_q", "", "inf"]]
    assert "op by op: worst 0 LSB, all equal over 2 sites\npassed</pre>" in shown._repr_html_()


def test_a_long_table_is_cut_in_the_middle() -> None:
    lines = [f"line {i} {'x' * 900}" for i in range(300)]
    shown = repr(_Shown("\n".join(lines))).splitlines()
    assert len(shown) == 36
    assert shown[0].startswith("line 0 ")
    assert shown[-1].startswith("line 299 ")
    assert "265 more lines" in "\n".join(shown)
    assert max(map(len, shown)) < 500
    whole = "\n".join(lines[: len(shown)])
    assert len(repr(_Shown(whole)).splitlines()) == 36
    assert "more lines" not in repr(_Shown(whole))


class _Net(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [M.Conv2d(3, 3, 3, padding=1) for _ in range(20)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


X = np.random.RandomState(0).randn(2, 3, 8, 8).astype("float32")


# On its own, a small network stays in float, of which there is little to show.
_EVERYTHING = {"placement": "everything"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the public functions give for a network of 20 layers."""
    folder: Path = tmp_path_factory.mktemp("shown")
    traced = qtrace.trace(_Net(), X, check=False)
    prepared = qtrace.prepare(traced, _EVERYTHING)
    qtrace.calibrate(prepared, [X], progress=False)
    converted = qtrace.convert(prepared)
    file = qtrace.export(converted, folder / "net.onnx")
    quantized = qtrace.quantize(traced, [X, X], folder / "one.onnx", recipe=_EVERYTHING, progress=False)
    tuned = qtrace.tune(
        traced, qtrace.QConfig(**_EVERYTHING), [X, X], folder / "tuned", TuneSettings(trials=1)
    )
    return {
        "explain": qtrace.explain(prepared),
        "why": qtrace.explain(prepared).why("*")[0],
        "compare": qtrace.compare(prepared, [X]),
        "inspect": qtrace.inspect(traced),
        "sensitivity": qtrace.sensitivity(prepared, [X], progress=False),
        "diagnose": qtrace.diagnose(prepared, [X], progress=False),
        "verify": qtrace.verify(file, converted, [X]),
        "diff": qtrace.diff(prepared, converted),
        "diff of files": qtrace.diff(qtrace.export(traced, folder / "float.onnx"), file),
        "check": qtrace.check(file, "onnxruntime"),
        "bench": qtrace.bench(file, seconds=0.01, progress=False),
        "split": qtrace.split(traced, by=lambda node: 0),
        "quantize": quantized,
        "verdict": quantized.verdict,
        "tune": tuned,
        "to_source": qtrace.graph.to_source(traced),
        "check_samples": qtrace.graph.check_samples(traced, X),
        "QConfig": qtrace.QConfig(weight={"bits": 4}),
        "load_recipe": qtrace.load_recipe("detr"),
        "calibrate_to_folder": _folder_of(traced, folder),
        "export": file,
        "lint": qtrace.graph.lint(traced),
        "find": qtrace.graph.find(traced, op="conv2d"),
        "compose": qtrace.graph.compose(traced),
        "table": qtrace.graph.table(traced, max_width=120).splitlines()[0],
        "param_groups": [sorted(group) for group in qtrace.param_groups(prepared, 0.1)],
        "card": quantized.card,
    }


def _folder_of(traced: Any, folder: Path) -> Any:
    np.save(folder / "data.npy", X)
    return qtrace.calibrate_to_folder(traced, folder / "data.npy", folder / "int8", progress=False)


def test_every_result_is_at_most_a_screen(results: dict[str, Any]) -> None:
    for name, result in results.items():
        lines = repr(result).splitlines()
        assert 1 <= len(lines) <= 40, name
        assert max(map(len, lines)) <= 500, name
        assert "object at 0x" not in repr(result), name


def test_every_class_that_a_public_function_gives_is_among_the_results(results: dict[str, Any]) -> None:
    shown = {type(result).__name__ for result in results.values()}
    shown |= {"FineTuned", "FirstDifference"}  # by tests of finetune and bisect
    assert {kind.__name__ for kind in api.results() if issubclass(kind, Displayed)} <= shown


def test_every_report_is_html(results: dict[str, Any]) -> None:
    for name, result in results.items():
        if isinstance(result, Displayed):
            assert result._text(None).strip(), name
            _rows(result)
    assert len(_rows(results["compare"])) > 40
    assert {len(row) for row in _rows(results["verify"])} == {6}
    assert _rows(results["verify"])[-1][0] == "relu_out_19_q"
    assert "<svg" in results["compare"]._repr_html_()


DATACLASS = re.compile(r"^\w+\(\w+=")


def test_no_result_shows_its_fields(results: dict[str, Any]) -> None:
    assert [name for name, result in results.items() if DATACLASS.match(repr(result))] == []


@each_of(
    ("call", "message"),
    [
        (lambda t: qtrace.split(t), "give one of at, by and by_backend"),
        (lambda t: qtrace.diff(t, "resnet18"), "resnet18 is a recipe and the module a model"),
        (lambda t: qtrace.diff("a.onnx", "resnet18"), "a.onnx is an ONNX file and resnet18 is not"),
        (lambda t: qtrace.diff(t, t), "the module is traced, not quantized"),
        (lambda t: qtrace.diff(1, t), "diff takes recipes, modules and paths, not int"),
        (lambda t: qtrace.split(t, by=3), "by takes a function of a node, not 3"),
        (lambda t: qtrace.inspect(_Net()), "inspect takes a TracedModule, not a _Net"),
        (lambda t: qtrace.bench(), "bench measures files: give at least one"),
        (lambda t: qtrace.bench("a.onnx", seconds=-1), "seconds=-1 is no time"),
        (lambda t: qtrace.bench("a.onnx", threads=0), "threads=0 is no number of threads"),
        (lambda t: qtrace.bench(["a.onnx"]), "bench takes the paths of files, each by itself"),
        (lambda t: qtrace.tune(t, "nothing", [X, X], "out"), "nothing"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[Any], Any], message: str) -> None:
    traced = qtrace.trace(lambda x: F.relu(x), X, check=False)
    with pytest.raises(qtrace.QtraceError, match=message):
        call(traced)


class _Shell:
    """The part of IPython's shell that a display of one's own is registered with."""

    def __init__(self) -> None:
        self.display_formatter = self
        self.formatters = {"text/plain": self}
        self.written = ""

    def for_type_by_name(self, module: str, name: str, function: Any) -> None:
        self.place, self.function = f"{module}.{name}", function

    def text(self, text: str) -> None:
        self.written = text


def test_a_notebook_shows_a_module_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, ipython = _Shell(), ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    shorten_modules(describe_graph)
    traced = qtrace.trace(_Net(), X, check=False)
    kind = type(traced)
    assert shell.place == f"{kind.__module__}.{kind.__name__}"
    shell.function(traced, shell, False)
    assert shell.written.splitlines()[:2] == ["TracedModule _Net of 60 exprs", "  inputs: x (2, 3, 8, 8)"]
    prepared = qtrace.prepare(traced, {})
    shell.function(prepared, shell, False)
    assert "prepared, phase float: " in shell.written
    assert len(shell.written.splitlines()) < 10
    shell.function("no module", shell, False)
    assert shell.written == "'no module'"


def test_a_quantized_module_begins_with_a_line_on_its_state(tmp_path: Path) -> None:
    traced = qtrace.trace(_Net(), X, check=False)
    plain = repr(traced)
    assert plain.startswith("TracedModule(")
    prepared = qtrace.prepare(traced, "w8a8", progress=False)
    sites = len(qtrace.explain(prepared).annotation.sites)
    recipe = f"{sites} sites, recipe onnxruntime + w8a8, backend onnxruntime"
    line, first = repr(prepared).splitlines()[:2]
    assert (line, first) == (f"prepared, phase float: {recipe}, not calibrated", "TracedModule(")
    qtrace.calibrate(prepared, [X], progress=False)
    assert repr(prepared).startswith(f"prepared, phase quantize: {recipe}, calibrated\nTracedModule(")
    qtrace.save(qtrace.convert(prepared), tmp_path / "net.mge")
    loaded = qtrace.load(tmp_path / "net.mge")
    assert repr(loaded).startswith(f"converted, phase quantize: {recipe}, calibrated\nTracedModule(")
    own = qtrace.prepare(traced, {"backend": "generic"}, progress=False)
    assert "recipe without a name, backend generic, not calibrated" in repr(own)
    setattr(own, RECORD_ATTRIBUTE, "damaged")
    assert repr(own).startswith("TracedModule(")
    assert repr(traced) == plain


class _Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@each_of(
    ("terminal", "options", "drawn"),
    [
        (True, {}, True),
        (True, {"progress": True}, True),
        (True, {"progress": False}, False),
        (False, {}, False),
        (False, {"progress": True}, False),
    ],
)
def test_bars_are_drawn_on_terminals_only(
    terminal: bool, options: dict[str, bool], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = qtrace.trace(lambda x: F.relu(x), X, check=False)
    prepared = qtrace.prepare(traced, {"backend": "generic"}, progress=False)
    monkeypatch.setattr(sys, "stderr", _Stream(terminal))
    qtrace.calibrate(prepared, [X, X], **options)
    assert ("calibrate" in sys.stderr.getvalue()) == drawn
    assert not drawn or re.search(r"2/2 \[.* batch/s\]", sys.stderr.getvalue())


@pytest.mark.parametrize("forced", [False, True])
def test_a_command_draws_bars_in_a_log_only_if_forced(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Stream(False))
    console = Console(forced=forced)
    with console.work():
        list(progress_bar(range(3), desc="gptq", unit="layer", disable=not console.progress))
    assert ("gptq: 100%" in sys.stderr.getvalue()) == forced


def test_sensitivity_is_function_and_package() -> None:
    import qtrace.sensitivity.layers

    assert callable(qtrace.sensitivity)
    assert qtrace.sensitivity.analyze.__name__ == "analyze"
