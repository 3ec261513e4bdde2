"""Mistakes of a config that can be found without a graph."""

from __future__ import annotations

from collections.abc import Iterator

from qtrace.config import backends
from qtrace.config.checking import check_plugin, check_scheme, check_whole
from qtrace.config.qconfig import QConfig
from qtrace.config.rule import Rule, SchemePatch
from qtrace.errors import ConfigError
from qtrace.plugins.options import hint
from qtrace.scheme import QScheme

__all__ = ["mistakes"]


def mistakes(qconfig: QConfig) -> tuple[str, ...]:
    """Lists the mistakes of a config, one sentence each, with file and line if the config comes from a file.

    A scheme counts as impossible if no combination of rules makes it possible, since only a graph shows which
    rules match the same op.
    """
    try:
        check_whole(qconfig)
    except ConfigError as error:
        return (str(error),)
    return tuple(_in_rules(qconfig))


def _in_rules(qconfig: QConfig) -> Iterator[str]:
    backend = backends.get(qconfig.backend)
    reachable = {
        sort: {_applied(getattr(qconfig, sort), getattr(backend, sort))} for sort in ("activation", "weight")
    }
    for rule in qconfig.rules:
        yield from _unknown_ops(rule)
        if rule.backends is not None and backend.name not in rule.backends:
            continue
        for sort, patch in (
            ("activation", rule.activation),
            ("activation", rule.output),
            ("weight", rule.weight),
        ):
            if patch is not None:
                schemes, problem = _schemes(backend, sort, patch, reachable[sort], rule.origin)
                reachable[sort] |= schemes
                if problem:
                    yield problem
        yield from _options(rule, reachable, rule.method or qconfig.effective_method)


def _unknown_ops(rule: Rule) -> Iterator[str]:
    from qtrace import ops  # here: it loads MegEngine

    known = ops.kinds()
    for kind in (*(rule.match.op or ()), *(rule.match.feeds or ()), *(rule.match.follows or ())):
        if kind not in known:
            yield f"{rule.origin}: unknown op {kind!r}{hint(kind, known)}"


def _schemes(
    backend: backends.Backend, sort: str, patch: SchemePatch, before: set[QScheme], origin: str
) -> tuple[set[QScheme], str]:
    """Returns the schemes from ``patch`` that can run, and a sentence if there are none."""
    possible, problems = set(), []
    for scheme in sorted(before, key=QScheme.describe):
        changed = _applied(patch, scheme)
        try:
            check_scheme(backend, sort, changed, origin)
        except ConfigError as error:
            problems.append(str(error))
        else:
            possible.add(changed)
    return possible, "" if possible else problems[0]


def _options(rule: Rule, reachable: dict[str, set[QScheme]], method: str) -> Iterator[str]:
    """Yields the mistakes that the rule's observers and fake quant have with every possible scheme."""
    observers = rule.observers
    plugins = [
        ("qtrace.observers", "activation", observers.activation if observers else None),
        ("qtrace.observers", "weight", observers.weight if observers else None),
        ("qtrace.fakequant", "activation" if method == "static" else "weight", rule.fakequant),
    ]
    for package, sort, spec in plugins:
        if spec is None:
            continue
        problems = []
        for scheme in sorted(reachable[sort], key=QScheme.describe):
            try:
                check_plugin(package, spec, sort, scheme, lambda _: rule.origin)
            except ConfigError as error:
                problems.append(str(error))
        if problems and len(problems) == len(reachable[sort]):
            yield problems[0]


def _applied(patch: SchemePatch | None, scheme: QScheme) -> QScheme:
    return scheme if patch is None else patch.apply(scheme)
