"""The placement that a user prefers, and the bits of weights, which follow by rule from the processor.

Without VNNI instructions, onnxruntime's kernels for uint8 and int8 add two products in 16 bits. Weights of
8 bits are stored as uint8 there, whose kernels are exact and slower; two products with weights of 7 bits fit,
so that these take the fast kernels, which a config that asks for speed gets.
"""

from __future__ import annotations

from typing import Any

from qtrace.config import QConfig, Rule, SchemePatch
from qtrace.onnxfile.saturation import SAFE_BITS, products_saturate
from qtrace.preparation.annotation import Preference
from qtrace.runtimes.host import RuntimeHost

__all__ = ["prefer_placement", "with_fewer_bits", "with_safe_bits"]

_ORIGIN = "weights of 7 bits"


def prefer_placement(config: QConfig, prefer: Preference | None) -> QConfig:
    """Returns the config with a placement that leaves the choice which a preference makes."""
    if prefer is None:
        return config
    return config.model_copy(update={"placement": "fastest" if prefer == "speed" else "balanced"})


def with_safe_bits(config: QConfig, host: RuntimeHost | None = None) -> QConfig:
    """Returns the config with weights of 7 bits if it asks for speed, and products of 8 bits saturate here.

    Args:
        config: the config.
        host: the interpreter or machine that has the runtime; None for this one.
    """
    fewer = with_fewer_bits(config) if config.effective_placement in ("balanced", "fastest") else None
    return config if fewer is None or not products_saturate(host) else fewer


def with_fewer_bits(config: QConfig) -> QConfig | None:
    """Returns a config with weights of 7 bits; None if it says itself what weights are, or has other kernels.

    Those of depthwise convolutions keep 8 bits: their kernels do not add in 16 bits.

    Args:
        config: the config, of whatever target.
    """
    says = [config.weight, *(rule.weight for rule in config.rules)]
    methods = {config.method or "static", *(rule.method or "static" for rule in config.rules)}
    if config.backend != "onnxruntime" or any(says) or methods != {"static"}:
        return None
    if _has_other_activations(config):
        return None
    match = {"op": "conv2d", "depthwise": True}
    depthwise = Rule.model_validate({"match": match, "weight": {"bits": 8}, "optional": True})
    rules = (depthwise.with_origin(_ORIGIN), *config.rules)
    changes: dict[str, Any] = {"weight": SchemePatch(bits=SAFE_BITS), "rules": rules}
    return config.model_copy(update=changes)


def _has_other_activations(config: QConfig) -> bool:
    """Whether an activation is not uint8: only products with uint8 saturate."""
    patches = (config.activation, *(p for r in config.rules for p in (r.activation, r.output)))
    return any(
        patch is not None and (patch.bits or 8, patch.signed or False) != (8, False) for patch in patches
    )
