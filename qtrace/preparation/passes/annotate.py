"""Annotate: decides for every expr and tensor what is quantized, how, and why. It changes nothing.

Each stage is a walk over the flat graph that takes data and returns data. *Chains*: which ops the backend
computes in one kernel (conv + relu). *Requests*, backwards: which parameters the readers of a tensor ask for,
through ops that only move values. *Sites*, forwards: where a fake quant goes; values stay integers through
moves. *Ties*: which sites share parameters. *Weights* and *biases* follow their layers. *Notes* give reasons.
"""

from __future__ import annotations

from qtrace.config import QConfig
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.preparation.annotation import Annotation, PlacementNote
from qtrace.preparation.passes._chains import find_chains
from qtrace.preparation.passes._notes import write_notes
from qtrace.preparation.passes._parameters import find_folds, place_biases, place_weights
from qtrace.preparation.passes._requests import propagate_requests
from qtrace.preparation.passes._sites import place_dynamic, place_sites, tie_sites
from qtrace.preparation.passes._view import MixedRanges, View, read_view
from qtrace.preparation.passes.place import Placing

__all__ = ["annotate", "annotate_view"]


def annotate(
    traced: TracedModule, qconfig: QConfig, placing: Placing | None = None, mixed: MixedRanges | None = None
) -> Annotation:
    """Decides what ``prepare`` will insert into ``traced``.

    Args:
        traced: a flat, expanded graph; it is only read.
        qconfig: the config; its backend says which ops run on integers.
        placing: the ops that stay float, and the choices for all; None to let the config choose.
        mixed: the ops and results that one grid would spoil; None for none.

    Returns:
        A note for every op and the list of sites; equal for equal graphs and configs.

    Raises:
        ConfigError: for rules that match nothing or ask for what the backend cannot run.
    """
    if placing is None:
        return annotate_view(read_view(traced, qconfig, mixed=mixed), qconfig)
    return annotate_view(placing.view(traced, qconfig, mixed), qconfig, placing.note)


def annotate_view(view: View, qconfig: QConfig, note: PlacementNote | None = None) -> Annotation:
    """Decides what is inserted into a graph whose ops have their choices.

    Args:
        view: the graph under its config.
        qconfig: the config.
        note: the prediction of its placement; None without one.
    """
    chains = find_chains(view)
    requests = propagate_requests(view, chains)
    placement = tie_sites(view, chains, place_sites(view, chains, requests))
    weights = place_weights(view, chains, placement)
    biases = place_biases(view, chains, placement, weights)
    weight_sites = {site.name: site for site in weights.values()}
    return Annotation(
        backend=view.backend.name,
        notes=write_notes(view, chains, requests, placement, weights),
        sites=(*placement.sites.values(), *weight_sites.values(), *biases),
        carried=placement.carried(),
        folds=find_folds(view, chains, placement, weights),
        origins=tuple(rule.origin for rule in qconfig.rules),
        inputs=tuple(n.name for n in view.traced.graph.inputs if isinstance(n, TensorNode)),
        outputs=tuple(n.name for n in view.traced.graph.outputs if isinstance(n, TensorNode)),
        factors={node.name: factor for node, factor in placement.factors.items()},
        placement=note,
        dynamic=place_dynamic(view, placement, weights),
    )
