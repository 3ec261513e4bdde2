"""How images become inputs, on the command line: the options win over the recipe, in every command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import cv2
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner

import qtrace
from qtrace import cli
from qtrace.cli import models as image_options
from qtrace.cli.program import group
from qtrace.data import open_data
from qtrace.errors import ConfigError
from qtrace.preparation.model import QuantizedModel
from tests.nets import net

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 10, 9, 3), np.uint8)  # N H W C
MEAN, STD = (10.0, 20.0, 30.0), (2.0, 4.0, 8.0)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> SimpleNamespace:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args))
    captured = capsys.readouterr()
    return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)


def _changed(*words: str, config: Any = None) -> Any:
    """The preprocess of a config that the options of a command change."""
    result: list[Any] = []

    @click.command()
    @image_options.images()
    def command() -> None:
        changed = image_options.change_config(config)
        result.append((None if changed is None else changed.preprocess, image_options.chosen_words()))

    outcome = CliRunner().invoke(command, list(words), standalone_mode=False)
    if outcome.exception is not None:
        raise outcome.exception
    return result[0]


def test_without_options_the_config_is_unchanged() -> None:
    assert _changed() == (None, [])
    config = qtrace.load_recipe("resnet50")
    assert _changed(config=config)[0] is config.preprocess


def test_each_option_changes_its_key_alone() -> None:
    config = qtrace.load_recipe("resnet50")
    own = config.preprocess
    assert own is not None
    for words, key, value in (
        (("--size", "32x48"), "size", (3, 32, 48)),
        (("--image-size", "3x32x48"), "size", (3, 32, 48)),
        (("--mean", "1,2,3"), "mean", (1, 2, 3)),
        (("--std", "4"), "std", (4, 4, 4)),
        (("--scale", "1/255"), "scale", 1 / 255),
        (("--channels", "rgb"), "channels", "rgb"),
        (("--layout", "nhwc"), "layout", "nhwc"),
    ):
        changed, repeated = _changed(*words, config=config)
        assert getattr(changed, key) == value
        assert changed.model_copy(update={key: getattr(own, key)}) == own
        assert _changed(*repeated, config=config)[0] == changed


def test_another_resize_forgets_what_belongs_to_the_old_one() -> None:
    yolox = qtrace.load_recipe("yolox")
    changed, _ = _changed("--resize", "stretch", config=yolox)
    assert (changed.resize, changed.fill_at) == ("stretch", "around")


def test_a_config_without_images_needs_size_mean_and_std() -> None:
    with pytest.raises(
        ConfigError, match=r"--size: the recipe says nothing of images, so give --mean and --std"
    ):
        _changed("--size", "8x8", config=qtrace.load_recipe("onnxruntime"))
    changed, _ = _changed("--size", "1x8x8", "--mean", "0", "--std", "255")
    assert (changed.size, changed.mean, changed.std) == ((1, 8, 8), (0,), (255,))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "8"), "no size"),
        (("--size", "8x8x8x8"), "no size"),
        (("--mean", "a"), "no numbers"),
        (("--scale", "1/0"), "no numbers"),
        (("--channels", "gbr"), "gbr"),
    ],
)
def test_empty_preprocess_options_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        _changed(*words, config=qtrace.load_recipe("resnet50"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mean", "1,2"), "mean has 2 numbers for 3 channels"),
        (("--std", "0"), "greater than 0"),
        (("--size", "2x8x8"), "1 or 3 channels"),
        (("--mean", "nan"), "mean"),
    ],
)
def test_what_no_recipe_may_say_no_option_may_say(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _changed(*words, config=qtrace.load_recipe("resnet50"))


def test_every_command_that_reads_data_has_the_options() -> None:
    commands = [c for c in group.commands.values() if any(p.name == "data" for p in c.params)]
    assert len(commands) >= 9
    for command in commands:
        names = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {f"--image-{name}" for name, _, _ in image_options._OPTIONS} <= names, command.name
        flags = [flag for p in command.params for flag in p.opts]
        assert len(flags) == len(set(flags)), command.name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("images")
    forward = lambda self, x: F.relu(self.conv(x))  # noqa: E731
    module = net(forward, conv=M.Conv2d(3, 4, 3, padding=1))
    qtrace.save(qtrace.trace(module, np.zeros((2, 3, 10, 9), np.float32), check=False), home / "float.mge")
    (home / "pictures").mkdir()
    for number, picture in enumerate(PIXELS):
        cv2.imwrite(str(home / f"pictures/{number:02}.png"), picture)
    np.save(home / "nhwc.npy", PIXELS)
    np.save(home / "nchw.npy", np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2)))
    return home


@pytest.mark.parametrize("data", ["pictures", "nhwc.npy"])
def test_calibrate_reads_images_as_the_options_say_and_later_commands_as_well(
    data: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    words = [
        "--size",
        "10x9",
        "--mean",
        "10,20,30",
        "--std",
        "2,4,8",
        "--channels",
        "bgr",
        "--layout",
        "nhwc",
    ]
    out = str(tmp_path / "int8")
    result = run(capsys, "calibrate", "float.mge", "-d", data, "-r", "onnxruntime", "-o", out, *words)
    assert result.code == 0, result.err
    assert f"{data}: inputs are (pixel - [10, 20, 30]) / [2, 4, 8], bgr, stretch to 10x9" in result.err
    assert result.err.count("inputs are") == 1
    sites = QuantizedModel(qtrace.load(f"{out}/quantized.mge")).rounded
    values = (PIXELS.astype(np.float32) - MEAN) / STD
    expected = (values.max() - min(values.min(), 0)) / 255
    np.testing.assert_allclose(sites["x_q"].qparams.scale, expected, rtol=0.03)
    # The options are in the model: no command behind needs them again.
    again = run(capsys, "compare", out, "-d", data, "--batch-size", "4")
    assert again.code == 0, again.err


@pytest.mark.parametrize("data", ["pictures", "nhwc.npy"])
def test_a_std_below_1_on_bytes_without_a_scale_is_warned_of(
    data: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    words = ["-d", data, "--size", "10x9", "--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
    words += ["--layout", "nhwc", "-r", "onnxruntime", "-o", str(tmp_path / "out.onnx"), "--force"]
    command = ["quantize", "float.mge", "--no-measure", "--no-verify"]
    warning = f"warning: {data}: pixels are 0 to 255, and a std below 1 is for pixels of 0 to 1: give --scale"
    result = run(capsys, *command, *words)
    assert result.err.count(warning) == 1, result.err
    assert warning not in run(capsys, *command, *words, "--scale", "1/255").err


def test_the_size_of_images_stands_in_the_summary_where_the_network_leaves_it_open(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    traced = qtrace.load("float.mge")
    words = [
        "-d",
        "pictures",
        "--size",
        "12x14",
        "--mean",
        "0",
        "--std",
        "255",
        "--no-measure",
        "--no-verify",
    ]
    for name, sizes, stands in (("open", {0: "n", 2: "h", 3: "w"}, True), ("fixed", {0: "n"}, False)):
        path = str(tmp_path / f"{name}.onnx")
        qtrace.export(traced, path)
        model = onnx.load(path)
        for axis, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
            if axis in sizes:
                dim.dim_param = sizes[axis]
            elif axis > 1:
                dim.dim_value = (12, 14)[axis - 2]
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        onnx.save(model, path)
        result = run(capsys, "quantize", path, *words, "-o", str(tmp_path / f"{name}-int8.onnx"))
        assert result.code == 0, result.err
        line = "size: x is 3x12x14 in the first batch, and open in the network"
        assert (line in result.err) == stands, result.err


def test_options_that_change_nothing_are_named(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    np.save(tmp_path / "floats.npy", RNG.normal(size=(8, 3, 10, 9)).astype(np.float32))
    words = ["-d", str(tmp_path / "floats.npy"), "-r", "resnet50", "--channels", "rgb", "--size", "10x9"]
    message = "floats.npy holds no images and no uint8 pixels of four axes"
    for command in (
        ["calibrate", "float.mge", "-o", str(tmp_path / "a")],
        ["quantize", "float.mge", "-o", str(tmp_path / "a.onnx")],
    ):
        result = run(capsys, *command, *words)
        assert result.code == 0, result.err
        assert result.err.count(message) == 1
        assert (
            "--size, --channels change nothing" in result.err
            or "--channels, --size change nothing" in result.err
        )


def test_family_recipes_say_that_they_are_bgr_imagenet(home: Path) -> None:
    described = qtrace.load_recipe("resnet50").preprocess
    assert described is not None
    assert "bgr, center_crop to 224x224, which is BGR ImageNet" in described.describe()
    rgb, _ = _changed("--channels", "rgb", config=qtrace.load_recipe("resnet50"))
    assert "BGR" not in rgb.describe()


def test_pixels_with_channels_last_equal_those_with_channels_first(home: Path) -> None:
    read = {}
    for layout in ("nchw", "nhwc"):
        config = {"preprocess": {"size": [3, 10, 9], "mean": MEAN, "std": STD, "layout": layout}}
        preprocess = qtrace.QConfig.model_validate(config).preprocess
        read[layout] = np.concatenate(
            [b[0] for b in open_data(home / f"{layout}.npy", preprocess=preprocess)]
        )
    np.testing.assert_array_equal(read["nchw"], read["nhwc"])
    expected = (PIXELS.astype(np.float32) - np.float32(MEAN)) / np.float32(STD)
    np.testing.assert_array_equal(read["nhwc"], expected.transpose(0, 3, 1, 2))


def test_a_new_recipe_for_images_has_all_keys_and_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from qtrace.config import Preprocess

    for family in ("resnet50", "yolox", "onnxruntime"):
        out = tmp_path / f"{family}.yaml"
        result = run(capsys, "recipes", "new", "--from", family, "--for-images", "-o", str(out))
        assert result.code == 0, result.err
        text = out.read_text()
        assert all(f"{key}: " in text for key in Preprocess.model_fields)
        config, own = qtrace.load_recipe(out), qtrace.load_recipe(family).preprocess
        assert config.preprocess == own or own is None
        assert yaml.safe_load(text)["preprocess"]["layout"] == "nchw"
