"""The rules for the objects that a model file may create, and for the state of each.

Three questions come from the unpickler: make an instance without running a constructor (NEWOBJ), call
something with arguments (REDUCE), give an object its state (BUILD). Each is answered from a table that is
keyed by the exact class; what is not in a table is refused. The import strings inside exprs and nodes are
checked here, before anything is imported. Containers that a file could still change after they were checked
are copied.
"""

from __future__ import annotations

from collections import OrderedDict
from inspect import FullArgSpec
from typing import Any

from megengine import Parameter, Tensor
from megengine.core._imperative_rt.common import CompNode
from megengine.core._wrap import Device
from megengine.core.tensor.dtype import QuantDtypeMeta
from megengine.distributed import Group
from megengine.module import Module
from megengine.quantization.utils import LSQParams, QParams, QuantMode
from megengine.traced_module import TracedModule
from megengine.traced_module.expr import Apply, CallFunction, CallMethod, Constant, GetAttr, Input
from megengine.traced_module.node import ModuleNode, TensorNode
from megengine.traced_module.pytree import ArgsIndex, LeafDef, TreeDef
from megengine.traced_module.serialization import _ModuleState
from megengine.traced_module.traced_module import InternalGraph, NameSpace

from qtrace.graph.files import allowlist, plain_values
from qtrace.graph.files.allowlist import (
    OBJECT_BYTES,
    AllowList,
    LoadBudget,
    Ref,
    RefusedError,
    refused,
    shown,
)
from qtrace.graph.files.plain_values import (
    Keys,
    Pending,
    Rule,
    Trees,
    dtype_class,
    from_buffer,
    make_op,
    make_scalar,
    op_state,
    start_array,
    start_dtype,
)
from qtrace.graph.notes import SAVED_META

__all__ = ["Pending", "Rules"]

_EXPR = "_id _disable_remove inputs outputs"
_CALL = f"{_EXPR} const_val arg_def out_def version"
_NODE = f"expr users _id _name _qualname {SAVED_META}"

# The state that MegEngine writes for each part of a graph, and the notes on nodes.
FIELDS: dict[type, frozenset[str]] = {
    cls: frozenset(fields.split())
    for cls, fields in {
        Input: f"{_EXPR} name",
        GetAttr: f"{_EXPR} name",
        Constant: f"{_EXPR} name value",
        CallMethod: f"{_CALL} method",
        CallFunction: f"{_CALL} func",
        Apply: f"{_EXPR} opdef_state version",
        TensorNode: f"{_NODE} _qparams _shape _dtype _device",
        ModuleNode: f"{_NODE} module_type",
        TreeDef: "type aux_data children_defs num_leaves",
        LeafDef: "type aux_data children_defs num_leaves const_val",
        ArgsIndex: "index name",
        NameSpace: "name qualname _used_names",
        InternalGraph: (
            "_exprs _inputs _outputs _watch_point _end_point _namespace _rst _name _qualname _total_ids"
        ),
        _ModuleState: "module state version",
        Group: "proc_ranks stream is_single_machine_cache",
        Device: "_cn _logical_name",
    }.items()
}


