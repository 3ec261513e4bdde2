"""qtrace split: by nodes and by backend."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace import cli
from tests.nets import images, net

X = images(1, 3, 6, 6)


def _forward(self: Any, x: Any) -> Any:
    y = F.relu(self.conv(x))
    return self.head(y) + F.softmax(y, axis=1)


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    module = net(_forward, conv=M.Conv2d(3, 4, 3), head=M.Conv2d(4, 4, 1))
    qtrace.save(qtrace.trace(module, X, check=False), tmp_path / "float.mge")

    def call(*args: str) -> SimpleNamespace:
        with pytest.raises(SystemExit) as caught:
            cli.main(["split", "float.mge", *args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return call


def test_parts_and_their_document_are_written(split: Any) -> None:
    result = split("--at", "conv_out", "--at", "head_out, softmax_out", "-o", "parts")
    assert result.code == 0, result.err
    assert result.out.splitlines()[1] == "part_1.mge: conv_out -> head_out, softmax_out"
    document = json.loads(Path("parts/parts.json").read_text())
    assert [part["file"] for part in document["parts"]] == ["part_0.mge", "part_1.mge", "part_2.mge"]
    values = {"x": mge.Tensor(X)}
    for part in document["parts"]:
        results = qtrace.load(f"parts/{part['file']}")(*(values[name] for name in part["inputs"]))
        results = results if isinstance(results, tuple) else (results,)
        values.update(zip(part["outputs"], results, strict=True))
    expected = qtrace.load("float.mge")(values["x"]).numpy()
    np.testing.assert_array_equal(values[document["outputs"][0]].numpy(), expected)


def test_by_backend_and_again_with_force(split: Any) -> None:
    assert split("--at", "conv_out", "--at", "relu_out", "-o", "parts").code == 0
    assert "exists and is not empty" in split("--by-backend", "ncnn", "-o", "parts").err
    result = split("--by-backend", "ncnn", "-o", "parts", "--force", "--json")
    document = json.loads(result.out)
    assert [part["supported"] for part in document["parts"]] == [True, False]
    assert sorted(path.name for path in Path("parts").iterdir()) == ["part_0.mge", "part_1.mge", "parts.json"]
    assert "(not supported by ncnn)" in split("--by-backend", "ncnn", "-o", "other").out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either --at or --by-backend"),
        (("--at", "conv_out", "--by-backend", "ncnn"), "give either --at or --by-backend"),
        (("--at", "conv_ou"), "did you mean conv_out"),
        (("--at", "conv_out,"), "lacks node ''"),
        (("--by-backend", "ncn"), "unknown backend 'ncn'"),
    ],
)
def test_mistakes_leave_no_folder(split: Any, args: tuple[str, ...], message: str) -> None:
    result = split(*args, "-o", "parts")
    assert result.code == 2
    assert message in result.err
    assert not Path("parts").exists()
