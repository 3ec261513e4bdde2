"""The process around a computation: what C libraries print, MegEngine's threads, signals, freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pty import STDERR_FILENO
from types import TracebackType
from typing import IO, Any, ParamSpec, TypeVar

from qtrace.errors import QtraceError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C, SIGTERM and SIGHUP inside the block, so that cleanup code completes."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_alone = threading.Lock()  # the file descriptor belongs to the whole process


@contextlib.contextmanager
def caught_lines(starts: tuple[str, ...]) -> Iterator[list[str]]:
    """Keeps lines that begin with one of ``starts`` out of file descriptor 2.

    Yields:
        A list that holds these lines after the block; all other lines go to stderr. It stays empty if there
        is no stderr.

    Raises:
        OSError: when no file handle is free.
    """
    lines: list[str] = []
    with _alone, contextlib.ExitStack() as stack:
        if _is_open():
            caught = stack.enter_context(tempfile.TemporaryFile())
            stack.callback(_restore_stderr, os.dup(STDERR_FILENO), caught, starts, lines)
            _flush()
            os.dup2(caught.fileno(), STDERR_FILENO)
        yield lines


def _is_open() -> bool:
    try:
        os.fstat(STDERR_FILENO)
    except OSError:
        return False
    return True


def _restore_stderr(original: int, caught: IO[bytes], starts: tuple[str, ...], lines: list[str]) -> None:
    _flush()
    os.dup2(original, STDERR_FILENO)
    os.close(original)
    caught.seek(0)
    for line in caught.read().decode("utf-8", "surrogateescape").splitlines(keepends=True):
        if line.startswith(starts):
            lines.append(line.rstrip())
        else:
            with contextlib.suppress(OSError):  # a full disk
                os.write(STDERR_FILENO, line.encode("utf-8", "surrogateescape"))


def _flush() -> None:
    """Writes Python's buffered text before the file descriptor changes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


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


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Computes products of matrices on one thread within the block, whatever the environment says.

    More threads add up the parts of a sum in another order. What is decided by small margins then differs.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):
        yield


