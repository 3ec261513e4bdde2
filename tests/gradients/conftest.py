from __future__ import annotations

from collections.abc import Iterator

import pytest

from qtrace.gradients import conv


@pytest.fixture(autouse=True, scope="module")
def _small_ones_too() -> Iterator[None]:
    """Our kernels for tiny convolutions, too, which native ones would compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "MIN_MULTIPLICATIONS", 0)
        yield
