"""The verdict of ``qtrace calibrate`` on a packed output, in the folder and in the next command."""

import json
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import images, net

# What would stay in float, as its columns have unlike ranges, is rounded all the same.
_ROUNDED = "schema: qtrace/1\nbackend: tflite\nrules:\n- {match: {name: b}, quantize: true}\n"
_FACTORS = np.repeat([64.0, 0.02], [4, 6]).astype("float32")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a network of one convolution that computes boxes and scores, and its data."""
    monkeypatch.chdir(tmp_path)
    layers = {"a": M.Conv2d(3, 8, 3, padding=1), "b": M.Conv2d(8, 10, 1)}
    module = net(lambda self, x: self.b(F.relu(self.a(x))), **layers)
    module.b.weight *= _FACTORS.reshape(-1, 1, 1, 1)
    module.b.bias *= _FACTORS.reshape(1, -1, 1, 1)
    x = images(32, 3, 8, 8)
    qtrace.save(qtrace.trace(module, x[:2], check=False), "float.mge")
    np.save("x.npy", x)
    Path("tflite.yaml").write_text(_ROUNDED)
    Path("float_end.yaml").write_text(
        "schema: qtrace/1\nbackend: tflite\nrules:\n- {match: {name: b}, quantize: false}\n"
    )


def _calibrate(run, recipe: str):
    words = ["calibrate", "float.mge", "-d", "x.npy", "-r", recipe, "-o", "out", "--batch-size", "2"]
    result = run(*words)
    assert result.code == (1 if recipe == "tflite.yaml" else 0), result.err
    return result.err, json.loads(Path("out/verdict.json").read_text())


def test_lost_columns_are_named_and_no_export_is_offered(run, packed) -> None:
    text, data = _calibrate(run, "tflite.yaml")
    assert "verdict   broken: 0.0 dB in the worst output group (b_out, columns 4..9)" in text
    assert "next: qtrace export" not in text
    assert data["verdict"]["word"] == "broken"
    groups = {group["name"]: group["informative"] for group in data["verdict"]["groups"]}
    assert groups == {"b_out, columns 0..3": True, "b_out, columns 4..9": False}


def test_columns_that_are_kept_are_good(run, packed) -> None:
    text, data = _calibrate(run, "float_end.yaml")
    assert "verdict   good: " in text
    assert "next: qtrace export" in text
    assert len(data["verdict"]["groups"]) == 2


def test_samples_of_the_calibration_are_not_enough_and_more_are_asked_for(run, packed) -> None:
    words = ["calibrate", "float.mge", "-d", "x.npy", "-r", "float_end.yaml", "-o", "out"]
    words += ["--evaluation", "x.npy"]
    text = run(*words).err
    assert "verdict   check: " in text
    assert "No sample is new to the calibration" in text
    assert "next: qtrace calibrate float.mge --data MORE_DATA --recipe float_end.yaml" in text
    data = json.loads(Path("out/verdict.json").read_text())["verdict"]
    assert [doubt["kind"] for doubt in data["doubts"]] == ["few-samples"]
    assert not Path("out/cure.yaml").exists()


_QUANTIZE = ("quantize", "float.mge", "-d", "x.npy", "-o", "out.tflite", "--no-verify", "--no-measure", "-q")
_CLOSENESS = ("--metric", "metrics:closeness")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (("-r", "tflite.yaml"), 1, "the graph is useless"),
        (("-r", "tflite.yaml", "--allow-broken"), 0, ""),
        (("-r", "float_end.yaml", "--at-least", "90"), 1, "a limit does not hold"),
        (("-r", "tflite.yaml", "--allow-broken", *_CLOSENESS, "--max-drop", "1e-9"), 1, "in float"),
        (("-r", "float_end.yaml", "--max-drop", "0"), 2, "give --metric, too"),
        (("-r", "float_end.yaml", "--metric", "metrics:none"), 2, "metrics"),
    ],
)
def test_quantize_ends_with_1_if_a_check_fails_and_with_2_if_a_mistake_was_given(
    run, packed, given, code, said
) -> None:
    Path("metrics.py").write_text(
        "import megengine as mge, numpy as np, qtrace\n"
        "X = mge.Tensor(np.load('x.npy'))\n"
        "Y = qtrace.load('float.mge')(X).numpy()\n"
        "def closeness(graph):\n"
        "    return -float(np.abs(graph(X).numpy() - Y).mean())\n"
    )
    result = run(*_QUANTIZE, *given)
    assert (result.code, said in result.err) == (code, True), result.err
    assert Path("out.tflite").exists() == (code == 0)


def test_calibrate_and_compare_end_with_1_if_the_verdict_is_broken_or_a_limit_does_not_hold(
    run, packed
) -> None:
    _calibrate(run, "tflite.yaml")
    assert run("compare", "out", "-d", "x.npy", "-q").code == 1
    words = ["calibrate", "float.mge", "-d", "x.npy", "-r", "float_end.yaml", "-o", "limited"]
    assert run(*words, "--at-least", "90").code == 1
    assert run("compare", "limited", "-d", "x.npy", "-q").code == 0
