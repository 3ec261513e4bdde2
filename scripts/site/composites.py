"""The page of composites: every rule with its formula, what it becomes, and where the formula comes from."""

from __future__ import annotations

import inspect
from typing import Any

from scripts.site import source

__all__ = ["page"]

_HEAD = """# Composites

Exporters write a function that their format lacks in pieces: `x * clip(x + 3, 0, 6) / 6` for hard swish, nine
ops for a layer norm. Quantized piece by piece, such a function loses accuracy and speed. `prepare` turns the
pieces into one op:

```python
import megengine.functional as F
import megengine.module as M
import numpy as np

import qtrace
from qtrace.graph import compose, flatten


class Gate(M.Module):
    def forward(self, x):
        return x * F.relu6(x + 3) / 6


traced = qtrace.trace(Gate(), np.ones((1, 4), "float32"))
flat = flatten(traced)
print(compose(flat)[0].rule)  # HardSwish
```

`compose` finds them in any flat graph, and says why what looks like a composite is none. The order of
operands, the association of sums and products, and the form of a call (function, operator, Tensor method,
module) do not matter. Constants may be numbers, constants of the trace or stored tensors with one entry; they
must be equal to the formula's to a millionth. A piece whose value is used elsewhere stays, and its composite
with it. `prepare` keeps a composite in pieces if the target has integer kernels for the pieces only, and logs
what it changed.
"""


def page() -> str:
    """The page in Markdown."""
    rows = ["| composite | formula | becomes | in `prepare` |", "| --- | --- | --- | --- |"]
    sections = []
    for rule in source.find("composite_rules")():
        when = "if the target has it" if rule.kind else "yes" if rule.in_prepare else "in pieces"
        name = f"[{rule.title}](#{type(rule).__name__})"
        rows.append(f"| {name} | {_code(rule.formula)} | {_code(rule.becomes)} | {when} |")
        sections.append(_section(rule))
    return "\n\n".join((_HEAD, "\n".join(rows), *sections)) + "\n"


def _code(text: str) -> str:
    return "; ".join(f"`{part.strip()}`" for part in text.replace("|", "\\|").split(";"))


def _section(rule: Any) -> str:
    text = (inspect.getdoc(type(rule)) or "").replace("``", "`")
    return f"## {rule.title.capitalize()} {{#{type(rule).__name__}}}\n\n{text}"
