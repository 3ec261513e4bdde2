"""MegEngine, kept quiet and honest: no notes about CUDA at its start, no error that shows after success.

Every command uses it, and so may a script: ``from qtrace.cli import engine; engine.start()`` before anything
else loads MegEngine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

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
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        return
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            import megengine as mge

            mge.device.get_device_count("gpu")
            mge.Tensor([0.0]).numpy()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if not line.startswith(_NOISE):
                    print(line, file=sys.stderr)


def synchronize() -> None:
    """Waits for all kernels: an error in one would otherwise surface at exit, and with exit code 0."""
    if "megengine" in sys.modules:
        import megengine as mge

        mge._full_sync()  # under this name in MegEngine's own documentation
