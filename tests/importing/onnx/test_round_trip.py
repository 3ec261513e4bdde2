"""Networks of each family of the zoo, written as float ONNX and imported: outputs, parameters, sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qtrace
from qtrace.graph.flatten import flatten
from qtrace.preparation.model import QuantizedModel
from tests.zoo.catalog import CNN
from tests.zoo.checks import leaves, tensors
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.quick import one_of_each, parameters
from tests.zoo.transformers.entries import TRANSFORMERS

# An op that changes nothing (an identity, a join of one tensor), or a view of a parameter (VAN's scales),
# parts what the import fuses: fewer sites.
WITHOUT_IDENTITIES = {
    **dict.fromkeys(("repvgg_train", "repvgg_deploy"), 5),
    "densenet": 2,
    "van": 4,
}
# Their LayerNorms of channels are written as products and sums, so that parameters join.
IN_PIECES = ("convnext", "van")
# One of each kind: the others take minutes.
OTHERS = tuple(e for e in (*DETECTORS, *TRANSFORMERS) if e.name in ("yolov3", "vit"))
pytestmark = pytest.mark.usefixtures("synchronous")

QUICK = ("resnet_basic", "mobilenet_v3_composed", "repvgg_deploy", "alexnet")
ONE_OF_EACH = {entry.name for entry in one_of_each(CNN)}
NETWORKS = [entry for entry in CNN if entry.name in ONE_OF_EACH or entry.name in QUICK]


@pytest.mark.quick(1)
@pytest.mark.parametrize("entry", parameters((*NETWORKS, *OTHERS), QUICK))
def test_network(entry: Any, tmp_path: Path) -> None:
    args = entry.example()
    traced = qtrace.trace(entry.build(), *args, check=False)
    net = qtrace.from_onnx(qtrace.export(traced, tmp_path / "m.onnx"))
    for expected, got in zip(leaves(traced(*tensors(args))), leaves(net(*tensors(args))), strict=True):
        largest = np.abs(expected.numpy()).max()
        assert np.abs(got.numpy() - expected.numpy()).max() <= 2e-6 * largest
    if entry.name not in IN_PIECES:
        flat = flatten(traced)
        source, imported = ({name for name, _ in m.named_parameters()} for m in (flat, net))
        assert source <= imported <= set(flat.state_dict())  # the file does not say which tensors are trained
    sites = [len(QuantizedModel(qtrace.prepare(m)).sites) for m in (traced, net)]
    if entry.name != "convnext":
        assert sites[0] - sites[1] == WITHOUT_IDENTITIES.get(entry.name, 0)
