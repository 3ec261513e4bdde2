"""The worst columns of an output decide its figure, in report, table and page."""

import json
from dataclasses import replace

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from tests.nets import images, net

# What would stay in float, as its columns have unlike ranges, is rounded all the same.
_ROUNDED = [{"match": {"name": "b"}, "quantize": True}]
_FACTORS = np.repeat([64.0, 0.02], [4, 6]).astype("float32")


def _packed(self, x):
    y = self.b(F.relu(self.a(x)))
    return y, self.b(F.relu(self.a(x) * 0.5)).mean(axis=(2, 3))


@pytest.fixture(scope="module")
def comparison():
    module = net(_packed, a=M.Conv2d(3, 8, 3, padding=1), b=M.Conv2d(8, 10, 3, padding=1))
    module.b.weight *= _FACTORS.reshape(-1, 1, 1, 1)
    module.b.bias *= _FACTORS.reshape(1, -1, 1, 1)
    batches = [images(2, 3, 8, 8, seed=s) for s in range(10)]
    traced = qtrace.trace(module, batches[0], check=False)
    prepared = qtrace.prepare(traced, {"backend": "tflite", "rules": _ROUNDED})
    qtrace.calibrate(prepared, batches, progress=False)
    return qtrace.compare(prepared, batches)


def test_the_worst_columns_are_the_figure_of_an_output(comparison):
    for output in comparison.outputs:
        large, small = output.groups
        assert (large.runs, small.runs) == (((0, 4),), ((4, 10),))
        assert large.informative
        assert not small.informative
        assert output.sqnr_db == small.sqnr_db < 3 < 20 < large.sqnr_db
    assert len(json.loads(json.dumps(comparison.to_dict()))["outputs"][0]["groups"]) == 2


def test_the_table_names_the_columns(comparison):
    text = comparison.table()
    assert "output 0: 0.0 dB at columns 4..9, cosine" in text
    assert "  columns 4..9: 0.0 dB, no information is left\n  columns 0..3: " in text


def test_the_page_names_the_columns(comparison):
    page = replace(comparison, sites=comparison.sites[:1]).html()
    assert page.count("<td>columns 4..9</td>") == 2
    assert page.count("no information is left") == 2
