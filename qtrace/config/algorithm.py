"""The base of post-training algorithms: options, stage and order, which a config checks."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

from qtrace import plugins
from qtrace.config.qconfig import QConfig
from qtrace.config.spec import Spec
from qtrace.errors import ConfigError, QtraceError
from qtrace.plugins.options import OptionModel, check_options

__all__ = ["Algorithm", "Named", "algorithms", "check_imported", "is_packaged", "prefix_errors"]

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
