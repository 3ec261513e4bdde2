"""Annotate: decides for every expr and tensor what is quantized, how, and why. It changes nothing.

Each stage is a walk over the flat graph that takes data and returns data. *Chains*: which ops the backend
computes in one kernel (conv + relu). *Wants*, backwards: which parameters the readers of a tensor ask for,
through ops that only move values. *Sites*, forwards: where a fake quant goes; values stay integers through
moves. *Ties*: which sites share parameters. *Weights* and *biases* follow their layers. *Notes* give reasons.
"""

from __future__ import annotations

from qtrace import ops
from qtrace.config import QConfig, backends
from qtrace.graph.dataflow import static_nodes
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.annotation import Annotation
from qtrace.preparation.passes._chains import find_chains
from qtrace.preparation.passes._choices import choose
from qtrace.preparation.passes._notes import write_notes
from qtrace.preparation.passes._parameters import find_folds, place_biases, place_weights
from qtrace.preparation.passes._region import find_region
from qtrace.preparation.passes._sites import place_sites, tie_sites
from qtrace.preparation.passes._view import View
from qtrace.preparation.passes._wants import propagate_wants

__all__ = ["annotate"]


def annotate(traced: TracedModule, qconfig: QConfig) -> Annotation:
    """Decides what ``prepare`` will insert into ``traced``.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config; its backend says which ops run on integers.

    Returns:
        A note for every op and the list of sites; equal for equal graphs and configs.

    Raises:
        ConfigError: for rules that match nothing or ask for what the backend cannot run.
    """
    view = _view(traced, qconfig)
    chains = find_chains(view)
    wants = propagate_wants(view, chains)
    placement = tie_sites(view, chains, place_sites(view, chains, wants))
    weights = place_weights(view, chains, placement)
    biases = place_biases(view, chains, placement, weights)
    weight_sites = {site.name: site for site in weights.values()}
    return Annotation(
        backend=view.backend.name,
        notes=write_notes(view, chains, wants, placement, weights),
        sites=(*placement.sites.values(), *weight_sites.values(), *biases),
        carried=placement.carried(),
        folds=find_folds(view, chains, placement, weights),
        origins=tuple(rule.origin for rule in qconfig.rules),
        inputs=tuple(n.name for n in traced.graph.inputs if isinstance(n, TensorNode)),
        outputs=tuple(n.name for n in traced.graph.outputs if isinstance(n, TensorNode)),
        factors={node.name: factor for node, factor in placement.factors.items()},
    )


def _view(traced: TracedModule, qconfig: QConfig) -> View:
    """Reads the exprs of ``traced`` and chooses for each by the rules of ``qconfig``."""
    backend = backends.get(qconfig.backend)
    calls = {e: c for e in exprs(traced) if (c := ops.read(e)) is not None}
    choices = choose(traced, calls, qconfig, backend)
    region = None if qconfig.region is None else find_region(traced, qconfig.region, qconfig.place)
    return View(traced, calls, choices, backend, region, static_nodes(traced))
