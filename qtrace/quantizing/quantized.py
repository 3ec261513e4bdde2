"""The result of the one call: the file, its verdict, and what became of each op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qtrace.display import Displayed
from qtrace.graph.interface import read_inputs
from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TracedModule
from qtrace.inspection.explanation import Explanation, explain
from qtrace.preparation.record import fake_quants, read_record
from qtrace.quantizing.card import Card, make_card
from qtrace.quantizing.delivering import Delivery
from qtrace.quantizing.judging import Judgement
from qtrace.runtimes.host import RuntimeHost
from qtrace.sensitivity.diagnosis.verdict import Verdict
from qtrace.verification.report import VerifyReport

__all__ = ["Quantized"]


@dataclass(frozen=True, repr=False)
class Quantized(Displayed):
    """The result of ``qtrace.quantize``.

    Attributes:
        path: the file.
        judgement: the verdict with its causes, and the recipe that cures them.
        verify: the report of the file's run beside the graph; None if it was not run.
        prepared: the calibrated graph, to be trained on.
        converted: the graph that was exported, in float if `delivery` says so.
        raised: the layers that stay in float to keep the metric.
        traced: the float network.
        data: the name of the calibration data.
        delivery: what was measured of the quantized file beside float, and which of both was written: float
            if it is faster here, unless the config asks for the quantized one.
        seconds: name of a stage -> its time in seconds.
        runtime_host: the interpreter or machine that has the runtime; None for this one.
    """

    path: Path
    judgement: Judgement
    verify: VerifyReport | None
    prepared: TracedModule
    converted: TracedModule
    raised: tuple[str, ...] = ()
    traced: TracedModule | None = None
    data: str = ""
    delivery: Delivery = field(default_factory=Delivery)
    seconds: Mapping[str, float] = field(default_factory=dict)
    runtime_host: RuntimeHost | None = None

    @cached_property
    def card(self) -> Card:
        """The card of the file, for people who take it; its time is measured when it is first asked for."""
        assert self.traced is not None
        return make_card(
            self.path,
            self.traced,
            self.converted,
            explain(self.delivery.prepared or self.prepared),
            verdict=None if self.delivery.in_float else self.verdict,
            verify=self.verify,
            data=self.data,
            stages=self.seconds,
            host=self.runtime_host,
        )

    def _text(self, max_width: int | None) -> str:
        return "\n".join(self.summary())

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the calibrated graph; None if it could not be judged.

        If `delivery` says that the file is in float, it is that of the quantized graph, which was left out.
        """
        return self.judgement.verdict

    def explain(self) -> Explanation:
        """Explains what became of each op of the file, as ``qtrace.explain`` does."""
        return explain(self.delivery.prepared or self.prepared)

    def to_dict(self) -> dict[str, Any]:
        """Returns verdict, causes and what was measured, for JSON; apart, those of a graph left out."""
        judged = self.judgement.to_dict()
        if self.delivery.in_float:
            judged = {"quantized_and_not_written": judged}
        return {**judged, **self.delivery.to_dict()}

    def summary(self) -> list[str]:
        """Returns file, verdict with its causes, and what the runtime computed, a line each."""
        diagnosis, sentence = self.judgement.diagnosis, self.delivery.sentence()
        judged = [*(diagnosis.lines() if diagnosis is not None else ["no verdict"]), *self._open_sizes()]
        placement = read_record(self.prepared).annotation.placement
        judged += placement.choice_lines() if placement is not None else []
        if not any(fake_quants(self.prepared)):
            judged.append("no op of the file is on integers: `explain()` says why for each")
        if self.raised:
            judged.append(f"in float to keep the metric: {', '.join(self.raised)}")
        if self.delivery.in_float:
            judged[0] = f"of the quantized file, which was not written: {judged[0]}"
            lines = [f"{self.path}", sentence, *judged]
        else:
            lines = [f"{self.path}", *judged, *([sentence] if sentence else [])]
        lines += [self.delivery.growth] if self.delivery.growth else []
        if self.verify is None:
            return [*lines, "verify: not run"]
        client = [f"  {self.verify.client}"] if self.verify.client else []
        return [*lines, "verify: the runtime computes what the graph computes", *client]

    def _open_sizes(self) -> list[str]:
        """Returns a line for each input whose sizes the network leaves open, with those of the data."""
        if self.traced is None or not (inputs := read_inputs(self.traced)):
            return []
        shapes = ("x".join(map(str, shape[1:])) for _, shape in list_inputs(self.traced))
        return [
            f"size: {info.name} is {shape} in the first batch, and open in the network"
            for info, shape in zip(inputs.values(), shapes, strict=True)
            if info.sizes and None in info.sizes[1:]
        ]
