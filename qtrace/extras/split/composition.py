"""A graph as a sequence of parts, and how their tensors are passed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from megengine.traced_module import TracedModule

from qtrace.display import Displayed
from qtrace.graph.interpreter import Interpreter

__all__ = ["Composition", "GraphPart"]


@dataclass(frozen=True)
class GraphPart:
    """One part of a graph.

    Attributes:
        name: the name of the part's graph.
        module: the part as a traced module, which shares nothing with the other parts.
        inputs: the names of the tensors that ``module`` takes, by position: inputs of the whole graph first,
            then results of earlier parts.
        outputs: the names of the tensors that ``module`` returns: one tensor, or a tuple. The last part
            returns them in the structure of the whole graph where it computes all of its outputs.
        supported: whether the backend runs the part, if the graph was partitioned by a backend; else None.
    """

    name: str
    module: TracedModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    supported: bool | None = None


class Composition(Displayed, Sequence[GraphPart]):
    """The parts of a graph in the order in which they run; calling it computes what the graph computes.

    Args:
        parts: the parts in order.
        signature: a module with the inputs, outputs and argument structure of the whole graph; its exprs are
            not run.

    Attributes:
        inputs: the names of the inputs of the whole graph.
        outputs: the names of its outputs.
    """

    def __init__(self, parts: Sequence[GraphPart], signature: TracedModule) -> None:
        self._parts = tuple(parts)
        self._signature = signature
        self.inputs = tuple(str(n._name) for n in signature.graph._inputs[1:])
        self.outputs = tuple(str(n._name) for n in signature.graph._outputs)

    @overload
    def __getitem__(self, index: int) -> GraphPart: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[GraphPart, ...]: ...

    def __getitem__(self, index: int | slice) -> GraphPart | tuple[GraphPart, ...]:
        """Returns one part, or several."""
        return self._parts[index]

    def _text(self, max_width: int | None) -> str:
        lines = (f"{i}: {', '.join(part.inputs)} -> {', '.join(part.outputs)}" for i, part in enumerate(self))
        return "\n".join(lines)

    def __len__(self) -> int:
        """Returns the number of parts."""
        return len(self._parts)

    def __iter__(self) -> Iterator[GraphPart]:
        """Yields the parts in order."""
        return iter(self._parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the parts in order and returns what the whole graph returns.

        Args:
            *args: the arguments of the whole graph.
            **kwargs: its keyword arguments.

        Raises:
            GraphError: when the whole graph does not take such arguments.
        """
        arg_def, (_, *tensors) = Interpreter(self._signature).bind(args, kwargs)
        values = dict(zip(self.inputs, tensors, strict=True))
        for part in self._parts:
            ((_, inner),) = part.module.argdef_graph_map.items()
            results = inner.interpret(part.module, *(values[name] for name in part.inputs))
            values.update(zip(part.outputs, results, strict=True))
        results = [values[name] for name in self.outputs]
        return self._signature.argdef_outdef_map[arg_def].unflatten(results)

    def interface(self) -> dict[str, Any]:
        """Returns the parts with their tensors as plain data, for a document next to their files."""
        parts = [
            {
                "name": part.name,
                "inputs": list(part.inputs),
                "outputs": list(part.outputs),
                **({} if part.supported is None else {"supported": part.supported}),
            }
            for part in self._parts
        ]
        return {"inputs": list(self.inputs), "outputs": list(self.outputs), "parts": parts}
