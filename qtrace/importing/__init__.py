"""Ways in for networks of other frameworks: each format is a package that builds a traced module."""

from __future__ import annotations

import sys
from typing import Any


def is_torch_module(source: Any) -> bool:
    """Returns whether an object is a module of torch, without loading torch."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "nn") and isinstance(source, torch.nn.Module)
