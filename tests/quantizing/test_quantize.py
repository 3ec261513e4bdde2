"""The one call: from a network and data to a verified file, or to a sentence and no file."""

from __future__ import annotations

import logging
from pathlib import Path

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Tensor
from megengine.autodiff import Function

import qtrace
from qtrace.errors import CalibrationError, ConfigError, DataError, ExportError, GraphError, QtraceError
from qtrace.preparation.model import QuantizedModel, fake_quants
from qtrace.quantizing import calibrator, judging
from tests.nets import images, net

DATA = images(16, 3, 8, 8)


def _module() -> M.Module:
    return net(lambda self, x: self.b(F.relu(self.a(x))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float network as an ONNX file."""
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    qtrace.export(qtrace.trace(_module(), DATA[:2], check=False), path)
    return path


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "target", "backend"),
    [
        ("a.onnx", None, "onnxruntime"),
        ("a.tflite", None, "tflite"),
        ("a.param", None, "ncnn"),
        ("a.onnx", "openvino", "openvino"),
    ],
)
def test_a_module_becomes_a_verified_file_of_each_format(here, name, target, backend) -> None:
    result = qtrace.quantize(_module(), DATA, name, target=target, progress=False)
    assert result.path == Path(name)
    assert Path(name).is_file()
    assert (result.verdict.samples, result.verdict.measured_on) == (4, "held-back samples")
    assert "Only 4 samples are new to the calibration" in str(result.verdict)
    assert result.verify.passed
    assert QuantizedModel(result.prepared).annotation.backend == backend
    assert len(repr(result).splitlines()) <= 20
    assert not [file for file in here.iterdir() if file.name.startswith(".")]


def test_an_onnx_file_a_saved_one_and_a_traced_module_give_the_same_scales(here, onnx_file) -> None:
    traced = qtrace.from_onnx(onnx_file)
    qtrace.save(traced, "net.mge")
    written = []
    for source in (onnx_file, "net.mge", traced):
        result = qtrace.quantize(source, DATA, "out.onnx", verify=False, progress=False)
        assert result.verify is None
        written.append(result.prepared)
    scales = [[float(q.qparams().scale.mean()) for q in fake_quants(model)] for model in written]
    assert scales[0] == scales[1] == scales[2]


class _Loader:
    """Batches with labels, as a DataLoader gives them."""

    def __iter__(self):
        for start in range(0, 16, 4):
            yield DATA[start : start + 4], np.arange(4)


def test_labels_beside_the_inputs_of_a_file_are_left_out(here, onnx_file, caplog) -> None:
    for data, label in ((_Loader(), "value 1"), ([{"x": DATA, "y": np.zeros(16, np.int64)}], "y")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "qtrace"):
            qtrace.quantize(onnx_file, data, "out.onnx", verify=False, measure=False, progress=False)
        assert [line.endswith(label) for line in caplog.messages if "taken for labels" in line] == [True]


def _generator():
    yield from (DATA[start : start + 4] for start in range(0, 16, 4))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("data", "labels"),
    [
        ([DATA[:8], DATA[8:]], ""),
        (_generator, ""),
        (_Loader(), "value 1"),
        ([{"x": DATA[:8], "y": np.zeros(8, np.int64)}], "y"),
        ({"x": DATA}, ""),
    ],
)
def test_data_in_every_form_and_labels_are_said_once(here, caplog, data, labels) -> None:
    with caplog.at_level(logging.WARNING, "qtrace"):
        qtrace.quantize(_module(), data, "out.onnx", verify=False, progress=False)
    said = [line for line in caplog.messages if "taken for labels" in line]
    assert len(said) == bool(labels)
    assert all(line.endswith(labels) for line in said)


class _Masked(M.Module):
    """Takes a mask and more that may be left out, as BERT does; ``labels`` are for training."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = M.Linear(8, 8)

    def forward(self, x, scale=None, mask=None, labels=None):
        y = self.fc(x)
        y = y if scale is None else y * scale
        y = y if mask is None else y * F.expand_dims(mask.astype("float32"), -1)
        return y if labels is None else (y, F.sum(y * F.expand_dims(labels.astype("float32"), -1)))


def test_masks_that_may_be_left_out_are_inputs_and_labels_are_not(here, caplog) -> None:
    rng = np.random.default_rng(3)
    mask = (rng.random((16, 5)) > 0.4).astype("int32")
    data = {"x": rng.normal(size=(16, 5, 8)).astype("float32"), "mask": mask, "labels": 1 - mask}
    with caplog.at_level(logging.WARNING, "qtrace"):
        result = qtrace.quantize(_Masked(), data, "out.onnx", measure=False, progress=False)
    assert [line for line in caplog.messages if "taken for labels" in line] == [
        "the arrays: taken for labels and left out of each batch: labels"
    ]
    assert result.verify.passed
    import onnxruntime

    session = onnxruntime.InferenceSession("out.onnx")
    assert [i.name for i in session.get_inputs()] == ["x", "mask"]
    (y,) = session.run(None, {"x": data["x"], "mask": mask})
    assert np.abs(y[mask == 0]).max() == 0
    assert np.abs(y[mask == 1]).max() > 0.1


class _Rounds(Function):
    def forward(self, x):
        return F.round(x * 8) / 8

    def backward(self, grad):
        return grad


def test_a_module_with_a_gradient_of_its_own_needs_none_for_a_file(here) -> None:
    module = net(
        lambda self, x: F.relu(self.b(_Rounds()(self.a(x)))), a=M.Conv2d(3, 8, 3), b=M.Conv2d(8, 4, 1)
    )
    assert qtrace.quantize(module, DATA, "out.onnx", measure=False, progress=False).verify.passed


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": "tflite"}, ConfigError, "out.onnx is no file for tflite: name it out.tflite"),
        ({"out": "out.bin"}, ConfigError, "out.bin has the suffix .bin, which no target takes: name"),
        ({"out": "out.ONNX"}, ExportError, "a suffix in lower case: name it out.onnx"),
        ({"out": "."}, ConfigError, "is a folder: name a file to write, such as net.onnx"),
        ({"out": "out.tflite", "target": "onnxruntime"}, ConfigError, "is no file for onnxruntime"),
        ({"target": "nonsense"}, ConfigError, "nonsense"),
        ({"target": "ncnn", "recipe": "backend/tflite"}, ConfigError, "the recipe is for tflite"),
        ({"max_drop": 0.1}, ConfigError, "give metric=, too"),
        ({"metric": "accuracy"}, ConfigError, "metric= is 'accuracy': give a function"),
        ({"data": iter([DATA])}, DataError, "can be iterated only once"),
        ({"data": 3}, DataError, "neither iterable nor a function"),
        ({"data": "gone.npz"}, DataError, "There is no file gone.npz"),
        ({"data": DATA[:0]}, DataError, "above 0"),
        ({"data": [(DATA, DATA)]}, QtraceError, "cannot be called with 2 example"),
        ({"data": DATA * 0}, CalibrationError, "as the input is 0 everywhere in the array: look at what"),
        ({"data": [{"x": DATA * 0 + 3}] * 2}, CalibrationError, "the input is 3 everywhere in the data"),
        ({"source": 3}, GraphError, "type int: give the path"),
        ({"source": "net.pth"}, GraphError, "net.pth is no network"),
        ({"source": "gone.onnx"}, QtraceError, "gone.onnx"),
        ({"at_least": 90.0}, CalibrationError, "nothing was written, as a limit does not hold"),
    ],
)
def test_mistakes_are_a_sentence_and_leave_nothing(here, change, error, message) -> None:
    options = {"source": _module(), "data": DATA, "out": "out.onnx", "progress": False, **change}
    with pytest.raises(error, match=message):
        qtrace.quantize(options.pop("source"), options.pop("data"), options.pop("out"), **options)
    assert list(here.iterdir()) == []


