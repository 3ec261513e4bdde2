"""Adam on numpy arrays takes the steps of its paper, and Adam by torch's kernels takes the same."""

from __future__ import annotations

import numpy as np
import pytest

from qtrace.learning import Adam
from tests.each import each_of


@each_of("size", [1.0, 1e-8])
def test_adam_takes_the_steps_of_the_paper(size: float) -> None:
    """Kingma and Ba 2015, algorithm 1, written out for one number: gradients of any size, or of epsilon's."""
    value, m, v, x = np.array([1.0]), 0.0, 0.0, 1.0
    adam = Adam(value, 0.1)
    for t, g in enumerate((0.5 * size, -2.0 * size, 3.0 * size), start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        adam.step(np.array([g]))
    np.testing.assert_allclose(value, [x])


@pytest.mark.parametrize("few", [0, 2**12])
def test_adam_of_torch_takes_the_steps_of_numpys(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the engine torch needs the extra torch")
    from qtrace.extras.torch.learning import engine as module
    from qtrace.extras.torch.learning.engine import TorchAdam

    monkeypatch.setattr(module, "_FEW", few)  # few values are numpy's, 0 leaves all to torch

    rng = np.random.default_rng(0)
    start = rng.normal(size=(5, 7)).astype(np.float32)
    lr = rng.uniform(0.1, 1, (5, 1)).astype(np.float32)
    ours, theirs = TorchAdam(start.copy(), lr), Adam(start.copy(), lr)
    for factor in (0.5, 1.0, 0.3):
        gradient = rng.normal(size=(5, 7)).astype(np.float32)
        ours.step(gradient, factor, 0.7)
        theirs.step(gradient, factor, 0.7)
    for name in ("value", "first", "second"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-7)
    assert ours.steps == theirs.steps == 3
    for unit in (
        np.float32(0.5),
        np.ones((len(start), *[1] * (start.ndim - 1)), "float32") * 3,
        np.abs(start),
    ):
        ours_sum, theirs_sum = (adam.square_sum(start, unit) for adam in (TorchAdam, Adam))
        assert ours_sum == pytest.approx(theirs_sum)
    assert ours.is_finite()
    ours.value[3, 5] = np.inf
    assert not ours.is_finite()
    start[:] = 3e38  # the sum overflows float32
    assert TorchAdam(start, lr).is_finite()
    assert np.isfinite(TorchAdam.square_sum(start, np.float32(1.0)))
