"""export, verify and bisect on files that are missing, cut, or something else: one sentence, exit code 2."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from tests.nets import images, net

X = images(4, 4, 8, 8)


def _converted(seed: int, recipe: str = "onnxruntime") -> object:
    module = net(lambda self, x: self.c(x), c=M.Conv2d(4, 4 + seed, 3))
    prepared = qtrace.prepare(qtrace.trace(module, X, check=False), recipe)
    return qtrace.convert(qtrace.calibrate(prepared, [X * (1 + seed)], progress=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, their files, data, and all that can go wrong with them."""
    here = tmp_path_factory.mktemp("files")
    for name, seed, recipe in (
        ("one", 0, "onnxruntime"),
        ("two", 1, "onnxruntime"),
        ("n", 0, "backend/ncnn"),
    ):
        converted = _converted(seed, recipe)
        qtrace.save(converted, here / f"{name}.mge")
        qtrace.export(converted, here / (f"{name}.param" if name == "n" else f"{name}.onnx"))
    qtrace.export(_converted(60), here / "parted.onnx", external=True)
    (here / "parted.onnx.data").unlink()
    np.save(here / "x.npy", X)
    np.save(here / "narrow.npy", X[:, :3])
    (here / "text.txt").write_text("hello")
    (here / "text.onnx").write_text("hello")
    (here / "empty.onnx").write_bytes(b"")
    for name in ("one.onnx", "n.param", "n.bin", "one.mge"):
        data = (here / name).read_bytes()
        (here / f"cut_{name}").write_bytes(data[: len(data) // 2])
    (here / "lost.param").write_bytes((here / "n.param").read_bytes())
    (here / "cut_n.param").write_bytes((here / "n.param").read_bytes())
    return here


def _run(folder: Path, *args: str) -> tuple[int, str]:
    """The exit code and what stands on stderr."""
    errors = io.StringIO()
    places = [
        str(folder / a) if re.fullmatch(r"[\w.]+\.(onnx|mge|npy|param|bin|txt|xyz)", a) else a for a in args
    ]
    streams = contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO())
    with streams[0], streams[1], pytest.raises(SystemExit) as end:
        cli.main(places)
    return end.value.code, errors.getvalue()


WRONG: dict[str, tuple[str, str, str, str]] = {
    # what is wrong: file, model, data, what is said
    "no such file": ("none.onnx", "one.mge", "x.npy", r"none\.onnx does not exist"),
    "no such model": ("one.onnx", "none.mge", "x.npy", r"none\.mge"),
    "no such data": ("one.onnx", "one.mge", "none.npy", r"none\.npy"),
    "another suffix": ("text.txt", "one.mge", "x.npy", r"no runtime runs files like text\.txt; known: "),
    "text as model": ("text.onnx", "one.mge", "x.npy", r"text\.onnx is not an ONNX file"),
    "empty": ("empty.onnx", "one.mge", "x.npy", r"empty\.onnx is not an ONNX file"),
    "cut": ("cut_one.onnx", "one.mge", "x.npy", r"cut_one\.onnx is not an ONNX file, or not all of one"),
    "cut model": ("one.onnx", "cut_one.mge", "x.npy", r"cut_one\.mge"),
    "of another model": ("two.onnx", "one.mge", "x.npy", r"two\.onnx is not an export of this module"),
    "data that do not fit": ("one.onnx", "one.mge", "narrow.npy", r"\(4, 3, 8, 8\), which does not fit"),
    "tensors lost": ("parted.onnx", "one.mge", "x.npy", r"parted\.onnx\.data does not exist"),
    "weights lost": ("lost.param", "n.mge", "x.npy", r"lost\.bin does not exist"),
    "weights instead of the model": ("n.bin", "n.mge", "x.npy", r"n\.bin holds weights: .*, n\.param\."),
    "weights cut": ("cut_n.param", "n.mge", "x.npy", r"cut_n\.param: its two files are incomplete"),
    "of another target": ("n.param", "one.mge", "x.npy", r"n\.param is not an export of this module"),
    "no dump": ("one.mge", "one.mge", "x.npy", r"one\.mge is a model that qtrace\.save .* not a dump"),
}


@pytest.mark.parametrize("command", ["verify", "bisect"])
@pytest.mark.parametrize("case", WRONG)
def test_verify_and_bisect(case: str, command: str, folder: Path) -> None:
    file, model, data, said = WRONG[case]
    code, text = _run(folder, command, file, "-m", model, "-d", data, "-q")
    assert code == 2, text
    _one_sentence(text, said)


def _one_sentence(text: str, said: str) -> None:
    lines = [line for line in text.strip().splitlines() if line]
    assert len(lines) == 1, text
    assert re.search(said, lines[0]), text
    assert "Traceback" not in text


EXPORTS: dict[str, tuple[tuple[str, ...], str]] = {
    "no such model": (("none.mge", "-o", "out.onnx"), r"none\.mge"),
    "cut model": (("cut_one.mge", "-o", "out.onnx"), r"cut_one\.mge"),
    "text": (("text.txt", "-o", "out.onnx"), r"text\.txt"),
    "suffix in upper case": (("one.mge", "-o", "out.ONNX"), "in lower case: name it out.onnx"),
    "unknown suffix": (("one.mge", "-o", "out.xyz"), r"no format has the suffix '\.xyz'"),
    "weights of ncnn": (("one.mge", "-o", "out.bin"), r"name the model, out\.param\."),
    "weights of Caffe": (("one.mge", "-o", "out.caffemodel"), r"name the model, out\.prototxt\."),
    "unknown format": (("one.mge", "-o", "out.onnx", "-f", "onx"), r"unknown format 'onx'"),
    "unknown option": (("one.mge", "-o", "out.onnx", "-O", "pack=1"), r"option 'pack'; it knows: packed"),
    "unknown op": (("one.mge", "-o", "out.onnx", "--allow-float", "conv2"), r"allow_float names 'conv2'"),
    "no such option here": (
        ("one.mge", "-o", "out.prototxt", "--allow-float", "conv2d"),
        r"format caffe lacks option 'allow_float'",
    ),
    "another target": (
        ("one.mge", "-o", "out.param"),
        r"site x is uint8 affine, which ncnn does not compute",
    ),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_export(case: str, folder: Path) -> None:
    args, said = EXPORTS[case]
    before = sorted(p.name for p in folder.iterdir())
    target = str(folder / args[2])
    code, text = _run(folder, "export", args[0], "-o", target, *args[3:])
    assert code == 2, text
    _one_sentence(text, said)
    assert sorted(p.name for p in folder.iterdir()) == before
