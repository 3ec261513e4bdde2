"""The base of all fake quants: a module at one site with phases, an observer and parameters."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal, get_args

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.module import Module
from megengine.traced_module import register_as_builtin
from megengine.traced_module.pytree import register_supported_type

from qtrace.errors import CalibrationError, ConfigError, SchemeError
from qtrace.fakequant.kernels import Learn, Levels, as_float32, positive, quant_dequant
from qtrace.numerics import SMALLEST_SCALE
from qtrace.observers.base import Observer
from qtrace.plugins import name_of
from qtrace.plugins.options import OptionModel, check_options
from qtrace.scheme import QParams, QScheme

__all__ = ["PHASES", "FakeQuant", "Phase", "builtin", "scales"]

Phase = Literal["float", "observe", "quantize", "train"]
PHASES: tuple[str, ...] = get_args(Phase)

# MegEngine checks the attributes of a module that it serializes against the types registered here.
register_supported_type(QScheme)
register_supported_type(Observer)


class FakeQuant(Module):
    """Abstract base: rounds a tensor to the integers of its scheme and back.

    The phase selects what ``forward`` does: ``float`` passes the value through, ``observe`` also shows it to
    the observer, ``quantize`` applies frozen parameters, and ``train`` applies learned ones.

    A subclass declares its `Options`, defines `_learns_scale` and `_learn`, and is decorated with `builtin`.
    A subclass that learns something else than the scale also overrides `_setup`, `_derived` and `_adopt`; one
    that transforms weights overrides `shaped`.

    Attributes:
        Options: the options: a subclass of `OptionModel` with a field for each.

    Args:
        site: the name of the quantized tensor; it appears in every error.
        scheme: the scheme of the tensor.
        shape: the shape of scale and zero point, broadcastable to the tensor; ``()`` per tensor, (outputs,
            blocks, 1) for a weight with a scale per block.
        observer: collects the statistics from which ``calibrate`` takes the parameters.
        static: True for a parameter: it is observed once, not at every batch.
        numel: number of values of the parameter, or of one sample of an activation, that share one scale.
        channel_axes: the axes whose channels have a scale each. ``shape`` does not show them if a
            layer has one channel. None derives them from ``shape`` and the scheme's axis.

    Raises:
        ConfigError: when this fake quant does not support the scheme.
    """

    Options: ClassVar[type[OptionModel]] = OptionModel

    def __init__(
        self,
        site: str,
        scheme: QScheme,
        *,
        shape: tuple[int, ...] = (),
        observer: Observer | None = None,
        static: bool = False,
        numel: int = 1,
        channel_axes: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.site, self.scheme, self.observer = site, scheme, observer
        self.shape, self.static, self.numel = tuple(shape), static, max(int(numel), 1)
        self.channel_axes = None if channel_axes is None else tuple(channel_axes)
        self.phase: str = "float"
        self.batch = 0
        self.transforms = False
        if scheme.per_channel != (self.shape != ()):
            raise SchemeError(
                f"{site}: scheme {scheme.describe()} does not fit scales of shape {self.shape}."
            )
        kind = Parameter if self._learns_scale() else Tensor
        self.scale = kind(np.zeros(self.shape, np.float32))  # 0: not calibrated
        self.zero_point = as_float32(np.zeros(self.shape, np.float32))
        self._setup(dict(check_options(self.Options, name_of(type(self)), options)))

    @abc.abstractmethod
    def _learns_scale(self) -> bool:
        """Whether the scale is a Parameter that an optimizer may change; called before `_setup`."""

    def _setup(self, options: dict[str, Any]) -> None:
        """Sets up what the method learns.

        Args:
            options: all options with their values, checked.
        """
        return

    @abc.abstractmethod
    def _learn(self) -> Learn | None:
        """Selects the gradients of scale and zero point in the phase ``train``; None for none."""

    def _derived(self) -> tuple[Tensor, Tensor]:
        """Computes scale and zero point from learned parameters; the magnitude of the scale is applied."""
        return self.scale, self.zero_point

    def _adopt(self, scale: np.ndarray, zero_point: np.ndarray) -> None:
        """Sets the parameters that are learned instead of the scale; both arguments have ``self.shape``."""
        return

    def shaped(self, x: Tensor) -> Tensor:
        """Returns the tensor to round: ``x`` (float32, any shape), transformed if `transforms` is set."""
        return x

    @property
    def calibrated(self) -> bool:
        """Whether the site has parameters: no scale is 0. So a state dict restores this, too.

        It waits for the tensor, which ``forward`` must not do under ``jit.trace``: `set_phase` checks it.
        """
        return bool(np.all(self.scale.numpy() != 0))

    def forward(self, x: Tensor) -> Tensor:
        """Passes, observes or fake-quantizes ``x`` (float32, any shape), depending on the phase."""
        if self.phase == "float":
            return x
        if self.phase == "observe":
            self._observe(x)
            return x
        return self.quantize_dequantize(x)

    def quantize_dequantize(self, x: Tensor) -> Tensor:
        """Rounds ``x`` with the current parameters.

        The gradient passes straight through to ``x`` and, in the phase ``train``, to learned parameters.

        Args:
            x: float32 tensor.

        Raises:
            SchemeError: when the scales have another shape than ``shape``, or do not fit ``x``.
        """
        blocks = self.in_blocks(x)
        self._check_shapes(blocks)
        scale, zero_point = self._derived()
        levels = Levels.of(self.scheme)
        rounded = quant_dequant(self.shaped(blocks), scale, zero_point, levels, self.shape, self.learning)
        return self._joined(rounded, x)

    def in_blocks(self, x: Tensor) -> Tensor:
        """Views a weight in blocks as (outputs, blocks, block), filled up with zeros; others as they are."""
        size = self.scheme.block
        if size is None:
            return x
        outputs, count = self.shape[:2]
        missing = count * size - x.shape[1]
        if missing:
            x = F.concat([x, F.zeros((outputs, missing), dtype="float32")], axis=1)
        return x.reshape(outputs, count, size)

    def transformed(self, x: Tensor) -> Tensor:
        """Returns what is rounded of ``x``, in its shape: the weight that a converted graph stores."""
        return self._joined(self.shaped(self.in_blocks(x)), x)

    def _joined(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Inverts `in_blocks`: ``like`` is the tensor before."""
        if self.scheme.block is None:
            return blocks
        outputs, count, size = *self.shape[:2], self.scheme.block
        flat = blocks.reshape(outputs, count * size)
        return flat if like.shape[1] == count * size else flat[:, : like.shape[1]]

    def _check_shapes(self, x: Tensor) -> None:
        """Refuses shapes that a kernel would refuse later, after which a call may crash the process."""
        # Under a symbolic jit.trace a shape may be unknown.
        scale, value = tuple(self.scale._tuple_shape), x._tuple_shape
        if scale != self.shape:
            raise SchemeError(f"site {self.site}: its scale has shape {scale}, not {self.shape}: set that.")
        if value is None:
            return
        sizes = zip(reversed(scale), reversed(value), strict=False)
        if len(scale) > len(value) or any(n not in (1, m) for n, m in sizes):
            raise SchemeError(
                f"site {self.site}: its scales of shape {scale} do not fit a tensor of shape {tuple(value)}: "
                "prepare the graph for such tensors."
            )

    @property
    def learning(self) -> Learn | None:
        """The gradients of scale and zero point in the current phase; None for none."""
        return self._learn() if self.phase == "train" else None

    def signed_scale(self) -> Tensor:
        """Returns the scale with its sign, for callers that take the magnitude themselves."""
        return self._derived()[0]

    def effective_scale(self) -> Tensor:
        """Returns the positive scale that is applied."""
        scale = self._derived()[0]
        return positive(scale, self.shape) if self._learns_scale() else scale

    def grid_of(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Returns scale and zero point, float32, in shapes that broadcast to a tensor of ``shape``."""
        grid = self.effective_scale().numpy(), self.effective_zero_point().numpy()
        if self.scheme.block is None:
            return grid
        spread = (np.repeat(part[:, :, 0], self.scheme.block, axis=1)[:, : shape[1]] for part in grid)
        scale, zero_point = spread
        return scale, zero_point

    def effective_zero_point(self) -> Tensor:
        """Returns the zero point that is applied, float32 holding integers."""
        return self._derived()[1]

    def _observe(self, x: Tensor) -> None:
        if self.observer is None:
            raise CalibrationError(
                f"site {self.site} is converted and lacks an observer: prepare a graph again."
            )
        if self.static:
            if self.observer.empty:
                self.observer.observe(self.channels_first(x.numpy()), site=self.site)
        else:
            self.observer.observe(self.channels_first(x.numpy()), batch=self.batch, site=self.site)

    @property
    def counted_axes(self) -> tuple[int, ...]:
        """The axes of the tensor whose channels have a scale each; none per tensor."""
        if not self.scheme.per_channel:
            return ()
        if self.scheme.block is not None:
            return (0,)
        axes = getattr(self, "channel_axes", None)  # models saved by earlier versions do not have it
        if axes:
            return tuple(axis % len(self.shape) for axis in axes)
        own = (self.scheme.axis or 0) % len(self.shape)
        return tuple(i for i, size in enumerate(self.shape) if size != 1) or (own,)

    @property
    def folded_axes(self) -> tuple[int, ...]:
        """The channel axes if they are not just the scheme's axis; else none."""
        if self.scheme.block is not None:
            return ()
        axes = self.counted_axes
        own = axes and ((self.scheme.axis or 0) % len(self.shape),)
        return () if axes == own else axes

    def channels_first(self, value: np.ndarray) -> np.ndarray:
        """Reshapes a weight whose scales do not follow the scheme's one axis to (scales, rest)."""
        if self.scheme.block is not None:
            return split_blocks(value, self.scheme.block)
        return fold_channels(value, self.folded_axes)

    def set_qparams(self, qparams: QParams) -> None:
        """Sets the quantization parameters in place (optimizers and traces keep their tensors).

        No scale is smaller than ``qtrace.numerics.SMALLEST_SCALE``.

        Raises:
            SchemeError: when the number of scales is not this site's.
        """
        if qparams.scale.size != int(np.prod(self.shape)):
            raise SchemeError(
                f"site {self.site} takes {int(np.prod(self.shape))} scales, not {qparams.scale.size}."
            )
        kind = type(self.scale)
        scale = np.maximum(qparams.scale, np.float32(SMALLEST_SCALE))
        self.scale._reset(kind(scale.reshape(self.shape)))
        self.zero_point._reset(as_float32(qparams.zero_point.reshape(self.shape)))
        self._adopt(self.scale.numpy(), self.zero_point.numpy())

    def qparams(self) -> QParams:
        """Returns the current quantization parameters; scale and zero point of shape ``()`` or ``(C,)``.

        Raises:
            CalibrationError: when the site was never calibrated.
        """
        if not self.calibrated:
            raise CalibrationError(f"site {self.site} was never calibrated: run qtrace.calibrate first.")
        flat = (-1,) if self.shape else ()
        tensors = self.effective_scale(), self.effective_zero_point()
        scale, zero_point = (tensor.numpy().reshape(flat) for tensor in tensors)
        scale = np.maximum(scale, np.float32(SMALLEST_SCALE))  # as the kernels apply it
        return QParams(self.scheme, scale, zero_point.astype(np.int32))

    def _module_info_string(self) -> str:
        return f"{self.site}, {self.scheme.describe()}, {self.phase}"


def fold_channels(value: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Reshapes ``value`` to (channels, rest) with the channels on ``axes``; unchanged without axes."""
    if not axes:
        return value
    count = int(np.prod([value.shape[axis] for axis in axes]))
    return np.moveaxis(value, axes, range(len(axes))).reshape(count, -1)


def split_blocks(value: np.ndarray, block: int) -> np.ndarray:
    """Returns a weight (outputs, inputs) as (outputs x blocks, block), filled up with zeros."""
    filled = np.pad(value, ((0, 0), (0, -value.shape[1] % block)))
    return filled.reshape(-1, block)


def scales(module: Module) -> list[Parameter]:
    """Lists the learned parameters of ranges: scales, offsets, thresholds, ends.

    They need a lower learning rate than weights (a tenth) and no weight decay; ``qtrace.param_groups`` makes
    the groups for an optimizer.

    Args:
        module: a module made by ``qtrace.prepare``, or one that holds such modules.

    Returns:
        The Parameters of all fake quants, site by site; empty with ``fixed``.
    """
    fakes = (m for m in module.modules() if isinstance(m, FakeQuant))
    return [parameter for fake in fakes for parameter in fake.parameters(recursive=False)]


def builtin(cls: type[Module]) -> type[Module]:
    """Registers ``cls`` with the tracer as one module that it does not look into."""
    register_as_builtin(cls)
    return cls


def refuse_powers_of_two(fake: FakeQuant) -> None:
    """Refuses a scheme of powers of two for a method that learns any scale.

    Args:
        fake: the fake quant.

    Raises:
        ConfigError: naming the site and what to use instead.
    """
    if fake.scheme.power_of_two:
        raise ConfigError(
            f"{fake.site}: {name_of(type(fake))} learns any scale, but {fake.scheme.describe()} wants powers "
            "of two: use fakequant 'fixed' or 'tqt' there."
        )
