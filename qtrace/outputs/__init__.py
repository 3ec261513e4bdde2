"""The outputs of a graph in groups of columns of like range, and the errors of each group.

An output that packs unlike quantities, such as boxes and scores, has one sum of squares, and the largest of
them own it: it hides whatever happens to the small ones. So each group of columns is measured on its own, and
the worst one decides.
"""

from qtrace.outputs.errors import NO_INFORMATION_DB, GroupedErrors, GroupFigures
from qtrace.outputs.groups import ColumnGroup, find_groups

__all__ = ["NO_INFORMATION_DB", "ColumnGroup", "GroupFigures", "GroupedErrors", "find_groups"]
