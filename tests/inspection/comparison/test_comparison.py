"""compare: the figures against numpy's, and the table, the page and the command."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from PIL import Image

import qtrace
from qtrace import cli
from qtrace.comparing.sums import sqnr_db
from qtrace.errors import CalibrationError, ConfigError, GraphError
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.inspection.comparison import Comparison, report
from qtrace.numerics import fake_quantize
from qtrace.preparation.passes.insert import CONTAINER
from qtrace.scheme import QParams
from tests.nets import images, net

ROOT = Path(__file__).parents[3]
_SHRINK = np.linspace(0.3, 1.0, 141)


def _forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.first(x))
    y = F.concat([y, 8.0 * F.sigmoid(self.second(y))], axis=1)
    return self.fc(F.flatten(F.avg_pool2d(y, 8), 1))


def _prepared(config: dict[str, Any] | None = None) -> TracedModule:
    module = net(
        _forward,
        first=M.Conv2d(3, 4, 3, padding=1),
        second=M.Conv2d(4, 4, 3, padding=1),
        fc=M.Linear(8, 3),
    )
    prepared = qtrace.prepare(qtrace.trace(module, images(2, 3, 8, 8), check=False), config or {})
    qtrace.calibrate(prepared, _data(0), progress=False)
    return prepared


def _data(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(4, 3, 8, 8)).astype(np.float32) for _ in range(3)]


@pytest.fixture(scope="module")
def prepared() -> TracedModule:
    return _prepared({"observers": {"activation": {"percentile": {"percentile": 99.0}}}})


@pytest.fixture(scope="module")
def found(prepared: TracedModule) -> Comparison:
    return qtrace.compare(prepared, _data(1))


def _site(found: Comparison, name: str) -> Any:
    return next(site for site in found.sites if site.site == name)


def test_the_input_has_its_rounding_error_and_nothing_inherited(
    prepared: TracedModule, found: Comparison
) -> None:
    x = np.concatenate(_data(1))
    qparams = getattr(prepared, CONTAINER).x.qparams()
    site = _site(found, "x")
    assert site.sqnr_db == pytest.approx(sqnr_db(x, fake_quantize(x, qparams)), abs=1e-4)
    assert site.own_db == site.sqnr_db
    assert site.inherited_db == float("inf")
    lo, hi = ((end - float(qparams.zero_point)) * float(qparams.scale) for end in (0, 255))
    half = float(qparams.scale) / 2
    assert site.clipped == pytest.approx(np.mean((x < lo - half) | (x > hi + half)), abs=1e-6)
    assert site.clipped > 0.005
    assert site.used == 1.0


def test_the_output_has_what_running_both_phases_gives(prepared: TracedModule, found: Comparison) -> None:
    results = {}
    for phase in ("float", "quantize"):
        qtrace.set_phase(prepared, phase)
        results[phase] = np.concatenate([prepared(mge.Tensor(x)).numpy() for x in _data(1)])
    f, q = results["float"], results["quantize"]
    (output,) = found.outputs
    assert output.sqnr_db == pytest.approx(sqnr_db(f, q), abs=1e-4)
    cosine = np.sum(f * q) / np.linalg.norm(f) / np.linalg.norm(q)
    assert output.cosine == pytest.approx(cosine, abs=1e-6)
    assert output.same == np.mean(f.argmax(1) == q.argmax(1))
    assert _site(found, "fc_out").sqnr_db == pytest.approx(output.sqnr_db, abs=1e-4)


def test_own_error_is_that_of_the_op_alone_fed_in_float(prepared: TracedModule, found: Comparison) -> None:
    container = getattr(prepared, CONTAINER)
    values = {}
    nodes = {node.name: node for expr in exprs(prepared) for node in expr.outputs}
    qtrace.set_phase(prepared, "float")
    for name in ("avg_pool2d_out", "fc_out"):
        node = nodes[name]
        run = qtrace.graph.Interpreter(prepared)
        values[name] = np.concatenate([run.run_until(node, mge.Tensor(x)).numpy() for x in _data(1)])
    qtrace.set_phase(prepared, "quantize")
    weight = fake_quantize(prepared.fc.weight.numpy(), container.fc_weight.qparams())
    # The bias is rounded too, far more finely than shows here.
    flat = values["avg_pool2d_out"].reshape(-1, 8)
    alone = fake_quantize(flat @ weight.T + prepared.fc.bias.numpy(), container.fc_out.qparams())
    assert _site(found, "fc_out").own_db == pytest.approx(sqnr_db(values["fc_out"], alone), abs=0.05)
    assert _site(found, "fc_out").own_db > _site(found, "fc_out").sqnr_db


def test_weights_are_compared_channel_by_channel(prepared: TracedModule, found: Comparison) -> None:
    weight = prepared.first.weight.numpy()
    qparams = getattr(prepared, CONTAINER).first_weight.qparams()
    site = _site(found, "first_weight")
    assert site.sort == "weight"
    assert site.sqnr_db == pytest.approx(sqnr_db(weight, fake_quantize(weight, qparams)), abs=1e-4)
    rounded = np.rint(weight / qparams.scale.reshape(-1, 1, 1, 1)).reshape(len(weight), -1)
    assert site.used == pytest.approx(np.mean(rounded.max(1) - rounded.min(1)) / 254)


def test_sharing_costs_the_branch_with_the_narrow_range() -> None:
    prepared = _prepared({"backend": "tensorrt"})
    found = qtrace.compare(prepared, _data(0))
    tied = [group for group in found.groups if len(group.sites) > 1]
    assert tied, "concat ties its inputs on this backend"
    (group,) = tied
    # The ranges say who pays: the branch with the narrower one, and it alone.
    wide = {name: found.histograms[name].width * len(found.histograms[name].counts) for name in group.sites}
    narrow = min(group.sites, key=lambda name: wide[name])
    assert group.cost_db[group.sites.index(narrow)] == group.worst_db > 3.0
    assert min(group.cost_db) < 1.0
    assert f"{group.worst_db:.1f}" in found.table(None)


def test_the_cost_is_that_of_rounding_with_the_own_range() -> None:
    prepared = _prepared({"backend": "tensorrt"})
    found = qtrace.compare(prepared, _data(0))
    container = getattr(prepared, CONTAINER)
    (group,) = found.groups
    shared = getattr(container, group.group).qparams()
    qtrace.set_phase(prepared, "float")
    nodes = {node.name: node for expr in exprs(prepared) for node in expr.outputs}
    for name, cost in zip(group.sites, group.cost_db, strict=True):
        node = nodes[name.removesuffix("_q")]
        run = qtrace.graph.Interpreter(prepared)
        x = np.concatenate([run.run_until(node, mge.Tensor(batch)).numpy().ravel() for batch in _data(0)])
        own = [
            QParams(shared.scheme, np.float32(np.abs(x).max() * k / 127), shared.zero_point) for k in _SHRINK
        ]
        best = max(sqnr_db(x, fake_quantize(x, one)) for one in own)
        assert cost == pytest.approx(max(best - sqnr_db(x, fake_quantize(x, shared)), 0), abs=0.3)


def test_histograms_hold_every_value(found: Comparison) -> None:
    histogram = found.histograms["x"]
    x = np.concatenate(_data(1))
    assert sum(histogram.counts) == x.size
    first = np.flatnonzero(histogram.counts)[0]
    assert (
        histogram.left + histogram.width * first <= x.min() < histogram.left + histogram.width * (first + 1)
    )
    assert histogram.left + histogram.width * len(histogram.counts) >= x.max()
    assert len(histogram.counts) <= 128


def test_prepared_and_converted_compare_alike_and_stay_as_they_are(
    prepared: TracedModule, found: Comparison
) -> None:
    qtrace.set_phase(prepared, "quantize")
    converted = qtrace.convert(prepared)
    again = qtrace.compare(converted, _data(1))
    assert again.to_dict() == found.to_dict()
    x = mge.Tensor(_data(1)[0])
    np.testing.assert_array_equal(converted(x).numpy(), prepared(x).numpy())
    assert {m.phase for m in getattr(prepared, CONTAINER).__dict__.values() if hasattr(m, "phase")} == {
        "quantize"
    }


def test_batchnorm_kept_in_training_can_be_compared() -> None:
    module = net(lambda self, x: self.bn(self.conv(x)), conv=M.Conv2d(3, 4, 3), bn=M.BatchNorm2d(4))
    prepared = qtrace.prepare(
        qtrace.trace(module, images(2, 3, 8, 8), check=False), {"qat": {"bn": {"fold": False}}}
    )
    qtrace.calibrate(prepared, _data(0), progress=False)
    found = qtrace.compare(prepared, _data(1))
    assert 25 < found.outputs[0].sqnr_db < 60


def test_a_table_in_the_order_that_is_asked_for(found: Comparison) -> None:
    table = found.table(None)
    assert table.splitlines()[2].split()[0] == "x"
    assert re.search(r"output 0: \d+\.\d dB, cosine 0\.99\d+, same prediction", table)
    by_own = found.table(None, "own")
    worst = min(found.sites, key=lambda s: s.own_db)
    assert by_own.splitlines()[2].split()[0] == worst.site
    most = max(found.sites, key=lambda s: s.clipped)
    assert found.table(None, "clipped").splitlines()[2].split()[0] == most.site
    with pytest.raises(ConfigError, match="unknown order 'name'; known: graph, sqnr"):
        found.table(sort="name")


def test_refuses_what_cannot_be_compared(prepared: TracedModule) -> None:
    with pytest.raises(CalibrationError, match="no batches"):
        qtrace.compare(prepared, [])
    with pytest.raises(GraphError, match=r"call qtrace\.prepare"):
        qtrace.compare(M.Linear(2, 2), _data(1))
    with pytest.raises(CalibrationError, match="does not fit the model"):
        qtrace.compare(prepared, [np.zeros((1, 5, 8, 8), np.float32)])
    raw = qtrace.prepare(
        qtrace.trace(
            net(lambda self, x: self.fc(x), fc=M.Linear(3, 2)), np.ones((2, 3), np.float32), check=False
        )
    )
    with pytest.raises(CalibrationError, match="never calibrated"):
        qtrace.compare(raw, [np.zeros((1, 3), np.float32)])


@pytest.fixture(scope="module")
def written(prepared: TracedModule, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the command does with --html: exit code, streams and the page."""
    folder = tmp_path_factory.mktemp("compare")
    qtrace.save(prepared, folder / "prepared.mge")
    np.save(folder / "unseen.npy", np.concatenate(_data(1)))
    command = ["compare", str(folder / "prepared.mge"), "--data", str(folder / "unseen.npy")]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.main([*command, "--json", "--html", str(folder / "page.html")])
    page = folder / "page.html"
    return SimpleNamespace(code=end.value.code, out=out.getvalue(), err=err.getvalue(), page=page)


