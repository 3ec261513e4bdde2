"""Whether the target, the observers and the fake quants can do what a config says, told where it says so."""

from __future__ import annotations

from qtrace import plugins
from qtrace.config import backends
from qtrace.config.algorithm import algorithms
from qtrace.config.qconfig import QConfig
from qtrace.config.rule import Spec
from qtrace.errors import ConfigError, QtraceError
from qtrace.scheme import QScheme

__all__ = ["check_options", "check_scheme", "check_whole"]


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
        where = qconfig.place(f"observers.{sort}", sort)
        check_options("qtrace.observers", observers[sort], sort, scheme, where)
        where = qconfig.place("fakequant", "qat.fakequant", sort)
        check_options("qtrace.fakequant", qconfig.effective_fakequant, sort, scheme, where)
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


def check_options(package: str, spec: Spec, sort: str, scheme: QScheme, origin: str) -> None:
    """Makes an observer or a fake quant once, so that a wrong option is told with its place.

    Args:
        package: ``qtrace.observers`` or ``qtrace.fakequant``.
        spec: the plugin and its options.
        sort: ``activation`` or ``weight``.
        scheme: the scheme that it is for.
        origin: where it was written, for the message.

    Raises:
        ConfigError: saying why.
    """
    from qtrace.fakequant.base import FakeQuant  # here: it loads MegEngine
    from qtrace.observers.base import Observer

    try:
        if package == "qtrace.observers":
            plugins.resolve(package, spec.name, Observer)(scheme, **spec.options)
        else:
            fake_quant = plugins.resolve(package, spec.name, FakeQuant)
            fake_quant(f"{sort}s", scheme.replace(axis=None), **spec.options)
    except QtraceError as error:
        raise ConfigError(f"{origin}: {error}") from error
