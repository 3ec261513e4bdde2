"""Fixtures: a folder with a user's files, stand-ins for the library, and a run of `main`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qtrace import cli
from tests.cli.fakes import USER, Fakes


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a user's module, data and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"user_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USER)
    np.save("x.npy", np.zeros((5, 4), np.float32))
    Path("float.mge").write_text("float")
    return SimpleNamespace(path=tmp_path, module=name, names=lambda: sorted(os.listdir(tmp_path)))


@pytest.fixture
def run(capsys):
    """Runs main in this process; gives code, stdout and stderr."""

    def call(*args):
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.raises(SystemExit) as caught:
            cli.main([str(arg) for arg in args])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return call
