"""Transformers, and nets as users write them, on the whole road: trace, prepare, calibrate, convert."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import megengine as mge
import numpy as np
import pytest

import qtrace
from qtrace.errors import TraceError
from tests.nets import images
from tests.zoo.checks import Case
from tests.zoo.detectors.entry import trained
from tests.zoo.quick import parameters
from tests.zoo.transformers.entries import TRANSFORMERS, USER_NETS
from tests.zoo.transformers.users import Boxed

ENTRIES = (*TRANSFORMERS, *USER_NETS)

# The slow suite has the others, whose layers one of these has.
_QUICK = ("vit", "swin", *(entry.name for entry in USER_NETS))

# The others have the same parts. All are listed, as for the fixture, so that pytest keeps what it made.
OF_EACH_KIND = pytest.mark.parametrize(
    "case", parameters(ENTRIES, ("vit", "Frozen", "CalledTwice")), indirect=True, scope="module"
)


@pytest.fixture(scope="module", params=parameters(ENTRIES, _QUICK))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    level = mge.config.async_level
    mge.config.async_level = 0
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


@OF_EACH_KIND
def test_training_reaches_what_the_float_net_trains(case: Case) -> None:
    case.check_training()


@OF_EACH_KIND
def test_files_keep_every_number(case: Case, tmp_path: Path) -> None:
    case.check_files(tmp_path)


def test_converted_graph_is_clean_and_exact(case: Case) -> None:
    case.check_converted()


def test_other_batch_and_image_sizes(case: Case) -> None:
    case.check_shapes()


def test_an_output_of_a_class_of_its_own_is_reported() -> None:
    with pytest.raises(TraceError, match="Boxes"):
        qtrace.trace(trained(Boxed()), images(1, 3, 16, 16))


def test_another_method_is_traced_where_forward_returns_a_class_of_its_own() -> None:
    module, x = trained(Boxed()), images(2, 3, 16, 16)
    traced = qtrace.trace(module, x, method="raw")
    prepared = qtrace.calibrate(qtrace.prepare(traced), [x], progress=False)
    expected, outputs = module.raw(mge.Tensor(x)), prepared(mge.Tensor(x))
    assert len(outputs) == 2
    for reference, output in zip(expected, outputs, strict=True):
        assert np.abs(reference.numpy() - output.numpy()).max() < 0.05 * np.abs(reference.numpy()).max()


def test_names_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
