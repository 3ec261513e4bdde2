"""The description of a backend: its schemes, its integer ops, and the chains that it fuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from qtrace.scheme import QScheme

if TYPE_CHECKING:  # an op rule loads MegEngine, which a config does not need
    from qtrace.ops import OpCall


@dataclass(frozen=True)
class Limits:
    """The schemes that a backend can run for one sort of site.

    Attributes:
        bits: allowed widths.
        per_channel: whether per-channel scales are allowed.
        affine: whether a zero point is allowed.
        affine_per_channel: whether a zero point per channel is allowed.
        signed: None for both, else the one sign that is allowed.
        narrow: whether the lowest integer may be left out; kernels saturate at it.
        wide: whether the lowest integer may be used.
        symmetric_bits: widths at which no zero point is allowed.
        only_power_of_two: whether scales must be powers of two, as the kernels shift instead of multiplying.
        blocks: the numbers of inputs of a linear layer that may share a scale; empty if only whole channels.
        block_bits: widths that blocks may have.
    """

    bits: tuple[int, ...]
    per_channel: bool
    affine: bool
    signed: bool | None = None
    affine_per_channel: bool = False
    narrow: bool = True
    wide: bool = True
    symmetric_bits: tuple[int, ...] = ()
    only_power_of_two: bool = False
    blocks: tuple[int, ...] = ()
    block_bits: tuple[int, ...] = (4, 8)

    def problem(self, scheme: QScheme) -> str | None:
        """Explains why ``scheme`` cannot run; None if it can."""
        if scheme.bits not in self.bits:
            return f"{scheme.bits} bits (it runs {', '.join(map(str, self.bits))})"
        if scheme.block is not None and scheme.block not in self.blocks:
            known = f"blocks of {', '.join(map(str, self.blocks))}" if self.blocks else "whole channels"
            return f"a scale for each block of {scheme.block} inputs (it runs {known})"
        if scheme.block is not None and scheme.bits not in self.block_bits:
            return f"blocks of {scheme.bits} bits (it runs {', '.join(map(str, self.block_bits))})"
        if scheme.per_channel and not self.per_channel:
            return "per-channel scales (it runs one scale per tensor)"
        if scheme.per_channel and not scheme.symmetric and not self.affine_per_channel:
            return "per-channel scales with a zero point each (it runs those of symmetric schemes)"
        if not scheme.symmetric and not self.affine:
            return "affine schemes (it runs symmetric ones)"
        if not scheme.symmetric and scheme.bits in self.symmetric_bits:
            return f"affine schemes of {scheme.bits} bits (it runs symmetric ones)"
        if self.signed is not None and scheme.signed != self.signed:
            return f"{'signed' if scheme.signed else 'unsigned'} integers"
        if self.only_power_of_two and not scheme.power_of_two:
            return "scales that are no powers of two (it shifts instead of multiplying)"
        if scheme.narrow and not self.narrow:
            return "narrow ranges (it saturates at the lowest integer)"
        if not scheme.narrow and not self.wide:
            return "full ranges (it leaves out the lowest integer)"
        return None


@dataclass(frozen=True)
class Backend:
    """A target runtime.

    Attributes:
        name: the name that configs use.
        activation: scheme of activations unless a config changes it.
        weight: scheme of weights; its axis says per channel (0) or per tensor (None).
        ops: the op kinds that it computes on integers.
        fused: for each op kind, the activations that it computes in the same kernel.
        ties_concat: whether inputs and output of concat and stack must share their parameters.
        keeps_grid: whether the kernel of an op gives integers of its input's scale and zero point, so that
            input and result share their parameters; None where no kernel does.
        rounds_around_float: whether ``quantize: true`` may put an op without an integer kernel, in float,
            between quantized tensors.
        scales_freely: whether a tensor may be read with another scale than it was written with: a
            multiplication by a power of two then changes the scale instead of the integers.
        limits: the schemes that can run, for each sort of site ("activation", "weight").
        any_rounding: whether schemes may round otherwise than the default ones.
        float_kernels: the ops among ``ops`` that the runtime computes in float between rounded tensors, with
            the same resulting integers.
        without_kernels: the types of ONNX nodes that the runtime computes slowly, by a reference, or not at
            all. The file has simpler ones in their place, or is refused.
        float_results: the ops whose integer kernels write floats at no cost, where no function follows.
        integer_layers: whether the kernels of layers give only integers: a layer whose result must not be
            rounded is computed in float.
        cost_table: name of the measured times of its runtime; "" if there are none.
        runtime: the runtime that its files are for, where that is not the usual one of their suffix; "" for
            that one.
        rounds_for_speed: whether the packaged recipe of the target rounds everything since whole networks
            are faster so: a file that is slower than float is then not what it asks for.
        biases: how a layer adds its bias: as an int32 at the scale of the accumulator, as a float, or rounded
            by a scheme of its own.
        computed_weights: what becomes of a layer whose weight or bias depends on an input of the model. It is
            "rounded" if its scheme allows, else in float; always in "float"; or "refused".
        added_unrounded: the layers whose result a later sum adds before it is rounded, in one kernel.
        rounds_for_readers: whether a result is rounded only if an op on integers reads it.
        weights_per_tensor: the ops whose weight has one scale, whatever the scheme says.
        one_width: the ops whose input and result have equally many bits: a reader that wants another number
            rounds the result again.
        pieces: activation function -> the ops that make it, by their name among the pieces of `place`, where
            the target lacks a kernel of its own and rounds between them.
        fixed_results: op kind -> bits -> the ends of the range that its result has at these bits.
        smallest_range: the smallest range of an activation; smaller ones are widened.
        slower_with_zero_point: the layers whose kernels are slower if their input has a zero point other than
            0. A labelling in which such ranges are symmetric is then in question, too.
        device: what the target runs on, if no runtime of `qtrace.verification` is the device's and
            nothing was run there; else "".
        floats_run_on: where ops run that the device lacks integers for; "" if it computes floats, too.
        weight_only: the layers whose file may have integers as a weight where all else is float.
        contrib_weights: whether files have such weights in the forms that onnxruntime runs fastest, Cast and
            Mul, and MatMulNBits for blocks, in place of DequantizeLinear.
        dynamic: the layers that round what they read by the range of each batch, as ONNX's
            DynamicQuantizeLinear does: uint8 with a zero point.
        slower: the reason why an op of `ops` is no faster on integers, "" if it is. The second argument says
            whether no other layer computes before the op. Such an op stays in float unless a rule says
            ``quantize: true``. For an op that is not in `ops`, it is the reason why.
        cures: what its ONNX files need against faults of the runtime, by the names in
            `qtrace.export.onnx.cures`.
    """

    name: str
    activation: QScheme
    weight: QScheme
    ops: frozenset[str]
    fused: Mapping[str, frozenset[str]]
    ties_concat: bool
    limits: Mapping[str, Limits] = field(default_factory=dict)
    keeps_grid: Callable[[OpCall], bool] | None = None
    rounds_around_float: bool = False
    scales_freely: bool = False
    any_rounding: bool = False
    float_kernels: frozenset[str] = frozenset()
    without_kernels: frozenset[str] = frozenset()
    float_results: frozenset[str] = frozenset()
    integer_layers: bool = False
    cost_table: str = ""
    runtime: str = ""
    rounds_for_speed: bool = False
    biases: Literal["int32", "float"] | QScheme = "int32"
    computed_weights: Literal["rounded", "float", "refused"] = "rounded"
    added_unrounded: frozenset[str] = frozenset()
    rounds_for_readers: bool = False
    weights_per_tensor: frozenset[str] = frozenset()
    one_width: frozenset[str] = frozenset()
    pieces: Mapping[str, str] = field(default_factory=dict)
    fixed_results: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    smallest_range: float = 0.0
    slower_with_zero_point: frozenset[str] = frozenset()
    device: str = ""
    floats_run_on: str = ""
    weight_only: frozenset[str] = frozenset()
    contrib_weights: bool = False
    dynamic: frozenset[str] = frozenset()
    slower: Callable[[OpCall, bool], str] | None = None
    cures: frozenset[str] = frozenset()

    @property
    def rounding(self) -> str:
        """The rounding of its kernels."""
        return self.activation.rounding

    def kinds_of(self, method: str) -> frozenset[str]:
        """Returns the layers that it can quantize by a method other than ``static``; empty for none."""
        return {"weight_only": self.weight_only, "dynamic": self.dynamic}.get(method, frozenset())

    def problem(self, sort: str, scheme: QScheme) -> str | None:
        """Explains why it cannot run ``scheme`` for an "activation" or a "weight"; None if it can."""
        if scheme.rounding != self.rounding and not self.any_rounding:
            return f"{scheme.rounding} rounding (it rounds {self.rounding})"
        return self.limits[sort].problem(scheme)
