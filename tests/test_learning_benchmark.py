"""The benchmark of the engines of `qtrace.finetune` runs; its figures are for an idle machine."""

from __future__ import annotations

import pytest

from benchmarks import learning


@pytest.mark.slow
def test_quick_run_prints_the_ratio_of_both_engines(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the engine torch needs the extra torch")
    assert learning.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "finetune step, torch / MegEngine" in printed
    assert "finetune step, megengine" in printed
