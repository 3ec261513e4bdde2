"""Functions, lambdas and methods are traced and watched as modules are; inputs may have names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import TraceError
from qtrace.graph import exprs, flatten
from qtrace.graph.notes import source_line
from qtrace.graph.walk import op_label
from tests.graph.planted import RNG, ROWS, net

STEM = M.Linear(4, 4)
SHIFT = mge.Parameter(np.arange(4, dtype="float32"))
LAYERS = [M.Linear(4, 4), M.ReLU()]
X = mge.Tensor(ROWS)


def with_globals(x: Any, scale: float = 2.0) -> Any:
    y = F.relu(STEM(x)) * scale + SHIFT
    for layer in LAYERS:
        y = layer(y)
    return {"y": y, "sum": sum(F.sum(part) for part in (STEM(x), x))}


def branching(x: Any) -> Any:
    y = STEM(x)
    return y / 100 if y.max() > 100 else y


def _same(left: Any, right: Any) -> None:
    np.testing.assert_array_equal(left.numpy(), right.numpy())


def test_a_function_keeps_the_modules_and_parameters_that_it_names(tmp_path: Path) -> None:
    traced = qtrace.trace(with_globals, ROWS)
    for key, value in with_globals(X).items():
        _same(traced(X)[key], value)
    names = {name for name, _ in traced.named_parameters()}
    assert names == {"STEM.weight", "STEM.bias", "SHIFT", "LAYERS.0.weight", "LAYERS.0.bias"}
    traced.STEM.weight._reset(traced.STEM.weight * 0)
    assert STEM.weight.numpy().any()
    qtrace.save(traced, tmp_path / "function.mge")
    _same(qtrace.load(tmp_path / "function.mge")(X)["y"], traced(X)["y"])
    assert traced.graph._name.startswith("with_globals")


def test_a_lambda_keeps_the_variables_around_it() -> None:
    conv, gain = M.Linear(4, 3), mge.Parameter(np.ones(3, "float32"))
    forward = 2.0
    traced = qtrace.trace(lambda x: conv(x) * gain * forward, ROWS)
    _same(traced(X), conv(X) * gain * forward)
    assert {name for name, _ in traced.named_parameters()} == {"conv.weight", "conv.bias", "gain"}
    lines = {source_line(e).partition(":")[0] for e in exprs(traced) if e.inputs[1:]}
    assert lines == {"tests/graph/tracing/test_function_module.py"}
    prepared = qtrace.prepare(traced)
    qtrace.calibrate(prepared, [ROWS], progress=False)
    assert "conv" in str(qtrace.explain(prepared))


def test_a_captured_module_may_have_the_name_of_an_attribute_of_every_module() -> None:
    training = M.Linear(4, 3)
    traced = qtrace.trace(lambda x: training(x), ROWS)
    assert {name for name, _ in traced.named_parameters()} == {"training_.weight", "training_.bias"}
    assert traced.training is False


def test_a_function_is_watched_as_a_module_is() -> None:
    line = branching.__code__.co_firstlineno + 2
    with pytest.raises(TraceError, match=rf"branching uses values .*test_function_module.py:{line} reads"):
        qtrace.trace(branching, ROWS)
    entry = f"tests/graph/tracing/test_function_module.py:{line}"
    _same(qtrace.trace(branching, ROWS, allow_branch=[entry])(X), STEM(X))
    with pytest.raises(TraceError, match="the trace is wrong on an input of another batch size"):
        qtrace.trace(lambda x: x * len(x), ROWS)
    holder = net(lambda self, x: x, inner=STEM)
    with pytest.raises(TraceError, match="keeps parameters where a trace cannot see them"):
        qtrace.trace(lambda x: F.relu(_indirectly(x)), ROWS)
    _same(qtrace.trace(lambda x: holder.inner(x), ROWS)(X), STEM(X))


def _indirectly(x: Any) -> Any:
    return STEM(x)


def test_a_method_of_a_module_and_a_function_of_megengine() -> None:
    class Net(M.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = M.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return F.softmax(self.scores(x))

        def scores(self, x: Any) -> Any:
            return self.fc(x)

    model = Net()
    _same(qtrace.trace(model.scores, ROWS)(X), model.scores(X))
    _same(qtrace.trace(model.forward, ROWS)(X), model(X))
    traced = qtrace.trace(F.relu, ROWS)
    _same(traced(X), F.relu(X))
    assert [op_label(e) for e in exprs(traced)] == ["F.relu"]
    with pytest.raises(TraceError, match="method='scores' goes with a module, but branching is a function"):
        qtrace.trace(branching, ROWS, method="scores")


class Masked(M.Module):
    """Inputs of all kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = M.Linear(4, 4)

    def forward(self, x: Any, shift: Any = None, scale: float = 1.0, *, mask: Any = None) -> Any:
        y = self.fc(x) * scale
        y = y if shift is None else y + shift
        return y if mask is None else y * mask["left"]


SHIFTS, MASK = (RNG.standard_normal((2, 4)).astype("float32") for _ in range(2))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"shift": SHIFTS}),
        ((SHIFTS,), {"mask": {"left": MASK}}),
        ((), {"mask": {"left": MASK}, "scale": 3.0}),
        ((), {"shift": SHIFTS, "mask": {"left": MASK}}),
    ],
)
def test_inputs_by_name(args: tuple[Any, ...], kwargs: dict[str, Any], tmp_path: Path) -> None:
    model = Masked()
    traced = qtrace.trace(model, ROWS, *args, **kwargs)

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: tensors(v) for k, v in value.items()}
        return mge.Tensor(value) if isinstance(value, np.ndarray) else value

    given = [tensors(a) for a in (ROWS, *args)]
    expected = model(*given, **tensors(kwargs))
    _same(traced(*given, **tensors(kwargs)), expected)
    _same(flatten(traced)(*given, **tensors(kwargs)), expected)
    qtrace.save(traced, tmp_path / "masked.mge")
    _same(qtrace.load(tmp_path / "masked.mge")(*given, **tensors(kwargs)), expected)


def test_names_of_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TraceError, match=r"1 example\(s\) by position and maks by name .*maks"):
        qtrace.trace(Masked(), ROWS, maks=MASK)
    with pytest.raises(TraceError, match=r"missing a required argument: 'x'"):
        qtrace.trace(Masked(), mask={"left": MASK})
    with pytest.raises(TraceError, match=r"example mask \(list\) cannot be an input"):
        qtrace.trace(Masked(), ROWS, mask=[object()])


def test_a_named_input_is_varied_by_the_check() -> None:
    fixed = net(lambda self, x, other: x + mge.Tensor(np.array(ROWS.shape[0])) * 0 + other * other.shape[0])
    traced = qtrace.trace(fixed, ROWS, other=ROWS)
    three = mge.Tensor(np.ones((3, 4), "float32"))
    _same(traced(three, other=three), fixed(three, other=three))
    with pytest.raises(TraceError, match="another batch size"):
        qtrace.trace(net(lambda self, x, other: x + other * len(other)), ROWS, other=ROWS)
