"""What was measured on this machine and is not measured again: documents in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from qtrace.storage.files import parse_document, replacing

__all__ = ["cache_folder", "read_cached", "write_cached"]

_LOG = logging.getLogger("qtrace")


def cache_folder() -> Path:
    """Returns the folder of ``QTRACE_CACHE``, else ``qtrace`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("QTRACE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qtrace"


def read_cached(kind: str, key: Any) -> Any:
    """Returns the document of ``key``; None if there is none, or it is damaged, of which a warning tells.

    Args:
        kind: what is stored, such as ``times``.
        key: plain data on which the document depends, all of it.
    """
    path = _path(kind, key)
    try:
        document = parse_document(path.read_bytes())
        if document["key"] != json.loads(json.dumps(key)):
            raise ValueError("it belongs to another key")
        return document["value"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is damaged and is left out (%s); it is written again.", path, error)
        return None


def write_cached(kind: str, key: Any, value: Any) -> None:
    """Stores a document; a folder that cannot be written is left as it is.

    Args:
        kind: what is stored.
        key: plain data on which the document depends.
        value: the document, as plain data.
    """
    path = _path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as (stream,):
            stream.write(json.dumps({"key": key, "value": value}, indent=1).encode())
    except OSError as error:
        _LOG.info("nothing is remembered in %s: %s", path.parent, error.strerror or error)


def _path(kind: str, key: Any) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / f"{kind}-{digest}.json"
