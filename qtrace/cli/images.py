"""The options that say how images become inputs, besides the recipe's ``preprocess``, for every command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from qtrace.cli.console import Console
    from qtrace.config import QConfig
    from qtrace.data import DataSource

__all__ = ["change_config", "chosen_words", "images", "own_flags", "warn_unused"]

_META = "qtrace.images"  # in the context of the command: option -> its flag and its value


class _Numbers(click.ParamType):
    """One number, or one for each channel with commas between them; a fraction such as 1/255 is one, too."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        try:
            return [_number(part) for part in str(value).split(",")]
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} are no numbers, such as 0.5 or 123.675,116.28,103.53.", param, ctx)


def _number(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below) if below else float(above)


class _Size(click.ParamType):
    """Height and width, or channels, height and width."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        parts = str(value).lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is no size, such as 224x224 or 1x32x32 for grey images.", param, ctx)
        return [int(part) for part in parts]


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        context.meta.setdefault(_META, {})[parameter.name] = (parameter.opts[0], value)


_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("size", _Size(), "HxW or CxHxW, the size that images are brought to."),
    (
        "mean",
        _Numbers(),
        "What is subtracted from the channels of images, after --scale, such as 123.675,116.28,103.53.",
    ),
    ("std", _Numbers(), "What the channels of images are divided by then, such as 58.395,57.12,57.375."),
    ("scale", _Numbers(), "What pixels, 0 to 255, are multiplied by first, such as 1/255."),
    ("channels", click.Choice(["bgr", "rgb"]), "The order of channels that the model takes."),
    ("resize", click.Choice(["stretch", "center_crop", "letterbox"]), "How images get their size."),
    ("layout", click.Choice(["nchw", "nhwc"]), "The axes of uint8 arrays of pixels."),
)


def images(reserved: Sequence[str] = ()) -> Callable[..., Any]:
    """Adds --size, --mean, --std, --scale, --channels, --resize and --layout, and each as --image-NAME.

    What they say is kept in the command's context, for `change_config`.

    Args:
        reserved: the names that are another option of the command: they have only the long form.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, kind, text in reversed(_OPTIONS):
            flags = [f"--image-{name}"] if name in reserved else [f"--{name}", f"--image-{name}"]
            option = click.option(
                *flags,
                f"image_{name}",
                type=kind,
                metavar=None if isinstance(kind, click.Choice) else name.upper(),
                callback=_keep,
                expose_value=False,
                help=f"{text} Wins over the recipe's preprocess.",
            )
            function = option(function)
        return function

    return decorate


def _chosen() -> dict[str, tuple[str, Any]]:
    context = click.get_current_context(silent=True)
    chosen = {} if context is None else context.meta.get(_META, {})
    return {name.removeprefix("image_"): entry for name, entry in chosen.items()}


def chosen_words() -> list[str]:
    """Returns the options as words of a command line, to be repeated in another command."""
    words: list[str] = []
    for name, (flag, value) in _chosen().items():
        sign = "x" if name == "size" else ","
        words += [flag, value if isinstance(value, str) else sign.join(f"{n!r}" for n in value)]
    return words


def own_flags(text: str) -> str:
    """Returns a message that names the options as the running command has them: ``--image-size`` in tune."""
    context = click.get_current_context(silent=True)
    for option in () if context is None else context.command.params:
        name = str(option.name).removeprefix("image_")
        if name != option.name and f"--{name}" not in option.opts:
            text = text.replace(f"--{name}", option.opts[0])
    return text


def change_config(config: QConfig | None) -> QConfig | None:
    """Returns a config whose ``preprocess`` is as the options of the command say.

    Args:
        config: the config of the recipe or of the model; None for no config.

    Raises:
        ConfigError: when the result is no complete ``preprocess``.
    """
    chosen = _chosen()
    if not chosen:
        return config
    from qtrace.config import QConfig
    from qtrace.errors import ConfigError

    known = None if config is None else config.preprocess
    values = {} if known is None else dict(known.to_dict())
    flags = ", ".join(flag for flag, _ in chosen.values())
    if missing := [name for name in ("size", "mean", "std") if name not in values and name not in chosen]:
        raise ConfigError(
            f"{flags}: the recipe says nothing of images, so give "
            f"{own_flags(' and '.join(f'--{n}' for n in missing))}, too."
        )
    if "resize" in chosen:  # what says more about another way
        for name in ("crop_fraction", "fill", "fill_at"):
            values.pop(name, None)
    channels = len(chosen["mean"][1]) if "mean" in chosen else len(values.get("mean", ())) or 3
    for name, (_, value) in chosen.items():
        values[name] = value[0] if name == "scale" and len(value) == 1 else value
    size = values["size"]
    values["size"] = (
        size if len(size) == 3 else [3 if channels == 1 and "mean" in chosen else channels, *size]
    )
    for name in ("mean", "std"):
        if len(values[name]) == 1:
            values[name] = list(values[name]) * values["size"][0]
    try:
        checked = QConfig.model_validate({"preprocess": values})
    except ConfigError as error:
        raise ConfigError(f"{flags}: {error}") from error
    return checked if config is None else config.model_copy(update={"preprocess": checked.preprocess})


def warn_unused(source: str | DataSource, config: QConfig | None, console: Console) -> None:
    """Warns of options that change nothing, as the data holds no pixels.

    Args:
        source: the data, or its name.
        config: the config with the options.
        console: takes the warning.
    """
    chosen = _chosen()
    if not chosen or config is None:
        return
    if isinstance(source, str):
        from qtrace.data import open_data

        source = open_data(source, preprocess=config.preprocess)
    if not source.pixels:
        console.warn(
            f"{source.source} holds no images and no uint8 pixels of four axes: its values are inputs as "
            f"they are, and {', '.join(flag for flag, _ in chosen.values())} change nothing."
        )
