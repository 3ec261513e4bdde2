"""The public names, pinned: what users import must not change unseen."""

from __future__ import annotations

import subprocess
import sys

import pytest

import qtrace

NAMES = {"QConfig", "QParams", "QScheme", "fakequant", "graph", "observers", "recipes"}
NAMES |= {"calibrate", "convert", "explain", "export", "load", "load_recipe", "prepare", "save", "set_phase"}
NAMES |= {"trace", "verify"}


def test_public_names_are_these_and_resolve() -> None:
    assert set(qtrace.__all__) == NAMES
    for name in NAMES:
        assert getattr(qtrace, name) is not None
    assert set(dir(qtrace)) >= NAMES


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = qtrace.quantise


def test_functions_stay_callable_after_their_rooms_are_imported() -> None:
    code = (
        "import qtrace.export.onnx, qtrace.verification, qtrace.calibration, qtrace\n"
        "print(all(callable(getattr(qtrace, n)) for n in 'export verify prepare trace'.split()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


def test_import_alone_does_not_load_megengine() -> None:
    code = "import sys, qtrace; print('megengine' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
