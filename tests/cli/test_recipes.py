"""``qtrace recipes``: what its commands print, write and refuse."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from qtrace import cli
from qtrace.config.recipe import load_recipe, recipe_names

Run = Callable[..., SimpleNamespace]

USER = """
import megengine.functional as F
import megengine.module as M

class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.stem = M.Conv2d(3, 8, 3, padding=1)
        self.dw = M.Conv2d(8, 8, 3, padding=1, groups=8)
        self.fc = M.Linear(8, 2)
    def forward(self, x):
        x = F.relu(self.dw(F.relu(self.stem(x))))
        return self.fc(F.mean(x, axis=[2, 3]))
"""

HEAD = "schema: qtrace/1\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``qtrace recipes`` in this process; gives code, stdout and stderr."""

    def call(*args: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as caught:
            cli.main(["recipes", *args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Code of the user's own with a small network."""
    name = re.sub(r"\W", "_", f"user_{tmp_path.name}")
    (tmp_path / f"{name}.py").write_text(USER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{name}:Net"


def _write(body: str, name: str = "mine.yaml", head: str = HEAD) -> None:
    Path(name).write_text(head + body, encoding="utf-8")


# -- list and show ------------------------------------------------------------------------------------


def test_list(run: Run) -> None:
    result = run("list")
    assert (result.code, result.err) == (0, "")
    for name in recipe_names():
        assert re.search(rf"^  {re.escape(name)} +\S", result.out, re.MULTILINE)
    found = json.loads(run("list", "--json").out)
    kinds = {one["name"]: one["kind"] for one in found}
    assert set(kinds) == set(recipe_names())
    assert kinds["resnet"] == "family"
    assert kinds["backend/qnn"] == kinds["onnxruntime"] == "target"
    assert kinds["common/gate"] == "part"
    assert all(one["description"] for one in found)


@pytest.mark.parametrize("name", ["yolox", "backend/generic_w4a4", "resnet18", "common/gate"])
def test_show_is_a_recipe_with_reasons_and_origins(run: Run, name: str) -> None:
    result = run("show", name)
    assert result.code == 0
    Path("shown.yaml").write_text(result.out, encoding="utf-8")
    assert load_recipe("shown.yaml") == load_recipe(name)
    for rule in load_recipe(name).rules:
        assert f"  # {rule.origin}\n  - match: " in result.out


def test_show_says_where_each_value_was_written(run: Run) -> None:
    rules = "rules:\n  # Why.\n  - {match: {op: add}, quantize: false}\n"
    _write(f"imports: [mobilenet_v2]\nqat: {{epochs: 3}}\n{rules}")
    text = run("show", "mine.yaml").out
    assert "# backend: onnxruntime  # the default\n" in text
    assert "  epochs: 3  # mine.yaml:3\n" in text
    assert "  lr: 0.001  # qtrace/recipes/common/imagenet.yaml:" in text
    assert "  # Why.\n  # mine.yaml:6\n  - match: {op: add}\n    quantize: false\n" in text
    data = json.loads(run("show", "mine.yaml", "--json").out)
    assert data["file"] == "mine.yaml"
    entries = {entry["key"]: entry for entry in data["entries"]}
    assert entries["qat.epochs"] == {
        "key": "qat.epochs",
        "value": 3,
        "origin": "mine.yaml:3",
        "comment": "",
    }
    assert entries["rules"]["value"] == {"match": {"op": "add"}, "quantize": False}
    assert entries["rules"]["comment"] == "Why."


# -- check --------------------------------------------------------------------------------------------

# The body, which begins in line 2, and how each line of the result begins.
MISTAKES: list[tuple[str, list[str]]] = [
    ("weigth: {bits: 4}", ["mine.yaml:2: unknown key 'weigth'; did you mean 'weight'?"]),
    (
        "rules:\n  - match: {dephtwise: true}\n    quantize: false",
        ["mine.yaml:3: unknown key 'dephtwise' in rules[0].match; did you mean 'depthwise'?"],
    ),
    ("weight:\n  bits: four", ["mine.yaml:3: weight.bits must be a whole number, not 'four'."]),
    ("qat: {epochs: 3", ["mine.yaml:2: not valid YAML: "]),
    ("backend: tensor_rt", ["mine.yaml:2: backend: unknown backend 'tensor_rt'; did you mean 'tensorrt'?"]),
    (
        "backend: x",
        ["mine.yaml:2: backend: unknown backend 'x'; known: esp_dl, esp_dl_s3, generic, megengine, ncnn, "],
    ),
    ("imports: [mine.yaml]", ["mine.yaml:2: the imports go in a circle: mine.yaml -> mine.yaml."]),
    ("imports: [qnn]", ["mine.yaml:2: there is no recipe 'qnn'; did you mean 'backend/qnn'?"]),
    (
        "backend: tensorrt\nactivation: {bits: 16}",
        ["mine.yaml:3: backend tensorrt cannot run activation scheme int16 sym: 16 bits (it runs 8)."],
    ),
    (
        "imports: [backend/megengine]\nrules:\n  - match: {op: conv2d}\n    weight: {axis: 0}",
        ["mine.yaml:4: backend megengine cannot run weight scheme int8 sym per-channel(0) half-away: per-ch"],
    ),
    (
        "rules:\n  - {match: {op: conf2d}, quantize: false}\n  - {match: {feeds: expp}, quantize: false}",
        [
            "mine.yaml:3: unknown op 'conf2d'; did you mean 'conv2d'?",
            "mine.yaml:4: unknown op 'expp'; did you mean 'exp'?",
        ],
    ),
    (
        "observers: {activation: {mse: {binz: 3}}}",
        ["mine.yaml:2: unknown key 'binz' in mse; did you mean 'bins'?"],
    ),
    (
        "rules:\n  - match: {op: conv2d}\n    observers: {weight: {percentile: {percentile: 300}}}",
        ["mine.yaml:3: percentile.percentile must be at most 100.0, not 300."],
    ),
    (
        "backend: x\nqat: {lr: 0}\nrules:\n  - {match: {}, quantise: false}",
        ["mine.yaml:2: ", "mine.yaml:5: ", "mine.yaml:3: "],
    ),
]


@pytest.mark.parametrize(("body", "beginnings"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_check_tells_each_mistake_with_its_line(run: Run, body: str, beginnings: list[str]) -> None:
    _write(body)
    result = run("check", "mine.yaml")
    assert (result.code, result.err) == (1, "")
    lines = result.out.splitlines()
    told = [any(line.startswith(beginning) for line in lines) for beginning in beginnings]
    assert all(told), lines
    data = json.loads(run("check", "mine.yaml", "--json").out)
    assert data["passed"] is False
    assert [f"{p['file']}:{p['line']}: {p['message']}" for p in data["problems"]] == lines


def test_check_tells_mistakes_of_imported_files(run: Run) -> None:
    _write("activation: {bits: 99}\n", "base.yaml")
    _write("\nimports: [base.yaml]\n")
    assert run("check", "mine.yaml").out == "base.yaml:2: activation.bits must be at most 16, not 99.\n"


def test_check_tells_a_circle_at_its_import(run: Run) -> None:
    _write("imports: [b.yaml]\n")
    _write("imports:\n  - mine.yaml\n", "b.yaml")
    result = run("check", "mine.yaml")
    assert result.out.startswith("b.yaml:3: the imports go in a circle: mine.yaml -> b.yaml -> mine.yaml.")


def test_check_of_a_sound_recipe(run: Run) -> None:
    _write("imports: [backend/tflite, mobilenet_v2]\n")
    result = run("check", "mine.yaml")
    assert (result.code, result.out) == (0, "mine.yaml: 5 rules for tflite, nothing wrong.\n")
    assert json.loads(run("check", "resnet", "--json").out) == {
        "file": "resnet",
        "passed": True,
        "problems": [],
        "rules": [],
    }


@pytest.mark.parametrize("name", ["no.yaml", "nosuch", "dir/x"])
def test_check_of_nothing_is_the_callers_mistake(run: Run, name: str) -> None:
    result = run("check", name)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")


def test_check_with_a_model_counts_what_each_rule_meets(run: Run, model: str) -> None:
    _write("""imports: [backend/tensorrt, mobilenet_v2]
rules:
  - {match: {op: linear}, quantize: false}
  - {match: {op: silu}, quantize: false, optional: true}
  - {match: {op: conv2d}, weight: {axis: null}, backends: [megengine, ncnn]}
""")
    result = run("check", "mine.yaml", "--model", model, "--shape", "1x3x8x8")
    assert (result.code, result.err) == (0, "")
    assert "not for this target, only for megengine, ncnn" in result.out
    assert result.out.endswith("mine.yaml: 7 rules for tensorrt, nothing wrong.\n")
    data = json.loads(run("check", "mine.yaml", "-m", model, "--shape", "1x3x8x8", "--json").out)
    own = data["rules"][2:]  # behind those of the default
    assert [rule["ops"] for rule in own] == [["dw_out"], ["dw_out"], ["fc_out"], [], []]
    assert own[2] == {
        "origin": "mine.yaml:4",
        "match": {"op": "linear"},
        "changes": {"quantize": False},
        "ops": ["fc_out"],
        "states": {"float": 1},
        "passed_over": False,
        "optional": False,
    }
    assert [rule["passed_over"] for rule in own] == [False, False, False, False, True]


def test_check_with_a_model_tells_every_rule_that_meets_nothing(run: Run, model: str) -> None:
    _write("rules:\n- {match: {op: silu}, quantize: false}\n- {match: {gate: true}, quantize: false}\n")
    result = run("check", "mine.yaml", "--model", model, "--shape", "1x3x8x8")
    assert result.code == 1
    assert result.out.startswith(
        "mine.yaml:3: the rule for {op: silu} matches no op of this model: fix it, drop it, or say optional: "
        "true.\nmine.yaml:4: the rule for {gate: true} matches no op"
    )
    data = json.loads(run("check", "mine.yaml", "-m", model, "--shape", "1x3x8x8", "--json").out)
    assert [(p["file"], p["line"]) for p in data["problems"]] == [("mine.yaml", 3), ("mine.yaml", 4)]


def test_check_with_a_model_tells_what_prepare_would_refuse(run: Run, model: str) -> None:
    _write("rules:\n- {match: {op: relu}, weight: {bits: 4}}\n")
    result = run("check", "mine.yaml", "--model", model, "--shape", "1x3x8x8")
    assert result.code == 1
    assert "mine.yaml:3: the rule changes weights only, which matched ops (relu) lack" in result.out


def test_check_takes_a_traced_file(run: Run, model: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["trace", model, "--shape", "1x3x8x8", "-o", "net.mge", "-q"])
    result = run("check", "mobilenet_v2", "--model", "net.mge")
    assert result.code == 0
    assert result.out.count("dw_out") == 2


@pytest.mark.parametrize(
    "args", [("mobilenet_v2", "--shape", "1x3x8x8"), ("mobilenet_v2", "-m", "no_such_module:Net")]
)
def test_check_refuses_half_of_a_model(run: Run, args: tuple[str, ...]) -> None:
    result = run("check", *args)
    assert (result.code, result.out) == (2, "")


# -- new ----------------------------------------------------------------------------------------------


def test_new_begins_a_recipe(run: Run) -> None:
    result = run("new", "--from", "backend/ncnn", "--from", "resnet", "--out", "mine.yaml")
    assert (result.code, result.out, result.err) == (0, "mine.yaml\n", "")
    config = load_recipe("mine.yaml")
    assert (config.name, config.backend) == ("mine", "ncnn")
    assert config.rules == (*load_recipe("backend/ncnn").rules, *load_recipe("resnet").rules)
    assert run("check", "mine.yaml").code == 0


def _uncommented(text: str) -> str:
    """Examples stand right behind the sign, explanations one space further."""
    return re.sub(r"^#(?=[a-z]|  )", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("names", [["backend/qnn", "yolox"], ["w4a4_lsq"], ["common/gate"]])
def test_what_new_leaves_commented_is_right(run: Run, names: list[str]) -> None:
    text = run("new", *(arg for name in names for arg in ("--from", name))).out
    Path("a.yaml").write_text(text, encoding="utf-8")
    Path("b.yaml").write_text(_uncommented(text), encoding="utf-8")
    plain, whole = load_recipe("a.yaml"), load_recipe("b.yaml")
    for key in ("backend", "preprocess", "ptq", "qat", "expect"):
        if key in plain.model_fields_set:
            assert getattr(whole, key) == getattr(plain, key)
    assert len(whole.rules) == len(plain.rules) + 3
    assert {"description", "observers"} <= whole.model_fields_set


def test_new_imports_files_as_seen_from_the_new_one(run: Run) -> None:
    _write("description: base\n", "base.yaml")
    Path("sub").mkdir()
    assert run("new", "--from", "base.yaml", "-o", "sub/mine.yaml").code == 0
    assert load_recipe("sub/mine.yaml").description == "base"


def test_new_never_overwrites(run: Run) -> None:
    Path("mine.yaml").write_text("precious")
    result = run("new", "--from", "resnet", "--out", "mine.yaml")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: mine.yaml exists already; name another file or remove it.\n"
    assert Path("mine.yaml").read_text() == "precious"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--from", "resnet", "-o", "mine.txt"), "ends with .yaml or .yml"),
        (
            ("--from", "resnet", "-o", "no/such/mine.yaml"),
            "no/such/mine.yaml cannot be written: No such",
        ),
        (("--from", "resnext18", "-o", "mine.yaml"), "there is no recipe 'resnext18'; did you mean"),
        ((), "Usage: qtrace recipes new"),
    ],
)
def test_new_refuses(run: Run, args: tuple[str, ...], message: str) -> None:
    result = run("new", *args)
    assert result.code == 2
    assert message in result.err
    assert list(Path().iterdir()) == []


def test_new_as_data(run: Run) -> None:
    data: dict[str, Any] = json.loads(run("new", "--from", "resnet", "--json").out)
    assert data["file"] is None
    assert "imports: [resnet]" in data["recipe"]


@pytest.mark.parametrize("command", ["list", "show", "check", "new"])
def test_help_ends_with_an_example(command: str) -> None:
    result = CliRunner().invoke(cli.group, ["recipes", command, "--help"], prog_name="qtrace")
    assert result.exit_code == 0
    assert f"\nExample:\n  qtrace recipes {command}" in result.output
