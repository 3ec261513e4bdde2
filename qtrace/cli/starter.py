"""The text of a new recipe: its imports, and as comments the settings that it may change."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["starter"]

_TEXT = string.Template("""\
schema: $schema
$name
# A later import wins over an earlier one, and this file wins over all: first a target, then a family.
# `qtrace recipes show` prints what a file and its imports say, with the reasons, and `qtrace recipes check`
# what is wrong; with --model it also tells which rule meets which ops.
imports: $imports

# Remove the sign in front of what you want to say. A misspelt key is an error with its line.

# What it is for, in a sentence.
#description: int8 for my network

# The target, which a recipe under backend/ sets: $backends.
#backend: $backend

# How the pixels of an image become the input: (pixel * scale - mean) / std.
$preprocess

# How ranges are chosen where no rule says otherwise.
#observers: $observers

# Changes for some ops. A later rule wins; one that meets no op is an error unless it is optional. Ops are
# chosen by what they are (op, depthwise, gate, shared), by where they stand (position, before_output, feeds,
# follows, subgraph), which fits any code, or by name.
#rules:
#  - match: {position: last}
#    quantize_output: false
#  - match: {op: conv2d, depthwise: true}
#    weight: {bits: 8}
#    optional: true
#  - match: {name: "head.*"}
#    quantize: false
#    optional: true

# What changes the float network before it is quantized.
#ptq: $ptq

# How it is trained with rounding.
#qat: $qat

# What the result must reach.
#expect: $expect
""")

_DEFAULTS = {
    "preprocess": "{size: [3, 224, 224], mean: [0, 0, 0], std: [255, 255, 255]}",
    "observers": "{activation: mse, weight: minmax}",
    "ptq": "[fuse_bn]",
    "qat": "{fakequant: lsq, epochs: 10, lr: 0.001, bn: {fold: true}}",
    "expect": "{metric: top1, max_drop: 0.5}",
}


# Key of preprocess -> what it means, and its value where no import sets it.
_PIXELS = {
    "size": ("channels (1 for grey, or 3), height and width of the input", "[3, 224, 224]"),
    "channels": ("the model's order of channels, in which mean and std are, too: bgr or rgb", "bgr"),
    "scale": ("what pixels of 0 to 255 are multiplied by first; 0.00392156862745098 is 1/255", "1.0"),
    "mean": ("what is subtracted then, a number for each channel", "[0, 0, 0]"),
    "std": ("what each channel is divided by at last", "[255, 255, 255]"),
    "resize": ("stretch; center_crop keeps the aspect and cuts; letterbox keeps it and fills up", "stretch"),
    "crop_fraction": (
        "for center_crop: the share of the image's side that stays, 0.875 is 224 of 256",
        "0.875",
    ),
    "fill": ("for letterbox: the value of the pixels that are filled up, 0 to 255", "114"),
    "fill_at": ("for letterbox: on both sides, around the image, or at its end as YOLOX has it", "around"),
    "interpolation": ("how images are resized, as in OpenCV: nearest, linear, cubic or area", "linear"),
    "layout": ("the axes of uint8 arrays of pixels: nchw, or nhwc for channels last", "nchw"),
}
_OF_RESIZE = {"crop_fraction": "center_crop", "fill": "letterbox", "fill_at": "letterbox"}


def _describe_pixels(values: Mapping[str, Any]) -> str:
    """Returns ``preprocess`` with all keys, below their meanings; keys of another ``resize`` as comments."""
    resize = values.get("resize", "stretch")
    lines = ["preprocess:"]
    for key, (meaning, default) in _PIXELS.items():
        sign = "#" if _OF_RESIZE.get(key, resize) != resize else ""
        text = _flow(values[key]) if key in values else default
        lines += [f"  # {meaning[0].upper()}{meaning[1:]}.", f"  {sign}{key}: {text}"]
    return "\n".join(lines)


def starter(
    names: Sequence[str], out: Path | None, *, allow_code: bool = False, for_images: bool = False
) -> str:
    """Writes a recipe that imports ``names``, with their settings as comments to change.

    Args:
        names: names or files of recipes.
        out: the file of the new recipe, to which imported files are relative; None for stdout.
        allow_code: whether the recipes may name code, as for `qtrace.load_recipe`.
        for_images: whether every key of ``preprocess`` is written, with its meaning.

    Raises:
        ConfigError: when one of the recipes cannot be read.
    """
    from qtrace.config import backends
    from qtrace.config.recipe import SCHEMA, load_recipe

    configs = [load_recipe(name, allow_code=allow_code) for name in names]
    settings: dict[str, Any] = {}
    for config in configs:
        settings.update((key, value) for key, value in config.to_dict().items() if value)
    values = {key: _flow(settings[key]) if key in settings else default for key, default in _DEFAULTS.items()}
    pixels = settings.get("preprocess", {})
    values["preprocess"] = _describe_pixels(pixels) if for_images else f"#preprocess: {values['preprocess']}"
    return _TEXT.substitute(
        values,
        schema=SCHEMA,
        name="" if out is None else f"name: {_flow(out.stem)}\n",
        imports=_flow([_relative_to(name, out) for name in names]),
        backends=", ".join(backends.known()),
        backend=settings.get("backend", "onnxruntime"),
    )


def _relative_to(name: str, out: Path | None) -> str:
    """Returns the path of file ``name`` relative to the folder of ``out``; other names unchanged."""
    from qtrace.config.recipe import importable

    return name if out is None else importable(name, out.parent)


def _flow(value: Any) -> str:
    from qtrace.config.tree import dump

    return dump([value], flow=True).strip()[1:-1]
