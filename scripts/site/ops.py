"""The page of ops: every kind with its role, what it is in MegEngine, and who computes it on integers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from scripts.site import source

__all__ = ["page"]

_HEAD = """# Ops

A rule names kinds of op: `match: {op: conv2d}`. `qtrace explain` prints the kind of each node. Below are
all kinds, by role. Modules, functions, Tensor methods and operators that do the same are one kind.

```yaml
rules:
  - {match: {op: [softmax, gelu]}, quantize: true}
```

An op without a rule stays in float, and `explain` says so.
"""

_ROLES = {
    "compute": "They have a weight or multiply two activations. qtrace rounds their inputs and their output.",
    "elementwise": "They give new values. qtrace rounds their inputs and their output.",
    "activation": "As elementwise, but a backend may compute them in the kernel of the op before.",
    "norm": "Affine per channel. qtrace folds them into the op before, or treats them as elementwise.",
    "carry": "They only move values: scale and zero point pass through.",
    "concat": "They join several inputs in one output.",
    "float": "They stay in float unless a rule says `quantize: true`.",
    "shape": "Integers and shapes. They are never quantized.",
}
_PREFIXES = {"module": "M", "function": "F", "method": "Tensor"}


def page() -> str:
    """The page in Markdown."""
    backends, room = source.room("backends"), source.room("ops")
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for rule in room.rules():
        by_kind[rule.kind].append(rule)
    targets = {name: backends.get(name) for name in backends.known() if name != "generic"}
    parts = [f"{_HEAD}\nThere are {len(by_kind)} kinds."]
    for role in room.Role:
        kinds = sorted(kind for kind, rules in by_kind.items() if rules[0].role is role)
        parts.append(f"## {role.value.capitalize()} {{#{role.value}}}\n\n{_ROLES[role.value]}")
        last = "why it stays float" if role.value == "float" else "on integers in"
        rows = [f"| kind | in MegEngine | {last} |", "| --- | --- | --- |"]
        if role.value in ("carry", "shape"):
            rows = ["| kind | in MegEngine |", "| --- | --- |"]
        for kind in kinds:
            rules = by_kind[kind]
            cells = [f"`{kind}`", ", ".join(_names(rules))]
            if role.value == "float":
                cells.append(rules[0].reason)
            elif role.value not in ("carry", "shape"):
                names = [name for name, backend in targets.items() if kind in backend.ops]
                cells.append("every target" if len(names) == len(targets) else ", ".join(names))
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _names(rules: list[Any]) -> list[str]:
    """The names by which users call the op, modules first; at most four."""
    written: dict[str, None] = {}
    for rule in rules:
        for target in rule.targets:
            name = target.callee if isinstance(target.callee, str) else target.callee.__name__
            if target.sort in _PREFIXES:
                written[f"`{_PREFIXES[target.sort]}.{name}`"] = None
    shown = list(written)
    return shown if len(shown) <= 4 else [*shown[:4], "..."]