class Rules:
    """The tables for one file.

    Args:
        names: the allow-list, with the caller's own entries.
        budget: the memory and work that the file may cause.
        keep_devices: whether tensors go to the devices that the file names.

    Attributes:
        budget: the memory and work that the file may still cause.
        keys: which values may be keys of dicts.
        trees: the argument structures.
        traced: every TracedModule of the file, children before parents; their graphs are not restored yet.
        constants: the modules that Constants hold.
    """

    def __init__(self, names: AllowList, budget: LoadBudget, keep_devices: bool = False) -> None:
        self.names, self.budget = names, budget
        self.trees = Trees(names, budget)
        self.keys = Keys(budget, self.trees.size)
        self.traced: list[TracedModule] = []
        self.constants: list[Module] = []
        devices, metas = plain_values.Devices(keep_devices), plain_values.DtypeMetas()
        self._new: dict[type, Rule] = {
            cls: _bare(cls) for cls in (*FIELDS, Module, QParams, LSQParams, TracedModule)
        }
        self._new |= {cls: plain_values.tensor(cls, budget, devices) for cls in (Tensor, Parameter)}
        self._new |= {FullArgSpec: plain_values.argspec(budget), QuantDtypeMeta: metas.make}
        self._new |= {CompNode: lambda: Pending(devices.comp_node)}
        self._build: dict[type, Rule] = {cls: self._fields(cls) for cls in FIELDS}
        self._build |= {CallFunction: self._function, ModuleNode: self._module_node, Apply: self._apply}
        self._build |= {Constant: self._constant, _ModuleState: self._module_state, GetAttr: self._getattr}
        self._build |= {CallMethod: self._method, TreeDef: self._tree, LeafDef: self._tree}
        self._build |= {Module: _module, TracedModule: self._traced}
        self._build |= dict.fromkeys((Tensor, Parameter), plain_values.tensor_state)
        self._build |= dict.fromkeys((QParams, LSQParams), plain_values.qparams_state)
        self._build |= {Pending: lambda pending, state: pending.finish(state)}
        self._call: dict[str, Rule] = {
            "builtins:bytearray": plain_values.only(bytearray, bytes),
            "builtins:slice": plain_values.make_slice,
            "builtins:type": plain_values.singleton_type,
            "collections:OrderedDict": plain_values.only(OrderedDict),
            "collections:defaultdict": plain_values.make_defaultdict,
            "numpy:dtype": start_dtype,
            "numpy.core:_DType_reconstruct": dtype_class,
            "numpy.core.multiarray:_reconstruct": start_array,
            "numpy.core.multiarray:scalar": make_scalar,
            "numpy.core.numeric:_frombuffer": from_buffer,
            "megengine.quantization.utils:QuantMode": plain_values.only(QuantMode, int),
        }

    def new(self, cls: Any, args: Any) -> Any:
        """A bare instance of a class (NEWOBJ)."""
        target, key, kind = self._identify(cls)
        self.budget.take(OBJECT_BYTES)
        if type(args) is not tuple or not isinstance(target, type):
            raise RefusedError("it makes an instance of something that is no class")
        if kind == "extra":
            return target.__new__(target, *args)
        if kind in ("module", "qtrace"):
            return _bare(target)(*args)
        if target not in self._new:
            raise RefusedError(f"it makes an instance of {key}, which a model does not hold")
        return self._new[target](*args)

    def call(self, function: Any, args: Any) -> Any:
        """The result of a call (REDUCE): only a few names may be called, and the caller's own classes."""
        target, key, kind = self._identify(function)
        if type(args) is not tuple:
            raise RefusedError("it calls something with arguments that are no tuple")
        if kind == "extra" and isinstance(target, type):
            return target(*args)
        if key not in allowlist.REDUCERS:
            raise RefusedError(f"it calls {key} while loading")
        self.budget.take(OBJECT_BYTES + plain_values.weight(args))
        return self._call[key](*args)

    def build(self, instance: Any, state: Any) -> Any:
        """Gives an object its state (BUILD); returns the object, or what takes its place."""
        cls = type(instance)
        self.budget.take(plain_values.weight(state))
        rule = self._build.get(cls)
        if rule is None:
            kind = self.names.kind(_key(cls))
            if kind == "module":
                rule = _module
            elif kind in ("extra", "qtrace"):
                rule = (
                    _module if issubclass(cls, Module) and cls.__setstate__ is Module.__setstate__ else _own
                )
            else:
                raise RefusedError(f"it sets the state of {_key(cls)}, which lacks one in a model")
            self._build[cls] = rule
        result = rule(instance, state)
        return result if cls is Pending else instance

    def _identify(self, value: Any) -> tuple[Any, str, str | None]:
        """Returns the object that a Ref or a type stands for, its key and its kind."""
        if type(value) is Ref:
            return value.target, value.key, self.names.kind(value.key)
        if isinstance(value, type):
            key = _key(value)
            # The key of a type is what the type says of itself: only the very object that is listed counts.
            if self.names.kind(key) is not None and self.names.find(*key.split(":", 1)) is value:
                return value, key, self.names.kind(key)
        raise RefusedError(f"it calls, while loading, {shown(value)}")

    def _fields(self, cls: type) -> Rule:
        def rule(instance: Any, state: Any) -> None:
            self._check_fields(cls, state)
            instance.__dict__.update(state)

        return rule

    def _check_fields(self, cls: type, state: Any) -> None:
        known = FIELDS[cls]
        if type(state) is not dict or not known.issuperset(state):
            odd = (
                [shown(key) for key in state if key not in known][:3]
                if type(state) is dict
                else type(state).__name__
            )
            raise RefusedError(
                f"it gives a {cls.__name__} the state {shown(odd)}, which MegEngine never writes"
            )

    def _function(self, expr: CallFunction, state: Any) -> None:
        self._fields(CallFunction)(expr, state)
        expr.func = self.names.function(expr.func)

    def _module_node(self, node: ModuleNode, state: Any) -> None:
        self._fields(ModuleNode)(node, state)
        node.module_type = self.names.module_type(node.module_type)

    def _getattr(self, expr: GetAttr, state: Any) -> None:
        self._fields(GetAttr)(expr, state)
        parts = expr.name.split(".") if type(expr.name) is str else [""]
        if not all(parts) or any(part.startswith("__") for part in parts):
            raise RefusedError(f"it reads the attribute {shown(expr.name)} of a module")

    def _tree(self, tree: TreeDef, state: Any) -> None:
        self._check_fields(type(tree), state)
        self.trees.build(tree, state)

    def _method(self, expr: CallMethod, state: Any) -> None:
        self._fields(CallMethod)(expr, state)
        if type(expr.method) is not str or expr.method not in allowlist.TENSOR_METHODS | {
            "__call__",
            "__new__",
        }:
            raise RefusedError(f"it calls the method {shown(expr.method)}, which is not on the allow-list")

    def _apply(self, expr: Apply, state: Any) -> None:
        self._fields(Apply)(expr, state)
        saved = expr.__dict__.get("opdef_state")
        cls = saved.get("opdef_type") if type(saved) is dict else None
        key = _key(cls) if isinstance(cls, type) else shown(cls)
        if key not in allowlist.OPDEFS or self.names.find(*key.split(":", 1)) is not cls:
            raise refused("applies the op", key)
        state = op_state(cls, saved)
        expr.opdef = make_op(cls, state)
        expr.opdef_state = {**state, "opdef_type": cls}

    def _constant(self, expr: Constant, state: Any) -> None:
        self._fields(Constant)(expr, state)
        expr.value = self.module_of(expr.value)
        if not isinstance(expr.value, (Tensor, Module)):
            raise RefusedError(f"a Constant in it holds a {type(expr.value).__name__}")
        if isinstance(expr.value, Module):
            self.constants.append(expr.value)

    def _module_state(self, saved: _ModuleState, state: Any) -> None:
        self._fields(_ModuleState)(saved, state)
        cls = self.names.module_type(saved.module, instance=True)
        _check_attributes(cls, saved.state)
        saved.state = dict(saved.state)

    def module_of(self, value: Any) -> Any:
        """The module that a _ModuleState describes; any other value as it is."""
        if type(value) is not _ModuleState:
            return value
        if value.obj is None:
            cls = self.names.module_type(value.module, instance=True)
            module = cls.__new__(cls)
            module.__setstate__(value.state)
            value.obj = module
        return value.obj

    def _traced(self, module: TracedModule, state: Any) -> None:
        """Only sets the attributes: the graphs are restored when the file can no longer change them."""
        if module.__dict__:
            raise RefusedError("it gives a TracedModule its state twice")
        _check_attributes(TracedModule, state)
        Module.__setstate__(module, {name: self.module_of(value) for name, value in state.items()})
        self.traced.append(module)


def _key(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _bare(cls: Any) -> Rule:
    return lambda: cls.__new__(cls)


def _check_attributes(cls: type, state: Any) -> None:
    """Refuses attributes that would take the place of a method with something to call."""
    if type(state) is not dict:
        raise RefusedError(f"it gives a {cls.__name__} a state that is no dict")
    for name, value in state.items():
        if type(name) is not str or (name.startswith("__") and name.endswith("__")):
            raise RefusedError(f"it sets the attribute {shown(name)} of a {cls.__name__}")
        if isinstance(value, type) and callable(getattr(cls, name, None)):
            raise RefusedError(f"it replaces the method {shown(name)} of a {cls.__name__}")


def _module(module: Module, state: Any) -> None:
    _check_attributes(type(module), state)
    module.__setstate__(dict(state))


def _own(instance: Any, state: Any) -> None:
    """BUILD as Python does it, for qtrace's own classes and those that the caller listed."""
    setstate = getattr(type(instance), "__setstate__", None)
    if setstate is not None:
        setstate(instance, state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for part in (attributes, slots):
        if part is not None:
            _check_attributes(type(instance), part)
    if attributes:
        instance.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(instance, name, value)  # a frozen dataclass refuses setattr
