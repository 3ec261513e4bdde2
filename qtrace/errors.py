"""Every error that a user can cause, and every warning: a sentence that says what, where and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

SHOWN_NAMES = 3  # of a list within a sentence
SHOWN_LINES = 20  # of a list of problems, or of lines that a report prints


class QtraceError(Exception):
    """Base of all errors that a user can cause; the command line prints it and exits with `exit_code`.

    Attributes:
        exit_code: 2 for a mistake in what was given, 1 for a result that fails a check.
    """

    exit_code = 2


class SchemeError(QtraceError):
    """A quantization scheme or its parameters are impossible."""


class ConfigError(QtraceError):
    """A qconfig or recipe is wrong; the message carries file and line where there is a file."""


class GraphError(QtraceError):
    """A traced graph is inconsistent, or an edit would make it so."""


class TraceError(QtraceError):
    """A module cannot be traced faithfully."""


class CalibrationError(QtraceError):
    """Calibration data is missing, empty, not finite or of the wrong shape."""


class UnsafeFileError(QtraceError):
    """A model file asks for something that is not on the allow-list."""


class ImportingError(QtraceError):
    """A file of another framework cannot become a traced module."""


class ExportError(QtraceError):
    """A graph cannot be expressed in the chosen format."""


class DataError(QtraceError):
    """A data source cannot be read."""


class LimitError(CalibrationError):
    """A quantized network is useless, or breaks a limit of the user."""

    exit_code = 1


class VerifyError(ExportError):
    """A runtime computes something else than the graph of its file."""

    exit_code = 1


class Terminated(SystemExit):
    """A signal ended the process; this is no error, and differs from a ``sys.exit`` in the user's code."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class QtraceWarning(UserWarning):
    """Something is allowed but is likely to go wrong."""


class TrainingError(QtraceError):
    """A fine-tuning cannot begin, or its loss is not finite."""


@contextmanager
def refusing(kind: type[QtraceError], subject: object, action: str) -> Iterator[None]:
    """Says of an error of the system what cannot be done, such as ``written``, to a file or folder."""
    try:
        yield
    except OSError as error:
        raise kind(f"{subject} cannot be {action}: {error.strerror or error}.") from error


def shorten_list(entries: Iterable[object], separator: str = ", ", limit: int = SHOWN_NAMES) -> str:
    """Joins the first entries for a message, and says how many more there are."""
    texts = list(map(str, entries))
    shown = texts if len(texts) <= limit + 1 else texts[:limit]  # "and 1 more" is no shorter than a name
    rest = len(texts) - len(shown)
    return separator.join(shown) + (f"{separator.lstrip(',;')}and {rest} more" if rest else "")


def install(extra: str) -> str:
    """Returns the command that installs an extra of qtrace, for a message.

    The package index has another project of the name qtrace, so that a checkout is installed.

    Args:
        extra: the extra, as ``pyproject.toml`` names it.
    """
    return f"pip install -e '.[{extra}]' in the checkout of qtrace"


def missing_package(error: ModuleNotFoundError) -> Exception:
    """Returns the error for a package of an extra that is not installed; ``error`` itself for any other."""
    from importlib import metadata

    package = (error.name or "").partition(".")[0].replace("_", "-")
    for line in metadata.requires("qtrace") or ():
        required = re.match(r'([\w.-]+).*extra == "([\w-]+)"', line)
        if required and required[1].replace("_", "-") == package:
            return QtraceError(f"the package {package} is not installed: run {install(required[2])}.")
    return error