def test_constant_data_are_written_if_asked_for_and_one_constant_input_of_several_always(here) -> None:
    options = {"verify": False, "measure": False, "progress": False}
    qtrace.quantize(_module(), DATA * 0, "a.onnx", allow_broken=True, **options)
    module = net(lambda self, x, state: F.relu(self.a(x)) + state, a=M.Conv2d(3, 8, 3))
    state = np.zeros((16, 8, 6, 6), np.float32)
    qtrace.quantize(module, [(DATA, state)], "b.onnx", **options)
    assert sorted(file.name for file in here.iterdir()) == ["a.onnx", "b.onnx"]


def test_arrays_of_other_names_are_listed_and_batches_of_several_sizes_have_a_way(here, onnx_file) -> None:
    np.savez("several.npz", **{f"line{width}": DATA[:1, :, :, :width] for width in range(3, 9)})
    for data, names in (("several.npz", "line3, .*line7, ..."), ({"image": DATA}, "image")):
        text = f"lack input 'x' of .*net.onnx and have only the arrays {names}: name one of them so"
        with pytest.raises(DataError, match=text):
            qtrace.quantize(onnx_file, data, "out.onnx", progress=False)
    Path("several.npz").unlink()


def test_samples_in_the_place_of_batches_are_a_sentence(here, onnx_file) -> None:
    text = r"gives 'x' of shape \(3, 8, 8\), but .*net.onnx declares the axes \(.*, 3, 8, 8\): .*numpy.stack"
    with pytest.raises(DataError, match=text):
        qtrace.quantize(onnx_file, list(DATA), "out.onnx", progress=False)


