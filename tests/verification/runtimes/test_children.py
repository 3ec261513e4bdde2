"""Runtimes in a child: one that is killed, hangs or aborts is one sentence, and the caller lives on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import megengine.module as M
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.verification import runtimes
from tests.nets import images, net

X = images(2, 4, 6, 6)

# Runtime -> recipe, name of a file, title in messages.
RUNTIMES = {
    "litert": ("backend/tflite", "m.tflite", "LiteRT"),
    "ncnn": ("backend/ncnn", "m.param", "ncnn"),
}


def _export(name: str, folder: Path) -> Path:
    recipe, file, _ = RUNTIMES[name]
    traced = qtrace.trace(net(lambda self, x: self.c(x), c=M.Conv2d(4, 6, 3)), X, check=False)
    prepared = qtrace.calibrate(qtrace.prepare(traced, recipe), [X], progress=False)
    return qtrace.export(qtrace.convert(prepared), folder / file)


def _child(session: Any) -> Any:
    file = session.full._file if hasattr(session, "full") else session._file
    return file._child._child


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RUNTIMES)
def test_a_runtime_that_dies_or_hangs_is_one_sentence(name: str, tmp_path: Path) -> None:
    path, title = _export(name, tmp_path), RUNTIMES[name][2]
    runtime = runtimes.get(path, name)
    for number, sentence in (
        (signal.SIGABRT, "ended its process by signal SIGABRT: the runtime does not survive"),
        (signal.SIGSEGV, "ended its process by signal SIGSEGV: the runtime does not survive"),
        (signal.SIGSTOP, "gave no answer in .* s and was ended"),
    ):
        session = runtime.open(path, True)
        assert [o.shape for o in session.run([X]).outputs] == [(2, 6, 4, 4)]
        child = _child(session)
        if number == signal.SIGSTOP:
            child.idle = 0.5
        pid = child._process.pid
        os.kill(pid, number)
        with pytest.raises(ExportError, match=f"^{title} with .*{path.name} {sentence}") as caught:
            session.run([X])
        assert "\n" not in str(caught.value)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ncnn_does_not_survive_inputs_of_another_size(tmp_path: Path) -> None:
    path = _export("ncnn", tmp_path)
    session = runtimes.get(path).open(path, False)
    with pytest.raises(ExportError, match="^ncnn (with .* ended its process|refused the input)"):
        session.run([images(1, 3, 2, 2)])
