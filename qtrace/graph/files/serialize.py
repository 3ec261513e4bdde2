"""Saving and loading of traced, prepared and converted models, whose modules are checked.

A saved model is the file that ``megengine.save`` writes: a pickle of the TracedModule, here after a head with
its checksum. A pickle is a program, so ``load`` does not hand it to Python's unpickler. It runs the file on a
machine that can only build data (``unpickle.py``). It makes objects by the rules of ``rules.py`` from the
exact names of ``allowlist.py`` and the names that the caller adds. When the file was read to its end, its
modules and graphs (``restore.py``) are checked once and restored. So running it calls only listed functions,
listed tensor methods and listed modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megengine.module import Module
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Constant
from megengine.utils.max_recursion_limit import max_recursion_limit

from qtrace.errors import DataError, GraphError, SchemeError, UnsafeFileError, refusing
from qtrace.graph.files.allowlist import DEPTH, AllowList, DamagedError, LoadBudget, Ref, RefusedError, shown
from qtrace.graph.files.module_attributes import check_attributes
from qtrace.graph.files.plain_values import CONTAINERS, DICTS, Pending, weigh
from qtrace.graph.files.restore import Validator, check_calls, restore
from qtrace.graph.files.rules import Rules
from qtrace.graph.files.unpickle import PickleMachine
from qtrace.graph.interpreter import name_failures
from qtrace.graph.kernels import PART_BYTES
from qtrace.graph.notes import attach_lines, detach_lines
from qtrace.graph.tracing.hazards import debugging_marks
from qtrace.graph.walk import check_traced
from qtrace.plugins.options import check_arguments
from qtrace.process import on_engine_thread, paused_collector
from qtrace.scheme import QParams, QScheme
from qtrace.storage.files import kind_of, problem, replacing
from qtrace.storage.outputs import foreign

_GRAPHS = ("argdef_graph_map", "argdef_outdef_map")
# What MegEngine reads of every module and its earlier versions did not write.
_OF_LATER_VERSIONS = {"name": None, "_name": None, "_short_name": None, "quantize_disabled": False}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_modules(model: TracedModule, rules: Rules) -> None:
    """Refuses modules that MegEngine could not go through.

    Args:
        model: the outermost module; the graphs of traced modules are not checked.
        rules: the rules of the file.

    Raises:
        RefusedError: naming the module's class and what is wrong with it.
    """
    walk = _ModuleWalk(rules)
    for owner in (model, *rules.traced, *rules.constants):
        walk.visit(owner, ())
    try:
        for _ in model.named_tensors():
            pass
    except Exception as error:
        raise DamagedError(f"its modules cannot be listed ({type(error).__name__})") from None


def _check_graph_map(name: str, value: Any) -> None:
    """Refuses containers where graphs belong, which MegEngine would open at each occurrence."""
    if value is None:  # of the class
        return
    if type(value) not in DICTS or any(type(item) in CONTAINERS for item in value.values()):
        raise RefusedError(f"a TracedModule in it has something other than graphs in its {name}")


class _ModuleWalk:
    """Checks modules and the objects of qtrace in their attributes.

    Args:
        rules: the rules of the file.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._heights: dict[int, int] = {}
        self._open: set[int] = set()

    def visit(self, owner: Any, path: tuple[str, ...]) -> int:
        """Checks ``owner`` and what it holds, once; gives how deeply that is nested.

        Args:
            owner: a module, or an object of one of qtrace's classes.
            path: the attributes that lead to it.
        """
        if id(owner) in self._open:
            raise RefusedError(f"a {type(owner).__name__} in it holds itself")
        if len(path) + self._heights.get(id(owner), 0) > DEPTH:
            raise RefusedError(f"it nests modules more than {DEPTH} levels deep")
        if id(owner) in self._heights:
            return self._heights[id(owner)]
        self._open.add(id(owner))
        children = self._children(owner, ".".join(path))
        height = 1 + max((self.visit(child, (*path, name)) for name, child in children), default=0)
        self._open.discard(id(owner))
        self._heights[id(owner)] = height
        return height

    def _children(self, owner: Any, path: str) -> list[tuple[str, Any]]:
        """Checks the attributes of ``owner``; gives the modules and objects among them with their names."""
        children: list[tuple[str, Any]] = []

        def leaf(value: Any) -> None:
            if type(value) is Pending:
                raise RefusedError("it holds an array or a device without its state")
            if type(value) is Ref:
                raise RefusedError(f"a {type(owner).__name__} in it holds {value.key} where data belong")
            if isinstance(value, Module) or type(value).__module__.startswith("qtrace."):
                children.append((name, value))

        if isinstance(owner, Module):
            self._check_module(owner)
        for name, value in getattr(owner, "__dict__", {}).items():
            if not name.isprintable():
                raise RefusedError(f"a {type(owner).__name__} in it has an attribute called {shown(name)}")
            if name in _GRAPHS and type(owner) is TracedModule:
                _check_graph_map(name, value)
            else:
                weigh(value, self._rules.budget, leaf)
        if isinstance(owner, Module):
            check_attributes(owner, path or type(owner).__name__)
        if isinstance(owner, (QScheme, QParams)):
            _check_quantization(owner)  # its errors show the values, which are known to have an end now
        return children

    def _check_module(self, module: Module) -> None:
        fields, kind = module.__dict__, type(module).__name__
        for name in _HOOKS:
            hooks = fields.get(name)
            if type(hooks) not in DICTS or not all(self._listed(hook) for hook in hooks.values()):
                raise RefusedError(f"a {kind} in it has hooks that are no functions of yours")
        names = fields.get("_modules")
        if type(names) is not list or not all(type(name) is str and name in fields for name in names):
            raise RefusedError(f"a {kind} in it has {shown(names)} for the names of its modules")
        for name, value in _OF_LATER_VERSIONS.items():
            fields.setdefault(name, value)
        if type(fields.get("training")) is not bool:
            raise RefusedError(f"a {kind} in it is neither in training nor not")

    def _listed(self, value: Any) -> bool:
        key = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        return key in self._rules.names.extra


