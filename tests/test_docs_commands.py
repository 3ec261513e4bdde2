"""The shell commands of README.md and docs/: every one can be parsed, and those that quantize run."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

import qtrace
from qtrace import cli
from tests.each import each_of
from tests.test_docs import _MODELS, ROOT

BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = {"", "sh", "console", "bash"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("qtrace", "python", "make")


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of each command of a page that calls something of this repository."""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["kind"] not in SHELL:
            continue
        for line in block["code"].replace("\\\n", " ").splitlines():
            text = re.sub(r"^(\$|next:) ", "", line)
            if not text.startswith(tuple(f"{program} " for program in PROGRAMS)):
                continue
            for part in re.split(r" && | \| ", text):
                words = shlex.split(part, comments=True)
                if words[0] in PROGRAMS:
                    yield words


def problem_of(words: list[str]) -> str | None:
    """Says what is wrong with a command; None if it is right as far as it can be known without its files."""
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return None if rest[0] in targets else f"there is no target {rest[0]}"
    if program == "python":
        known = importlib.util.find_spec(rest[1]) if rest[0] == "-m" else (ROOT / rest[0]).exists()
        return None if known else f"there is no {' '.join(rest[:2])}"
    try:
        return _problem_of_options(rest)
    except click.UsageError as error:
        return error.format_message()


def _problem_of_options(words: list[str]) -> str | None:
    command: click.Command = cli.group
    context = click.Context(command, info_name="qtrace")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, inner, words = command.resolve_command(context, list(words))
        assert inner is not None
        command, context = inner, click.Context(inner, context, info_name=inner.name)
    values, left, _ = command.make_parser(context).parse_args(list(words))
    if left:
        return f"nothing takes {' '.join(left)}"
    for parameter in command.get_params(context):
        value = values.get(parameter.name)
        if parameter.required and not value:
            return f"{parameter.name} is missing"
        if isinstance(parameter.type, click.Choice) and isinstance(value, str):
            parameter.type.convert(value, parameter, context)
    return None


def test_every_command_of_the_pages_can_be_parsed() -> None:
    listed = [(page.relative_to(ROOT), words) for page in PAGES for words in commands(page)]
    assert len(listed) > 80
    problems = [
        f"{page}: {shlex.join(words)}: {text}" for page, words in listed if (text := problem_of(words))
    ]
    assert problems == []


@each_of(
    ("command", "problem"),
    [
        ("qtrace export a.mge -o b.onnx --input-name x", "No such option"),
        ("qtrace exprt a.mge -o b.onnx", "No such command"),
        ("qtrace export a.mge b.mge -o b.onnx", "nothing takes b.mge"),
        ("qtrace calibrate a.mge --out int8", "data is missing"),
        ("qtrace calibrate a.mge --data x --out int8 --engine nothing", "is not one of"),
        ("make tests", "no target tests"),
        ("python -m benchmarkz", "no -m benchmarkz"),
    ],
)
def test_a_wrong_command_is_found(command: str, problem: str) -> None:
    assert problem in (problem_of(shlex.split(command)) or "")


# In this order: what a command reads was made here, or by one before it.
RUN = {
    "docs/guides/classifier.md": ("trace", "calibrate", "export", "verify"),
    "docs/guides/quantize.md": ("quantize",),
    "docs/guides/verdict.md": ("calibrate", "compare"),
    "docs/guides/benchmark.md": ("bench",),
    "docs/guides/targets.md": ("calibrate", "export"),
}


@pytest.mark.slow
def test_commands_of_the_guides_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models.py").write_text(_MODELS, encoding="utf-8")
    Path("images").mkdir()
    random = np.random.default_rng(0)
    for index in range(12):
        pixels = random.integers(0, 256, (256, 256, 3), np.uint8)
        cv2.imwrite(f"images/{index}.png", cv2.GaussianBlur(pixels, (31, 31), 0))
    for name in ("train", "unseen"):
        np.save(f"{name}.npy", random.normal(size=(32, 3, 224, 224)).astype("float32"))
    _run(["qtrace", "trace", "models:resnet18", "--shape", "1x3x224x224", "-o", "float.mge"])
    for name in ("model", "float", "int8"):
        qtrace.export(qtrace.load("float.mge"), f"{name}.onnx")
    ran = 0
    for page, names in RUN.items():
        for words in commands(ROOT / page):
            if words[1] in names and "--kernels" not in words and "--predict" not in words:
                _run([*words, *FORCE.get(words[1], ())])
                ran += 1
                Path("int8").mkdir(exist_ok=True)  # a good verdict, as here, writes no cure
                Path("int8/cure.yaml").write_text(
                    "schema: qtrace/1\nimports: [backend/onnxruntime]\n", encoding="utf-8"
                )
    assert ran >= 12


FORCE = dict.fromkeys(("trace", "calibrate", "export", "quantize"), ("--force",))


def _run(words: list[str]) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as end:
        cli.main(words[1:])
    assert not end.value.code, f"{shlex.join(words)}: {out.getvalue()[-2000:]}"
