"""Every detector of the zoo on the whole road: trace, prepare, calibrate, train, save, convert."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import megengine as mge
import pytest

import qtrace
from qtrace.errors import TraceError
from tests.nets import images, net
from tests.zoo.checks import Case
from tests.zoo.detectors.entries import DETECTORS
from tests.zoo.detectors.yolo import StaticSilu
from tests.zoo.quick import parameters

# The slow suite has the others, whose parts one of these has.
_KINDS = ("retinanet", "faster_rcnn:rpn", "detr")


@pytest.fixture(scope="module", params=parameters(DETECTORS, _KINDS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    level = mge.config.async_level
    mge.config.async_level = 0  # F.arange races when several are queued
    yield Case(request.param)
    mge.config.async_level = level


def test_trace_equals_the_source(case: Case) -> None:
    case.check_trace()


def test_float_phase_equals_the_source(case: Case) -> None:
    case.check_float()


def test_without_folding_the_float_phase_is_exact(case: Case) -> None:
    case.check_unfolded()


def test_quantized_outputs_stay_close(case: Case) -> None:
    case.check_quantized()


def test_nearly_all_is_computed_on_integers(case: Case) -> None:
    case.check_share()


def test_training_reaches_what_the_float_net_trains(case: Case) -> None:
    case.check_training()


def test_files_keep_every_number(case: Case, tmp_path: Path) -> None:
    case.check_files(tmp_path)


def test_converted_graph_is_clean_and_exact(case: Case) -> None:
    case.check_converted()


def test_other_batch_and_image_sizes(case: Case) -> None:
    case.check_shapes()


def test_an_activation_with_a_static_forward_is_named() -> None:
    model = net(lambda self, x: self.act(x), act=StaticSilu())
    with pytest.raises(TraceError, match=r"act"):
        qtrace.trace(model, images(1, 3, 8, 8))


def test_names_are_unique() -> None:
    assert len({entry.name for entry in DETECTORS}) == len(DETECTORS)
