"""A wrong argument of a public function is one sentence that names it; other errors stay as they are."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import qtrace
from qtrace.errors import QtraceError
from qtrace.plugins.options import check_arguments
from tests.each import each_of


@check_arguments
def join(
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    *,
    share: float = 1.0,
    anything: Any = None,
) -> str:
    if anything == "own":
        raise QtraceError("a sentence of its own")
    if anything == "bug":
        return {}["missing"]
    total = sum((sizes or {}).values()) * (share / 1)
    return os.fspath(path) + "".join(f"/{name.strip()}" for name in names) + str(total)


@each_of(
    ("call", "message"),
    [
        (lambda: join(3), "join: path takes a text or a path, not 3."),
        (lambda: join(None), "join: path takes a text or a path, not None."),
        (lambda: join("a", 3), "join: names takes a list, not 3."),
        (lambda: join("a", ["b", 3]), "join: names takes a list whose entries are each a text, not 3."),
        (lambda: join("a", sizes=[1]), r"join: sizes takes a dict or None, not \[1\]."),
        (lambda: join("a", share="x"), "join: share takes a number, not 'x'."),
        (
            lambda: join(np.ones((2, 3))),
            r"join: path takes a text or a path, not an array of shape \(2, 3\).",
        ),
        (lambda: join(3, anything="own"), "a sentence of its own"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(QtraceError, match=f"^{message}$"):
        call()


def test_an_error_that_no_argument_explains_stays() -> None:
    with pytest.raises(KeyError, match="missing"):
        join("a", anything="bug")
    with pytest.raises(TypeError, match="unexpected keyword"):
        join("a", nothing=1)  # type: ignore[call-arg]
    assert join("a", ["b"], {"c": 2}, share=np.float32(0.5)) == "a/b1.0"


@each_of(
    ("call", "message"),
    [
        (lambda: qtrace.load(3), "load: path takes a text or a path, not 3"),
        (lambda: qtrace.from_onnx(None), "path takes a text or a path, not None"),
        (lambda: qtrace.check(3, "onnxruntime"), "file takes a text or a path, not 3"),
        (lambda: qtrace.bench("a.onnx", seconds="x"), "seconds takes a number, not 'x'"),
    ],
)
def test_public_functions_name_a_wrong_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(QtraceError, match=message):
        call()


@dataclass(frozen=True)
class _Options:
    share: float = 1.0
    names: Sequence[str] = ()


@check_arguments(options=_Options)
def halve(path: str, **options: Any) -> float:
    given = _Options(**options)
    return given.share / 2 + sum(len(name) for name in given.names)


def test_options_of_a_dataclass_are_named_like_arguments() -> None:
    assert halve("a", share=3.0) == 1.5
    with pytest.raises(QtraceError, match="halve: share takes a number, not 'x'"):
        halve("a", share="x")
    with pytest.raises(QtraceError, match="halve: names takes a list whose entries are each a text, not 3"):
        halve("a", names=[3])
    with pytest.raises(TypeError, match="unexpected keyword argument 'shares'"):
        halve("a", shares=2.0)


@pytest.mark.parametrize("function", [qtrace.quantize, qtrace.calibrate_to_folder])
def test_public_calls_have_at_most_twelve_arguments(function: Callable[..., Any]) -> None:
    assert len(inspect.signature(function).parameters) <= 12
