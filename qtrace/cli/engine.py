"""MegEngine, kept quiet and honest: no notes about CUDA at its start, no error that shows after success.

Every command uses it, and so may a script: ``from qtrace.cli import engine; engine.start()`` before anything
else loads MegEngine.
"""

from __future__ import annotations

import sys
import warnings

from qtrace.stderr import caught_lines

__all__ = ["start", "synchronize"]

# MegEngine's CUDA stub prints these to file descriptor 2 itself; no setting or logger turns them off.
_NOISE = ("info: +", "debug: failed to load cuda func")
_started = False


def start() -> None:
    """Starts MegEngine and drops what it says about a missing CUDA driver; other lines are passed on."""
    global _started
    if _started:
        return
    _started = True
    # MegEngine makes the processor flush subnormals to zero; numpy remarks on that.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    with caught_lines(_NOISE):
        import megengine as mge

        mge.device.get_device_count("gpu")
        mge.Tensor([0.0]).numpy()


def synchronize() -> None:
    """Waits for all kernels: an error in one would otherwise surface at exit, and with exit code 0."""
    if "megengine" in sys.modules:
        import megengine as mge

        mge._full_sync()  # under this name in MegEngine's own documentation
