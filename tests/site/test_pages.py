"""The pages that are written by code name all that there is; a page that lacks something fails."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import pytest
import yaml

import qtrace
from scripts import style
from scripts.site import api, cli, config, errors, hook, measured, plugins, project, source, stages
from tests.each import each_of


def _anchors(page: str) -> set[str]:
    return set(re.findall(r"\{#([\w.\-]+)\}", hook.generated()[page]))


@pytest.mark.parametrize("module", api.MODULES)
def test_every_public_name_has_an_entry_with_a_text(module: str) -> None:
    page = f"reference/api/{module}.md"
    names = api.public_names(module)
    assert names
    assert {f"{module}.{name}" for name in names} <= _anchors(page)
    for name in names:
        value = api.public(importlib.import_module(module), name)
        first = (inspect.getdoc(value) or "").splitlines()[0]
        assert first
        assert " ".join(first.split()) in " ".join(hook.generated()[page].split()), name


def test_every_name_of_qtrace_is_on_a_page() -> None:
    for name in qtrace.__all__:
        if inspect.ismodule(api.public(qtrace, name)) and name != "recipes":  # that room has no names
            assert f"qtrace.{name}" in api.MODULES
        elif name != "recipes":
            assert f"qtrace.{name}" in _anchors("reference/api/qtrace.md")


def test_classes_that_functions_return_are_described_with_their_methods() -> None:
    functions = {kind.__name__: function for kind, function in api.results().items()}
    assert {"Comparison", "Explanation", "VerifyReport"} <= set(functions)
    assert {"qtrace.Explanation.table", "qtrace.Comparison.worst"} <= _anchors("reference/api/qtrace.md")


def test_signatures_are_as_they_are_written() -> None:
    assert api.signature("set_phase", qtrace.set_phase) == "set_phase(prepared: Module, phase: str) -> None"
    long = api.signature("prepare", qtrace.prepare).splitlines()
    assert long[0] == "prepare("
    assert "    *," in long
    assert long[-1] == ") -> TracedModule"


def test_every_command_and_option_is_on_its_page() -> None:
    text, anchors = hook.generated()["reference/cli.md"], _anchors("reference/cli.md")
    commands = list(cli.commands())
    assert len(commands) >= 14
    for name, command in commands:
        assert name.replace(" ", "-") in anchors
        section = text.split(f"## `{name}` ")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert all(f"`{flag}`" in section for flag in parameter.opts), (name, parameter.opts)


def test_every_config_key_has_a_meaning_a_type_and_a_valid_example() -> None:
    text, anchors = hook.generated()["reference/config.md"], _anchors("reference/config.md")
    for model in config.models():
        examples = config.examples(model)
        for example in examples:
            model.model_validate(example)
        keys = {key for example in examples for key in example}
        assert keys == {key for owner, key, _ in config.settings() if owner is model}, model
    for model, key, field in config.settings():
        assert f"{model.__name__}.{key}" in anchors
        entry = text.split(f"{{#{model.__name__}.{key}}}\n:   ")[1]
        meaning, facts = entry.split("\n\n")[:2]
        assert meaning.strip(), (model, key)
        assert config.field_text(field) in facts
        assert "example: " in facts


def test_types_are_words() -> None:
    texts = {key: config.field_text(field) for _, key, field in config.settings()}
    assert texts["bits"] == "whole number, at least 2 and at most 16"
    assert texts["op"] == "text, or a list of texts"
    assert texts["resize"] == "one of `stretch`, `center_crop`, `letterbox`"
    assert texts["fakequant"].startswith("a [fake quant]")
    assert not any("typing" in text or "class '" in text for text in texts.values())
    assert qtrace.QConfig in config.models()


def test_every_error_and_warning_is_on_its_page_with_its_messages() -> None:
    names = errors.classes()
    module = importlib.import_module("qtrace.errors")
    assert set(names) == {
        n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__
    }
    assert set(names) <= _anchors("reference/errors.md")
    messages = errors.messages()
    for name, kind in names.items():
        silent = issubclass(kind, SystemExit)  # a signal's end has a number and no sentence
        assert messages.get(name) or kind.__subclasses__() or silent, name
    assert any(
        text.startswith("unknown phase … known:") or "unknown phase" in text
        for text in messages["ConfigError"]
    )
    assert any("async_level = 0" in text for text in messages["QtraceWarning"])


def test_errors_page_lists_nearly_every_raised_message() -> None:
    """Messages that are put together elsewhere are few: a new way to raise would empty the page unseen."""
    raised, known = 0, errors.classes()
    for module in source.modules():
        for node in style.statements(source.tree(module)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised += getattr(node.exc.func, "id", "") in known
    listed = sum(len(texts) for name, texts in errors.messages().items() if name in known)
    assert raised > 300
    assert listed > 0.85 * raised


def test_parts_of_the_package_are_found_by_name_wherever_they_stand() -> None:
    assert source.find("Algorithm").__name__ == "Algorithm"
    assert source.room("ops").rules()
    with pytest.raises(LookupError, match="no module"):
        source.find("nothing_of_this_name")
    with pytest.raises(LookupError, match="none; one was expected"):
        source.room("nothing_of_this_name")


def test_a_message_is_a_template() -> None:
    (call,) = ast.parse("E(f'{a}: {b!r} is not {c}{d}: give ' f'one' + x)").body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    assert errors._text(call.value.args[0]) == "…: … is not …: give one…"
    assert errors._text(ast.parse("f'{a}: {b}'", mode="eval").body) == ""


def test_every_plugin_backend_format_and_runtime_is_on_its_page() -> None:
    from qtrace import plugins as lookup

    backends, formats = source.room("backends"), source.room("export").formats
    anchors = _anchors("reference/plugins.md")
    assert {f"observers-{n}" for n in lookup.known("qtrace.observers")} <= anchors
    assert {f"fake-quants-{n}" for n in lookup.known("qtrace.fakequant")} <= anchors
    assert {f"algorithm-{n}" for n in plugins.algorithms()} <= anchors
    assert {f"backend-{n}" for n in backends.known()} <= anchors
    assert {f"format-{n}" for n in formats()} <= anchors
    text = hook.generated()["reference/plugins.md"]
    assert all(f"| `{name}` |" in text for name in ("onnxruntime", "openvino", "litert", "ncnn", "megengine"))
    for name, kind in plugins.algorithms().items():
        section = text.split(f"{{#algorithm-{name}}}")[1].split("\n### ")[0]
        for option in kind.model_fields:  # type: ignore[attr-defined]
            assert re.search(rf"^- `{option}`: [^*]", section, re.MULTILINE), (name, option)


def test_widths_are_put_together() -> None:
    assert plugins._widths((2, 3, 4, 8, 16)) == "2 to 4, 8, 16"
    assert "| `onnxruntime` | 2 to 8, 16 | 4, 8, 16 |" in plugins.bits()


def test_every_option_of_an_observer_has_a_text() -> None:
    text = hook.generated()["reference/plugins.md"].split("## Fake quants")[0]
    options = re.findall(r"^- `(\w+)`: (.*)$", text, re.MULTILINE)
    assert len(options) > 20
    assert [name for name, rest in options if rest.startswith("*")] == []


def test_every_op_and_recipe_is_on_its_page() -> None:
    kinds, recipe_names = source.room("ops").kinds, source.find("recipe_names")
    op_page, recipe_page = hook.generated()["reference/ops.md"], hook.generated()["reference/recipes.md"]
    assert [kind for kind in kinds() if f"| `{kind}` |" not in op_page] == []
    assert [name for name in recipe_names() if f"| `{name}` |" not in recipe_page] == []
    row = next(line for line in op_page.splitlines() if line.startswith("| `softmax` |"))
    assert "`M.Softmax`, `F.softmax`" in row


def test_every_composite_has_its_formula_and_its_source() -> None:
    text, anchors = hook.generated()["reference/composites.md"], _anchors("reference/composites.md")
    rules = source.find("composite_rules")()
    assert {type(rule).__name__ for rule in rules} == anchors
    for rule in rules:
        section = text.split(f"{{#{type(rule).__name__}}}")[1].split("\n## ")[0]
        assert re.search(r"Sources?: |exporters? |written |write ", section), rule.title
        assert rule.formula.split(";")[0] in text


@pytest.mark.parametrize("name", ["config", "errors", "composites"])
def test_python_on_the_written_pages_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", hook.generated()[f"reference/{name}.md"], re.DOTALL | re.MULTILINE
    )
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    for printed in re.findall(r"print\(.*?\)  # (.*)", "".join(blocks)):
        assert printed in capsys.readouterr().out


def test_yaml_on_the_pages_is_yaml() -> None:
    for path, text in hook.generated().items():
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            assert yaml.safe_load(inspect.cleandoc("\n" + block)), path


def test_the_drawing_names_every_stage_once() -> None:
    drawn = stages.drawing()
    names = [stage.function for stage in stages.STAGES]
    assert set(names) <= set(qtrace.__all__)
    assert all(drawn.count(f">qtrace.{name}<") == 1 for name in names)
    assert "float | observe | quantize | train" in drawn


@each_of(
    "name",
    [
        *("accuracy", "calibration", "demo", "detector_demo", "exports", "families", "figures"),
        *("ocr_client", "onnx_kinds", "onnx_open_axes", "onnx_ops", "onnx_shares", "shipped", "speed"),
        "torch_files",
    ],
)
def test_measured_tables_are_whole(name: str) -> None:
    tables = getattr(measured, name)()
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    assert len(rows) > 4
    for block in re.findall(r"(?:^\|.*\n?)+", tables, re.MULTILINE):
        widths = {line.count(" | ") for line in block.strip().splitlines()}
        assert len(widths) == 1, block[:200]


def test_marks_are_filled_and_links_to_the_top_lead_to_pages() -> None:
    assert "| resnet_basic |" in hook.filled("a\n\n<!-- generated: measured.families -->\n")
    with pytest.raises(AttributeError):
        hook.filled("<!-- generated: measured.nothing -->")
    assert project.relink("[a](../../SECURITY.md#x)", "docs/guides/a.md") == "[a](../project/security.md#x)"
    assert project.relink("[a](docs/guides/ptq.md)", "ARCHITECTURE.md", "project/architecture.md") == (
        "[a](../guides/ptq.md)"
    )
    assert project.relink("[a](https://x.y)", "docs/index.md") == "[a](https://x.y)"
