"""The outputs of the float network, to which graph and runtime are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from qtrace.comparing.groups import ColumnGroup, find_groups
from qtrace.comparing.selections import Share
from qtrace.data.batches import evaluating, translate_errors
from qtrace.errors import GraphError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel, is_quantized
from qtrace.preparation.phases import in_phase
from qtrace.verification.graph_runs import FloatLane
from qtrace.verification.selections import FirstOfEquals


class FloatOutputs:
    """Computes the outputs of the float network.

    Args:
        model: the converted graph.
        network: the network as traced, or prepared; None for the graph itself without its roundings. Its
            weights equal the network's weights unless an algorithm or training changed them.

    Attributes:
        source: what computes the outputs, in words.

    Raises:
        GraphError: when ``network`` is not a traced module.
    """

    def __init__(self, model: QuantizedModel, network: TracedModule | None) -> None:
        if network is not None and not isinstance(network, TracedModule):
            raise GraphError(f"the float network is a {type(network).__name__}: give the traced module.")
        self.model = model
        self.network = model.module if network is None else network
        self._last: tuple[int, list[np.ndarray]] | None = None  # number of a batch, its outputs
        self.source = "the graph without its roundings" if network is None else "the float network"

    @contextmanager
    def _in_float(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.network is not self.model.module:
                stack.enter_context(evaluating(self.network))
            if is_quantized(self.network):
                stack.enter_context(in_phase(self.network, "float"))
            yield

    def replay(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, places: Sequence[np.ndarray] | None
    ) -> tuple[list[np.ndarray], list[Share]]:
        """Returns the outputs for the arguments of a call, and how many selections of another run are right.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            number: the number of the batch, for messages.
            places: the places of the other run, as its tape has kept them; None to select by float's values.

        Raises:
            CalibrationError: when the batch does not fit the network.
            GraphError: when the network has another number of outputs than the graph.
        """
        if not places and self._last is not None and self._last[0] == number:
            return self._last[1], []
        run = FirstOfEquals(self.network, places=places)
        with self._in_float(), translate_errors(self.network, (args, kwargs), number):
            outputs = [t.numpy() for t in run.run_flat(*args, **kwargs)]
        expected = len(self.model.module.graph.outputs)
        if len(outputs) != expected:
            raise GraphError(
                f"the float network has {len(outputs)} outputs and the graph {expected}: give the network "
                "that was quantized."
            )
        if not run.tape.places:
            self.keep(number, outputs)
        return outputs, run.tape.shares

    def lane(self, places: Sequence[np.ndarray]) -> FloatLane | None:
        """Returns a lane next to the graph's; None if another network computes the outputs.

        Args:
            places: the places that the graph selects, to which it may add until the lane needs them.
        """
        return FloatLane(self.network, places=places) if self.network is self.model.module else None

    def keep(self, number: int, outputs: list[np.ndarray]) -> None:
        """Keeps the outputs of one batch, where nothing selects, for who asks for them next."""
        self._last = number, outputs

    def find_groups(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ColumnGroup, ...]:
        """Returns the column groups that the outputs for the first batch show.

        Args:
            names: the names of the outputs.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            CalibrationError: when the batch does not fit the network.
            GraphError: when the network has another number of outputs than the graph.
        """
        return find_groups(self.model.module, [self.replay(args, kwargs, 0, None)[0]], names=names)
