"""The page of packaged recipes."""

from __future__ import annotations

from scripts.site import source

__all__ = ["page"]

_HEAD = """# Recipes that come with qtrace

`--recipe NAME`, `qtrace.prepare(traced, NAME)` or `imports: [NAME]` takes one. `qtrace recipes show NAME`
prints it with everything that it imports, and with the reason for each rule.

```
qtrace calibrate float.mge --data images/ --recipe resnet50 --out int8
qtrace recipes new --from backend/tensorrt --from resnet --out mine.yaml
```

[Recipes](../guides/recipes.md) explains how to write one.
"""

_TITLES = {
    "": ("Families and presets", "A family knows the structure of a network. It names no target."),
    "backend": ("Targets", "Import one before a family; without one the target is onnxruntime."),
    "common": ("Parts", "Families import these."),
}


def page() -> str:
    """The page in Markdown."""
    import qtrace

    parts = [_HEAD]
    for folder, (title, text) in _TITLES.items():
        rows = ["| name | for | algorithms |", "| --- | --- | --- |"]
        for name in source.find("recipe_names")():
            if name.rpartition("/")[0] == folder:
                config = qtrace.load_recipe(name)
                algorithms = ", ".join(f"`{spec.name}`" for spec in config.ptq or ())
                rows.append(f"| `{name}` | {config.description or ''} | {algorithms} |")
        parts.append(f"## {title}\n\n{text}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"
