"""Files that earlier versions saved load, and give the same outputs. They are never written again."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace.calibration.algorithms import fingerprint, read_part
from qtrace.graph.files.allowlist import MOVED, AllowList, RefusedError
from qtrace.preparation.model import QuantizedModel
from qtrace.preparation.passes.insert import Container

FOLDERS = sorted(path for path in (Path(__file__).parents[2] / "golden" / "files").iterdir() if path.is_dir())
MODELS = [path for folder in FOLDERS for path in sorted(folder.glob("*.mge"))]


def _identity(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_there_are_files_of_each_stage() -> None:
    kinds = {path.stem.partition("_")[0] for path in MODELS}
    assert kinds == {"traced", "prepared", "converted"}


@pytest.mark.parametrize("path", MODELS, ids=_identity)
def test_a_model_gives_the_outputs_of_the_version_that_saved_it(path: Path) -> None:
    with np.load(path.with_name("outputs.npz")) as stored:
        x, expected = stored["input"], stored[path.stem]
    model = qtrace.load(path)
    np.testing.assert_allclose(model(mge.Tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick(3)
@pytest.mark.parametrize("path", [p for p in MODELS if p.stem.startswith("prepared")], ids=_identity)
def test_a_prepared_model_of_an_earlier_version_goes_on(path: Path, tmp_path: Path) -> None:
    with np.load(path.with_name("outputs.npz")) as stored:
        x, expected = stored["input"], stored[path.stem.replace("prepared", "converted")]
    converted = qtrace.convert(qtrace.load(path))
    again = qtrace.load(qtrace.save(converted, tmp_path / "again.mge") or tmp_path / "again.mge")
    np.testing.assert_allclose(again(mge.Tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_checkpoint_of_an_earlier_version_is_read(folder: Path) -> None:
    prepared = qtrace.load(folder / "prepared_fixed.mge")
    model = QuantizedModel(prepared)
    part = read_part(folder / "checkpoint.part.npz", model, fingerprint(model))
    assert list(part.statistics.batches) == [0]
    statistics = part.statistics
    qtrace.calibrate(
        prepared, [np.load(folder / "outputs.npz")["input"]], progress=False, statistics=statistics
    )


def test_the_files_name_classes_that_have_moved() -> None:
    content = b"".join(path.read_bytes() for path in MODELS)
    for old in MOVED:
        module, _, name = old.partition(":")
        assert module.encode() in content, old
        assert name.encode() in content, old


def test_an_old_name_gives_the_class_of_today_and_no_other() -> None:
    names = AllowList()
    assert names.find("qtrace.passes.insert", "Container").target is Container
    with pytest.raises(RefusedError, match="not on the allow-list"):
        names.find("qtrace.passes.insert", "insert")
