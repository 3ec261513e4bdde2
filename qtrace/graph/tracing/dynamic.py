"""Axes of a module's inputs that stay open in its trace: their record, and examples of other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from megengine import Tensor
from megengine.module import Module

from qtrace.errors import TraceError
from qtrace.graph.open_axes import OpenAxes, OpenAxis, other_sizes
from qtrace.graph.tracing.example_inputs import Arguments, resize_values

__all__ = ["Dynamic", "other_examples", "read_dynamic"]

Dynamic = Mapping[str, Mapping[int, str]]


def read_dynamic(module: Module, method: str, inputs: Arguments, dynamic: Dynamic) -> OpenAxes | None:
    """Returns the record of the open axes; None if `dynamic` names none.

    Args:
        module: the module.
        method: its method that is traced.
        inputs: the example.
        dynamic: name of an input of the method -> axis -> name of its size; negative axes count from the end.
            Axes of one name have one size.

    Raises:
        TraceError: for an input that the method does not have or that is no Tensor, an axis that it does not
            have, or sizes of one name that differ in the example.
    """
    if not isinstance(dynamic, Mapping) or not all(isinstance(own, Mapping) for own in dynamic.values()):
        raise TraceError(
            f"dynamic takes names of axes by input, such as {{'x': {{0: 'N'}}}}, not {dynamic!r}."
        )
    args, kwargs = inputs
    bound = inspect.signature(getattr(module, method)).bind(*args, **kwargs).arguments
    axes: list[OpenAxis] = []
    sizes: dict[str, tuple[int, str]] = {}
    for name, own in dynamic.items():
        if not isinstance(bound.get(name), Tensor):
            tensors = ", ".join(key for key, value in bound.items() if isinstance(value, Tensor))
            raise TraceError(
                f"dynamic: {name!r} is no Tensor among the inputs; there are: {tensors or 'none'}."
            )
        shape = tuple(int(n) for n in bound[name].shape)
        for axis, text in own.items():
            if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
                raise TraceError(f"dynamic: {name} has the shape {shape}, and no axis {axis!r}.")
            if not isinstance(text, str) or not text:
                raise TraceError(f"dynamic: axis {axis} of {name} needs a name such as 'H', not {text!r}.")
            position = axis % len(shape)
            size, other = sizes.setdefault(text, (shape[position], f"axis {position} of {name}"))
            if size != shape[position]:
                raise TraceError(
                    f"dynamic: {text!r} is {size} at {other} and {shape[position]} at axis {position} of "
                    f"{name}: axes of one name have one size."
                )
            axes.append(OpenAxis(name, position, text, text))
    return OpenAxes(tuple(axes)) if axes else None


def other_examples(
    module: Module, method: str, inputs: Arguments, record: OpenAxes
) -> list[tuple[str, Arguments]]:
    """Returns a title and the inputs for two other sizes of the open axes, with the values of the example."""
    signature = inspect.signature(getattr(module, method))
    args, kwargs = inputs
    bound = signature.bind(*args, **kwargs).arguments
    shapes = {axis.input: tuple(int(n) for n in bound[axis.input].shape) for axis in record.axes}
    examples = []
    for sizes in other_sizes(shapes, record.axes):
        resized = {name: Tensor(resize_values(bound[name].numpy(), shape)) for name, shape in sizes.items()}
        names = dict(zip(signature.parameters, args, strict=False))
        positional = tuple(resized.get(name, value) for name, value in names.items())
        positional += args[len(positional) :]
        named = {name: resized.get(name, value) for name, value in kwargs.items()}
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in sizes.items())
        examples.append((f"dynamic, at {shown},", (positional, named)))
    return examples
