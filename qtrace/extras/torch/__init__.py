"""PyTorch in: torch's own exporter writes ONNX, which `qtrace.importing.onnx` reads.

`importing` runs torch's exporter. `state` notes which parameter is which tensor of the module's state, and
gives tuned parameters back under these names. PyTorch is imported where it is used, never at the top: it is
the extra ``torch``.
"""

from __future__ import annotations

from qtrace.extras.torch.importing import from_torch
from qtrace.extras.torch.state import to_torch_state

__all__ = ["from_torch", "to_torch_state"]
