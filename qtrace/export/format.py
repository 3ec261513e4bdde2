"""What an export format is: how it writes a graph, its suffixes and options, and what it can express."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Content = bytes | Iterable[bytes]
"""What a file holds: all of it, or its pieces in order, which are made while they are written."""


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        name: the name by which users choose it.
        write: writes a graph: ``write(graph, path, **options)`` returns the contents of the files by path.
            ``graph`` is a `ConvertedGraph`, or a `PlainGraph` for a plain traced module; ``path`` is the file
            that the user named.
        suffixes: the suffixes that choose the format, but ``.mge``, which may be a model to work on; none for
            a format that has to be named.
        companions: the suffixes of files that are written next to the named one.
        options: the names of the options that ``write`` takes.
        float_options: the options that apply to plain traced modules, which the format writes in float; None
            if it does not write such modules.
        runs_graph: whether the format runs the graph by itself, and reads no recorded shapes.
        fixes_sizes: whether its files have numbers where the graph has open axes.
        find_fixing_layer: finds the layer of a graph that its file has for the recorded sizes only; "" for
            none. None where `fixes_sizes`, or the file itself, says it of each size.
        folds_norms: whether a plain traced module's BatchNorms become part of the layers before them: the
            runtime computes them one by one otherwise.
        has_composites: whether it has forms for attention, channel shuffle and the other composites that
            `qtrace.preparation.passes.compose.write_pieces` writes in pieces for other formats.
        float_types: the types in which it writes what stays float; () for a format that is a drawing, or the
            graph itself.
    """

    name: str
    write: Callable[..., Mapping[Path, Content]]
    suffixes: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    float_options: tuple[str, ...] | None = None
    runs_graph: bool = False
    fixes_sizes: bool = False
    find_fixing_layer: Callable[..., str] | None = None
    folds_norms: bool = False
    has_composites: bool = False
    float_types: tuple[str, ...] = ("fp32",)
