from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline: a loaded machine is not a bug.
settings.register_profile("qtrace", deadline=None)
settings.load_profile("qtrace")


@pytest.fixture
def synchronous() -> Iterator[None]:
    """Kernels one at a time: on CPU, MegEngine's gradients are wrong now and then when they are queued."""
    import megengine as mge

    level, mge.config.async_level = mge.config.async_level, 0
    yield
    mge.config.async_level = level
