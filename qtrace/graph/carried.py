"""Records that a traced module carries as JSON text: of a damaged one there is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qtrace.errors import GraphError, SchemeError

__all__ = ["parsing"]

_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, RecursionError, SchemeError)


@contextmanager
def parsing(record: str, cure: str) -> Iterator[None]:
    """Turns what a damaged record raises within the block into a `GraphError`.

    Args:
        record: the record and the verb, such as ``"the interface that the model carries is"``.
        cure: what to do.
    """
    try:
        yield
    except _DAMAGES as error:
        raise GraphError(f"{record} damaged ({type(error).__name__}): {cure}.") from error
