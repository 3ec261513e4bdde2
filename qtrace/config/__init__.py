"""The config's models, checked when they are written down rather than when they are used.

All are frozen and hashable, refuse unknown keys, and raise `ConfigError`: one sentence a mistake.
"""

from qtrace.config.qconfig import Bn, Expect, Preprocess, Qat, QConfig, Region
from qtrace.config.rule import Match, Observers, Rule, SchemePatch, Spec, Subgraph

__all__ = [
    "Bn",
    "Expect",
    "Match",
    "Observers",
    "Preprocess",
    "QConfig",
    "Qat",
    "Region",
    "Rule",
    "SchemePatch",
    "Spec",
    "Subgraph",
]
