"""Everything that a user can hand over, with every fault: one clear line, exit code 2, nothing left behind.

The files are made by `tests/faulty.py`. Commands run in this process, through the command line's own main.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import qtrace
from qtrace import cli
from qtrace.data import open_data
from qtrace.errors import QtraceError
from qtrace.storage.outputs import WORK
from tests import faulty
from tests.each import each_of

CODE = "bad_input_code"
NEW = ("-o", "new")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    faulty.build(folder)
    (folder / f"{CODE}.py").write_text(faulty.CODE)
    (folder / "own_code.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    return folder


@pytest.fixture
def place(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as the current one; whatever a test does, it holds the same afterwards."""
    monkeypatch.chdir(filled)
    monkeypatch.setattr(sys, "path", [*sys.path, str(filled)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = _names(filled)
    yield filled
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert _names(filled) == before


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run(*args: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        cli.main([str(arg) for arg in args])
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def refused(sentence: str, *args: str | Path) -> None:
    """Checks that a command fails with one sentence that matches, on stderr, and exit code 2."""
    code, out, err = run(*args)
    assert code == 2, err
    assert out == ""
    lines = [line for line in err.splitlines() if line]
    if lines[0].startswith("Usage: "):  # click's own: how the command is called, then the sentence
        lines = [line for line in lines if line.startswith("Error: ")]
    assert len(lines) == 1, err
    assert re.match(r"[Ee]rror: \S", lines[0]), err
    assert re.search(sentence, lines[0]), err


def calibrate(*more: str, model: str = "float.mge", data: str = "x.npz", recipe: str = "img.yaml") -> tuple:
    return ("calibrate", model, "-d", data, "-r", recipe, "-q", *NEW, *more)


def finetune(*more: str, model: str = "prepared.mge", data: str = "x.npz") -> tuple:
    return ("finetune", model, "-d", data, "-q", *NEW, *more)


ARGUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown command": ("No such command 'quantise'", ("quantise",)),
    "unknown option": ("No such option", calibrate("--worker", "2")),
    "nothing": ("Missing argument 'MODEL'", ("calibrate", "-d", "x.npz", *NEW)),
    "no data": ("Missing option '--data'", ("calibrate", "float.mge", *NEW)),
    "batch of nothing": ("batch-size", calibrate("--batch-size", "0")),
    "batch of text": ("batch-size", calibrate("--batch-size", "many")),
    "batches below zero": ("max-batches", calibrate("--max-batches", "-1")),
    "huge batches of huge number": (
        "workers",
        calibrate("--batch-size", str(10**30), "--max-batches", str(10**40), "--workers", "10000"),
    ),
    "no thread": ("threads", calibrate("--threads", "0")),
    "seconds that are no number": ("checkpoint-seconds", calibrate("--checkpoint-seconds", "nan")),
    "a cluster without Ray": ("package ray|does not answer", calibrate("--ray", "127.0.0.1:1")),
    "rate that is no number": ("NaN passes every bound: give a number", finetune("--lr", "nan")),
    "infinite rate": ("lr is inf", finetune("--lr", "inf")),
    "drift below zero": ("freeze_below is -1", finetune("--freeze-below", "-1")),
    "no step": ("steps", finetune("--steps", "0")),
    "code in its recipe": ("names code, 'own_code:Own'", finetune("-r", "code.yaml")),
    "no such block": ("nowhere", finetune("--block", "nowhere")),
    "teacher that is not there": ("missing.mge cannot be read", finetune("--teacher", "missing.mge")),
    "data to measure on that are not there": ("no file missing.npz", finetune("--eval-data", "missing.npz")),
    "unknown runtime": (
        "unknown runtime 'torch'",
        ("verify", "model.onnx", "-m", "quantized.mge", "-d", "x.npz", "--runtime", "torch"),
    ),
    "goal that is no number": (
        "NaN passes every bound: give a number",
        ("sensitivity", "float.mge", "-d", "x.npz", "-q", "--at-least", "nan"),
    ),
    "budget that is no number": (
        "NaN passes every bound: give a number",
        ("sensitivity", "float.mge", "-d", "x.npz", "-q", "--budget", "nan"),
    ),
    "metric that is nowhere": (
        "no module 'nowhere_at_all'",
        ("sensitivity", "float.mge", "-d", "x.npz", "-q", "--metric", "nowhere_at_all:f"),
    ),
    "level that is no level": (
        "--level '0' is not of the form CLS,BOX",
        ("sensitivity", "float.mge", "-d", "x.npz", "-q", "--metric", "detection", "--level", "0"),
    ),
    "page that is a folder": (
        "good is a folder",
        ("compare", "quantized.mge", "-d", "x.npz", "--html", "good"),
    ),
    "unknown engine": ("engine", calibrate("--engine", "torch")),
    "allow": ("not of the form 'pkg.mod:Qual.Name'", calibrate("--allow", "x")),
    "no shape": ("not a shape", ("trace", f"{CODE}:Net", "--shape", "1x", *NEW)),
    "huge shape": ("more than 2", ("trace", f"{CODE}:Net", "--shape", "99999x99999x99999", *NEW)),
    "shape of zero": ("", ("trace", f"{CODE}:Net", "--shape", "0x3x8x8", *NEW)),
    "shape and data": ("either --shape or --data", ("trace", f"{CODE}:Net", *NEW)),
    "factory of nothing": ("no module 'nowhere_at_all'", ("trace", "nowhere_at_all:N", "--shape", "1", *NEW)),
    "factory raises": ("KeyError: 'weights'", ("trace", f"{CODE}:broken", "--shape", "1", *NEW)),
    "factory exits": ("raised SystemExit: done", ("trace", f"{CODE}:leaves", "--shape", "1", *NEW)),
    "ONNX to trace": (
        "model.onnx is an ONNX file: `qtrace import model.onnx",
        ("trace", "model.onnx", "--shape", "1", *NEW),
    ),
    "weights to trace": ("det.pkl holds weights", ("trace", "det.pkl", "--shape", "1", *NEW)),
    "traced to trace": (
        "go on with `qtrace calibrate float.mge`",
        ("trace", "float.mge", "--shape", "1", *NEW),
    ),
    "Python file to trace": (
        "name its module, mydet:build",
        ("trace", "mydet.py:build", "--shape", "1", *NEW),
    ),
    "Python file to explain": ("name its module, mydet:build", ("explain", "src/mydet.py:build")),
    "no form of a name": ("not of the form pkg.mod:factory", ("trace", "resnet", "--shape", "1", *NEW)),
    "factory of dicts": ("returned dict", ("trace", f"{CODE}:no_module", "--shape", "1", *NEW)),
    "no forward": ("", ("trace", f"{CODE}:Partial", "--shape", "1x3x8x8", *NEW)),
    "shape that does not fit": ("", ("trace", f"{CODE}:Net", "--shape", "1x5x8x8", *NEW)),
    "no such method": ("maps", ("trace", f"{CODE}:Net", "--shape", "1x3x8x8", "--method", "maps", *NEW)),
    "empty name": ("an argument is empty", calibrate(model="")),
    "empty output": ("-o is empty: give a value, or leave it out", (*calibrate()[:-2], "-o", "")),
    "empty long option": ("--recipe is empty", ("explain", "float.mge", "--recipe=")),
    "zero byte": ("", ("explain", "float\0.mge")),
    "output is a file": ("x.npz is a file", ("calibrate", "float.mge", "-d", "x.npz", "-o", "x.npz")),
    "output in a file": (
        "is a file, not a folder",
        ("calibrate", "float.mge", "-d", "x.npz", "-o", "x.npz/new"),
    ),
    "output has others": (
        "holds files that are not ours",
        ("calibrate", "float.mge", "-d", "x.npz", "--force", "-o", "good"),
    ),
    "output is a folder": ("is a folder", ("export", "quantized.mge", "-o", "good", "-f", "onnx")),
    "output is a pipe": ("is a device or a pipe", ("export", "quantized.mge", "-o", "pipe.onnx")),
    "no such node": ("nowhere", ("explain", "prepared.mge", "--why", "nowhere")),
    "nothing to raise for": (
        "--raise is for a search",
        ("sensitivity", "float.mge", "-d", "x.npz", "--raise", "w8"),
    ),
    "raised to what is not": (
        "w99",
        ("sensitivity", "float.mge", "-d", "x.npz", "--raise", "w99", "--at-least", "1"),
    ),
    "two goals": (
        "two goals",
        ("sensitivity", "float.mge", "-d", "x.npz", "--at-least", "1", "--budget", "1"),
    ),
    "recipe name": ("there is no recipe 'resnet51'; did you mean", calibrate(recipe="resnet51")),
    "format option": ("'pack'", ("export", "quantized.mge", "-o", "new.onnx", "-O", "pack=1")),
    "format option without value": ("NAME=VALUE", ("export", "quantized.mge", "-o", "new.onnx", "-O", "x")),
    "format option that is no YAML": (
        "cannot be read",
        ("export", "quantized.mge", "-o", "new.onnx", "-O", "packed=["),
    ),
    "new recipe over another": ("exists already", ("recipes", "new", "--from", "resnet", "-o", "img.yaml")),
}


@pytest.mark.parametrize("fault", ARGUMENTS)
def test_arguments(fault: str, place: Path) -> None:
    sentence, args = ARGUMENTS[fault]
    refused(sentence, *args)


ARRAYS = {
    "missing.npz": "There is no file",
    "dir.npy": "",
    "pipe.npy": "There is no file",
    "cut.npz": "not a whole .npz",
    "cut.npy": "truncated",
    "empty.npz": "not a whole .npz",
    "empty.npy": "NumPy's .npy format",
    "text.npz": "not a whole .npz",
    "text.npy": "NumPy's .npy format",
    "wrong.npy": "NumPy's .npy format",
    "wrong.npz": "not a whole .npz",
    "channels.npz": r"\(6, 2, 8, 8\).*does not fit",
    "rank.npz": r"\(6, 8, 8\).*does not fit",
    "size.npz": "",
    "complex.npz": "complex64, which is no model input",
    "strings.npz": "which is no model input",
    "objects.npy": "Python objects",
    "wide.npz": "beyond 32 bits",
    "nan.npz": "NaN",
    "inf.npy": "infinity",
    "none.npz": "is empty: its shape",
    "nothing.npz": "holds no array",
    "single.npy": "a single number",
    "unequal.npz": "different numbers of samples",
    "names.npz": "",
    "labels.npz": "only labels",
    "twice.npz": "more than one array called 'x'",
    "same.npz": "more than one array called 'x'",
    "huge.npy": "truncated or damaged",
    "huge.npz": "truncated or damaged",
    "negative.npy": "is empty: its shape|NumPy's .npy format",
    "bomb.npz": "",
    "other.npz": "NumPy's .npy format",
    "pixels.npy": "N x C x H x W",
    "axes.npy": "has 30 axes, and MegEngine's tensors have at most 7",
    "more_axes.npy": "has 40 axes",
    "members.npz": "'a0'",
    "img.yaml": "cannot be read as data",
}


# Every other command that reads data, and a fault of each kind.
DATA_READERS = {
    "finetune": lambda data: finetune(data=data),
    "compare": lambda data: ("compare", "quantized.mge", "-d", data),
    "sensitivity": lambda data: ("sensitivity", "float.mge", "-d", data, "-q"),
    "verify": lambda data: ("verify", "model.onnx", "-m", "quantized.mge", "-d", data, "-q"),
    "bisect": lambda data: ("bisect", "model.onnx", "-m", "quantized.mge", "-d", data, "-q"),
}
DATA = {
    "missing.npz": "There is no file",
    "cut.npz": "not a whole .npz",
    "strings.npz": "no model input",
    "channels.npz": "does not fit",
    "nan.npz": "batch 0.*NaN",
    "good": "give --size, --scale, --mean, --std and --channels, or a recipe with the key `preprocess`",
    f"{CODE}:nothing": "gives no batch",
    f"{CODE}:stops": "making batch 1 raised RuntimeError",
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("command", DATA_READERS)
@pytest.mark.parametrize("name", DATA)
def test_data_of_other_commands(name: str, command: str, place: Path) -> None:
    refused(DATA[name], *DATA_READERS[command](name))


@each_of("name", ARRAYS)
def test_arrays(name: str, place: Path) -> None:
    refused(ARRAYS[name], *calibrate(data=name))


RECIPES = {
    "missing.yaml": "there is no such file",
    "dir.yaml": "not a file",
    "pipe.yaml": "not a file",
    "empty.yaml": "empty.yaml:1: the file is empty",
    "cut.yaml": "cut.yaml:3: not valid YAML|cut.yaml:2: not valid YAML",
    "latin1.yaml": "latin1.yaml:2: the file is not UTF-8",
    "binary.yaml": "not UTF-8|is not allowed in YAML",
    "huge.yaml": "larger than 1 MiB",
    "list.yaml": "a recipe is a mapping",
    "schema.yaml": "schema.yaml:1: schema 'qtrace/9' is not supported",
    "noschema.yaml": "'schema: qtrace/1' is missing",
    "key.yaml": "key.yaml:2: unknown key 'observer'; did you mean 'observers'",
    "type.yaml": "type.yaml:2: rules must be a list",
    "nan.yaml": "nan.yaml:2: .*finite number",
    "zero.yaml": "zero.yaml:2: .*greater than 0",
    "channels.yaml": "channels.yaml:2: .*1 or 3 channels",
    "duplicate.yaml": "duplicate.yaml:3: duplicate key 'backend'",
    "tag.yaml": "tag.yaml:2: the tag .* is not supported",
    "bomb.yaml": "more than 10000 values",
    "deep.yaml": "deep.yaml:2: more than 50 levels of nesting",
    "code.yaml": "code.yaml:2: fakequant names code, 'own_code:Own'",
    "circle.yaml": "circle.yaml:2: the imports go in a circle",
    "lost.yaml": "lost.yaml:2: nowhere.yaml: there is no such file",
    "absolute.yaml": "absolute.yaml:2: .*absolute path",
    "unmet.yaml": "unmet.yaml:2: ",
    "bits.yaml": "bits.yaml:2: ",
    "text.txt": "there is no recipe 'text.txt'",
    "digits.yaml": r"^error: digits.yaml:2: '9+\.\.\. cannot be read as int\.$",
    "long.yaml": "long.yaml:2: qat.epochs is a whole number of 13288 bits: give one of 64",
    "hex.yaml": "hex.yaml:2: activation.bits is a whole number of 400000 bits",
    "vast.yaml": "vast.yaml:2: .*more than 256 million pixels",
    "imports.yaml": "imports.yaml:2: imports lists 3000 recipes; a file may import at most 200",
    "keys.yaml": "keys.yaml:22: 2980 more mistakes begin here",
    "chain0.yaml": "chain49.yaml:2: imports stand more than 50 levels below each other",
}


@each_of("name", RECIPES)
def test_recipes(name: str, place: Path) -> None:
    refused(RECIPES[name], *calibrate(recipe=name))


# A recipe that names code is refused by every command that reads one, and let through where it may.
READERS = {
    "trace": ("trace", f"{CODE}:Net", "--data", "x.npz", *NEW, "-r"),
    "calibrate": ("calibrate", "float.mge", "-d", "x.npz", *NEW, "-r"),
    "explain": ("explain", "float.mge", "-r"),
    "compare": ("compare", "quantized.mge", "-d", "x.npz", "-r"),
    "verify": ("verify", "model.onnx", "-m", "quantized.mge", "-d", "x.npz", "-r"),
    "bisect": ("bisect", "model.onnx", "-m", "quantized.mge", "-d", "x.npz", "-r"),
    "sensitivity": ("sensitivity", "float.mge", "-d", "x.npz", "-r"),
    "show": ("recipes", "show"),
    "new": ("recipes", "new", "--from"),
}


@each_of("command", READERS)
def test_no_command_runs_the_code_of_a_recipe(command: str, place: Path) -> None:
    refused("names code, 'own_code:Own'", *READERS[command], "code.yaml")
    code, _, err = run(*READERS[command], "code.yaml", "--allow-code", "--help")
    assert code == 0, err
    assert "own_code" not in sys.modules


def test_recipes_check_tells_code_as_a_finding(place: Path) -> None:
    code, out, _ = run("recipes", "check", "code.yaml")
    assert code == 1
    assert "code.yaml:2: fakequant names code" in out
    assert "own_code" not in sys.modules


def test_allowed_code_is_imported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("own_code lacks Own", *calibrate("--allow-code", recipe="code.yaml"))
    assert (place / "ran").exists()
    (place / "ran").unlink()
    monkeypatch.delitem(sys.modules, "own_code")


LOADERS = {
    "missing": "lacks 'missing'",
    "nothing": "gives no batch",
    "three": "returned int",
    "texts": "batch 0 is of type str",
    "empty_batch": r"batch 0\[0\] has shape \(0, 3, 8, 8\)|batch 0 has shape \(0, 3, 8, 8\)",
    "empty_dict": "batch 0 is an empty dict",
    "strings": "dtype <U1",
    "objects": "dtype object",
    "wide": "beyond 32 bits|does not fit|NaN, infinity or a number beyond",
    "channels": r"\(2, 2, 8, 8\).*does not fit",
    "names": "'y'|named y|y",
    "too_many": "",
    "nan": "batch 0.*NaN",
    "inf": "batch 1.*NaN, infinity",
    "rank": "",
    "stops": "making batch 1 raised RuntimeError: the disk is gone at",
    "exits": "making batch 1 raised SystemExit: 3 at",
    "leaves": "calling it raised SystemExit: done at",
    "needs": "calling it raised TypeError",
    "iterator": "iterated only once",
}


@each_of("name", LOADERS)
def test_loaders(name: str, place: Path) -> None:
    refused(LOADERS[name], *calibrate(data=f"{CODE}:{name}"))
    if name in ("inf", "stops", "exits"):  # the batches before are kept, for --resume
        assert os.listdir("new") == [WORK]
        shutil.rmtree("new")


IMAGES = {
    "cutpng": r"cutpng/b\.png is a truncated or damaged PNG",
    "cutjpeg": r"cutjpeg/b\.jpg is a truncated JPEG",
    "badjpeg": r"b\.jpg is a damaged image \(.*(marker|Huffman|data segment)",
    "badpng": r"b\.png is a damaged image \(Not enough image data\)|b\.png is a damaged image \(bad ",
    "emptyimage": r"b\.png is empty",
    "textimage": r"b\.png is not an image",
    "bombimage": r"b\.png claims 32768 x 32768 pixels",
    "noimages": "holds no image",
    "onlybad": r"a\.png is not an image",
    "leaving": r"b\.png is a link that leaves",
    "absolute": r"b\.png is a link that leaves",
    "circle": r"b\.png is a link that leads nowhere",
    "dangling": r"b\.png cannot be read: No such file",
    "pipes": r"b\.png is not a regular file",
    "missing": "does not exist",
}


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outside = place / "leaving" / "b.png"
    if name == "leaving":  # into another folder
        outside.unlink()
        outside.symlink_to(place / "good" / "a.png")
    refused(IMAGES[name], *calibrate(data=name))
    assert capfd.readouterr().err == ""  # no line of a decoder's own


def test_images_need_a_preprocess(place: Path) -> None:
    refused("or a recipe with the key `preprocess`", *calibrate(data="good", recipe="onnxruntime"))


def test_bad_images_are_skipped_when_asked(place: Path, tmp_path: Path) -> None:
    command = ("calibrate", "float.mge", "-r", "img.yaml", "--skip-bad", "-o")
    code, _, err = run(*command, tmp_path / "new", "-d", "mixed")
    assert code == 0, err
    for name in ("b.png", "c.jpg"):
        assert err.count(f"warning: left out: mixed/{name} ") == 1, err
    code, _, err = run(*command, tmp_path / "none", "-d", "onlybad")
    assert code == 2
    assert "gives no batch" in err
    assert not (tmp_path / "none").exists()


def test_images_of_every_kind_are_the_same_picture(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("schema: qtrace/1\npreprocess: {size: [3, 6, 4], mean: [0, 0, 0], std: [1, 1, 1]}\n")
    expected = faulty.picture().transpose(2, 0, 1)
    for name, data in faulty.good_pictures().items():
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(data)
        source = open_data(str(folder), preprocess=qtrace.load_recipe(recipe).preprocess)
        ((batch,),) = list(source)
        near = 30 if name.endswith(".jpg") and name != "misnamed.jpg" else 20 if "palette" in name else 0
        assert np.abs(batch[0] - expected).max() <= near, name


def test_names_that_are_no_utf8(place: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    (folder / os.fsdecode(b"b\xff.png")).write_bytes(b"hello")
    refused(r"b.*\.png is not an image", *calibrate(data=str(folder)))
    code, out, err = run("trace", f"{CODE}:Net", "--shape", "1x3x8x8", "-o", folder / "net.mge")
    assert (code, (folder / "net.mge").is_file()) == (0, True), err
    assert r"caf\xe9/net.mge" in out


MODELS = {
    "missing.mge": "cannot be read: No such file",
    "dir.mge": "is a folder",
    "pipe.mge": "not a regular file",
    "cut.mge": "cut short|takes more",
    "empty.mge": "is empty",
    "text.mge": "not a saved model",
    "zip.mge": "zip archive",
    "evil.mge": "posix:system, which is not on the allow-list",
    "protocol.mge": "its first bytes are not quite those",
    "list.mge": "holds a list",
    "x.npz": "zip archive",
    "text.onnx": "not an ONNX file",
    "cut.onnx": "not an ONNX file|not a valid ONNX model",
}
TAKERS = {
    "finetune": lambda name: finetune(model=name),
    "calibrate": lambda name: calibrate(model=name),
    "explain": lambda name: ("explain", name),
    "export": lambda name: ("export", name, "-o", "new.onnx"),
    "verify": lambda name: ("verify", "model.onnx", "-m", name, "-d", "x.npz"),
    "compare": lambda name: ("compare", name, "-d", "x.npz", "--html", "new.html"),
    "sensitivity": lambda name: ("sensitivity", name, "-d", "x.npz", "-q"),
    "check": lambda name: ("recipes", "check", "img.yaml", "-m", name),
}


@pytest.mark.parametrize("command", TAKERS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, command: str, place: Path) -> None:
    refused(MODELS[name], *TAKERS[command](name))
    assert not (place / "ran").exists()


STAGES = {
    "float to a document": (("export", "float.mge", "-o", "new.dot"), "is a plain traced module: prepare"),
    "prepared to export": (("export", "prepared.mge", "-o", "new.onnx"), ""),
    "float to verify": (
        ("verify", "model.onnx", "-m", "float.mge", "-d", "x.npz"),
        "from a quantized module",
    ),
    "prepared to verify": (("verify", "model.onnx", "-m", "prepared.mge", "-d", "x.npz"), "not converted"),
    "prepared to calibrate": (calibrate(model="prepared.mge"), "prepared or converted already"),
    "float to finetune": (finetune(model="float.mge"), "not a prepared module"),
    "converted to finetune": (finetune(model="quantized.mge"), "converted, not prepared"),
    "prepared to sensitivity": (("sensitivity", "prepared.mge", "-d", "x.npz"), "prepared or converted"),
    "float to bisect": (("bisect", "model.onnx", "-m", "float.mge", "-d", "x.npz"), "not a converted module"),
    "float to compare": (("compare", "float.mge", "-d", "good"), "float.mge is traced, not quantized"),
    "float to verify with images": (
        ("verify", "model.onnx", "-m", "float.mge", "-d", "good"),
        "or a recipe with the key `preprocess`",
    ),
}


@each_of("stage", STAGES)
def test_models_of_another_stage(stage: str, place: Path) -> None:
    args, sentence = STAGES[stage]
    refused(sentence, *args)


EXPORTED = {
    "missing.onnx": "does not exist",
    "cut.onnx": "not an ONNX file",
    "empty.onnx": "not an ONNX file",
    "text.onnx": "not an ONNX file",
    "pipe.onnx": "",
    "outside.onnx": "keeps tensors in '../secret.bin', which is not a file in its own folder",
    "root.onnx": "keeps tensors in '/etc/hostname'",
    "noplace.onnx": "keeps tensors in ''",
    "offset.onnx": "lacks a whole number for its place",
    "before.onnx": "lacks a whole number for its place",
    "nozero.onnx": "lacks a stored zero point",
    "sparse.onnx": "has 5.0 GiB, and an ONNX file less than 2 GiB",
    "good": "",
    "x.npz": "no runtime",
}


@pytest.mark.parametrize("command", ["verify", "bisect"])
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_files(name: str, command: str, place: Path) -> None:
    refused(EXPORTED[name], command, name, "-m", "quantized.mge", "-d", "x.npz", "-q")


CONFIGS = {
    "unknown key": {"observer": "mse"},
    "wrong type": {"rules": 3},
    "unknown backend": {"backend": "tpu"},
    "NaN": {"qat": {"lr": float("nan")}},
    "infinite": {"qat": {"lr": float("inf")}},
    "zero": {"qat": {"epochs": 0}},
    "empty": {"rules": [{}]},
    "absurd bits": {"weight": {"bits": 10**9}},
    "absurd bins": {"observers": {"activation": {"mse": {"bins": 10**12}}}},
    "option of a wrong type": {"observers": {"activation": {"mse": {"bins": "many"}}}},
    "unknown option": {"fakequant": {"lsq": {"x": 1}}},
    "no class": {"fakequant": "json:JSONDecoder"},
    "no module": {"fakequant": "nowhere_at_all:X"},
    "no name": {"fakequant": "json:nothing"},
    "twice": {"ptq": ["fuse_bn", "fuse_bn"]},
    "long": {"qat": {"epochs": 10**5000}},
    "long option": {"observers": {"activation": {"mse": {"bins": 10**5000}}}},
    "unknown import": {"imports": ["resnet_of_nobody"]},
    "imports of a wrong type": {"imports": 3},
    "imports that are no names": {"imports": [object()]},
    "a wrong key beside imports": {"imports": ["resnet"], "observer": "mse"},
    "code beside imports": {"imports": ["resnet"], "fakequant": "json:JSONDecoder"},
    "not plain data": {"observers": {"activation": {"mse": {"bins": object()}}}},
}


@each_of("fault", CONFIGS)
def test_configs_in_python(fault: str, filled: Path) -> None:
    traced = qtrace.load(filled / "float.mge")
    with pytest.raises(QtraceError) as caught:
        qtrace.prepare(traced, CONFIGS[fault])
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("name", ["x.npz", "img.yaml", "float.mge", "good"])
def test_unreadable(name: str, place: Path) -> None:
    mode = (place / name).stat().st_mode
    (place / name).chmod(0)
    try:
        data = "good" if name == "good" else "x.npz"
        refused(f"{name}.*Permission denied", *calibrate(data=data))
    finally:
        (place / name).chmod(mode)
