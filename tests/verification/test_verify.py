"""verify: real networks agree with onnxruntime, and planted faults in a file do not pass unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qtrace
from qtrace.errors import CalibrationError, ExportError, GraphError
from qtrace.graph.types import TracedModule
from qtrace.verification.report import VerifyReport
from tests.each import each_of
from tests.nets import MobileNetV2, ResNet, images, net, randomize


def _converted(module: M.Module, batches: list[np.ndarray]) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False))
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "size"),
    [
        (ResNet(16, (1, 1, 1, 1)), 32),
        (MobileNetV2(0.25, blocks=(1, 2, 2)), 32),
        pytest.param(ResNet(64, classes=100), 64, marks=pytest.mark.slow),
        pytest.param(MobileNetV2(1.0, 100), 64, marks=pytest.mark.slow),
    ],
)
def test_resnet18_and_mobilenetv2_in_onnxruntime(model: M.Module, size: int, tmp_path: Path) -> None:
    randomize(model)
    batches = [images(4, 3, size, size, seed=s) for s in range(4)]
    converted = _converted(model, batches[:3])
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches[3:])
    assert report.worst_lsb() <= 1
    assert report.equal_share() >= 0.999
    assert report.sqnr_db("reference") >= 35
    assert report.passed, report.table()
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


def _net() -> M.Module:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = F.relu(self.a(x))
        return self.fc(F.flatten(F.max_pool2d(F.relu(self.b(y) + y), 2), 1))

    return net(forward, a=M.Conv2d(4, 4, 3, padding=1), b=M.Conv2d(4, 4, 3, padding=1), fc=M.Linear(64, 5))


def _edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def _initializer(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(value), value.dtype), name))


FAULTS = {
    "bias scale off by 2": lambda m: _initializer(m, "a_bias_scale", lambda v: v * 2),
    "weights shuffled": lambda m: _initializer(m, "a_weight_int", lambda v: v[::-1]),
    "zero point dropped": lambda m: _initializer(m, "x_zero_point", lambda v: v * 0),
    "weight scales swapped": lambda m: _initializer(m, "b_weight_scale", lambda v: v[::-1]),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault: str, tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8, seed=s) for s in range(2)]
    converted = _converted(_net(), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    assert qtrace.verify(path, converted, batches).passed
    _edit(path, FAULTS[fault])
    report = qtrace.verify(path, converted, batches)
    assert not report.passed
    assert "FAILED" in report.table()
    wrong = [name for name, tally in report.sites["op_by_op"].items() if tally.worst > 1]
    assert wrong, report.table()


def test_the_first_wrong_site_is_the_faulty_one(tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8, seed=s) for s in range(2)]
    converted = _converted(_net(), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    _edit(path, FAULTS["weights shuffled"])
    report = qtrace.verify(path, converted, batches)
    wrong = [name for name, tally in report.sites["op_by_op"].items() if tally.worst > 1]
    # Op by op, each site is computed from the runtime's own inputs: later sites are not to blame.
    assert wrong == ["relu_out_q"]


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8)]
    converted = _converted(_net(), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    other = _converted(net(lambda self, x: self.q(x), q=M.Conv2d(4, 4, 1)), batches)
    with pytest.raises(ExportError, match="not an export of this module"):
        qtrace.verify(path, other, batches)
    with pytest.raises(CalibrationError, match="no batches"):
        qtrace.verify(path, converted, [])
    with pytest.raises(
        CalibrationError, match=r"batch 1 gives 2 inputs.*takes 1 input, x of shape \(4, 4, 8, 8\)"
    ):
        qtrace.verify(path, converted, [batches[0], (batches[0], np.zeros(4, "int32"))])
    with pytest.raises(
        CalibrationError, match=r"batch 0 gives 1 input of shape \(4, 3, 8, 8\), which does not fit"
    ):
        qtrace.verify(path, converted, [batches[0][:, :3]])
    with pytest.raises(ExportError, match="does not exist"):
        qtrace.verify(tmp_path / "none.onnx", converted, batches)
    (tmp_path / "text.onnx").write_text("this is not a model")
    with pytest.raises(ExportError, match="text.onnx"):
        qtrace.verify(tmp_path / "text.onnx", converted, batches)
    with pytest.raises(ExportError, match="it comes from a quantized module or one with other weights"):
        qtrace.verify(path, qtrace.trace(_net(), batches[0], check=False), batches)
    with pytest.raises(GraphError, match="not a converted"):
        qtrace.verify(path, _net(), batches)


def test_runs_in_eval_mode_and_gives_the_flags_back(tmp_path: Path) -> None:
    batches = [images(4, 4, 8, 8)]
    converted = _converted(
        net(lambda self, x: self.bn(F.exp(self.c(x))), c=M.Conv2d(4, 4, 1), bn=M.BatchNorm2d(4)), batches
    )
    path = qtrace.export(converted, tmp_path / "m.onnx")
    converted.train()
    assert qtrace.verify(path, converted, batches).passed
    assert all(m.training for m in converted.modules())


def test_integer_kernels_are_counted_and_the_others_named(tmp_path: Path) -> None:
    batches = [images(2, 4, 8, 8)]
    module = net(
        lambda self, x: F.mean(self.up(F.relu(self.a(x))), axis=(2, 3)),
        a=M.Conv2d(4, 4, 3, padding=1),
        up=M.ConvTranspose2d(4, 4, 2, 2),
    )
    converted = _converted(module, batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches)
    assert report.kernels is not None
    assert report.kernels.integer == ("a_out",)
    assert [(op, why.rpartition(" ")[2]) for _, op, why in report.kernels.floats] == [
        ("ConvTranspose", "ConvTranspose"),
        ("ReduceMean", "ReduceMean"),
    ]
    assert "integer kernels: 1 of 3 ops of the file that read integers; the others" in report.summary()
    assert report.to_dict()["kernels"]["integer"] == ("a_out",)
    assert qtrace.verify(path, converted, batches, optimized=False).kernels is None


REASONS: dict[str, Callable[[M.Module, mge.Tensor], mge.Tensor]] = {
    "its result is not rounded: Mul reads it in float": lambda self, x: F.silu(self.a(x)),
    "it reads the float result of Sigmoid, not integers": lambda self, x: F.silu(self.a(x)),
    "its result is clipped to fewer values than its integers can hold, and onnxruntime fuses no Clip": (
        lambda self, x: F.clip(self.a(x), -0.01, 0.01) + 3.0 * x
    ),
    "onnxruntime has an integer kernel for this op, but not with these attributes, types or shapes": (
        lambda self, x: F.max_pool2d(F.vision.interpolate(self.a(x), size=(5, 5), mode="bilinear"), 1)
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("reason", REASONS)
def test_what_keeps_an_op_from_an_integer_kernel_is_said(reason: str, tmp_path: Path) -> None:
    batches = [images(2, 4, 8, 8)]
    converted = _converted(net(REASONS[reason], a=M.Conv2d(4, 4, 3, padding=1)), batches)
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches)
    assert reason in report.summary()


def test_ordinary_networks_run_on_integer_kernels(tmp_path: Path) -> None:
    for model in (ResNet(8, (1, 1)), MobileNetV2(0.25, blocks=(1, 2, 1))):
        batches = [images(2, 3, 32, 32)]
        converted = _converted(randomize(model), batches)
        path = qtrace.export(converted, tmp_path / "m.onnx")
        kernels = qtrace.verify(path, converted, batches).kernels
        assert kernels is not None
        assert len(kernels.integer) >= 0.9 * (len(kernels.integer) + len(kernels.floats))


def _float_heads() -> M.Module:
    """Two outputs in float, one a thousand times as large as the other."""

    def forward(self: M.Module, x: mge.Tensor) -> tuple[mge.Tensor, mge.Tensor]:
        y = F.relu(self.a(x))
        return self.scores(y), self.boxes(y) * 1000

    parts = {name: M.Conv2d(4, 4, 3, padding=1) for name in ("a", "scores", "boxes")}
    return net(forward, **parts)


@pytest.fixture
def heads(tmp_path: Path) -> tuple[TracedModule, Path, list[np.ndarray]]:
    batches = [images(4, 4, 8, 8, seed=s) for s in range(2)]
    recipe = {"rules": [{"match": {"name": "scores"}, "quantize_output": False}]}
    prepared = qtrace.prepare(qtrace.trace(_float_heads(), batches[0], check=False), qtrace.QConfig(**recipe))
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    path = qtrace.export(converted, tmp_path / "m.onnx")
    report = qtrace.verify(path, converted, batches)
    assert report.passed, report.table()
    assert "scores_out" not in {n.removesuffix("_q") for n in report.sites["op_by_op"]}
    return converted, path, batches


def test_a_fault_behind_the_last_integers_fails_beside_larger_outputs(
    heads: tuple[TracedModule, Path, list[np.ndarray]],
) -> None:
    converted, path, batches = heads
    _edit(path, lambda m: _initializer(m, "scores_weight_scale", lambda v: v * 2))
    report = qtrace.verify(path, converted, batches)
    assert report.worst_lsb() == 0
    assert report.weakest_output() == ("scores_out", pytest.approx(0, abs=6))
    assert report.sqnr_db() == report.weakest_output()[1]
    assert not report.passed
    assert "output scores_out, from the runtime's own integers, has" in report.summary()
    found = qtrace.bisect(path, converted, batches)
    assert found is not None
    assert (found.site, found.op, found.path, found.stage) == ("scores_out", "F.conv2d", "scores", "plain")
    assert found.sqnr_db == pytest.approx(report.outputs["op_by_op"]["scores_out"].sqnr_db, abs=3)
    assert f"{found.differing} of {found.values} floats differ" in found.table()
    assert json.loads(json.dumps(found.to_dict()))["histogram"] == {}


@pytest.mark.quick(1)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_output_that_is_not_finite_fails(
    value: float, heads: tuple[TracedModule, Path, list[np.ndarray]]
) -> None:
    converted, path, batches = heads
    _edit(path, lambda m: _initializer(m, "scores_bias_scale", lambda v: np.full_like(v, value)))
    report = qtrace.verify(path, converted, batches)
    assert not report.passed
    assert report.sqnr_db() == -np.inf
    assert report.to_dict()["sqnr_db"]["reference"] is None
    found = qtrace.bisect(path, converted, batches)
    assert found is not None
    assert found.site == "scores_out"


def test_outputs_of_another_number_or_shape_are_refused(
    heads: tuple[TracedModule, Path, list[np.ndarray]],
) -> None:
    converted, path, batches = heads
    whole = path.read_bytes()
    _edit(path, lambda m: m.graph.output.pop())
    with pytest.raises(ExportError, match="number of outputs is 1, but 2 in the graph"):
        qtrace.verify(path, converted, batches)

    def widen(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if "scores_out" in n.output)
        node.output[0] = "planted"
        model.graph.node.append(onnx.helper.make_node("Concat", ["planted"] * 2, ["scores_out"], axis=1))
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 8

    path.write_bytes(whole)
    _edit(path, widen)
    for check in (qtrace.verify, qtrace.bisect):
        with pytest.raises(ExportError, match=r"output scores_out has shape \(4, 8, 8, 8\) in the runtime"):
            check(path, converted, batches)


def test_equal_infinities_are_no_noise() -> None:
    report = VerifyReport("m.onnx", 1, 0.999, 35.0)
    masked = np.array([[1.0, -np.inf, np.nan]])
    report.add_outputs("reference", ["y"], [masked], [masked.copy()])
    assert report.sqnr_db() == np.inf
    assert report.passed
    report.add_outputs("reference", ["y"], [masked], [-masked])
    assert report.sqnr_db() == -np.inf


def _report(
    outputs: dict[str, float], step: int = 1, differing: int = 1, limit: float | None = None
) -> VerifyReport:
    """A report on a file whose ops differ by ``step`` in some of 10,000 integers.

    Args:
        outputs: mode -> the ratio of its outputs in dB.
        step: by how much the integers differ.
        differing: how many of them do.
        limit: the smallest ratio allowed from end to end.
    """
    report = VerifyReport("m.onnx", 1, 0.999, 35.0, end_to_end_db=limit)
    mine = np.zeros(10_000, np.int64)
    theirs = mine.copy()
    theirs[:differing] = step
    report.add("op_by_op", "a_q", mine, theirs)
    signal = np.ones((100, 10))
    for mode, ratio in outputs.items():
        report.add_outputs(mode, ["y"], [signal], [signal * (1 + 10 ** (-ratio / 20))])
    return report


@each_of(
    ("values", "differing", "min_equal", "passed"),
    [
        (504, 1, 0.999, True),
        (504, 5, 0.999, False),
        (504, 1, 1.0, False),
        (50_000, 60, 0.999, True),
        (50_000, 80, 0.999, False),
    ],
)
def test_a_share_fails_where_chance_does_not_explain_it(
    values: int, differing: int, min_equal: float, passed: bool
) -> None:
    report = VerifyReport("m.onnx", 1, min_equal, 35.0)
    runtime = np.zeros(values, np.int8)
    runtime[:differing] = 1
    report.add("op_by_op", "a_q", np.zeros(values, np.int8), runtime)
    assert report.passed is passed, report.summary()


def test_bisect_names_no_op_for_one_tie(tmp_path: Path) -> None:
    batch = images(2, 3, 6, 6)
    converted = _converted(randomize(net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 4, 3))), [batch])
    path = qtrace.export(converted, tmp_path / "m.onnx")
    _edit(path, lambda m: _initializer(m, "conv_bias_int", lambda v: v + np.array([8, 0, 0, 0])))
    report = qtrace.verify(path, converted, [batch])
    differing = sum(report.histogram().values())
    assert (differing, report.worst_lsb(), report.passed) == (1, 1, True), report.table()
    assert qtrace.bisect(path, converted, [batch]) is None


def test_a_good_file_below_a_limit_of_ones_own_is_reported_that_no_op_is_wrong() -> None:
    report = _report({"reference": 34.7, "deployed": 33.9})
    assert report.passed
    report.end_to_end_db = 35.0
    text = report.summary()
    assert not report.passed
    assert "outputs (reference) have 34.7 dB, 35.0 dB needed" in text
    for part in (
        "no op is wrong: no op differs from the graph by more than 1 LSB",
        "later layers amplify them",
        "what to do: measure the accuracy of the task",
        "call qtrace.verify without min_sqnr_db",
    ):
        assert part in text
    assert "more samples" not in text  # a limit of one's own is no comparison by chance
    assert report.to_dict()["remarks"] == text.splitlines()[-3:]


@each_of(
    ("report", "said", "not_said"),
    [
        (
            _report({"reference": 50.0, "deployed": 20.0}, limit=35.0),
            "only the optimized form falls short",
            "amplify",
        ),
        (_report({"reference": 20.0}, differing=500), "bisect names the first op", "no op is wrong"),
        (_report({"reference": 20.0}, step=2), "", "no op"),
        (_report({"reference": 50.0, "deployed": 50.0}), "passed", "no op"),
    ],
)
def test_the_verdict_says_no_more_than_what_is_known(report: VerifyReport, said: str, not_said: str) -> None:
    assert said in report.summary()
    assert not_said not in report.summary()


def test_data_of_another_size_than_the_file_fixes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    def forward(self: M.Module, x: mge.Tensor) -> mge.Tensor:
        y = self.conv(x)
        return F.reshape(y, (self.samples, -1)) if self.samples else F.mean(y, (2, 3))

    for samples in (0, 2):
        module = net(forward, conv=M.Conv2d(3, 4, 3))
        module.samples = samples
        batches = [images(2, 3, 8, 8)]
        converted = _converted(module, batches)
        path = qtrace.export(converted, tmp_path / "m.onnx")
        assert qtrace.verify(path, converted, batches).passed
        with pytest.raises(
            CalibrationError, match=r"fixes it to \(\?, 3, 8, 8\), as it was traced: give data"
        ):
            qtrace.verify(path, converted, [*batches, images(2, 3, 12, 12)])
        if samples:
            for runtime in ("onnxruntime", "openvino"):
                with pytest.raises(ExportError, match="fixes its first axis to 2, .* give batches of 2"):
                    qtrace.verify(path, converted, [images(3, 3, 8, 8)], runtime=runtime)
                assert qtrace.verify(path, converted, [images(4, 3, 8, 8)], runtime=runtime).passed
        else:
            assert qtrace.verify(path, converted, [images(5, 3, 8, 8)]).passed
