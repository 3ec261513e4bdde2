"""JSON documents that qtrace wrote, and that anything may have damaged since."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_document"]


def parse_document(text: str | bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        ValueError: when the text is anything else, such as lists that are nested too deeply.
    """
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document
