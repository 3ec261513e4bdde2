"""Whether the target, the observers and the fake quants can do what a config says, told where it says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qtrace import plugins
from qtrace.config import backends
from qtrace.config.algorithm import algorithms, placed
from qtrace.config.qconfig import QConfig
from qtrace.config.rule import Spec
from qtrace.errors import ConfigError
from qtrace.plugins.options import check_options
from qtrace.scheme import QScheme

__all__ = ["check_plugin", "check_scheme", "check_whole"]


def check_whole(qconfig: QConfig) -> None:
    """Checks what a config says about every op, before any graph is looked at.

    Raises:
        ConfigError: with file and line where the config has them.
    """
    backend = backends.get(qconfig.backend)
    observers = {"activation": qconfig.activation_observer, "weight": qconfig.weight_observer}
    for sort, changes in (("activation", qconfig.activation), ("weight", qconfig.weight)):
        scheme: QScheme = getattr(backend, sort)
        if changes is not None:
            scheme = changes.apply(scheme)
        check_scheme(backend, sort, scheme, qconfig.place(sort))
        place = partial(qconfig.option_place, f"observers.{sort}", sort)
        check_plugin("qtrace.observers", observers[sort], sort, scheme, place)
        place = partial(qconfig.option_place, "fakequant", "qat.fakequant", sort)
        check_plugin("qtrace.fakequant", qconfig.effective_fakequant, sort, scheme, place)
    algorithms(qconfig)


def check_scheme(backend: backends.Backend, sort: str, scheme: QScheme, origin: str) -> None:
    """Refuses a scheme that the backend cannot run.

    Args:
        backend: the target.
        sort: ``activation`` or ``weight``.
        scheme: how tensors of that sort are to be quantized.
        origin: where it was written, for the message.

    Raises:
        ConfigError: saying why.
    """
    problem = backend.problem(sort, scheme)
    if problem is not None:
        raise ConfigError(
            f"{origin}: backend {backend.name} cannot run {sort} scheme {scheme.describe()}: {problem}."
        )


def check_plugin(package: str, spec: Spec, sort: str, scheme: QScheme, place: Callable[[str], str]) -> None:
    """Refuses wrong options of an observer or a fake quant, and a scheme that it cannot do.

    Args:
        package: ``qtrace.observers`` or ``qtrace.fakequant``.
        spec: the plugin and its options.
        sort: ``activation`` or ``weight``.
        scheme: the scheme that it is for.
        place: gives the place where an option was written; where the plugin was, for ``""``.

    Raises:
        ConfigError: with a line for each mistake.
    """
    from qtrace.fakequant.base import FakeQuant  # here: it loads MegEngine
    from qtrace.observers.base import Observer

    observes, origin = package == "qtrace.observers", place("")
    with placed(origin):
        plugin = plugins.resolve(package, spec.name, Observer if observes else FakeQuant)
    if (schema := plugin.Options) is not None:  # type: ignore[attr-defined]
        check_options(schema, spec.name, spec.options, place)
    with placed(origin):
        where = (scheme,) if observes else (f"{sort}s", scheme.replace(axis=None))
        plugin(*where, **spec.options)
