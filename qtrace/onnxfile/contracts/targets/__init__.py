"""The contracts, one target a file, each with a constant ``CONTRACT``; the file name is its name.

A contract of your own is ``pkg.mod:NAME``, or an entry point in the group ``qtrace.contracts``.
"""

from __future__ import annotations

from qtrace.errors import ExportError
from qtrace.onnxfile.contracts.base import Contract
from qtrace.plugins import ObjectPlugins

__all__ = ["get", "known"]

_CONTRACTS = ObjectPlugins(__name__, "qtrace.contracts", Contract, ExportError)
known, get = _CONTRACTS.known, _CONTRACTS.get
