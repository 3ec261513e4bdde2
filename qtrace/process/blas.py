"""The threads of numpy's and scipy's BLAS, whose number decides the last bits of products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

__all__ = ["one_blas_thread"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Computes products of matrices on one thread within the block, whatever the environment says.

    More threads add up the parts of a sum in another order. What is decided by small margins then differs.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield
