"""Weights of 7 bits instead of 8, for processors whose fast kernels saturate with 8.

Without VNNI instructions, onnxruntime's kernels for uint8 and int8 add two products in 16 bits. Weights of
8 bits are stored as uint8 there, whose kernels are exact and slower; two products with weights of 7 bits fit,
so that these take the fast kernels. Which of both is better depends on the network.
"""

from __future__ import annotations

from typing import Any

from qtrace.config import QConfig, Rule, SchemePatch
from qtrace.onnxfile.saturation import SAFE_BITS

__all__ = ["with_fewer_bits"]

_ORIGIN = "weights of 7 bits"


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
