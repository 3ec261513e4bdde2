"""Values of the data that forward reads as Python values: each is an error with its line."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine.traced_module.node import NodeMixin

import qtrace
from qtrace.errors import QtraceWarning, TraceError
from qtrace.graph.tracing import recording
from tests.each import each_of
from tests.graph.planted import ROWS, holder, net

ROWS_OF_NAMES = [F.relu, F.sigmoid, F.tanh]


def rescaled(self: Any, x: Any) -> Any:
    y = self.fc(x)
    if F.abs(y).max() > 100:
        y = y / 100
    return y


def halved(self: Any, x: Any) -> Any:
    while x.max() > 8:
        x = x / 2
    return x


def checked(self: Any, x: Any) -> Any:
    assert (x >= -9).all() if hasattr(x, "all") else F.min(x) >= -9
    return self.fc(x)


def scaled(self: Any, x: Any) -> Any:
    return x * float(x.mean())


def counted(self: Any, x: Any) -> Any:
    return x + int(F.sum(x > 0))


def shifted(self: Any, x: Any) -> Any:
    return x + x.max().item()


def listed(self: Any, x: Any) -> Any:
    return x + x[0].tolist()[0]


def array(self: Any, x: Any) -> Any:
    return x - mge.Tensor(x.numpy().mean(0))


def as_array(self: Any, x: Any) -> Any:
    return x - mge.Tensor(np.asarray(x).mean(0))


def chosen(self: Any, x: Any) -> Any:
    return ROWS_OF_NAMES[F.argmax(x[0, :3])](x)


def repeated(self: Any, x: Any) -> Any:
    for _ in range(F.argmax(x[0, :3]) + 1):
        x = F.relu(x)
    return x


def combined(self: Any, x: Any) -> Any:
    return x * 2 if x.mean() > 0 and x.max() < 3 else x


def negated(self: Any, x: Any) -> Any:
    return x * 2 if not x.mean() > 50 else x


def filtered(self: Any, x: Any) -> Any:
    parts = [row for row in (x[0], x[1]) if row.sum() > -90]
    return F.stack(parts)


def between(self: Any, x: Any) -> Any:
    return x * 2 if -9 < x.mean() < 9 else x


def either(self: Any, x: Any) -> Any:
    return x * 2 if x.min() > 0 or x.max() > 1 else x


def looped(self: Any, x: Any) -> Any:
    for _ in range(int(F.abs(x).sum())):
        x = F.relu(x)
    return x


def looked_up(self: Any, x: Any) -> Any:
    return {True: F.relu, False: F.tanh}[bool(F.max(x) > 0)](x)


def clipped(self: Any, x: Any) -> Any:
    return x - float(np.percentile(x.numpy(), 90))


def ufunc(self: Any, x: Any) -> Any:
    return x * mge.Tensor(np.exp(x))  # asarray


def cut(self: Any, x: Any) -> Any:
    return x[:, : int(F.argmax(x[0])) + 1]


def any_of(self: Any, x: Any) -> Any:
    return F.relu(x) if any(part > 2 for part in x[0]) else x


def root(self: Any, x: Any) -> Any:
    return x / math.sqrt(float(F.sum(x * x)))


def compared(self: Any, x: Any) -> Any:
    return F.relu(x) if F.sum(x) == 0 else x


FORWARDS = (
    *(rescaled, halved, checked, scaled, counted, shifted, listed, array, as_array, chosen, repeated),
    *(combined, negated, filtered, between, either, looped, looked_up, clipped, ufunc, cut, any_of, root),
    compared,
)


def _line(forward: Callable[..., Any], text: str = "") -> str:
    """The line of a forward that reads a value."""
    first = forward.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[first : first + 3]
    keys = (
        "if ",
        "range(",
        "bool(",
        "while ",
        "assert ",
        "float(",
        "int(",
        ".item",
        ".tolist",
        "numpy",
        "asarray",
        "argmax",
    )
    return f"test_reads.py:{first + 1 + next(i for i, s in enumerate(lines) if any(k in s for k in keys))}"


@each_of("forward", FORWARDS)
@each_of("inside", [False, True])
def test_a_value_of_the_data_is_refused_with_its_line(forward: Callable[..., Any], inside: bool) -> None:
    model = net(forward, fc=M.Linear(4, 4))
    with pytest.raises(TraceError, match="uses values of its data as Python values") as caught:
        qtrace.trace(holder(model) if inside else model, ROWS, check=False)
    assert f"{_line(forward)} reads " in str(caught.value)
    assert f"--allow-branch tests/graph/tracing/{_line(forward)}" in str(caught.value)


@each_of("forward", [rescaled, combined, negated])
def test_an_allowed_line_keeps_the_branch_of_the_example(forward: Callable[..., Any]) -> None:
    model = net(forward, fc=M.Linear(4, 4))
    for entry in (_line(forward), f"tests/graph/tracing/{_line(forward)}"):
        traced = qtrace.trace(model, ROWS, allow_branch=[entry])
        x = mge.Tensor(ROWS)
        np.testing.assert_array_equal(traced(x).numpy(), model(x).numpy())
    with pytest.raises(TraceError, match="uses values of its data"):
        qtrace.trace(model, ROWS, allow_branch=["other.py:3"])
    with pytest.raises(TraceError, match="allow_branch takes FILE:LINE, such as net.py:12, not '12'"):
        qtrace.trace(model, ROWS, allow_branch=["12"])


def test_an_allowed_line_without_a_read_is_named_and_leaves_the_check_on() -> None:
    with pytest.warns(QtraceWarning, match=r"allow_branch names other.py:3, where forward reads no value"):
        qtrace.trace(net(lambda self, x: x + 1), ROWS, allow_branch=["other.py:3"])
    with pytest.raises(TraceError, match="the trace is wrong on an input of another batch size"):
        qtrace.trace(net(lambda self, x: x * len(x)), ROWS, allow_branch=["other.py:3"])


def test_sizes_and_the_training_flag_are_notes(caplog: pytest.LogCaptureFixture) -> None:
    class Net(M.Module):
        def forward(self, x: Any) -> Any:
            if self.training:
                x = x * 2
            columns = int(x.shape[1])
            return x * columns + F.full((columns,), float(F.zeros_like(x).sum()))

    with caplog.at_level(logging.INFO, "qtrace"):
        traced = qtrace.trace(Net(), ROWS)
    notes = [r.getMessage() for r in caplog.records]
    assert any("reads self.training: the trace has the branch of eval mode" in n for n in notes)
    assert any("by int(): this size is fixed in the trace" in n for n in notes)
    assert {r.levelno for r in caplog.records} == {logging.INFO}
    np.testing.assert_array_equal(traced(mge.Tensor(ROWS)).numpy(), 4 * ROWS)


IMAGES = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype("float32")


@each_of(
    ("forward", "example"),
    [
        (lambda self, x: x * float(int((x + 1).shape[2])), IMAGES),
        (lambda self, x: sum(x[:, :, i : i + 1] for i in range(int(x.shape[2]))), IMAGES),
        (lambda self, x: F.mean(x[:, :, : int(x.shape[2])], (2, 3)), IMAGES),
        (lambda self, x: x * float(int(x.shape[1])), IMAGES[0]),
    ],
    ids=["int", "loop", "slice", "length"],
)
def test_a_size_as_a_number_is_a_warning_if_it_makes_other_sizes_wrong(
    forward: Callable[..., Any], example: np.ndarray
) -> None:
    with pytest.warns(QtraceWarning, match=r"holds a size .*test_reads.py:\d+ by .*at other sizes, such as"):
        qtrace.trace(net(forward), example)
    names = {axis: f"axis{axis}" for axis in range(1, example.ndim)}
    with pytest.raises(TraceError, match="the trace is wrong on dynamic"):
        qtrace.trace(net(forward), example, dynamic={"x": names})


@each_of(
    ("forward", "example"),
    [
        (lambda self, x: x[:, :, : int(x.shape[2]) * 9], IMAGES),  # right at any size
        (lambda self, x: x + np.ones((int(x.shape[2]), 4), "float32"), IMAGES),  # the trace fails, aloud
        (lambda self, x: self.fc(x) * float(int(x.shape[1])), IMAGES[0, 0]),  # the module fails
    ],
    ids=["right", "trace-fails", "module-fails"],
)
def test_a_size_as_a_number_without_harm_is_no_warning(
    forward: Callable[..., Any], example: np.ndarray
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", QtraceWarning)
        qtrace.trace(net(forward, fc=M.Linear(4, 4)), example)


def test_parameters_and_sizes_for_submodules_are_no_data() -> None:
    inner = net(lambda self, x, size: x.reshape(-1, int(size[1])))

    def forward(self: Any, x: Any) -> Any:
        return self.inner(x, x.shape) * float(F.ones((1,)).sum())

    with pytest.warns(
        QtraceWarning, match="holds a size"
    ):  # of the last reshape, which is right for it alone
        traced = qtrace.trace(net(forward, inner=inner), ROWS)
    assert traced(mge.Tensor(ROWS)).shape == (2, 4)


GIVEN: dict[str, Callable[[Any, Any], Any]] = {
    "a float of a shape": lambda self, x: mge.Tensor([1.0]) * x.shape[1] / 2,
    "a constant": lambda self, x: mge.Tensor(np.ones((1, 4), "float32")),
    "a buffer": lambda self, x: self.buffer,
    "zeros of a shape": lambda self, x: F.zeros(x.shape),
    "positions": lambda self, x: F.arange(x.shape[1]),
}


@each_of("depth", [1, 2])
@each_of("given", GIVEN)
def test_what_a_submodule_is_given_is_no_data_unless_it_derives_from_data(given: str, depth: int) -> None:
    inner: Any = net(lambda self, x, other: x * 2 if other.sum() > 0.5 else x)
    if depth == 2:
        inner = net(lambda self, x, other: self.inner(x, other + 1), inner=inner)
    buffer = mge.Tensor(np.ones((1, 4), "float32"))
    model = net(lambda self, x: self.inner(x, GIVEN[given](self, x)), inner=inner, buffer=buffer)
    traced = qtrace.trace(model, ROWS, check=False)
    np.testing.assert_array_equal(traced(mge.Tensor(ROWS)).numpy(), model(mge.Tensor(ROWS)).numpy())


@pytest.mark.parametrize("calls", [2, 3])
def test_a_later_call_of_a_submodule_is_watched(calls: int) -> None:
    """The first call of a submodule is given a constant, or takes the path that reads nothing."""
    inner: Any = net(lambda self, x, other: x * 2 if other.sum() > 0.5 else x)
    inner = net(lambda self, x, other: self.inner(x, other), inner=inner)

    def given(self: Any, x: Any) -> Any:
        for _ in range(calls - 1):
            x = self.inner(x, self.buffer)
        return self.inner(x, x)

    buffer = mge.Tensor(np.ones((1, 4), "float32"))
    line = f"tests/graph/tracing/test_reads.py:{inner.inner.forward.__code__.co_firstlineno}"
    with pytest.raises(TraceError, match=f"uses values of its data as Python values.*{line} reads"):
        qtrace.trace(net(given, inner=inner, buffer=buffer), ROWS, check=False)

    def by_state(self: Any, x: Any) -> Any:
        self.count[0] += 1
        return x * 2 if self.count[0] % calls == 0 and x.sum() > 0.5 else x

    counting = net(by_state, count=[0])
    with pytest.raises(TraceError, match=f"test_reads.py:{by_state.__code__.co_firstlineno + 2} reads"):
        qtrace.trace(
            net(lambda self, x: self.m(self.m(self.m(x))) if calls == 3 else self.m(self.m(x)), m=counting),
            ROWS,
            check=False,
        )


def test_tracing_a_later_call_changes_neither_graphs_nor_names(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = net(lambda self, x, size: self.fc(F.relu(x)) + size[0] * 0, fc=M.Linear(4, 4))
    outer = net(lambda self, x: self.inner(self.inner(x, x.shape), x.shape), inner=inner)
    model = net(lambda self, x: self.outer(self.outer(x)), outer=outer)

    def graphs() -> list[str]:
        traced = qtrace.trace(model, ROWS)
        np.testing.assert_array_equal(traced(x).numpy(), model(x).numpy())
        parts = (traced, traced.outer, traced.outer.inner)
        return [str(graph) for part in parts for graph in part.argdef_graph_map.values()]

    x = mge.Tensor(ROWS)
    watched = graphs()
    monkeypatch.setattr(recording, "_trace_later_calls", contextlib.nullcontext)
    assert watched == graphs()
    assert len(watched) == 3


@each_of("give", [lambda x: x, lambda x: F.argmax(x), lambda x: F.argmax(x, axis=1)])
def test_data_that_a_submodule_is_given_is_data_also_as_an_integer(give: Callable[[Any], Any]) -> None:
    inner = net(lambda self, x, other: x * 2 if other.sum() > 0.5 else x)
    model = net(lambda self, x: self.inner(x, give(x)), inner=inner)
    with pytest.raises(TraceError, match="uses values of its data as Python values"):
        qtrace.trace(model, ROWS, check=False)


def test_tensors_read_as_before_after_a_trace_and_a_failed_one() -> None:
    own = {name: vars(mge.Tensor).get(name) for name in ("__bool__", "numpy", "item", "__array__")}
    wrap = vars(NodeMixin)["wrap"]
    qtrace.trace(net(lambda self, x: x + 1), ROWS)
    with pytest.raises(TraceError):
        qtrace.trace(net(scaled), ROWS)
    assert own == {name: vars(mge.Tensor).get(name) for name in own}
    assert vars(NodeMixin)["wrap"] is wrap
    assert float(mge.Tensor(2.5)) == 2.5
