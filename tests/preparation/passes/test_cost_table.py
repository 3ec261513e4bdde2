"""A placement by the times of the user's own device, which the config names as a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import qtrace
from qtrace.config import QConfig
from qtrace.config.recipe import dump_recipe
from qtrace.costs import CostTable
from qtrace.errors import ConfigError
from qtrace.preparation.annotation import PlacementNote
from qtrace.preparation.model import QuantizedModel
from qtrace.quantizing.figures import note_file
from tests.nets import MobileNetV2, images, randomize

X = images(1, 3, 32, 32)


class Notes:
    """Keeps what a command notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    warn = note


@pytest.fixture(scope="module")
def traced() -> Any:
    return qtrace.trace(randomize(MobileNetV2()), X, check=False)


def _write(folder: Path, factor: float, runtime: str = "onnxruntime") -> Path:
    """Writes a table of a device that takes ``factor`` times as long as the packaged table says."""
    table = CostTable.load(runtime)
    slower = [replace(m, seconds=m.seconds * factor) for m in table.measurements]
    file = folder / "device.json"
    file.write_text(CostTable(table.machine, slower, table.per_run * factor).to_json())
    return file


def _placement(traced: Any, config: Any) -> PlacementNote:
    placement = QuantizedModel(qtrace.prepare(traced, config), "prepared").annotation.placement
    assert placement is not None
    return placement


def _recipe(folder: Path, *lines: str) -> Path:
    recipe = folder / "mine.yaml"
    recipe.write_text("\n".join(["schema: qtrace/1", *lines, ""]))
    return recipe


def test_a_recipe_names_the_times_beside_it(traced: Any, tmp_path: Path) -> None:
    _write(tmp_path, 3.0)
    recipe = _recipe(tmp_path, "placement: fastest", "cost_table: device.json")
    packaged, own = _placement(traced, {"placement": "fastest"}), _placement(traced, recipe)
    assert own.table == "device.json"
    assert packaged.table == "onnxruntime"
    assert own.float_milliseconds == pytest.approx(3.0 * packaged.float_milliseconds, rel=0.01)


def test_the_times_choose_the_ops(traced: Any, tmp_path: Path) -> None:
    table = CostTable.load("onnxruntime")
    for factor, mode in ((100.0, "float"), (0.01, "fastest")):
        times = [
            replace(m, seconds=m.seconds * (factor if m.form != "float" and m.op.kind == "conv2d" else 1.0))
            for m in table.measurements
        ]
        file = tmp_path / "device.json"
        file.write_text(CostTable(table.machine, times).to_json())
        assert _placement(traced, {"placement": "fastest", "cost_table": str(file)}).mode == mode


def test_a_backend_without_packaged_times_takes_those_of_the_user(traced: Any, tmp_path: Path) -> None:
    config = {"backend": "megengine", "placement": "fastest", "cost_table": str(_write(tmp_path, 1.0))}
    assert _placement(traced, config).table == "device.json"
    assert "does nothing" not in qtrace.explain(traced, config).summary()


def test_the_file_is_predicted_by_the_same_times(traced: Any, tmp_path: Path) -> None:
    recipe = qtrace.load_recipe(
        _recipe(tmp_path, "placement: fastest", f"cost_table: {_write(tmp_path, 3.0).name}")
    )
    figures = {}
    for name, config in (("own", recipe), ("packaged", QConfig(placement="fastest"))):
        prepared = qtrace.prepare(traced, config)
        qtrace.calibrate(prepared, [X], progress=False)
        file, notes = tmp_path / f"{name}.onnx", Notes()
        converted = qtrace.convert(prepared)
        qtrace.export(converted, file)
        figures[name] = note_file(converted, file, notes)  # type: ignore[arg-type]
        assert any("device.json" in line for line in notes.lines) == (name == "own")
    assert figures["own"]["predicted_float_seconds"] == pytest.approx(
        3.0 * figures["packaged"]["predicted_float_seconds"], rel=0.01
    )


def test_a_dumped_config_finds_the_file_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 1.0)
    config = qtrace.load_recipe(_recipe(tmp_path, "placement: fastest", "cost_table: device.json"))
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "dumped.yaml").write_text(dump_recipe(config))
    monkeypatch.chdir(other)
    assert qtrace.load_recipe("dumped.yaml").cost_table == str(tmp_path / "device.json")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("placement: fastest", "cost_table: gone.json"), r"mine.yaml:3: the cost table .*gone.json cannot"),
        (("placement: fastest", "cost_table: mine.yaml"), r"mine.yaml:3: the cost table .* is damaged"),
        (
            ("placement: fastest", "backend: ncnn", "cost_table: device.json"),
            "mine.yaml:4: cost_table .* has times of onnxruntime, but backend ncnn runs in ncnn: measure",
        ),
        (("cost_table: device.json",), "cost_table does nothing, as everything is quantized: set placement"),
    ],
)
def test_mistakes_are_refused(traced: Any, lines: tuple[str, ...], message: str, tmp_path: Path) -> None:
    _write(tmp_path, 1.0)
    with pytest.raises(ConfigError, match=message):
        qtrace.prepare(traced, _recipe(tmp_path, *lines))