def test_the_command_takes_the_network_and_the_models_own_preprocess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = net(lambda self, x: self.first(x), first=M.Conv2d(3, 4, 3))
    traced = qtrace.trace(module, images(2, 3, 8, 8), check=False)
    preprocess = {"size": [3, 8, 8], "mean": [128.0] * 3, "std": [64.0] * 3, "channels": "rgb"}
    prepared = qtrace.prepare(traced, {"preprocess": preprocess, "ptq": ["fuse_bn", "bias_correction"]})
    qtrace.calibrate(prepared, _data(0), progress=False)
    qtrace.save(prepared, "prepared.mge")
    qtrace.save(traced, "float.mge")
    (tmp_path / "images").mkdir()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save("images/a.png")
    said = []
    for more in ([], ["--float", "float.mge"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(["compare", "prepared.mge", "--data", "images", "--json", *more])
        captured = capsys.readouterr()
        assert caught.value.code == 0, captured.err
        said.append(json.loads(captured.out)["note"])
    assert said[0].startswith("bias_correction changed the weights")
    assert said[1] == ""


def test_the_command_prints_and_writes_a_page(written: Any) -> None:
    assert written.code == 0, written.err
    document = json.loads(written.out)
    assert document["sites"][0]["site"] == "x"
    assert document["samples"] == 12
    assert "page.html is written" in written.err
    assert "<svg" in written.page.read_text("utf-8")


def test_the_plot_has_the_sign_of_the_table(found: Comparison) -> None:
    from matplotlib.figure import Figure

    sites = [site for site in found.sites if site.sort == "activation"]
    sites[-1] = dataclasses.replace(sites[-1], inherited_db=max(site.own_db for site in sites) + 10)
    axes = Figure().add_subplot()
    report._draw_sites(axes, sites)
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    assert tops == pytest.approx([site.own_db for site in sites])
    (line,) = (line for line in axes.lines if line.get_label().startswith("SQNR"))
    assert list(line.get_ydata()) == pytest.approx([site.sqnr_db for site in sites])
    assert "higher is better" in axes.get_ylabel()
    assert min(axes.get_ylim()) == 0
    outside = [value for line in axes.lines for value in line.get_ydata() if value > max(axes.get_ylim())]
    assert not outside, "no point is cut off"
    assert not axes.yaxis_inverted()
    assert "\N{MINUS SIGN}" not in report._plot_waterfall(sites)


def _chromium() -> str:
    """The browser; where ``QTRACE_BROWSER`` is ``required``, its absence is a failure."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get("QTRACE_BROWSER") == "required":
        pytest.fail("there is no Chromium: install Debian's package chromium.")
    if found is None:
        pytest.skip("there is no Chromium")
    return found


def _browse(address: str, folder: Path, *options: str) -> str:
    """What headless Chromium prints of a page."""
    switches = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    )
    switches += " --disable-component-update --disable-quic --hide-scrollbars --window-size=1200,1400"
    command = [_chromium(), *switches.split(), f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


@pytest.fixture(scope="module")
def dom(written: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a browser makes of the page."""
    return _browse(written.page.as_uri(), tmp_path_factory.mktemp("browser"), "--dump-dom")


def test_a_browser_finds_sites_by_name(written: Any, dom: str, found: Comparison, tmp_path: Path) -> None:
    def rows(dom: str) -> dict[str, bool]:
        found = re.findall(r'<tr data-site="(\S+) [^"]*"( hidden="")?>', dom)
        assert found
        return {name: not hidden for name, hidden in found}

    whole = rows(dom)
    assert set(whole) == {site.site for site in found.sites}
    assert all(whole.values())
    dom = _browse(f"{written.page.as_uri()}#search=second", tmp_path, "--dump-dom")
    searched = rows(dom)
    assert {name for name, shown in searched.items() if shown} == {n for n in whole if "second" in n}
    assert 0 < sum(searched.values()) < len(searched)
    assert f"{sum(searched.values())} of {len(found.sites)} sites" in dom
    figures = re.findall(r'<figure class="(?:distribution|channels)" data-site="([^"]+)"( hidden="")?>', dom)
    assert figures
    assert all(("second" in name) != bool(hidden) for name, hidden in figures)


def test_a_browser_shows_labels_channels_and_the_verdict(written: Any, dom: str, found: Comparison) -> None:
    for site in found.sites:
        if site.sort == "activation":
            assert f"<title>{site.site}: SQNR " in dom, "a bar says its site under the pointer"
    assert '<pre id="findings">verdict   ' in dom
    document = json.loads(written.out)
    channels = {e["site"]: e["channels"] for e in document["diagnosis"]["sites"]}
    plots = re.findall(r'<figure class="channels" data-site="([^"]+)"[^>]*>(.*?)</figure>', dom, re.DOTALL)
    assert len(plots) == min(10, len(channels))
    for name, plot in plots:
        titles = re.findall(r"<title>channel (\d+): (\S+) to (\S+), noise", plot)
        assert [int(number) for number, *_ in titles] == list(range(len(channels[name]["low"])))
        for number, low, high in titles:
            assert float(low) == pytest.approx(channels[name]["low"][int(number)], rel=1e-3)
            assert float(high) == pytest.approx(channels[name]["high"][int(number)], rel=1e-3)


def test_a_browser_draws_the_plots_without_a_network(
    written: Any, dom: str, found: Comparison, tmp_path: Path
) -> None:
    page, picture = written.page, tmp_path / "page.png"
    text = page.read_text("utf-8")
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)([^"')\s>]+)""", text)
    assert not [link for link in links if not link.startswith(("#", "data:"))]
    _browse(page.as_uri(), tmp_path, f"--screenshot={picture}")
    plots = len(re.findall('<figure class="distribution" data-site="[^"]+"><svg', dom))
    assert plots == min(10, len(found.histograms))
    assert dom.count('<figure id="waterfall"><svg') == 1
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    for colour, least in ((0xE6, 0x9F, 0x00), 3000), ((0x1B, 0x3A, 0x5C), 3000):
        near = np.abs(pixels - np.array(colour)).max(axis=-1) < 8
        assert np.count_nonzero(near) > least, f"the page does not show {colour}"


@pytest.fixture(scope="module")
def both() -> tuple[TracedModule, TracedModule]:
    module = net(
        _forward,
        first=M.Conv2d(3, 4, 3, padding=1),
        second=M.Conv2d(4, 4, 3, padding=1),
        fc=M.Linear(8, 3),
    )
    traced = qtrace.trace(module, images(2, 3, 8, 8), check=False)
    config = {"backend": "generic", "weight": {"bits": 4}, "ptq": ["fuse_bn", "gptq", "bias_correction"]}
    prepared = qtrace.prepare(traced, config)
    qtrace.calibrate(prepared, _data(0), progress=False)
    return traced, prepared


class TestTheFloatNetwork:
    """Where algorithms have changed weights, the graph in float is not the network any more."""

    def test_compare_takes_outputs_of_the_float_model_as_reference(
        self, both: tuple[TracedModule, TracedModule]
    ) -> None:
        traced, prepared = both
        found = qtrace.compare(prepared, _data(1), float_model=traced)
        x = mge.Tensor(np.concatenate(_data(1)))
        assert found.outputs[0].sqnr_db == pytest.approx(
            sqnr_db(traced(x).numpy(), prepared(x).numpy()), abs=1e-3
        )
        assert not found.note

    def test_weights_have_the_error_of_what_was_written(
        self, both: tuple[TracedModule, TracedModule]
    ) -> None:
        traced, prepared = both
        found = qtrace.compare(prepared, _data(1), float_model=traced)
        site = _site(found, "first_weight")
        written, float_weight = prepared.first.weight.numpy(), traced.first.weight.numpy()
        assert site.sqnr_db == pytest.approx(sqnr_db(float_weight, written), abs=1e-3)

    def test_compare_notes_changed_weights_without_a_float_model(
        self, both: tuple[TracedModule, TracedModule]
    ) -> None:
        found = qtrace.compare(both[1], _data(1)[:1])
        assert _site(found, "first_weight").sqnr_db == float("inf")  # on its grid already
        assert "note: gptq, bias_correction changed the weights" in found.table()
        assert 'id="note"' in dataclasses.replace(found, sites=found.sites[:1]).html()

    def test_a_prepared_twin_and_a_converted_graph_do_as_well(
        self, both: tuple[TracedModule, TracedModule]
    ) -> None:
        traced, prepared = both
        twin = qtrace.prepare(traced, {"backend": "generic", "weight": {"bits": 4}})
        first, second = (
            qtrace.compare(model, _data(1)[:1], float_model=network)
            for model, network in ((prepared, twin), (qtrace.convert(prepared), traced))
        )
        assert first.outputs == second.outputs

    def test_another_network_is_refused(self, both: tuple[TracedModule, TracedModule]) -> None:
        other = qtrace.trace(M.Sequential(M.Conv2d(3, 4, 3), M.ReLU()), images(2, 3, 8, 8), check=False)
        with pytest.raises(GraphError, match="the float network lacks node"):
            qtrace.compare(both[1], _data(1), float_model=other)
