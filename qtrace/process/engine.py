"""Starts MegEngine without its messages about CUDA, and waits for its kernels before success is reported."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from qtrace.process.signals import caught_lines

__all__ = ["load", "quiet", "synchronize"]

# MegEngine's CUDA stub prints these to file descriptor 2 itself; no setting or logger turns them off.
_NOISE = ("info: +", "debug: failed to load cuda func")
# From <linux/prctl.h>.
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
# How much longer a thread of MegEngine may sleep than it asks for.
_SLACK_NS = 5_000_000
# The variable that says how often MegEngine's threads look for work before they sleep.
_SPIN = "MGB_WORKER_MAX_SPIN"
# The module by which MegEngine's hub downloads files.
_DOWNLOADS = "megfile"
_started = False


def load() -> None:
    """Imports MegEngine without its messages about a missing CUDA driver; starts none of its threads.

    A process may still be forked then. `quiet` starts the threads.
    """
    # MegEngine makes the processor flush subnormals to zero; numpy warns about that.
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")
    if "megengine" not in sys.modules:
        with caught_lines(_NOISE), _late_downloads():
            importlib.import_module("megengine")


class _LateModule(types.ModuleType):
    """Stands for a module while another one is imported: its functions import it when they are called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(importlib.import_module(self.__name__), name)(*args, **kwargs)


@contextlib.contextmanager
def _late_downloads() -> Iterator[None]:
    """Lets what is imported in this block load the module that downloads files when it downloads one.

    MegEngine imports it for its hub, and with it clients of clouds: a third of all modules.
    """
    if _DOWNLOADS in sys.modules:
        yield
        return
    stand_in = sys.modules[_DOWNLOADS] = _LateModule(_DOWNLOADS)
    try:
        yield
    finally:
        if sys.modules.get(_DOWNLOADS) is stand_in:
            del sys.modules[_DOWNLOADS]


def quiet() -> None:
    """Starts MegEngine without its messages about a missing CUDA driver, and lets its idle threads sleep.

    Call it before anything else loads MegEngine; a second call does nothing. Every ``qtrace`` command does,
    and so does the first call of a function of ``qtrace`` that computes. Other lines that MegEngine prints go
    to stderr.
    """
    global _started
    if _started:
        return
    load()
    with caught_lines(_NOISE), _slack_for_new_threads(), _short_spin():
        import megengine as mge
        from megengine.logger import set_mgb_log_level

        level = logging.getLogger("megbrain").level
        # MegEngine logs the variable at its first wait, by Python's logging and inside of a lock. If that
        # collected garbage, a Tensor in it would wait for the lock forever.
        set_mgb_log_level(logging.ERROR)
        mge.device.get_device_count("gpu")
        (mge.Tensor([0.0] * 64) + 1).numpy()  # the first op starts the threads
        set_mgb_log_level(level)
    _started = True


@contextlib.contextmanager
def _short_spin() -> Iterator[None]:
    """Makes MegEngine's threads, which first wait in this block, spin only once before they sleep.

    Spinning threads take the cores from other programs. MegEngine reads the variable once; if it is 0,
    MegEngine reads and logs it at every wait. Programs that this process starts do not see the variable.
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
    """Makes threads that start in this block wake up less often, on Linux.

    A thread of MegEngine that frees memory wakes up every 10 us, which costs a quarter of a core. A thread
    inherits the timer slack of the thread that starts it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        yield
        return
    previous = prctl(_PR_GET_TIMERSLACK)
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(previous))


def synchronize() -> None:
    """Waits for all kernels: an error in one would otherwise surface at exit, and with exit code 0."""
    if "megengine" in sys.modules:
        import megengine as mge

        mge._full_sync()  # under this name in MegEngine's own documentation
