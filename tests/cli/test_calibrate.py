"""``qtrace calibrate``: the output folder, mistakes, interruptions, and a run that goes on."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import qtrace
from qtrace.config import Preprocess
from qtrace.errors import QtraceError
from qtrace.quantizing.reporting import FILES, VERDICT
from qtrace.storage import outputs
from tests.cli.fakes import calibrate_arguments


def test_writes_a_folder(run, here, fakes):
    result = run(
        *calibrate_arguments("--batch-size", 2, "--max-batches", 2, "--allow", "a:B", "--allow", "c:D")
    )
    assert result.code == 0
    assert result.out.splitlines() == [f"out/{name}" for name in FILES]
    assert sorted(os.listdir("out")) == sorted(FILES)
    assert not [name for name in here.names() if name.startswith(".")]
    assert fakes.calls["load"] == ("float.mge", ("a:B", "c:D"))
    assert fakes.calls["collect"] == ([(4, 4)], "auto")  # two batches of two run at once
    assert fakes.calls["calibrate"] == (1, True)  # the bar itself looks for a terminal
    assert Path("out/quantized.mge").read_text() == "float prepared converted"
    assert Path("out/explain.txt").read_text() == "a table\n"
    report = json.loads(Path("out/report.json").read_text())
    assert report["sites"] == [{"site": "x"}]
    assert (report["batches"], report["recipe"]) == (1, "good")
    assert Path("out").stat().st_mode & 0o777 == 0o777 & ~umask()


def test_json(run, here, fakes):
    result = run(*calibrate_arguments("--json", "--quiet"))
    document = json.loads(result.out)
    assert document["files"] == [f"out/{name}" for name in FILES]
    assert document["engine"] == {"name": "megengine", "reason": "as asked"}
    assert result.err == ""


def test_engine(run, here, fakes):
    result = run(*calibrate_arguments("--engine", "megengine"))
    assert fakes.calls["collect"][1] == "megengine"
    assert "engine megengine: as asked\n" in result.err
    assert run(*calibrate_arguments("--engine", "torch")).code == 2


def test_forced_progress(run, here, fakes):
    run(*calibrate_arguments("--progress"))
    assert fakes.calls["calibrate"][1] is True


def test_factory_is_traced_on_the_first_batch_and_prints_go_to_stderr(run, here, fakes):
    result = run(
        "calibrate",
        f"{here.module}:Net",
        "-d",
        f"{here.module}:loader",
        "-r",
        "good",
        "-o",
        "o",
        "--json",
    )
    assert result.code == 0
    assert json.loads(result.out)["batches"] == 1  # of six samples
    assert "loading" in result.err
    assert fakes.calls["trace"][0] == [(6, 4)]


def test_skipped_images_are_reported(run, here, fakes, monkeypatch):
    how = Preprocess(size=(3, 2, 2), mean=(0.0,) * 3, std=(1.0,) * 3)
    monkeypatch.setitem(
        vars(qtrace), "load_recipe", lambda name, allow_code: SimpleNamespace(preprocess=how, expect=None)
    )
    os.mkdir("images")
    Path("images/a.ppm").write_bytes(b"P6 2 2 255\n" + bytes(12))
    Path("images/b.png").write_bytes(b"nonsense")
    refused = run("calibrate", "float.mge", "-d", "images", "-r", "r", "-o", "out")
    assert refused.code == 2
    assert "images/b.png is not an image" in refused.err
    result = run("calibrate", "float.mge", "-d", "images", "-r", "r", "-o", "out", "--skip-bad", "--json")
    assert result.err.count("warning: left out: images/b.png is not an image") == 1
    assert json.loads(result.out)["skipped"] == ["images/b.png"]


def test_labels_are_reported(run, here, fakes):
    np.savez("d.npz", x=np.zeros((5, 4)), y=np.zeros(5))
    result = run("calibrate", "float.mge", "-d", "d.npz", "-r", "good", "-o", "out")
    assert "taken for labels and left out: y" in result.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"-d": "gone.npy"}, "There is no file gone.npy"),
        ({"-d": "float.mge"}, "'float.mge' cannot be read as data"),
        ({"-d": "text.npy"}, "is not an array in NumPy's .npy format"),
        ({"-d": "cut.npz"}, "is not a whole .npz file"),
        ({"-d": "objects.npy"}, "holds Python objects"),
        (
            {"-d": "images"},
            "give --size, --scale, --mean, --std and --channels, or a recipe with the key `preprocess`",
        ),
        ({"-d": "gone.module:loader"}, "there is no module 'gone'"),
        ({"-r": "bad"}, "error: there is no recipe 'bad': choose good."),
        ({"model": "gone.mge"}, "gone.mge cannot be read"),
        ({"-o": "float.mge"}, "float.mge is a file; name a folder"),
        ({"-o": "float.mge/out"}, "float.mge is a file, not a folder"),
        ({"-o": "/proc/out"}, "/proc/out cannot be written"),
        ({"-o": "images"}, "images exists and is not empty"),
    ],
)
def test_calibrate_refuses_wrong_arguments(run, here, fakes, change, message):
    Path("text.npy").write_text("1 2 3\n")
    np.savez("cut.npz", x=np.zeros((5, 4)))
    Path("cut.npz").write_bytes(Path("cut.npz").read_bytes()[:100])
    np.save("objects.npy", np.array([None, 1]), allow_pickle=True)
    os.mkdir("images")
    Path("images/notes.txt").write_text("")
    before = here.names()
    options = {"-d": "x.npy", "-r": "good", "-o": "out"} | change
    model = options.pop("model", "float.mge")
    result = run("calibrate", model, *(word for pair in options.items() for word in pair))
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert result.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.err
    assert here.names() == before


def test_failure_leaves_nothing(run, here, fakes):
    fakes.fail = QtraceError("batch 3 has\nNaN.")
    before = here.names()
    result = run(*calibrate_arguments())
    assert (result.code, result.err.splitlines()[-1]) == (2, "error: batch 3 has NaN.")
    assert here.names() == before


def test_internal_error_keeps_its_traceback(run, here, fakes):
    fakes.fail = ZeroDivisionError("inside")
    result = run(*calibrate_arguments())
    assert result.code == 70
    assert "ZeroDivisionError: inside" in result.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "/there/x"), "error: /there/x: No space left on device."),
        (OSError(24, "Too many open files"), "Too many open files."),
        (MemoryError(), "error: there is not enough memory; use smaller batches."),
    ],
)
def test_what_the_machine_lacks(run, here, fakes, error, said):
    before = here.names()
    fakes.fail = error
    result = run(*calibrate_arguments("-q"))
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert said in result.err
    assert here.names() == before


def test_interrupt(run, here, fakes):
    fakes.fail = KeyboardInterrupt()
    before = here.names()
    result = run(*calibrate_arguments())
    assert result.code == 130
    assert "interrupted" in result.err
    assert here.names() == before


def test_calibrate_refuses_a_folder_with_files_unless_forced(run, here, fakes):
    os.mkdir("out")
    assert run(*calibrate_arguments()).code == 0  # it was empty
    first = Path("out").stat().st_ino
    refused = run(*calibrate_arguments())
    assert refused.code == 2
    assert "--force" in refused.err
    fakes.fail = QtraceError("failed")
    assert run(*calibrate_arguments("--force")).code == 2
    assert Path("out").stat().st_ino == first
    assert sorted(os.listdir("out")) == sorted(FILES)
    fakes.fail = None
    assert run(*calibrate_arguments("--force")).code == 0
    assert Path("out").stat().st_ino != first
    assert not [name for name in here.names() if name.startswith(".")]


def test_force_does_not_remove_the_users_files(run, here, fakes):
    assert run(*calibrate_arguments()).code == 0
    Path("out/thesis.tex").write_text("years of work")
    result = run(*calibrate_arguments("--force"))
    assert result.code == 2
    assert "thesis.tex" in result.err
    assert Path("out/thesis.tex").exists()


def test_what_algorithms_did_is_reported_and_written(run, here):
    rng = np.random.default_rng(0)
    np.savez("d.npz", x=rng.normal(size=(4, 4)).astype("float32"))
    Path("lin.py").write_text(
        "import megengine.module as M\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = M.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
    )
    Path("r.yaml").write_text(
        "schema: qtrace/1\nptq: [fuse_bn, {adaround: {iterations: 3}}, bias_correction]\n"
    )
    done = run("calibrate", "lin:Net", "-d", "d.npz", "-r", "r.yaml", "-o", "out")
    assert done.code == 0, done.err
    assert "bias_correction: 1 changed, 0 left" in done.err
    assert "outputs: fc_out " in done.err
    reports = json.loads(Path("out/report.json").read_text())["ptq"]
    assert [r["algorithm"] for r in reports] == ["fuse_bn", "adaround", "bias_correction"]
    assert reports[1]["options"] == {"iterations": 3}
    assert "Post-training algorithms:" in Path("out/explain.txt").read_text()
    assert sorted(os.listdir("out")) == sorted((*FILES, VERDICT))


def test_an_interrupted_calibration_is_resumed_and_a_second_one_is_refused(run, here):
    Path("net_here.py").write_text(
        "import pathlib, numpy as np, megengine.module as M\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = M.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
        "def batches():\n"
        "    for i in range(5):\n"
        "        if i == 3 and pathlib.Path('bad').exists(): raise OSError('disk gone')\n"
        "        yield np.full((3, 4), i + 1, 'float32')\n"
    )
    assert run("trace", "net_here:Net", "--shape", "3x4", "-o", "net.mge").code == 0
    command = ("calibrate", "net.mge", "-d", "net_here:batches", "-r", "onnxruntime", "-o")
    assert run(*command, "whole").code == 0
    Path("bad").touch()
    stopped = run(*command, "out")
    assert stopped.code == 2
    assert "making batch 3 raised OSError: disk gone" in stopped.err
    assert "what was done is kept in out: go on with --resume" in stopped.err
    assert os.listdir("out") == [outputs.WORK]
    again = run(*command, "out")
    assert again.code == 2
    assert "go on with --resume, or begin anew with --force" in again.err
    Path("bad").unlink()
    Path("out", outputs.WORK, "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert "out was locked by process 1 on elsewhere" in run(*command, "out", "--resume").err
    Path("out", outputs.WORK, "lock").unlink()
    other = run(*command, "out", "--resume", "--batch-size", "2", "--engine", "onnxruntime")
    assert "belongs to another calibration" in other.err
    assert "go on with --resume" not in other.err
    resumed = run(*command, "out", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert "1 batches were observed before" in resumed.err
    assert json.loads(resumed.out)["batches"] == 2
    assert sorted(os.listdir("out")) == sorted((*FILES, VERDICT))
    assert Path("out/report.json").read_bytes() == Path("whole/report.json").read_bytes()
    assert not [name for name in here.names() if name.startswith(".")]


def umask():
    value = os.umask(0)
    os.umask(value)
    return value


NATIVE = """
import megengine.module as M
from tests.native_nets import trained

