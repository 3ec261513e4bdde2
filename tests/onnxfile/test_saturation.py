"""Whether onnxruntime's products of integers are right on a processor."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import pytest

from qtrace.onnxfile import kernels
from qtrace.onnxfile.kernels import products_are_wrong
from qtrace.runtimes import worker
from tests.each import each_of


class Session:
    """A session whose products are right but for one of them."""

    wrong = -1
    runs = 0

    def __init__(self, model, settings, name):
        import onnx

        (weight,) = onnx.load_from_string(model).graph.initializer
        self.weight = onnx.numpy_helper.to_array(weight).astype(np.int32)

    def run(self, names, feeds):
        Session.runs += 1
        product = feeds["x"].astype(np.int32) @ self.weight
        product[-1, -1] += Session.runs == Session.wrong
        return [product]


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Sets the flags of the processor, the version of onnxruntime and the product that is wrong."""

    def choose(flags, version, wrong):
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} avx2\n")
        monkeypatch.setattr(worker, "_CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(metadata, "version", lambda name: version)
        monkeypatch.setattr(kernels, "open_session", Session)
        Session.wrong, Session.runs = wrong, 0
        products_are_wrong.cache_clear()

    yield choose
    products_are_wrong.cache_clear()


@each_of("version", ["1.21.0", "1.23.2", "1.24.1"])
def test_a_product_that_is_right_by_chance_does_not_hide_the_kernels(processor, version):
    """They add what their memory holds, which was 0 once: a file was written that loses every 32nd row."""
    processor("amx_int8", version, wrong=-1)
    assert products_are_wrong()


@pytest.mark.parametrize(("flags", "version"), [("avx512f", "1.23.2"), ("amx_int8", "1.25.0")])
def test_other_processors_and_versions_are_measured_several_times(processor, flags, version):
    processor(flags, version, wrong=-1)
    assert not products_are_wrong()
    assert Session.runs == 12
    for wrong in (1, 4, 12):
        processor(flags, version, wrong)
        assert products_are_wrong()
