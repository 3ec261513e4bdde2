"""The targets of the fuzzer, and a round of one."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import (
    arrays,
    checkpoints,
    commands,
    edited,
    graphs,
    merging,
    models,
    numbers,
    onnx_files,
    pictures,
    recipes,
)
from tests.fuzz.silent import target as silent

__all__ = ["TARGETS", "round_of"]

TARGETS: dict[str, Callable[[st.DataObject, Path], None]] = {
    "recipes": recipes.check,
    "models": models.check,
    "edited": edited.check,
    "onnx": onnx_files.check,
    "arrays": arrays.check,
    "pictures": pictures.check,
    "checkpoints": checkpoints.check,
    "commands": commands.check,
    "graphs": graphs.check,
    "merging": merging.check,
    "numbers": numbers.check,
    "silent": silent.check,
}


def round_of(name: str, seed: int, examples: int, before_each: Callable[[], object] | None = None) -> None:
    """Runs one target on so many examples, which ``seed`` decides; those of shrinking come on top.

    Args:
        name: of the target.
        seed: of the round.
        examples: how many.
        before_each: called before each of them.

    Raises:
        Exception: what the smallest failing example raised, with that example in its notes.
    """
    # MegEngine lets the processor flush subnormals; hypothesis refuses to draw floats then. (fenv_t *) -1 is
    # glibc's FE_DFL_ENV.
    ctypes.CDLL("libm.so.6").fesetenv(ctypes.c_void_p(-1))

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        if before_each is not None:
            before_each()
        with tempfile.TemporaryDirectory() as folder:
            TARGETS[name](data, Path(folder))

    run()
