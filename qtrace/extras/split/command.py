"""The command ``qtrace split``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qtrace.cli import models, options
from qtrace.cli.console import Console
from qtrace.storage.outputs import output_folder

_DOCUMENT = "parts.json"


@click.command(
    cls=options.Command,
    example="""
        qtrace split detector.mge --at p3_out,p4_out,p5_out -o detector-parts
        qtrace split float.mge --by-backend ncnn -o parts
    """,
)
@click.argument("model")
@click.option(
    "--at",
    "cuts",
    metavar="NODE[,NODE]",
    multiple=True,
    help="Cut behind this node, or behind several together. Repeatable, in the order of the graph.",
)
@click.option(
    "--by-backend", "backend", metavar="B", help="Cut where support by this backend begins or ends instead."
)
@options.folder_to_write("The folder to make.")
@click.option("--force", is_flag=True, help="Replace the folder if it holds nothing but parts.")
@options.allow
@options.output
def split(
    model: models.NamedModel,
    cuts: tuple[str, ...],
    backend: str | None,
    out: Path,
    force: bool,
    console: Console,
) -> None:
    """Split a model into parts that are calibrated and exported by themselves.

    MODEL is a float.mge of `qtrace trace`, or an ONNX file. The folder gets part_0.mge, part_1.mge and so on
    in the order in which they run, and parts.json with the names of the tensors that they read and give.
    """
    if bool(cuts) == (backend is not None):
        raise click.UsageError("give either --at or --by-backend.")
    with console.work():
        import qtrace

        loaded = model.load()
        at = [[name.strip() for name in cut.split(",")] for cut in cuts] if cuts else None
        parts = qtrace.split(loaded, at, by_backend=backend)
        files = [f"part_{index}.mge" for index in range(len(parts))]
        document = parts.interface()
        document["parts"] = [
            {"file": file, **part} for file, part in zip(files, document["parts"], strict=True)
        ]
        old = [entry.name for entry in out.glob("part_*.mge")] if out.is_dir() else []
        with output_folder(out, names=(*files, *old, _DOCUMENT), force=force) as folder:
            for file, part in zip(files, parts, strict=True):
                qtrace.save(part.module, folder / file)
            (folder / _DOCUMENT).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"{file}: {', '.join(part.inputs)} -> {', '.join(part.outputs)}"
        + ("" if part.supported is None else f" ({'' if part.supported else 'not '}supported by {backend})")
        for file, part in zip(files, parts, strict=True)
    ]
    console.result("\n".join(lines), {"folder": str(out), **document})
