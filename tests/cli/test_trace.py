"""``qtrace trace``: the first batch or shapes, and factories that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def test_by_shape(run, here, fakes):
    result = run(
        "trace", f"{here.module}:factory", "--shape", "2x4", "--shape", "1", "-o", "net.mge", "--no-check"
    )
    assert (result.code, result.out) == (0, "net.mge\n")
    assert "a print of the user's" in result.err
    assert fakes.calls["trace"] == ([(2, 4), (1,)], False)
    assert Path("net.mge").read_text() == "traced"


def test_by_data(run, here, fakes):
    assert run("trace", f"{here.module}:Net", "-d", "x.npy", "-o", "net.mge").code == 0
    assert fakes.calls["trace"] == ([(1, 4)], True)


def test_by_named_inputs(run, here, fakes):
    np.savez("d.npz", mask=np.zeros((2, 4)), x=np.zeros((2, 3)))
    result = run("trace", f"{here.module}:Net", "-d", "d.npz", "-o", "net.mge")
    assert result.code == 2
    assert "Net.forward takes x; name the arrays after" in result.err


def test_named_inputs_go_by_the_names_of_forward(run, here, fakes):
    np.savez("d.npz", b=np.zeros((2, 4)), a=np.zeros((2, 3)))
    assert run("trace", f"{here.module}:Pair", "-d", "d.npz", "-o", "net.mge").code == 0
    assert fakes.calls["trace"] == ([(1, 3), (1, 4)], True)


def test_replaces_an_older_file(run, here, fakes):
    Path("net.mge").write_text("old")
    assert run("trace", f"{here.module}:Net", "--shape", "2x4", "-o", "net.mge", "--force").code == 0
    assert Path("net.mge").read_text() == "traced"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("broken", r"broken: calling it without arguments raised KeyError: 'weights' at "),
        ("two", "is a int; name a function"),
        ("loader", "returned generator, not a megengine.module.Module"),
        ("nothing", "lacks 'nothing'"),
    ],
)
def test_no_factory(run, here, fakes, attribute, message):
    before = here.names()
    result = run("trace", f"{here.module}:{attribute}", "--shape", "2x4", "-o", "net.mge")
    assert result.code == 2
    assert result.out == ""
    assert message in result.err
    assert result.err.count("\n") == 1
    assert [name for name in here.names() if name != "__pycache__"] == before


def test_debug_shows_the_traceback_of_the_users_code(run, here, fakes):
    result = run("--debug", "trace", f"{here.module}:broken", "--shape", "2x4", "-o", "net.mge")
    assert result.code == 2
    assert 'return {}["weights"]' in result.err
    assert "Traceback" not in run("trace", f"{here.module}:broken", "--shape", "2x4", "-o", "net.mge").err


@pytest.mark.parametrize("args", [[], ["--shape", "1", "-d", "x.npy"]])
def test_shape_or_data(run, here, fakes, args):
    result = run("trace", f"{here.module}:Net", "-o", "net.mge", *args)
    assert result.code == 2
    assert "either --shape or --data" in result.err


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_a_trace_that_copies_views_warns_only_if_the_module_itself_is_wrong(run, here, quiet):
    Path("box_decoder.py").write_text(
        "import megengine as mge, megengine.module as M, numpy as np\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.grid = mge.Tensor(np.ones((1, 10, 2), 'float32'))\n"
        "    def forward(self, x):\n"
        "        return self.grid * x[..., :2]\n"
    )
    command = ("trace", "box_decoder:Net", "-o", "net.mge", *quiet)
    right = run(*command, "--shape", "1x10x6", "--no-check")
    ends = "" if quiet else "inputs: x float32 1x10x6\noutputs: mul_out float32 1x10x2\n"
    assert (right.code, right.out, right.err) == (0, "net.mge\n", ends)
    wrong = run(*command, "--shape", "2x10x6")
    assert (wrong.code, wrong.out) == (0, "net.mge\n")
    assert wrong.err.startswith("warning: Net: MegEngine's kernels on CPU can take a view")
    assert wrong.err.count("\n") == (1 if quiet else 3)


def test_a_branch_by_a_value_is_refused_unless_its_line_is_allowed(run, here):
    Path("rescaled.py").write_text(
        "import megengine.module as M\n"
        "class Net(M.Module):\n"
        "    def forward(self, x):\n"
        "        if x.max() > 100:\n"
        "            x = x / 100\n"
        "        return x + 1\n"
    )
    command = ("trace", "rescaled:Net", "--shape", "2x4", "-o", "net.mge")
    refused = run(*command)
    assert refused.code == 2
    assert "rescaled.py:4 reads " in refused.err
    assert "(--allow-branch rescaled.py:4)" in refused.err
    assert not Path("net.mge").exists()
    assert run(*command, "--allow-branch", "rescaled.py:4").code == 0
    assert Path("net.mge").exists()
