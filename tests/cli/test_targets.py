"""No command destroys what it reads, or replaces a file that another tool wrote unless it is asked to."""

from __future__ import annotations

import os
from pathlib import Path

import click
import numpy as np
import pytest

import qtrace
from qtrace.cli import group
from qtrace.cli.options import _check_inputs
from tests.importing.onnx.networks import conv_bn, save

_STRANGERS = {
    "trace": ("trace", "MODULE:Net", "--shape", "2x4", "-o"),
    "import": ("import", "net.onnx", "-o"),
    "export": ("export", "float.mge", "-o"),
    "check": ("check", "net.onnx", "--target", "tensorrt", "--fix", "-o"),
    "explain": ("explain", "float.mge", "--dot"),
    "inspect": ("inspect", "float.mge", "--dot"),
    "compare": ("compare", "float.mge", "--data", "x.npy", "--html"),
    "sensitivity": ("sensitivity", "float.mge", "--data", "x.npy", "--at-least", "30", "--patch"),
    "quantize": ("quantize", "net.onnx", "--data", "x.npy", "-o"),
}
_INPUTS = {
    "import": ("import", "net.onnx", "-o", "net.onnx"),
    "export": ("export", "float.mge", "-f", "megengine", "-o", "float.mge"),
    "export of a folder": ("export", "int8", "-f", "megengine", "-o", "int8/quantized.mge"),
    "export of an ONNX file": ("export", "net.onnx", "-o", "net.onnx"),
    "by another path": ("export", "net.onnx", "-o", "../HERE/net.onnx"),
    "by a link": ("export", "net.onnx", "-o", "link.onnx"),
    "check": ("check", "net.onnx", "--target", "tensorrt", "--fix", "-o", "net.onnx"),
    "data": ("export", "float.mge", "--data", "x.npy", "-o", "x.npy"),
    "explain": ("explain", "float.mge", "--dot", "float.mge"),
    "explain's recipe": ("explain", "float.mge", "-r", "mine.yaml", "--dot", "mine.yaml"),
    "inspect": ("inspect", "float.mge", "--dot", "float.mge"),
    "inspect's data": ("inspect", "float.mge", "--samples", "images", "--dot", "images/a.png"),
    "compare": ("compare", "float.mge", "-d", "x.npy", "--float", "f.mge", "--html", "f.mge"),
    "sensitivity": ("sensitivity", "float.mge", "-d", "x.npy", "-r", "mine.yaml", "--patch", "mine.yaml"),
    "calibrate": ("calibrate", "int8/quantized.mge", "-d", "x.npy", "-o", "int8"),
    "calibrate's cure": ("calibrate", "float.mge", "-d", "x.npy", "-r", "int8/cure.yaml", "-o", "int8"),
    "finetune": ("finetune", "int8/prepared.mge", "-d", "x.npy", "-o", "int8"),
    "finetune of a folder": ("finetune", "int8", "-d", "x.npy", "-o", "int8"),
    "tune": ("tune", "float.mge", "-d", "x.npy", "-r", "int8/cure.yaml", "-o", "int8"),
    "split": ("split", "int8/quantized.mge", "--at", "a", "-o", "int8"),
    "quantize": ("quantize", "net.onnx", "-d", "x.npy", "-o", "net.onnx"),
    "quantize's recipe": ("quantize", "net.onnx", "-d", "x.npy", "-r", "mine.yaml", "-o", "mine.yaml"),
}


@pytest.fixture
def files(here):
    """A current directory with files that stand for a user's own."""
    Path("float.mge").write_bytes(b"float")
    save(conv_bn(), Path())
    os.symlink("net.onnx", "link.onnx")
    for name in (
        "int8/prepared.mge",
        "int8/quantized.mge",
        "int8/cure.yaml",
        "f.mge",
        "mine.yaml",
        "images/a.png",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"the only copy")
    return here


def _contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", _STRANGERS.values(), ids=_STRANGERS)
def test_a_file_of_another_tool_is_replaced_only_by_force(run, files, words):
    Path("old.bin").write_bytes(b"of another tool")
    before = _contents()
    words = [word.replace("MODULE", files.module) for word in words]
    result = run(*words, "old.bin")
    assert result.code == 2
    assert "old.bin exists, and nothing in it says that qtrace wrote it" in result.err
    assert "--force" in result.err
    assert _contents() == before


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "force"])
@pytest.mark.parametrize("words", _INPUTS.values(), ids=_INPUTS)
def test_an_input_is_never_replaced(run, files, words, force):
    before = _contents()
    words = [word.replace("HERE", files.path.name) for word in words]
    result = run(*words, *force if "tune" not in words or force else ())
    assert result.code == 2
    assert "input of this command" in result.err
    assert _contents() == before


def test_a_folder_with_the_name_of_the_recipe_is_no_input(here):
    os.mkdir("int8")
    command = click.Command("calibrate", params=[click.Option(["--recipe"]), click.Option(["--out"])])
    with command.make_context("calibrate", ["--recipe", "int8", "--out", "int8"]):
        _check_inputs(Path("int8"), "out")


def test_every_option_that_names_an_output_is_checked():
    """A new command cannot forget the check: its outputs are options of these names."""
    outputs = {
        (name, option.opts[0])
        for name, command in group.commands.items()
        for option in command.params
        if isinstance(option.type, click.Path) and isinstance(option, click.Option)
    }
    assert {name for name, flag in outputs if flag in ("--dot", "--html", "--patch")} | {
        name for name, flag in outputs if flag == "--out"
    } == {*_STRANGERS, "calibrate", "finetune", "tune", "split"}
    for name in _STRANGERS:
        assert "--force" in {flag for option in group.commands[name].params for flag in option.opts}


def test_what_qtrace_wrote_is_replaced_without_force(run, files):
    for words in (
        ("import", "net.onnx", "-o", "own.mge"),
        ("export", "own.mge", "-o", "own.onnx"),
        ("export", "own.mge", "-o", "own.onnx", "--example"),
        ("inspect", "own.mge", "--dot", "own.dot"),
        ("explain", "own.mge", "--dot", "plan.dot"),
    ):
        for _ in range(2):
            result = run(*words)
            assert result.code == 0, result.err


def test_calibrate_offers_a_name_of_its_own(run, files):
    np.save("x.npy", np.random.default_rng(0).standard_normal((64, 3, 8, 8), np.float32))
    before = Path("net.onnx").read_bytes()
    result = run("calibrate", "net.onnx", "-d", "x.npy", "-r", "onnxruntime", "-o", "out")
    assert "next: qtrace export out/quantized.mge -o net-int8.onnx" in result.err
    assert run("export", "out", "-o", "net-int8.onnx").code == 0
    assert Path("net.onnx").read_bytes() == before
    refused = run("export", "out/quantized.mge", "-o", "net.onnx")
    assert refused.code == 2
    assert "--force" in refused.err
    assert run("export", "out/quantized.mge", "-o", "net.onnx", "--force").code == 0
    qtrace.load("out/quantized.mge")