def _check_quantization(value: QScheme | QParams) -> None:
    """Makes a scheme or its parameters again, which checks them."""
    try:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        type(value)(**fields)
    except (SchemeError, TypeError, ValueError, AttributeError, OverflowError):
        raise RefusedError(f"a {type(value).__name__} in it is not one that qtrace makes") from None


_NUMBERS = struct.Struct("<QI")  # length and CRC-32 of what follows
_MARK = b"qtrace"
_BEGIN = pickle.PROTO + b"\x04" + pickle.SHORT_BINBYTES + bytes([len(_MARK) + _NUMBERS.size]) + _MARK
SIZE = len(_BEGIN) + _NUMBERS.size + len(pickle.POP)


class _Counting:
    """A file that is written to, with the length and the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = self.checksum = 0

    def write(self, data: Any) -> None:
        """Writes bytes, or what pickle hands over in their place."""
        self.checksum = zlib.crc32(data, self.checksum)
        self.length += memoryview(data).nbytes
        self._file.write(data)


@contextlib.contextmanager
def sealing(file: BinaryIO) -> Iterator[Any]:
    """Gives what to write a pickle to; when that is whole, ``file`` begins with its head.

    Args:
        file: open for writing, at its beginning, and able to seek.
    """
    file.write(bytes(SIZE))
    body = _Counting(file)
    yield body
    file.seek(0)
    file.write(_BEGIN + _NUMBERS.pack(body.length, body.checksum) + pickle.POP)
    file.seek(0, 2)


def check_seal(data: Any) -> int:
    """Returns the position at which the pickle of a model begins: after the head, if there is one.

    A damaged head is not taken for none.

    Args:
        data: the whole file, ``bytes`` or an ``mmap``.

    Raises:
        DamagedError: when the file is not as it was written.
    """
    if data[: len(_BEGIN)] != _BEGIN:
        if (
            sum(have == want for have, want in zip(data[2 : len(_BEGIN)], _BEGIN[2:], strict=False)) > 1
        ):  # as a pickle without a head
            raise DamagedError("it is damaged: its first bytes are not quite those that qtrace.save writes")
        return 0
    head = data[len(_BEGIN) : SIZE]
    if len(head) < SIZE - len(_BEGIN):
        raise DamagedError("it is cut short")
    length, checksum = _NUMBERS.unpack_from(head)
    if len(data) != SIZE + length:
        how = "cut short" if len(data) < SIZE + length else "damaged"
        raise DamagedError(f"it is {how}: it has {len(data)} bytes of {SIZE + length}")
    with memoryview(data) as view, view[SIZE:] as body:
        actual = zlib.crc32(body)
    if actual != checksum or head[-1:] != pickle.POP:
        raise DamagedError("it is damaged: its bytes are not those that were written")
    return SIZE


@check_arguments
@on_engine_thread
def save(module: TracedModule, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes a traced, prepared or converted model to a file; the file appears complete or not at all.

    Args:
        module: a result of ``qtrace.trace``, ``prepare`` or ``convert``; it is not changed.
        path: the file; an existing one is replaced if qtrace wrote it. ``megengine.load`` reads it too.
        force: whether to replace a file that qtrace did not write, too.

    Raises:
        GraphError: when ``module`` is not a TracedModule, or holds something that cannot be saved, such as
            watch points.
        DataError: when the file cannot be written, or is one that qtrace did not write.
    """
    check_traced(module, "save writes")
    if marks := debugging_marks(module):
        raise GraphError(f"the model cannot be saved: {marks}")
    if wrong := problem(path):
        raise DataError(wrong)
    target = Path(os.path.realpath(path))
    with refusing(DataError, path, "written"):
        if kind := kind_of(target):
            raise DataError(f"{path} is {kind}: name a file.")
        if not force and (reason := foreign(target)):
            raise DataError(f"{reason}. Name another file, or replace it with force=True.")
        with replacing(target) as (file,), sealing(file) as body:
            dump(module, body)