def factory():
    return trained(M.Sequential(M.QuantStub(), M.ConvBnRelu2d(3, 4, 3)))
"""


def test_a_model_of_megengines_own_quantization_keeps_its_scales(run, here, monkeypatch):
    import megengine as mge
    from megengine.traced_module import trace_module

    (here.path / f"native_{here.module}.py").write_text(NATIVE)
    monkeypatch.syspath_prepend(str(here.path))
    images = np.ones((2, 3, 6, 6), np.float32)
    np.save("images.npy", images)
    module = importlib.import_module(f"native_{here.module}")
    mge.save(trace_module(module.factory(), mge.Tensor(images)), "traced.mge")
    reports = []
    for model in (f"native_{here.module}:factory", "traced.mge"):
        result = run("calibrate", model, "-d", "images.npy", "-r", "onnxruntime", "-o", "o", "--force")
        assert result.code == 0, result.err
        reports.append(json.loads(Path("o/report.json").read_text())["sites"])
        assert "From the model's own quantization: 3 of 3 scales." in Path("o/explain.txt").read_text()
    origins = [{site["site"]: site["native"] for site in sites} for sites in reports]
    assert "the weight of 1 (qat.ConvBnRelu2d)" in origins[0].values()
    assert sorted(origins[0].values()) == sorted(origins[1].values())
    assert sorted(site["scale"] for site in reports[0]) == sorted(site["scale"] for site in reports[1])
