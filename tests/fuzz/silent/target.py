"""Random networks with hazards, quantized: no group of output columns is lost in silence.

The hazards are numbers that stand for minus infinity, joins of unlike ranges, shared layers and biases, and
odd names. Each network comes as a MegEngine module or as an ONNX file; its framework computes what is right.
"""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.silent.cases import cases
from tests.fuzz.silent.serving import answer

__all__ = ["check"]

# Refusals that accuse the wrong side, or come too late to be of use.
WRONG = re.compile(
    r"does not match its quantization record|lacks attribute|repair the data|export it again|cannot run"
)


def check(data: st.DataObject, folder: Path) -> None:
    case = data.draw(cases())
    said = answer(case, folder)
    if said.startswith("finding") or WRONG.search(said):
        raise AssertionError(f"{said}\n{case.runnable()}")
