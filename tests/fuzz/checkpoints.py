"""Checkpoints: the part that was written, or a CalibrationError; damage changes no number."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import megengine.module as M
from hypothesis import strategies as st

import qtrace
from qtrace.calibration.algorithms import Part, pack, unpack
from qtrace.calibration.collecting import fresh, no_statistics
from qtrace.errors import CalibrationError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from tests.fuzz.mutation import mutated, one_sentence
from tests.nets import images, net

IDENTITY = "of this calibration"


@lru_cache(maxsize=1)
def _seed() -> tuple[TracedModule, bytes]:
    module = net(lambda self, x: self.a(x), a=M.Conv2d(2, 3, 1))
    x = images(2, 2, 4, 4)
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), {"observers": {"activation": "mse"}})
    return prepared, pack(_whole(prepared), IDENTITY)


def _whole(prepared: TracedModule) -> Part:
    nothing = no_statistics(QuantizedModel(prepared))
    seen = {}
    for group, observer in nothing.observers.items():
        part = fresh(observer)
        part.observe(images(2, 3, 4, 4), batch=0)
        seen[group] = [part]
    return Part(nothing.plus(seen, {0: 7}), None, ("a.png",), {1: 9})


def check(data: st.DataObject, folder: Path) -> None:
    prepared, whole = _seed()
    try:
        part = unpack(data.draw(mutated(whole)), QuantizedModel(prepared), IDENTITY, "the checkpoint")
    except CalibrationError as error:
        one_sentence(error)
    else:
        assert pack(part, IDENTITY) == whole
