"""Both graphs of a fine-tuning in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qtrace.extras.finetune.twins import Arithmetic, Twins
from qtrace.extras.torch.learning.engine import TorchEngine, TorchGraph
from qtrace.graph.types import TracedModule

_ARITHMETIC = Arithmetic(torch.from_numpy, torch.nn.functional.mse_loss, torch.log_softmax, torch.exp)


class TorchTwins(Twins):
    """Both graphs in torch.

    Args:
        student, teacher, form: as for `Twins`.
        blocks: names of the nodes whose values are compared.

    Raises:
        UnsupportedError: when torch cannot express an op of a graph.
    """

    def __init__(
        self, student: TracedModule, teacher: TracedModule, form: Any, blocks: Sequence[str]
    ) -> None:
        graph = TorchGraph(student, blocks)
        super().__init__(student, teacher, form, TorchEngine(graph), _ARITHMETIC)
        self._graphs = [TorchGraph(teacher, blocks, fixed=True), graph]

    def call(self, student: bool, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Runs one graph; see `Twins`."""
        graph = self._graphs[student]
        return graph.call(args, kwargs), graph.values
