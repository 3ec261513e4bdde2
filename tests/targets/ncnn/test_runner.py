"""ncnn nets are timed as other files are, and a default that is slower there than float gives float."""

from __future__ import annotations

from pathlib import Path

import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.benchmarking.files import Speed, compare_files
from qtrace.benchmarking.runners import RunnerSettings, open_file
from qtrace.errors import ExportError
from qtrace.quantizing import delivering
from tests.nets import images, net

X = images(8, 3, 12, 12)
IN_FLOAT = Speed(1e-3, 1.0, 1.0, 1.0, 14)
SLOWER, FASTER = (Speed(1e-3 / r, r, r - 0.02, r + 0.02, 14) for r in (0.77, 1.5))


def _module() -> M.Module:
    return net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(qtrace.export(qtrace.trace(_module(), X[:1], check=False), tmp_path / "net.param"))


def test_a_net_is_timed_on_the_given_shape(path: Path) -> None:
    settings = RunnerSettings(shapes={"x": (2, 3, 12, 12)})
    runner = open_file(path, None, settings)
    assert runner.samples == 2
    assert runner.run() > 0
    first, second = compare_files([path, path], settings=settings, seconds=0.05)
    assert first.ratio == 1
    assert second.seconds > 0


def test_a_net_without_a_shape_names_the_option(path: Path) -> None:
    with pytest.raises(ExportError, match="--shape x=1x3x224x224"):
        open_file(path)


def test_a_net_without_its_weights_is_refused(path: Path) -> None:
    path.with_suffix(".bin").unlink()
    with pytest.raises(ExportError, match=r"net\.bin does not exist: it belongs next to net\.param"):
        open_file(path, None, RunnerSettings(shapes={"x": (1, 3, 12, 12)}))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("speed", "options", "in_float", "said"),
    [
        (SLOWER, {}, True, "so the file is in float"),
        (SLOWER, {"keep": True}, False, "the file is slower than float here"),
        (SLOWER, {"recipe": {"backend": "ncnn", "placement": "everything"}}, False, "slower than float here"),
        (FASTER, {}, False, "measured  1.50x"),
    ],
)
def test_the_default_is_float_where_integers_are_slower(
    tmp_path: Path, monkeypatch, speed, options, in_float, said
) -> None:
    asked = []

    def timed(paths, settings, **others):
        asked.append(settings.shapes)
        return [IN_FLOAT, speed]

    monkeypatch.setattr(delivering, "compare_files", timed)
    out = tmp_path / "out.param"
    result = qtrace.quantize(_module(), X, out, progress=False, batch_size=1, **options)
    assert asked == [{"x": (8, 3, 12, 12)}]
    assert result.delivery.in_float is in_float
    assert said in "\n".join(result.summary())
    assert ("8=" in out.read_text(encoding="utf-8")) is not in_float
    assert result.verify is not None
    assert result.verify.passed
