"""A network with an LSTM: trained, quantized, fine-tuned, exported and verified."""

from __future__ import annotations

from pathlib import Path

import megengine as mge
import pytest

from examples import crnn


@pytest.mark.slow
def test_lines_are_read_as_well_on_integers(tmp_path: Path) -> None:
    level = mge.config.async_level
    try:
        figures = crnn.run(tmp_path, training=800, epochs=5, unseen=400)
    finally:
        mge.config.async_level = level
    assert figures["verified"] == 1
    assert figures["float"] > 0.5  # ten classes: the LSTM and the layers before it have learned
    assert figures["int8"] > figures["float"] - 0.01
