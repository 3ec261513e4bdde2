from __future__ import annotations

import ctypes

import pytest


@pytest.fixture(scope="module", autouse=True)
def _subnormals() -> None:
    """Numbers as IEEE 754 has them: MegEngine, once imported, lets the processor flush subnormals.

    Hypothesis refuses to draw floats then. ``(fenv_t *) -1`` is glibc's ``FE_DFL_ENV``.
    """
    ctypes.CDLL("libm.so.6").fesetenv(ctypes.c_void_p(-1))
