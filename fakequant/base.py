"""What every fake quant is: a module at one site, with phases, an observer and quantization parameters."""

from __future__ import annotations

import abc
from typing import Any, Literal, get_args

import megengine.functional as F
import numpy as np
from megengine import Parameter, Tensor
from megengine.module import Module
from megengine.traced_module import register_as_builtin
from megengine.traced_module.pytree import register_supported_type

from qtrace.errors import CalibrationError, ConfigError, SchemeError
from qtrace.fakequant._kernel import as_float32, quant_dequant
from qtrace.numerics import SMALLEST_SCALE
from qtrace.observers.base import Observer
from qtrace.scheme import QParams, QScheme

__all__ = ["PHASES", "FakeQuant", "Phase", "scales"]

Phase = Literal["float", "observe", "quantize", "train"]
PHASES: tuple[str, ...] = get_args(Phase)

# MegEngine checks the attributes of a module that it serializes against the types registered here.
register_supported_type(QScheme)
register_supported_type(Observer)


class FakeQuant(Module):
    """Abstract base: rounds a tensor to the integers of its scheme and back.

    The phase says what ``forward`` does: ``float`` passes the value through, ``observe`` shows it to the
    observer and passes it through, ``quantize`` applies frozen parameters, ``train`` is the subclass's.

    A subclass defines `_setup`, `_learns_scale` and `_train`, and is decorated with `builtin`.

    Args:
        site: the name of the quantized tensor; it appears in every error.
        scheme: how the tensor is quantized.
        shape: the shape of scale and zero point, broadcastable to the tensor; ``()`` per tensor.
        observer: collects the statistics from which ``calibrate`` takes the parameters.
        static: True for a parameter: it is observed once, not at every batch.
        numel: how many values share one scale: of the parameter, or of one sample of an activation.

    Raises:
        ConfigError: when the scheme cannot be used with this fake quant.
    """

    def __init__(
        self,
        site: str,
        scheme: QScheme,
        *,
        shape: tuple[int, ...] = (),
        observer: Observer | None = None,
        static: bool = False,
        numel: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.site, self.scheme, self.observer = site, scheme, observer
        self.shape, self.static, self.numel = tuple(shape), static, max(int(numel), 1)
        self.phase: str = "float"
        self.batch = 0
        if scheme.per_channel != (self.shape != ()):
            raise SchemeError(
                f"{site}: scheme {scheme.describe()} does not fit scales of shape {self.shape}."
            )
        kind = Parameter if self._learns_scale() else Tensor
        self.scale = kind(np.zeros(self.shape, np.float32))  # 0: not calibrated
        self.zero_point = as_float32(np.zeros(self.shape, np.float32))
        self._setup(options)

    @abc.abstractmethod
    def _learns_scale(self) -> bool:
        """Whether the scale is a Parameter that an optimizer may change; it is asked before `_setup`."""

    @abc.abstractmethod
    def _setup(self, options: dict[str, Any]) -> None:
        """Takes the subclass's options; an unknown one is a ConfigError."""

    @abc.abstractmethod
    def _train(self, x: Tensor) -> Tensor:
        """What ``forward`` does in the phase ``train``."""

    @property
    def calibrated(self) -> bool:
        """Whether the site has parameters: no scale is 0, so that a state dict brings them along.

        It waits for the tensor, which ``forward`` must not do under ``jit.trace``: `set_phase` asks.
        """
        return bool(np.all(self.scale.numpy() != 0))

    def forward(self, x: Tensor) -> Tensor:
        """Passes, observes or fake-quantizes ``x`` (float32, any shape), as the phase says."""
        if self.phase == "float":
            return x
        if self.phase == "observe":
            self._observe(x)
            return x
        return self._train(x) if self.phase == "train" else self.quantize_dequantize(x)

    def quantize_dequantize(self, x: Tensor, scale_gain: float | None = None) -> Tensor:
        """Rounds ``x`` with the present parameters; straight-through gradient to ``x``.

        Args:
            x: float32 tensor.
            scale_gain: factor on the gradient of the scale; None for none.
        """
        scheme = self.scheme
        return quant_dequant(
            x,
            self.effective_scale(),
            self.zero_point,
            scheme.qmin,
            scheme.qmax,
            scheme.rounding == "half_even",
            self.shape,
            scale_gain,
        )

    def effective_scale(self) -> Tensor:
        """The positive scale that is applied (a learned scale may have crossed zero)."""
        return F.maximum(F.abs(self.scale), SMALLEST_SCALE) if self._learns_scale() else self.scale

    def _observe(self, x: Tensor) -> None:
        if self.observer is None:
            raise CalibrationError(
                f"site {self.site} is converted and has no observer: prepare a graph again."
            )
        if self.static:
            if self.observer.empty:
                self.observer.observe(self.channels_first(x.numpy()), site=self.site)
        else:
            self.observer.observe(self.channels_first(x.numpy()), batch=self.batch, site=self.site)

    def channels_first(self, value: np.ndarray) -> np.ndarray:
        """A weight whose channels are not on the scheme's one axis, as (channels, rest)."""
        if not self.scheme.per_channel:
            return value
        own = (self.scheme.axis or 0) % len(self.shape)
        axes = [i for i, size in enumerate(self.shape) if size != 1] or [own]
        if axes == [own]:
            return value
        return np.moveaxis(value, axes, range(len(axes))).reshape(int(np.prod(self.shape)), -1)

    def set_qparams(self, qparams: QParams) -> None:
        """Takes quantization parameters, in place (optimizers and traces keep their tensors).

        Raises:
            SchemeError: when the number of scales is not this site's.
        """
        if qparams.scale.size != int(np.prod(self.shape)):
            raise SchemeError(
                f"site {self.site} takes {int(np.prod(self.shape))} scales, not {qparams.scale.size}."
            )
        kind = type(self.scale)
        self.scale._reset(kind(qparams.scale.reshape(self.shape)))
        self.zero_point._reset(as_float32(qparams.zero_point.reshape(self.shape)))

    def qparams(self) -> QParams:
        """The present quantization parameters; scale and zero point of shape ``()`` or ``(C,)``.

        Raises:
            CalibrationError: when the site was never calibrated.
        """
        if not self.calibrated:
            raise CalibrationError(f"site {self.site} was never calibrated: run qtrace.calibrate first.")
        flat = (-1,) if self.shape else ()
        scale = self.effective_scale().numpy().reshape(flat)
        return QParams(self.scheme, scale, self.zero_point.numpy().reshape(flat).astype(np.int32))

    def _module_info_string(self) -> str:
        return f"{self.site}, {self.scheme.describe()}, {self.phase}"


def scales(module: Module) -> list[Parameter]:
    """The learned scales of a prepared module, for a parameter group of their own in an optimizer.

    Scales are far smaller than weights and want a lower learning rate (a tenth) and no weight decay.

    Args:
        module: a module made by ``qtrace.prepare``, or one that holds such modules.

    Returns:
        One Parameter for each site whose fake quant learns its scale; empty with ``fixed``.
    """
    return [m.scale for m in module.modules() if isinstance(m, FakeQuant) and isinstance(m.scale, Parameter)]


def reject_options(owner: str, options: dict[str, Any], known: tuple[str, ...] = ()) -> None:
    """Refuses options that a fake quant does not know.

    Raises:
        ConfigError: naming the unknown option and the known ones.
    """
    for key in options:
        if key not in known:
            names = ", ".join(known) if known else "none"
            raise ConfigError(f"fake quant {owner} has no option {key!r}; it knows: {names}.")


def builtin(cls: type[Module]) -> type[Module]:
    """Lets the tracer call ``cls`` as one module instead of looking inside."""
    register_as_builtin(cls)
    return cls
