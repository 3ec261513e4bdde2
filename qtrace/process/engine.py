"""MegEngine without remarks about CUDA at its start, and without errors that show only after success."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from qtrace.process.stderr import caught_lines

__all__ = ["quiet", "synchronize"]

# MegEngine's CUDA stub prints these to file descriptor 2 itself; no setting or logger turns them off.
_NOISE = ("info: +", "debug: failed to load cuda func")
# From <linux/prctl.h>.
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
# Nanoseconds that a thread of MegEngine's may sleep longer than it asks for.
_SLACK = 5_000_000
# How often MegEngine's threads look for work before they sleep.
_SPIN = "MGB_WORKER_MAX_SPIN"
_started = False


def quiet() -> None:
    """Starts MegEngine without its remarks on a missing CUDA driver, and lets its idle threads sleep.

    Call it before anything else loads MegEngine; a second call does nothing. Every ``qtrace`` command does.
    Other lines that MegEngine prints are passed on to stderr.
    """
    global _started
    if _started:
        return
    _started = True
    # MegEngine makes the processor flush subnormals to zero; numpy remarks on that.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    with caught_lines(_NOISE), _slack_for_new_threads(), _short_spin():
        import megengine as mge
        from megengine.logger import set_mgb_log_level

        level = logging.getLogger("megbrain").level
        # It remarks on the variable at its first wait, by Python's logging and inside of a lock: if that
        # happened to collect garbage, a Tensor among it would wait for the lock forever.
        set_mgb_log_level(logging.ERROR)
        mge.device.get_device_count("gpu")
        (mge.Tensor([0.0] * 64) + 1).numpy()  # the threads begin with the first op
        set_mgb_log_level(level)


@contextlib.contextmanager
def _short_spin() -> Iterator[None]:
    """MegEngine's threads, when they first wait in this block, wait for each other in loops only once.

    Many rounds of them take the cores from whatever else runs. The variable is read once, unless it is 0:
    then it is read, and remarked on, at every wait. Other programs that this one starts do not see it.
    """
    if _SPIN in os.environ:
        yield
        return
    os.environ[_SPIN] = "1"
    try:
        yield
    finally:
        del os.environ[_SPIN]


@contextlib.contextmanager
def _slack_for_new_threads() -> Iterator[None]:
    """Threads that begin in this block wake up less often, where the system is Linux.

    MegEngine has one that frees memory of what was computed: it looks every 10 us, which takes a quarter of
    a core from whatever computes. A thread inherits its timers' slack from the one that starts it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        yield
        return
    before = prctl(_PR_GET_TIMERSLACK)
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK))
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(before))


def synchronize() -> None:
    """Waits for all kernels: an error in one would otherwise surface at exit, and with exit code 0."""
    if "megengine" in sys.modules:
        import megengine as mge

        mge._full_sync()  # under this name in MegEngine's own documentation
