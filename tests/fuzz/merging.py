"""Observers: whatever the batches, and however they are spread and merged, the same state and parameters."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tests.observers.test_contract import NAMES, PER_CHANNEL, PER_TENSOR, batch_lists, fingerprint, seen


def check(data: st.DataObject, folder: Path) -> None:
    name, scheme = data.draw(st.sampled_from(NAMES)), data.draw(st.sampled_from((PER_TENSOR, PER_CHANNEL)))
    batches = data.draw(batch_lists())
    whole = seen(name, batches, scheme)
    owners = [data.draw(st.integers(0, 3)) for _ in batches]
    shards = [
        [batch for batch, own in zip(batches, owners, strict=True) if own == worker] for worker in range(4)
    ]
    parts = [seen(name, data.draw(st.permutations(shard)), scheme) for shard in shards]  # some saw nothing
    while len(parts) > 1:
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        second = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(first.merge(second))
    assert fingerprint(parts[0]) == fingerprint(whole)
    assert parts[0].qparams() == whole.qparams()
