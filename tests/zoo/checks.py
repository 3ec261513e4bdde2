"""The checks that every network of the zoo passes, and the stages on its way that they share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
from megengine.autodiff import GradManager
from megengine.optimizer import SGD

import qtrace
from qtrace.graph.lint import lint
from qtrace.graph.types import TracedModule
from qtrace.preparation.passes.compose import compose_pieces
from qtrace.preparation.passes.expand import expand
from qtrace.preparation.passes.insert import CONTAINER
from tests.zoo import repvgg
from tests.zoo.shares import layer_share, whole_share

__all__ = ["Case", "Entry", "close", "leaves", "rounded_to_nearest", "run"]

Arrays = list[np.ndarray]

# MegEngine's kernels on CPU compute the decode of a batch wrong in these modules; their traces copy views.
WRONG_IN_BATCHES = {"fcos:infer"}

# MegEngine's roi_align on CPU adds its gradient to memory that it does not clear: in these modules, what the
# parameters below the attribute get is that of whatever was in the memory before, NaN now and then.
WRONG_GRADIENTS = {"faster_rcnn:box": "backbone."}


def rounded_to_nearest(config: qtrace.QConfig) -> qtrace.QConfig:
    """``config`` with everything on integers, as few channels gain nothing by them, and without gptq."""
    ptq = tuple(spec for spec in config.ptq or () if spec.name != "gptq")
    return config.without_placement().model_copy(update={"ptq": ptq or None})


def leaves(value: Any) -> list[mge.Tensor]:
    """The tensors of an output, whatever they are packed in."""
    return [t for t in _walk(value) if isinstance(t, mge.Tensor)]


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):  # a trace sorts the keys
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)
    else:
        yield value


def tensors(args: Any) -> Any:
    """Arguments with their arrays as fresh Tensors."""
    if isinstance(args, dict):
        return {k: tensors(v) for k, v in args.items()}
    if isinstance(args, (list, tuple)):
        return type(args)(tensors(v) for v in args)
    return mge.Tensor(args) if isinstance(args, np.ndarray) else args


@contextmanager
def engine(level: int) -> Iterator[None]:
    """Sets how far MegEngine's ops may run ahead of Python."""
    before = mge.config.async_level
    mge.config.async_level = level
    try:
        yield
    finally:
        mge.config.async_level = before


def run(model: M.Module, args: tuple[Any, ...]) -> Arrays:
    return [t.numpy() for t in leaves(model(*tensors(args)))]


def run_each(model: M.Module, args: tuple[Any, ...]) -> Arrays:
    """The outputs of each sample alone, joined: the values that MegEngine should give for a batch."""
    single = [run(model, tuple(a[i : i + 1] for a in args)) for i in range(len(args[0]))]
    return [np.concatenate(parts) for parts in zip(*single, strict=True)]


def equal(left: Arrays, right: Arrays) -> None:
    assert len(left) == len(right) > 0
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def close(left: Arrays, right: Arrays, rtol: float = 1e-5) -> None:
    """Every value within ``rtol`` of its output's largest."""
    assert len(left) == len(right) > 0
    for x, y in zip(left, right, strict=True):
        assert x.shape == y.shape
        assert np.abs(x - y).max() <= rtol * np.abs(x).max()


def ratio(reference: np.ndarray, output: np.ndarray) -> float:
    """Signal to quantization noise in dB; infinite where nothing was lost."""
    reference, output = reference.astype(np.float64), output.astype(np.float64)
    noise = float(np.sum((reference - output) ** 2))
    return float("inf") if noise == 0.0 else float(10 * np.log10(max(np.sum(reference**2), 1e-30) / noise))


class Entry(Protocol):
    """The facts of a network that the checks need; ``catalog.Entry`` describes the fields."""

    @property
    def name(self) -> str: ...
    @property
    def build(self) -> Callable[[], M.Module]: ...
    @property
    def recipe(self) -> str: ...
    @property
    def ends(self) -> tuple[str, ...] | None: ...
    @property
    def sqnr(self) -> float: ...
    @property
    def other_sqnr(self) -> float | None: ...
    @property
    def note(self) -> str: ...
    @property
    def share(self) -> float: ...

    def example(self) -> tuple[Any, ...]:
        """The inputs of the trace."""

    def calibration(self) -> list[tuple[Any, ...]]:
        """The inputs of the calibration."""

    def probes(self) -> list[tuple[Any, ...]]:
        """The inputs on which stages are compared: one for ``sqnr``, then other batch and image sizes."""


