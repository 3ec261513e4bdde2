"""Says what the config changed for one op, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator

from qtrace.config import QConfig, Rule, SchemePatch, Spec, backends
from qtrace.config.tree import dump
from qtrace.preparation.annotation import ExprNote
from qtrace.scheme import QScheme

__all__ = ["Changes"]


class Changes:
    """Replays the rules of a config for an op, to say what each changed.

    Args:
        backend: the name of the backend.
        qconfig: the config.
        origins: file and line of each rule.
        comments: the comment above each rule; empty if unknown.
    """

    def __init__(
        self, backend: str, qconfig: QConfig, origins: tuple[str, ...], comments: tuple[str, ...]
    ) -> None:
        self.backend, self.qconfig = backends.get(backend), qconfig
        self.origins, self.comments = origins, comments

    def describe(self, note: ExprNote) -> Iterator[str]:
        """Yields a sentence for the backend, for what the config says of every op, and for each rule."""
        state = _State(self.backend.activation, self.backend.weight, self.qconfig)
        schemes = f"{state.schemes['activation'].describe()} activations"
        if note.weight:
            schemes += f" and {state.schemes['weight'].describe()} weights"
        yield f"Backend {self.backend.name} asks for {schemes}."
        for sort, patch in (("activation", self.qconfig.activation), ("weight", self.qconfig.weight)):
            if patch is not None and (sort == "activation" or note.weight):
                changed = state.patch(sort, patch)
                yield f"For every op, {self.qconfig.place(sort)} {_join(changed)}."
        for rank in note.ranks:
            rule = self.qconfig.rules[rank]
            match = dump(rule.match.to_dict(), flow=True).strip()
            changed = state.apply(rule, bool(note.weight))
            comment = f" ({self.comments[rank]})" if self.comments and self.comments[rank] else ""
            yield f"Rule {self.origins[rank]}, match {match}, {_join(changed)}.{comment}"
        if not note.ranks and self.qconfig.rules:
            yield "No rule of the config matches it."


class _State:
    """The settings of an op after some of the rules."""

    def __init__(self, activation: QScheme, weight: QScheme, qconfig: QConfig) -> None:
        self.schemes: dict[str, QScheme] = {"activation": activation, "weight": weight}
        self.settings: dict[str, object] = {
            "observer of activations": qconfig.activation_observer,
            "observer of weights": qconfig.weight_observer,
            "fake quant": qconfig.effective_fakequant,
        }

    def patch(self, sort: str, patch: SchemePatch) -> list[str]:
        """Changes one scheme; returns the change in words."""
        first = sort not in self.schemes  # a result lacks a scheme of its own at first
        old = self.schemes.get(sort) or self.schemes["activation"]
        new = self.schemes[sort] = patch.apply(old)
        if first:
            return [f"gives its result {new.describe()}, whatever its readers ask for"]
        return [] if old == new else [f"changes {_SORTS[sort]} from {old.describe()} to {new.describe()}"]

    def _set(self, setting: str, value: Spec | bool | None) -> list[str]:
        if value is None or self.settings.get(setting) == value:
            return []
        old, self.settings[setting] = self.settings.get(setting), value
        shown = [_spec(v) if isinstance(v, Spec) else str(v).lower() for v in (old, value)]
        if isinstance(value, Spec) and old is not None:
            return [f"changes the {setting} from {shown[0]} to {shown[1]}"]
        return [f"says {setting}: {shown[1]}"]

    def apply(self, rule: Rule, has_weight: bool) -> list[str]:
        """Applies ``rule``; returns its changes in words, which may be none.

        Args:
            rule: the rule.
            has_weight: whether the op has a weight, which the rule may change.
        """
        changes: list[str] = []
        for sort in _SORTS:
            patch: SchemePatch | None = getattr(rule, sort)
            if patch is not None and patch.changes and (has_weight or sort != "weight"):
                changes += self.patch(sort, patch)
        observers = rule.observers
        if observers is not None:
            changes += self._set("observer of activations", observers.activation)
            changes += self._set("observer of weights", observers.weight if has_weight else None)
        changes += self._set("fake quant", rule.fakequant)
        for flag in ("quantize", "quantize_output", "share", "placement", "method"):
            changes += self._set(flag, getattr(rule, flag))
        return changes


_SORTS = {"activation": "activations", "weight": "weights", "output": "its result"}


def _spec(spec: Spec) -> str:
    return dump(spec.to_dict(), flow=True).strip().removesuffix("...").strip()


def _join(changes: list[str]) -> str:
    return " and ".join(changes) or "changes nothing: it was so already"
