"""Checks that the target, the observers and the fake quants support a config, and names its lines.

Mistakes of a config that can be found without a graph.

The short names of precisions, for targets that have them.

``w4a8`` gives the bits of weights and activations, ``w4`` only the bits of weights, and with ``w8a8_dynamic``
the range of activations follows each batch.
"""

from __future__ import annotations

import abc
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from qtrace import plugins
from qtrace.config import backends
from qtrace.config.backends.base import Backend
from qtrace.config.qconfig import QConfig
from qtrace.config.rule import Rule, SchemePatch, Spec
from qtrace.errors import ConfigError, QtraceError
from qtrace.plugins.options import OptionModel, check_options, hint
from qtrace.scheme import QScheme

# The base of post-training algorithms: options, stage and order, which a config checks.

_PACKAGE = "qtrace.ptq"


class Algorithm(OptionModel, abc.ABC):
    """Abstract base: a frozen object whose fields are the options of a recipe's ``ptq`` entry.

    Attributes:
        stage: "float" changes the float graph in ``prepare``, "calibrated" works with data at the end of
            ``calibrate``.
        after: names of algorithms that precede this one if both are listed.
        instead_of: names of algorithms that cannot be listed together with this one.
        reason: the reason of `after` and `instead_of`, as the end of a sentence.
        reads_samples: whether it reads the samples of ``prepare``.
    """

    stage: ClassVar[Literal["float", "calibrated"]]
    after: ClassVar[tuple[str, ...]] = ()
    instead_of: ClassVar[tuple[str, ...]] = ()
    reason: ClassVar[str] = ""
    reads_samples: ClassVar[bool] = False

    @abc.abstractmethod
    def apply(self, task: Any) -> Any:
        """Changes the model in ``task`` and returns a report; see ``qtrace.ptq.base``."""

    def ready(self, task: Any) -> None:
        """Prepares the float graph for a calibrated `apply`; called in ``prepare``."""
        return


Named = tuple[str, Algorithm]


def algorithms(qconfig: QConfig) -> tuple[Named, ...]:
    """Returns the algorithms of a config with their options, in order, after checking them.

    Raises:
        ConfigError: for options that an algorithm does not know, and for an order that makes no sense.
    """
    listed: list[Named] = []
    for index, spec in qconfig.ptq_entries:
        place = partial(qconfig.option_place, f"ptq[{index}]", "ptq")
        with prefix_errors(place("")):
            kind = plugins.resolve(_PACKAGE, spec.name, Algorithm)
        algorithm: Algorithm = check_options(kind, spec.name, spec.options, place)
        _check_order(spec.name, algorithm, listed, place(""))
        listed.append((spec.name, algorithm))
    return tuple(listed)


def is_packaged(name: str) -> bool:
    """Returns whether ``name`` is an algorithm of qtrace, not a user's or an installed package's."""
    return name in plugins.packaged(_PACKAGE)


@contextlib.contextmanager
def prefix_errors(origin: str) -> Iterator[None]:
    """Puts ``origin`` before the sentence of an error."""
    try:
        yield
    except QtraceError as error:
        raise ConfigError(f"{origin}: {error}") from error


def check_imported(named: Iterable[Spec]) -> None:
    """Refuses plugins in a model file whose look-up would import a module.

    Args:
        named: the plugins. A model file may name any module, whose import runs its code.

    Raises:
        ConfigError: when a plugin's module is not imported yet.
    """
    for spec in named:
        module, own, _ = spec.name.partition(":")
        if own and module not in sys.modules:
            raise ConfigError(
                f"the model names {spec.name!r} of its own: import {module} first, if you trust it."
            )


def _check_order(name: str, algorithm: Algorithm, before: list[Named], origin: str) -> None:
    """Refuses an algorithm that cannot follow those ``before``."""
    for other, earlier in before:
        if other == name:
            raise ConfigError(f"{origin}: ptq lists {name} twice: keep one.")
        if other in algorithm.instead_of or name in earlier.instead_of:
            reason = algorithm.reason if other in algorithm.instead_of else earlier.reason
            raise ConfigError(f"{origin}: ptq lists {other} and {name}: keep one, for {reason}.")
        if name in earlier.after:
            raise ConfigError(f"{origin}: put {name} before {other} in ptq, for {earlier.reason}.")
        if algorithm.stage == "float" and earlier.stage == "calibrated":
            raise ConfigError(
                f"{origin}: put {name} before {other} in ptq, for {name} changes the float graph and {other} "
                "needs the calibrated one."
            )


def check_whole(qconfig: QConfig) -> None:
    """Checks the settings for every op, without a graph.

    Raises:
        ConfigError: with file and line where the config has them.
    """
    backend = backends.get(qconfig.backend)
    check_method(backend, qconfig.effective_method, qconfig.place("method"))
    _check_unread(qconfig)
    rounds = {"activation": _rounds_activations(qconfig), "weight": True}
    observers = {"activation": qconfig.activation_observer, "weight": qconfig.weight_observer}
    for sort, changes in (("activation", qconfig.activation), ("weight", qconfig.weight)):
        scheme: QScheme = getattr(backend, sort)
        if changes is not None:
            with prefix_errors(qconfig.place(sort)):
                scheme = changes.apply(scheme)
        check_scheme(backend, sort, scheme, qconfig.place(sort))
        place = partial(qconfig.option_place, f"observers.{sort}", sort)
        check_plugin("qtrace.observers", observers[sort], sort, scheme, place)
        place = partial(qconfig.option_place, "fakequant", "qat.fakequant", sort)
        if rounds[sort]:
            check_plugin("qtrace.fakequant", qconfig.effective_fakequant, sort, scheme, place)
    algorithms(qconfig)