class Case:
    """One network on its way from module to converted graph; every stage and output is made once."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._outputs: dict[tuple[str, bool], list[Arrays]] = {}
        self.trained: dict[str, np.ndarray] = {}  # the gradients of `check_training`
        self.single = entry.name in WRONG_IN_BATCHES
        self.probes = entry.probes()

    @functools.cached_property
    def module(self) -> M.Module:
        return self.entry.build()

    @functools.cached_property
    def traced(self) -> TracedModule:
        return qtrace.trace(self.module, *self.entry.example())

    @functools.cached_property
    def level(self) -> int:
        """0 where ops race that make ranges: slow, since Python then waits for every op."""
        called = {getattr(e, "func", None) for e in qtrace.graph.exprs(qtrace.graph.flatten(self.traced))}
        return 0 if called & {F.arange, F.linspace} else 1

    @functools.cached_property
    def config(self) -> qtrace.QConfig:
        """The recipe of the family, on integers throughout."""
        return rounded_to_nearest(qtrace.load_recipe(self.entry.recipe))

    @functools.cached_property
    def prepared(self) -> TracedModule:
        return qtrace.prepare(self.traced, self.config, outputs=self.entry.ends)

    @functools.cached_property
    def unfolded(self) -> TracedModule:
        return qtrace.prepare(self.traced, self.config.model_copy(update={"ptq": ()}))

    @functools.cached_property
    def composed(self) -> TracedModule:
        """The trace, with composites in one op, which rounds float32 in another order than the pieces."""
        flat = qtrace.graph.flatten(self.traced)
        expand(flat)
        compose_pieces(flat, self.config)
        return flat

    @functools.cached_property
    def calibrated(self) -> TracedModule:
        model = copy.deepcopy(self.prepared)
        with engine(self.level):
            return qtrace.calibrate(model, self.entry.calibration(), progress=False)

    @functools.cached_property
    def converted(self) -> TracedModule:
        return qtrace.convert(self.calibrated)

    def outputs(self, stage: str, singly: bool = False) -> list[Arrays]:
        """The outputs of a stage for the probes, or for each of their samples alone."""
        if (stage, singly) not in self._outputs:
            run_probe, model = run_each if singly else run, getattr(self, stage)
            with engine(self.level):
                self._outputs[stage, singly] = [run_probe(model, args) for args in self.probes]
        return self._outputs[stage, singly]

    @property
    def expected(self) -> list[Arrays]:
        """The outputs of the module for the probes, sample by sample where MegEngine gets batches wrong."""
        return self.outputs("module", self.single)

    def ratios(self) -> list[float]:
        pairs = zip(self.expected[0], self.outputs("calibrated")[0], strict=True)
        return [ratio(x, y) for x, y in pairs]

    def check_same(self, stage: str, reference: str = "module") -> None:
        """Bit for bit; where the module gets batches wrong, its samples alone, and batches are close."""
        for expected, single, batch in zip(
            self.outputs(reference, self.single),
            self.outputs(stage, self.single),
            self.outputs(stage),
            strict=True,
        ):
            equal(expected, single)
            close(expected, batch)

    # -- the checks ---------------------------------------------------------------------------------

    def check_trace(self) -> None:
        self.check_same("traced")
        # By value: MegEngine renames a module that is both an attribute and an item of a list.
        left = {p.numpy().tobytes() for p in self.traced.parameters()}
        lost = [n for n, p in self.module.named_parameters() if p.numpy().tobytes() not in left]
        assert [n for n in lost if not n.startswith("unused.")] == []

    def check_float(self) -> None:
        for expected, output in zip(self.expected, self.outputs("prepared"), strict=True):
            close(expected, output)

    def check_unfolded(self) -> None:
        self.check_same("unfolded", "composed")
        for expected, output in zip(self.expected, self.outputs("composed", self.single), strict=True):
            close(expected, output)

    def check_quantized(self) -> None:
        assert self.entry.sqnr >= 20 or self.entry.note, "less than 20 dB needs a reason"
        assert qtrace.explain(self.calibrated).annotation.sites, "nothing was quantized"
        ratios = self.ratios()
        assert min(ratios) >= self.entry.sqnr, [round(r, 1) for r in ratios]

    def check_share(self) -> None:
        assert whole_share(self.calibrated) >= self.entry.share
        assert layer_share(self.calibrated) >= 0.99

    def check_training(self) -> None:
        sample = tuple(first_sample(a) for a in self.probes[0])
        model = copy.deepcopy(self.calibrated)
        with engine(0):  # gradients race
            qtrace.set_phase(model, "train")
            model.eval()
            expected = gradients(copy.deepcopy(self.traced), sample)
            actual = self.trained = gradients(model, sample)
            wrong = WRONG_GRADIENTS.get(self.entry.name)
            actual = {n: g for n, g in actual.items() if wrong is None or not n.startswith(wrong)}
            optimizer = SGD([p for n, p in model.named_parameters() if n in actual], lr=1e-4)
            optimizer.step()
            after = run(model, sample)
        assert expected
        assert actual
        assert set(expected) - self.folded() <= set(self.trained)
        assert [n for n, g in actual.items() if not np.isfinite(g).all()] == []
        assert [
            n for n, g in actual.items() if (n not in expected or expected[n].any()) and not g.any()
        ] == []
        assert all(np.isfinite(y).all() for y in after)

    def folded(self) -> set[str]:
        """Parameters of BatchNorms, layer scales and RepVGG's smaller branches where layers took them."""
        left = {name for name, _ in self.calibrated.named_modules()}
        norms = [
            name
            for name, module in self.module.named_modules()
            if isinstance(module, (M.BatchNorm1d, M.BatchNorm2d)) and name not in left
        ]
        branches = [n for n, m in self.module.named_modules() if isinstance(m, repvgg.Branches)]
        merged = [f"{name}.point" for name in branches if f"{name}.point" not in left]
        stored = {name for name, _ in self.calibrated.named_parameters()}
        scales = {name for name, _ in self.module.named_parameters() if name.endswith(".gamma")} - stored
        return scales | {f"{name}.{tensor}" for name in (*norms, *merged) for tensor in ("weight", "bias")}

    def check_files(self, folder: Path) -> None:
        qtrace.save(self.calibrated, folder / "m.mge")
        loaded = qtrace.load(folder / "m.mge")
        equal(self.outputs("calibrated")[0], run(loaded, self.probes[0]))
        assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in self.calibrated.named_parameters()]

    def check_converted(self) -> None:
        # What the trace has and never reads is the user's leftover, not ours.
        before = {str(p) for p in lint(qtrace.graph.flatten(self.traced))}
        assert [str(p) for p in lint(self.converted) if str(p) not in before] == []
        assert not list(getattr(self.converted, CONTAINER).parameters())
        for expected, output in zip(self.outputs("calibrated"), self.outputs("converted"), strict=True):
            equal(expected, output)

    def check_shapes(self) -> None:
        for number, (expected, outputs) in enumerate(
            zip(self.expected, self.outputs("calibrated"), strict=True)
        ):
            assert [y.shape for y in outputs] == [x.shape for x in expected]
            assert all(np.isfinite(y).all() for y in outputs)
            if number and self.entry.other_sqnr is not None:
                # The ranges are those of other images, and of another context around every pixel.
                assert min(map(ratio, expected, outputs)) >= self.entry.other_sqnr


def first_sample(args: Any) -> Any:
    """The first sample of arrays, which may be packed in a dict."""
    return {k: v[:1] for k, v in args.items()} if isinstance(args, dict) else args[:1]


def gradients(model: M.Module, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The gradients of the outputs' mean squares, of every parameter that has one."""
    named = dict(model.named_parameters())
    manager = GradManager().attach(list(named.values()))
    with manager:
        outputs = [y for y in leaves(model(*tensors(args))) if y.dtype == np.float32]
        loss = sum((F.mean(y * y) for y in outputs[1:]), F.mean(outputs[0] * outputs[0]))
        manager.backward(loss)
    return {n: p.grad.numpy() for n, p in named.items() if p.grad is not None}