_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def on_engine_thread(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Makes a public function raise a clear error on threads and processes where MegEngine cannot compute.

    Its first call starts MegEngine's threads, and lets them sleep while they are idle.
    MegEngine itself fails with an assertion there, which reads as if a good model or file were damaged.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        try:
            quiet()
            import megengine as mge

            mge.Tensor(0.0)
        except RuntimeError as error:
            _translate(function.__name__, str(error), error)
        return function(*args, **kwargs)

    return call


def _translate(name: str, message: str, error: RuntimeError) -> None:
    """Raises a clear error for the two that MegEngine gives there; other errors surface later."""
    if "assert_available" in message:
        raise QtraceError(
            f"{name} was called in a forked process, where MegEngine cannot compute: start processes anew, "
            "such as by multiprocessing.get_context('spawn')."
        ) from error
    if "context.transformations" in message:
        raise QtraceError(
            f"{name} was called on a thread on which MegEngine cannot compute: call it on the main thread, "
            "or in a process of its own."
        ) from error


_Item = TypeVar("_Item")
_Handle = TypeVar("_Handle")


def count_threads(threads: int | None) -> int:
    """Returns ``threads``, or the number of cores where it is None."""
    return threads or os.cpu_count() or 1


class Together:
    """Threads that compute together with the calling one, within a ``with`` block.

    What they run is numpy, scipy and sessions, which release Python's lock, and never MegEngine. A call
    computes on one thread, whatever their number is, so that the results are the same for any.

    Args:
        threads: number of threads, the calling one included; None for all cores.

    Attributes:
        threads: number of threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = count_threads(threads)
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Together:
        if self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads - 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def begin(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """Begins a call on another thread; returns what gives its result, or raises its error.

        Without another thread, the call runs when its result is asked for.
        """
        return call if self._pool is None else self._pool.submit(call).result

    def run(self, calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
        """Returns the results of some calls, in their order; a call may itself run others.

        Raises:
            Exception: the first call's that fails.
        """
        first, *others = calls
        if self._pool is None:
            return [first(), *(call() for call in others)]
        waiting: list[Future[_Result]] = [self._pool.submit(call) for call in others]
        try:
            own = {0: first()}
            for number, (call, future) in enumerate(zip(others, waiting, strict=True), 1):
                # This thread takes what no other one has begun, so that nested calls never wait forever.
                if future.cancel():
                    own[number] = call()
            return [own[i] if i in own else waiting[i - 1].result() for i in range(len(waiting) + 1)]
        finally:
            for future in waiting:
                future.cancel()

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Returns what a function gives for each item."""
        calls = [functools.partial(function, item) for item in items]
        return self.run(calls) if calls else []


def prefetch(items: Iterable[_Item], begin: Callable[[_Item], _Handle], count: int = 1) -> Iterator[_Handle]:
    """Yields what ``begin`` gives for each item, once it has begun the next ones, too.

    An error of an item comes in its turn, when those before it are done.

    Args:
        items: the items, each of which is read when the one before it was begun.
        begin: begins with an item.
        count: number of items that have begun next to the one that is taken.
    """
    waiting: deque[_Handle] = deque()
    failure: Exception | None = None
    try:
        for item in items:
            waiting.append(begin(item))
            if len(waiting) > count:
                yield waiting.popleft()
    except Exception as error:
        failure = error
    while waiting:
        yield waiting.popleft()
    if failure is not None:
        raise failure


def prefetch_map(
    function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int | None
) -> Iterator[_Result]:
    """Yields the results of a function in order, while threads compute the results of the next items.

    Args:
        function: a function that releases Python's lock, as a session does.
        items: its arguments.
        threads: number of threads; None for all cores. With one, each result is computed when it is taken.
    """
    count = count_threads(threads)
    beside = count if count > 1 else 0
    with Together(1 + beside) as together:
        begun = prefetch(items, lambda item: together.begin(functools.partial(function, item)), beside)
        yield from map(_finish, begun)


def _finish(begun: Callable[[], _Result]) -> _Result:
    return begun()


@contextlib.contextmanager
def paused_collector(collect_first: bool = False) -> Iterator[None]:
    """Pauses collection within the block: it would walk a hundred thousand new objects again and again.

    Args:
        collect_first: whether to free graphs that were dropped before, which only the collector can.
    """
    enabled = gc.isenabled()
    if enabled and collect_first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def older_objects_spared() -> Iterator[None]:
    """Collects within the block only what it makes; what was there before is looked at afterwards.

    The modules of MegEngine, onnx and qtrace have some 140,000 objects, which take a tenth of a second each
    time. Graphs that were dropped before are freed first: a block that is entered again and again would spare
    them for good. It does nothing where objects are spared already, by the caller or by a block around this
    one.
    """
    if gc.get_freeze_count():
        yield
        return
    if gc.isenabled():
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_MB = 2**20
# What gives back the memory that other libraries keep.
_others: list[Callable[[], None]] = []


def return_free_memory() -> None:
    """Gives freed memory back to the system, where the C library can (glibc).

    It keeps what was freed in pieces of up to 32 MB for later, in every thread. For a network with weights of
    this size that adds up to several times the network. MegEngine computes and frees later than it is told,
    so this waits for it: without, what it rounds of all weights is in memory at once.
    """
    synchronize()
    for give_back in _others:
        give_back()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def when_returning(give_back: Callable[[], None]) -> None:
    """Adds a function that `return_free_memory` calls, for memory that another library keeps."""
    _others.append(give_back)


def returns_memory(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Decorates a stage after which the memory that it has freed goes back to the system."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        result = function(*args, **kwargs)
        return_free_memory()
        return result

    return call


class LargeFrees:
    """Gives freed memory back each time that much was freed.

    Args:
        least: the number of bytes after which it is worth the time, milliseconds.
    """

    def __init__(self, least: int = 128 * _MB) -> None:
        self._least, self._freed = least, 0

    def note(self, count: int) -> None:
        """Notes that ``count`` bytes were freed."""
        self._freed += count
        if self._freed >= self._least:
            self.give_back()

    def give_back(self) -> None:
        """Gives back what was freed since the last time, if it is worth a call."""
        if self._freed >= min(self._least, 16 * _MB):
            return_free_memory()
        self._freed = 0
