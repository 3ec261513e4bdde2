"""Absorption on random chains keeps the output within 1e-5; its work grows in step with the graph."""

from __future__ import annotations

from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import qtrace
from qtrace.preparation.normalize import normalize
from qtrace.preparation.passes.absorb import absorb
from tests.graph.counting import count_calls
from tests.nets import net
from tests.preparation.passes.chains import absorbed, random_chains

_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


def _check_chains(seed: int, count: int) -> int:
    """Absorbs the constants of ``count`` random chains; returns how many plans were carried out."""
    module, x = random_chains(np.random.default_rng(seed), count)
    return len(absorbed(module, x)[1].changed)


@settings(max_examples=2, **_SETTINGS)
@given(st.integers(0, 2**32 - 1))
def test_random_chains_keep_their_output(seed: int) -> None:
    assert _check_chains(seed, 12) > 3


@pytest.mark.slow
@settings(max_examples=50, **_SETTINGS)
@given(st.integers(0, 2**32 - 1))
def test_a_thousand_random_chains_keep_their_output(seed: int) -> None:
    assert _check_chains(seed, 20) > 5


@pytest.mark.parametrize("first", ["conv", "sigmoid"])
def test_the_work_grows_in_step_with_the_graph(first: str) -> None:
    def chain(length: int) -> Any:
        def forward(self: Any, x: Any) -> Any:
            y = self.c(x) if first == "conv" else F.sigmoid(x)
            for _ in range(length):
                y = F.relu(y * 1.01)
            return y

        return normalize(
            qtrace.trace(net(forward, c=M.Conv2d(4, 4, 3)), np.zeros((1, 4, 8, 8), np.float32), check=False)
        )

    short, long = chain(20), chain(80)
    assert count_calls(lambda: absorb(long)) < 6 * count_calls(lambda: absorb(short))
