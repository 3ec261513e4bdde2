"""The outputs of a graph in groups of columns of like range, and the errors of each group.

An output that packs unlike quantities, such as boxes and scores, has one sum of squares, and the largest of
them own it: it hides whatever happens to the small ones. So each group of columns is measured on its own, and
the worst one decides.

The public names are loaded when they are first used: who finds groups needs no errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins.packages import load_when_used

if TYPE_CHECKING:
    from qtrace.outputs.errors import NO_INFORMATION_DB, GroupedErrors, GroupFigures
    from qtrace.outputs.groups import ColumnGroup, find_groups

__all__ = ["NO_INFORMATION_DB", "ColumnGroup", "GroupFigures", "GroupedErrors", "find_groups"]

_HOMES = {
    "qtrace.outputs.errors": "NO_INFORMATION_DB GroupFigures GroupedErrors",
    "qtrace.outputs.groups": "ColumnGroup find_groups",
}

load_when_used(__name__, _HOMES)
