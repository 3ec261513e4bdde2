from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from qtrace import process
from tests.each import quick_cases, seed

# Before anything else loads MegEngine: a thread of it would take a quarter of a core from the tests.
process.quiet()
gc.disable()  # until `pytest_collection_finish`: of what a collection of tests makes, nearly all stays

from qtrace import costs  # noqa: E402
from qtrace.config import recipe  # noqa: E402
from qtrace.config.tree import Tree, read  # noqa: E402
from qtrace.runtimes import child  # noqa: E402
from tests import warm  # noqa: E402

# No deadline: a loaded machine is not a bug. The same examples in every run, so that a change is judged by
# what it changed; `make fuzz` draws others, and many.
settings.register_profile("qtrace", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("qtrace")


# Files and folders with tests that take long go first, so that no worker is left alone with one at the end.
LONG = (
    *("test_detector_demo.py", "test_benchmarks.py", "test_demo.py", "test_docs.py", "qat", "zoo", "workers"),
    *("export", "quantizing", "cli", "calibration", "sensitivity", "targets"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by the places of their files in `LONG`, then large files first, and workers keep that.

    The slow suite has the cases that `quick_cases` leaves out. Where torch is installed all are quick, as the
    slow suite does without it.
    """
    here = Path(__file__).parent

    sizes = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return (LONG.index(name), 0) if name in LONG else (len(LONG), -sizes[item.path])

    items.sort(key=place)
    products: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items if importlib.util.find_spec("torch") is None else ():
        if not any(item.get_closest_marker(name) for name in ("slow", "long")):
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        for case in {*cases} - {*quick_cases(cases)}:
            case.add_marker(pytest.mark.slow(untimed=True))


def pytest_collection_finish() -> None:
    """Spares the modules and tests from the garbage collector, which `quantize` would let see all of them.

    It collects less often than by default, as a tenth of the tests' time went into it.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _subnormals() -> None:
    """Numbers as IEEE 754 has them: MegEngine, once imported, lets the processor flush subnormals.

    Hypothesis refuses to draw floats then. ``(fenv_t *) -1`` is glibc's ``FE_DFL_ENV``.
    """
    ctypes.CDLL("libm.so.6").fesetenv(ctypes.c_void_p(-1))


@pytest.fixture(scope="module", autouse=True)
def _spared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tells `quantize` that all objects are spared, unless a test is about that: counting them takes long."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_garbage.py":
            patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def _warm_runtimes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Verifications use the processes of those before, unless a test is about these processes."""
    with pytest.MonkeyPatch.context() as patch:
        if not any(place in request.path.as_posix() for place in warm.COLD):
            patch.setattr(child, "_start", warm.start)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Seeds what several tests share by the fixture's name: the first test that asks for it may be any."""
    if fixturedef.scope != "function":
        seed(f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param', '')}]")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Weights and data of a test are the same in every run, alone or with others, in any order."""
    seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def _untimed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is timed, as that takes seconds and the answer depends on the machine: tests give the times.

    What is marked ``slow`` may measure, but for ``slow(untimed=True)``: cases of a test that is quick.
    """
    if "megengine" in sys.modules:  # a room that the test itself loads would measure
        room = importlib.import_module("qtrace.quantizing.delivering")
        mark = request.node.get_closest_marker("slow")
        if mark is None or mark.kwargs.get("untimed"):
            monkeypatch.setattr(room, "compare_files", _refuse_to_time)


def _refuse_to_time(*args: Any, **options: Any) -> Any:
    from qtrace.errors import ExportError

    raise ExportError("tests give the times")


@pytest.fixture
def synchronous() -> Iterator[None]:
    """Kernels one at a time: on CPU, MegEngine's gradients are wrong now and then when they are queued."""
    import megengine as mge

    level, mge.config.async_level = mge.config.async_level, 0
    yield
    mge.config.async_level = level


@pytest.fixture(scope="session", autouse=True)
def _packaged_recipes_are_parsed_once() -> Iterator[None]:
    """Parsing is most of the time of loading a recipe, and the packaged files stay as they are."""
    trees: dict[tuple[str, str], Tree | None] = {}

    def parse(text: str, file: str, problems: list[str]) -> Tree | None:
        if (text, file) not in trees:
            tree = read(text, file, problems)
            if problems or not file.startswith("qtrace/recipes/"):
                return tree
            trees[text, file] = tree
        return trees[text, file]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "read", parse)
        yield


@pytest.fixture(scope="session", autouse=True)
def plain_default() -> Iterator[None]:
    """Lets `prepare` without a config quantize everything, learn nothing, and place by one table.

    Most tests are about sites, and quick; tests/test_default.py is about the default that users meet.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "DEFAULT_RECIPE", "onnxruntime")
        patch.setattr(costs, "processor_flags", lambda: ("avx2", "avx512_vnni", "amx_int8"))  # everywhere
        yield