@check_arguments
@on_engine_thread
def load(path: str | os.PathLike[str], allow: Iterable[str] = (), keep_devices: bool = False) -> TracedModule:
    """Reads a model that ``save`` or ``megengine.save`` wrote, and runs nothing that the file brings.

    Args:
        path: the file.
        allow: exact names of your own that the file may use, ``"pkg.mod:Qual.Name"``: a module class that you
            registered as built-in, a function that you wrapped, the class of an attribute. They are
            imported, and the file chooses what your classes are made with: list them only for files that
            you trust.
        keep_devices: whether tensors go to the devices that the file names, which starts their threads. By
            default everything goes to MegEngine's default device.

    Returns:
        The model, ready to run, with MegEngine's own objects for its dtypes.

    Raises:
        UnsafeFileError: when the file asks for anything that is not on the allow-list; the message names it.
        DataError: when the file is missing, cut short, damaged, or holds something else.
        ConfigError: when an entry of ``allow`` is not of the form above.
    """
    if wrong := problem(path):
        raise DataError(wrong)
    names = AllowList(allow)
    try:
        with _contents(path) as data, paused_collector(collect_first=len(data) > PART_BYTES):
            rules = Rules(names, LoadBudget(len(data)), keep_devices)
            model = PickleMachine(data, rules).run(check_seal(data))
            if type(model) is TracedModule:
                _finish(model, rules)
    except RefusedError as error:
        raise UnsafeFileError(f"{path} is refused: {error}.") from None
    except DamagedError as error:
        raise DataError(f"{path} cannot be loaded: {error}.") from None
    except DataError:
        raise
    except Exception as error:  # whatever else a damaged file makes of Python, numpy and MegEngine
        reason = (str(error).splitlines() or [""])[0][:150].encode("ascii", "replace").decode()
        reason = f"{type(error).__name__}: {reason}"
        raise DataError(f"{path} is no saved model, or damaged ({reason}).") from error
    if type(model) is not TracedModule:
        raise DataError(f"{path} holds a {type(model).__name__}, not a TracedModule saved by qtrace.save.")
    return model


def _finish(model: TracedModule, rules: Rules) -> None:
    """Checks and restores all graphs of a model that was read to its end."""
    if len(getattr(model, "argdef_graph_map", None) or ()) != 1:
        raise RefusedError("its outermost module does not have one graph")
    check_modules(model, rules)
    validator = Validator(rules.trees, rules.budget)
    for traced in rules.traced:
        validator.check(traced)
    for traced in rules.traced:
        restore(traced, rules.budget)
    for traced in rules.traced:
        check_calls(traced, rules.budget)
    detach_lines(model)
    name_failures(model)


def dump(module: TracedModule, file: Any) -> None:
    """Pickles as ``megengine.save`` does, then takes away the notes that MegEngine leaves on modules.

    Args:
        module: the module; it is not changed.
        file: a file open for writing.

    Raises:
        GraphError: when ``module`` holds something that cannot be saved.
    """
    try:
        attach_lines(module)
        with max_recursion_limit():  # the pickler recurses along the graph
            pickle.dump(module, file, pickle.DEFAULT_PROTOCOL)
    except (AssertionError, AttributeError, TypeError, pickle.PicklingError) as error:
        raise GraphError(f"the model cannot be saved: {error}") from error
    finally:
        detach_lines(module)
        for part in _modules(module):
            part.__dict__.pop("_m_dump_modulestate", None)


def _modules(module: TracedModule) -> Iterator[Module]:
    """Every module of a model, those in Constants included."""
    for part in module.modules():
        yield part
        for graph in (getattr(part, "argdef_graph_map", None) or {}).values():
            for expr in graph._exprs:
                if isinstance(expr, Constant) and isinstance(expr.value, Module):
                    yield from expr.value.modules()


@contextlib.contextmanager
def _contents(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The bytes of a file, mapped into memory."""
    with contextlib.ExitStack() as stack:
        with refusing(DataError, path, "read"):
            if kind := kind_of(Path(path), "not a regular file"):  # a pipe would never end
                raise DataError(f"{path} is {kind}: name a saved model.")
            file = stack.enter_context(open(path, "rb"))
            head = file.read(4)
        if not head:
            raise DataError(f"{path} is empty: no model was saved there, or saving it was interrupted.")
        if head.startswith(b"PK\x03\x04"):
            raise DataError(
                f"{path} is a zip archive (torch or npz?), not a TracedModule saved by qtrace.save."
            )
        if head[0] != pickle.PROTO[0]:
            raise DataError(
                f"{path} is not a saved model: qtrace.save and megengine.save write pickle files."
            )
        try:
            data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (io.UnsupportedOperation, ValueError, OSError) as error:
            raise DataError(f"{path} cannot be read: {error}.") from error
        yield data
