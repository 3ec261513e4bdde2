from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import settings

from qtrace.process import engine

# Before anything else loads MegEngine: a thread of it would take a quarter of a core from the tests.
engine.quiet()

# No deadline: a loaded machine is not a bug. What needs more examples says so; `make fuzz` has many.
settings.register_profile("qtrace", deadline=None, max_examples=50)
settings.load_profile("qtrace")


@pytest.fixture(scope="module", autouse=True)
def _subnormals() -> None:
    """Numbers as IEEE 754 has them: MegEngine, once imported, lets the processor flush subnormals.

    Hypothesis refuses to draw floats then. ``(fenv_t *) -1`` is glibc's ``FE_DFL_ENV``.
    """
    ctypes.CDLL("libm.so.6").fesetenv(ctypes.c_void_p(-1))


@pytest.fixture
def synchronous() -> Iterator[None]:
    """Kernels one at a time: on CPU, MegEngine's gradients are wrong now and then when they are queued."""
    import megengine as mge

    level, mge.config.async_level = mge.config.async_level, 0
    yield
    mge.config.async_level = level
