"""Command lines: whatever is given, an exit code that is promised, one sentence, and nothing half-written."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import tempfile
from functools import lru_cache
from pathlib import Path

from hypothesis import strategies as st

from qtrace import cli
from qtrace.storage.outputs import WORK
from tests import faulty
from tests.fuzz.mutation import mutated

WHOLE = ("float.mge", "prepared.mge", "quantized.mge", "model.onnx", "x.npz", "img.yaml", "good/a.png")
NUMBERS = ("1", "3", "0", "-1", "0.5", "1e400", "nan", "inf", "9" * 30, "1x3x8x8", "0x0", "1x" * 40 + "1")
ODD = (
    *("", " ", "-", "--", "\0", "\n", "\udcff", "é" * 99, "x" * 300, "a:b", "=", "fifo.npy", "[", "true"),
    *("new", "good", "good/a.png", "img.yaml/new", "a/b/c", *WHOLE, *NUMBERS),
)
OUT = "new"  # the name of an output
DATA = ("--batch-size", "--max-batches", "--skip-bad", "-q", "--json", "--progress", "--allow", "-r img.yaml")
COLLECTED = ("--threads", "--checkpoint-batches", "--checkpoint-seconds", "--engine onnxruntime", "--resume")
FINETUNED = (
    *("--lr", "--range-lr", "--freeze-below", "--block conv", "--block", "--teacher float.mge", "--teacher"),
    *("--seed", "--checkpoint-steps", "--eval-data x.npz", "--resume", "--force"),
)
SEARCHED = (
    *(
        "--metric",
        "--level",
        "--channels-last",
        "--threshold",
        "--max-drop",
        "--budget",
        "--raise",
        "--groups",
    ),
    *("--raise w16", "--unit bops", "--eval-data x.npz", "--metric sqnr", "--metric top1"),
)
# A command that is right, and its other options: alone, with a value of their own, or with any.
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"calibrate float.mge -d x.npz -r img.yaml -o {OUT} --engine megengine", (*DATA, *COLLECTED, "--force")),
    (f"calibrate float.mge -d good -r img.yaml -o {OUT}", (*DATA, *COLLECTED)),
    ("explain float.mge -r img.yaml", ("--json", "--all", "--shape 1x3x8x8", "--shape", "--why x")),
    (f"explain prepared.mge --why conv --dot {OUT}", ("--json", "--why", "--all", "--dot", "-q")),
    (f"export quantized.mge -o {OUT}.onnx", ("-O packed=true", "-O", "-f onnx_float", "--allow-float", "-q")),
    (
        f"export quantized.mge -o {OUT}.x -f onnx_float",
        ("-O params=aimet-2.0.0", "-O params=", "-f", "-f ncnn"),
    ),
    (f"export quantized.mge -o {OUT}.tflite", ("-O io=int8", "-O io=float", "-f caffe", "-f megengine")),
    ("verify model.onnx -m quantized.mge -d x.npz", (*DATA, "--runtime onnxruntime", "--runtime openvino")),
    ("bisect model.onnx -m quantized.mge -d x.npz", (*DATA, "--max-lsb", "--runtime")),
    (f"compare quantized.mge -d x.npz --html {OUT}", (*DATA, "--sort own", "--sort")),
    ("compare prepared.mge -d x.npz", (*DATA, "--sort sqnr")),
    (f"finetune prepared.mge -d x.npz --steps=2 -o {OUT}", (*DATA, *FINETUNED)),
    (f"sensitivity float.mge -d x.npz --at-least 0.5 --patch {OUT}.yaml", (*DATA, *SEARCHED)),
    ("recipes show img.yaml", ("--json", "-q", "--allow-code")),
    ("recipes check img.yaml -m float.mge", ("--json", "--shape", "--allow", "-q")),
    (f"recipes new --from img.yaml -o {OUT}.yaml", ("--json", "-q")),
)
# What a command reads, and may be damaged; an exported file is its runtime's matter (SECURITY.md).
DAMAGED = {
    "calibrate": ("x.npz", "good/a.png", "img.yaml", "float.mge"),
    "explain": ("float.mge", "prepared.mge", "img.yaml"),
    "export": ("quantized.mge",),
    "recipes": ("img.yaml", "float.mge"),
    "finetune": ("x.npz", "prepared.mge"),
    "sensitivity": ("x.npz", "float.mge"),
    **dict.fromkeys(("verify", "bisect", "compare"), ("x.npz", "quantized.mge")),
}
CODES = {0, 1, 2}


@lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        faulty.build(Path(folder))
        return {name: (Path(folder) / name).read_bytes() for name in WHOLE}


@st.composite
def _lines(draw: st.DrawFn, change: bool) -> list[str]:
    """A command that is right, with some options; with ``change`` a word is another, left out, or doubled."""
    right, options = draw(st.sampled_from(COMMANDS))
    words = right.split(" ")
    for option in draw(st.lists(st.sampled_from(options), max_size=3)):
        words += option.split(" ")
        if option.startswith("--") and " " not in option:
            words += draw(st.lists(st.sampled_from(NUMBERS + ODD), max_size=1))
    if change:
        at = draw(st.integers(1, len(words) - 1))
        words[at : at + 1] = draw(
            st.one_of(st.sampled_from(ODD).map(lambda odd: [odd]), st.sampled_from([[], [words[at]] * 2]))
        )
    return words


def _run(words: list[str]) -> tuple[int, str]:
    """Exit code and stderr; signals are handled as before afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            cli.main(words)
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    raise AssertionError("a command returns")


def _held(folder: Path) -> dict[str, bytes]:
    """Every file and folder, with what is in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def check(data: st.DataObject, folder: Path) -> None:
    kind = data.draw(st.sampled_from(("right", "words", "file")))
    words = data.draw(_lines(kind == "words"))
    files = dict(_files())
    if kind == "file":
        name = data.draw(st.sampled_from(DAMAGED[words[0]]))
        files[name] = data.draw(mutated(files[name]))
    (folder / "good").mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "fifo.npy")
    before, here = _held(folder), Path.cwd()
    os.chdir(folder)
    try:
        code, said = _run(words)
    finally:
        os.chdir(here)
    assert code in CODES, f"{words}: {said}"
    after = _held(folder)
    assert not [name for name in after if name.endswith(".tmp")], words
    if code == 2:
        sentences = [line for line in said.splitlines() if re.match("[Ee]rror: ", line)]
        helped = len(words) <= 2 and said.startswith("Usage: ")  # a command without arguments shows its help
        assert len(sentences) == 1 or helped, f"{words}: {said}"
        assert "--debug" in words or "Traceback" not in said, f"{words}: {said}"
        kept = [name for name in after if WORK in name]  # checkpoints, for --resume
        new = {name: held for name, held in after.items() if not any(k.startswith(name) for k in kept)}
        assert new == before, words
