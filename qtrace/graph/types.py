"""MegEngine's IR classes under one name, so that no other room imports MegEngine's internals."""

from megengine.traced_module import TracedModule
from megengine.traced_module.expr import (
    Apply,
    CallFunction,
    CallMethod,
    Constant,
    Expr,
    GetAttr,
    Input,
    is_call_module,
)
from megengine.traced_module.node import ModuleNode, Node, TensorNode

__all__ = [
    "Apply",
    "CallFunction",
    "CallMethod",
    "Constant",
    "Expr",
    "GetAttr",
    "Input",
    "ModuleNode",
    "Node",
    "TensorNode",
    "TracedModule",
    "is_call_module",
]