@pytest.mark.parametrize("shape", [(8, 4, 8, 8), (8, 3, 8)])
def test_other_data_on_which_the_network_fails_are_refused_before_the_calibration(
    here, shape, monkeypatch
) -> None:
    """Without a verification the file was written, with a warning that there is no verdict."""
    monkeypatch.setattr(calibrator, "calibrate", lambda *_, **__: pytest.fail("it calibrates"))
    with pytest.raises(CalibrationError, match=r"does not fit the model: it was traced with x of shape"):
        qtrace.quantize(
            _module(),
            DATA,
            "out.onnx",
            evaluation=images(*shape),
            verify=False,
            measure=False,
            progress=False,
        )
    assert not Path("out.onnx").exists()


_PREPROCESS = {"size": [3, 8, 8], "mean": [120, 110, 99], "std": [50, 60, 70]}
_PIXELS = {"backend": "onnxruntime", "preprocess": _PREPROCESS}


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("form", [lambda p: p, lambda p: {"x": p}, lambda p: [(p,)], lambda p: lambda: [p]])
def test_pixels_in_memory_are_what_pixels_in_a_file_are(here, form, layout, caplog) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), dtype=np.uint8)
    recipe = {**_PIXELS, "preprocess": {**_PREPROCESS, "layout": layout}}
    stored = pixels if layout == "nchw" else np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    np.save("pixels.npy", stored)
    found = []
    for data in ("pixels.npy", form(stored)):
        options = {"recipe": recipe, "verify": False, "measure": False, "progress": False}
        options |= {"evaluation": "pixels.npy"}  # so that nothing is held back
        with caplog.at_level(logging.INFO, "qtrace"):
            result = qtrace.quantize(_module(), data, "out.onnx", **options)
        found.append([float(q.qparams().scale.mean()) for q in fake_quants(result.prepared)])
    assert found[0] == found[1]
    assert len([line for line in caplog.messages if ": inputs are " in line]) == 2
    assert not [line for line in caplog.messages if "raw pixels" in line]


def test_pixels_in_memory_with_other_axes_are_a_sentence(here) -> None:
    pixels = np.zeros((16, 8, 8, 3), np.uint8)
    with pytest.raises(
        DataError, match="the array, batch 0 holds uint8 pixels of shape .* give --layout nhwc"
    ):
        qtrace.quantize(_module(), pixels, "out.onnx", recipe=_PIXELS, progress=False)


def test_a_prepared_network_is_refused(here) -> None:
    prepared = qtrace.prepare(qtrace.trace(_module(), DATA[:2], check=False))
    with pytest.raises(GraphError, match="quantized already"):
        qtrace.quantize(prepared, DATA, "out.onnx", progress=False)


def test_a_broken_graph_is_written_only_if_asked_for(here) -> None:
    module = _module()
    module.b.weight[:1] *= 4000.0
    recipe = {"backend": "tflite", "rules": [{"match": {"name": "b"}, "quantize": True}]}
    with pytest.raises(CalibrationError, match=r"nothing was written.*broken.*allow_broken="):
        qtrace.quantize(module, DATA, "out.tflite", recipe=recipe, progress=False)
    assert list(here.iterdir()) == []
    result = qtrace.quantize(
        module, DATA, "out.tflite", recipe=recipe, allow_broken=True, verify=False, progress=False
    )
    assert result.verdict.word == "broken"
    assert Path("out.tflite").is_file()