def _rounds_activations(qconfig: QConfig) -> bool:
    """Whether a layer may round activations by a scheme of the config."""
    methods = [qconfig.effective_method, *(rule.method for rule in qconfig.rules)]
    return "static" in methods


def _check_unread(qconfig: QConfig) -> None:
    """Refuses a file that sets a scheme of activations and a method that rounds none by it.

    An imported file may set one of the two, as a family does that a recipe of a method is joined with.
    """
    if _rounds_activations(qconfig) or qconfig.activation is None:
        return
    scheme, method = qconfig.place("activation"), qconfig.place("method")
    files = {place.rpartition(":")[0] for place in (scheme, method)}
    if len(files) == 1 and "" not in files:
        raise ConfigError(
            f"{scheme}: activation does nothing with method: {qconfig.effective_method}, which rounds no "
            "activation by a scheme of the config: leave it out."
        )


def check_scheme(backend: backends.Backend, sort: str, scheme: QScheme, origin: str) -> None:
    """Refuses a scheme that the backend cannot run.

    Args:
        backend: the target.
        sort: ``activation`` or ``weight``.
        scheme: the scheme of tensors of that sort.
        origin: the file and line of the scheme, for the message.

    Raises:
        ConfigError: with the reason.
    """
    problem = backend.problem(sort, scheme)
    if problem is not None:
        raise ConfigError(
            f"{origin}: backend {backend.name} cannot run {sort} scheme {scheme.describe()}: {problem}."
        )


def check_method(backend: backends.Backend, method: str, origin: str) -> None:
    """Refuses a method that the backend lacks.

    Args:
        backend: the target.
        method: ``static``, ``dynamic`` or ``weight_only``.
        origin: the file and line of the method, for the message.

    Raises:
        ConfigError: naming the targets that have it.
    """
    if method == "static" or backend.kinds_of(method):
        return
    able = [name for name in backends.known() if backends.get(name).kinds_of(method)]
    raise ConfigError(
        f"{origin}: backend {backend.name} lacks method {method}: use method: static, or one of "
        f"the backends {', '.join(able)}."
    )


def check_plugin(package: str, spec: Spec, sort: str, scheme: QScheme, place: Callable[[str], str]) -> None:
    """Refuses wrong options of an observer or a fake quant, and a scheme that it does not support.

    Args:
        package: ``qtrace.observers`` or ``qtrace.fakequant``.
        spec: the plugin and its options.
        sort: ``activation`` or ``weight``.
        scheme: the scheme of its site.
        place: returns the place of an option; for ``""`` the place of the plugin.

    Raises:
        ConfigError: with a line for each mistake.
    """
    from qtrace.fakequant.base import FakeQuant  # here: it loads MegEngine
    from qtrace.observers.base import Observer

    observes, origin = package == "qtrace.observers", place("")
    with prefix_errors(origin):
        plugin = plugins.resolve(package, spec.name, Observer if observes else FakeQuant)
    check_options(plugin.Options, spec.name, spec.options, place)  # type: ignore[attr-defined]
    with prefix_errors(origin):
        arguments = (scheme,) if observes else (f"{sort}s", scheme.replace(axis=None, block=None))
        plugin(*arguments, **spec.options)


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


SYMMETRIC = "common/symmetric_activations"
"""The recipe for targets whose activations lack a zero point at some width."""

_NAME = re.compile(r"w(\d+)(?:a(\d+))?(_dynamic)?")


def is_precision(name: object) -> bool:
    """Returns whether ``name`` is the short name of a precision."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def lacks_zero_points(name: str, target: str) -> bool:
    """Returns whether the activations of a target lack a zero point at the width of a precision."""
    bits = _bits(name).get("activation")
    limits = backends.get(target).limits.get("activation")
    return limits is not None and bits in limits.symmetric_bits


def check_precision(names: Sequence[str], target: str) -> None:
    """Refuses a precision that a target lacks.

    Args:
        names: the parts of a recipe's name; those that are no precision are left out.
        target: the name of the target.

    Raises:
        ConfigError: naming the bits that the target has.
    """
    backend = backends.get(target)
    for name in filter(is_precision, names):
        _check_method(name, backend, target)
        for sort, bits in _bits(name).items():
            limits = backend.limits.get(sort)
            if limits is not None and bits not in limits.bits:
                raise ConfigError(
                    f"{target} lacks {name}: it runs weights of {_written(backend, 'weight')} bits and "
                    f"activations of {_written(backend, 'activation')} bits."
                )


def _check_method(name: str, backend: Backend, target: str) -> None:
    match = _NAME.fullmatch(name)
    assert match is not None
    method = "dynamic" if match[3] else "static" if match[2] else "weight_only"
    if method != "static" and not backend.kinds_of(method):
        able = [known for known in backends.known() if backends.get(known).kinds_of(method)]
        raise ConfigError(
            f"{target} lacks {name}: quantizing by method {method} is for {' and '.join(able)}; choose a "
            "precision of weights and activations, such as w8a8."
        )


def _bits(name: str) -> dict[str, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    bits = {"weight": int(match[1])}
    if match[2] and not match[3]:
        bits["activation"] = int(match[2])
    return bits


def _written(backend: Backend, sort: str) -> str:
    widths = [str(bits) for bits in backend.limits[sort].bits]
    return " or ".join(filter(None, [", ".join(widths[:-1]), widths[-1]]))