class _Failed:
    passed = False

    def table(self) -> str:
        return "the table"


def test_a_file_that_fails_its_verification_is_not_left_and_the_old_one_stays(here, monkeypatch) -> None:
    qtrace.quantize(_module(), DATA, "out.onnx", verify=False, progress=False)
    before = Path("out.onnx").read_bytes()
    monkeypatch.setattr(judging, "verify_file", lambda *args, **options: _Failed())
    with pytest.raises(ExportError, match="out.onnx was not written.*\n.*the table"):
        qtrace.quantize(_module(), DATA[:8], "out.onnx", progress=False)
    assert Path("out.onnx").read_bytes() == before
    assert [file.name for file in here.iterdir()] == ["out.onnx"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("count", "size", "most", "verified"),
    [(64, 1, None, 2), (400, 1, None, 12), (9, 2, None, 2), (9, 2, 400, 2)],
)
def test_a_file_is_verified_on_a_quarter_of_the_calibration(
    here, monkeypatch, count, size, most, verified
) -> None:
    """A fault that few values show, such as sums that saturate, needs more data than the verdict does."""
    given = []

    def verify(path, converted, batches, **options):
        given.extend(batches)
        return _Failed()

    monkeypatch.setattr(judging, "verify_file", verify)
    if most is not None:
        monkeypatch.setattr(judging, "_VERIFIED_VALUES", most)
    batches = [images(size, 3, 8, 8, seed=i) for i in range(count)]
    with pytest.raises(ExportError):
        qtrace.quantize(_module(), batches, "out.onnx", progress=False)
    arrays = [array for (array,) in given]
    assert len(arrays) == verified
    assert len({array.tobytes() for array in arrays}) == verified


def test_batches_of_large_images_are_cut_before_they_are_verified(here, monkeypatch) -> None:
    given = []

    def verify(path, converted, batches, **options):
        given.extend(batches)
        return _Failed()

    monkeypatch.setattr(judging, "verify_file", verify)
    for most, samples in ((6 * 3 * 8 * 8, {3}), (1, {2}), (10**9, {4, 8})):
        given.clear()
        monkeypatch.setattr(judging, "_VERIFIED_VALUES", most)
        with pytest.raises(ExportError):
            qtrace.quantize(_module(), DATA[:16], "out.onnx", batch_size=4, progress=False)
        assert {len(array) for (array,) in given} == samples


def test_max_drop_raises_layers_until_the_metric_holds_or_says_that_it_cannot(here) -> None:
    layers = {"a": M.Conv2d(3, 8, 3), "b": M.Conv2d(8, 8, 1), "c": M.Conv2d(8, 4, 1)}
    module = net(lambda self, x: self.c(F.relu(self.b(F.relu(self.a(x))))), **layers)
    traced = qtrace.trace(module, DATA[:2], check=False)
    reference = traced(Tensor(DATA[:4])).numpy()

    def metric(model) -> float:
        return 1.0 - float(np.abs(model(Tensor(DATA[:4])).numpy() - reference).mean())

    recipe = {"backend": "onnxruntime", "weight": {"bits": 4}}
    plain = qtrace.quantize(traced, DATA, "a.onnx", recipe=recipe, metric=metric, **_QUICK)
    lost = plain.verdict.float_metric - plain.verdict.metric
    options = {"recipe": recipe, "metric": metric, **_QUICK}
    result = qtrace.quantize(traced, DATA, "b.onnx", max_drop=0.9 * lost, **options)
    assert 0 < len(result.raised) < 3
    assert result.verdict.float_metric - result.verdict.metric <= 0.9 * lost
    assert "in float to keep the metric" in repr(result)
    with pytest.raises(CalibrationError, match="only with every layer in float: nothing was written"):
        qtrace.quantize(traced, DATA, "c.onnx", max_drop=1e-9, **options)
    assert not Path("c.onnx").exists()


_QUICK = {"verify": False, "progress": False, "allow_broken": True}
