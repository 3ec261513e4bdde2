"""What every observer promises, asked of each one in the folder."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtrace import plugins
from qtrace.errors import CalibrationError, ConfigError, SchemeError
from qtrace.numerics import choose
from qtrace.observers.base import Observer, from_dict, to_dict
from qtrace.scheme import QScheme
from tests.each import each_of

PACKAGE = "qtrace.observers"
NAMES = plugins.known(PACKAGE)
# Few bins make the tests fast; what they promise does not depend on the number.
FEW = {"bins": 64}
OPTIONS = {
    "aciq": FEW,
    "cosine": {**FEW, "candidates": 8},
    "kl": {**FEW, "candidates": 16},
    "lsq_plus": FEW,
    "moving_percentile": {"percentile": 60.0},
    "mse": {**FEW, "candidates": 8},
    "percentile": {**FEW, "percentile": 99.0},
    "power_of_two": FEW,
}
PER_TENSOR = QScheme()
PER_CHANNEL = QScheme(signed=True, symmetric=True, axis=1)


def make(name: str, scheme: QScheme = PER_TENSOR) -> Observer:
    return plugins.resolve(PACKAGE, name, Observer)(scheme, **OPTIONS.get(name, {}))


def fingerprint(observer: Observer) -> str:
    """Everything that an observer knows, to the bit."""
    return json.dumps(to_dict(observer), sort_keys=True)


def seen(name: str, batches, scheme: QScheme = PER_TENSOR) -> Observer:
    """An observer that has seen (index, batch) pairs."""
    observer = make(name, scheme)
    for index, batch in batches:
        observer.observe(batch, batch=index)
    return observer


# All exponents, both zeros and the smallest numbers: what goes wrong when bins do not nest exactly.
VALUES = st.one_of(
    st.floats(-3, 3, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 4096.0]),
)


@st.composite
def batch_lists(draw: st.DrawFn) -> list[tuple[int, np.ndarray]]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    arrays = [draw(st.lists(VALUES, min_size=2 * n, max_size=2 * n)) for n in sizes]
    return list(enumerate(np.array(a, np.float32).reshape(-1, 2) for a in arrays))


@pytest.mark.parametrize("scheme", [PER_TENSOR, PER_CHANNEL])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(batches=batch_lists(), data=st.data())
def test_any_sharding_and_any_order_gives_the_same_state(name, scheme, batches, data):
    whole = seen(name, batches, scheme)
    order = data.draw(st.permutations(batches))
    shards = [seen(name, [batch], scheme) for batch in order]
    # A random binary tree of merges.
    while len(shards) > 1:
        i = data.draw(st.integers(0, len(shards) - 2))
        shards[i : i + 2] = [shards[i].merge(shards[i + 1])]
    assert fingerprint(shards[0]) == fingerprint(whole)
    lo, hi = whole.range()
    assert (lo <= hi).all()
    assert shards[0].qparams() == whole.qparams() == choose(lo, hi, scheme)


@each_of("name", NAMES)
def test_merge_changes_neither_and_shares_nothing(name):
    a, b = seen(name, [(0, np.ones(3))]), seen(name, [(1, np.full(3, -7.0))])
    before = fingerprint(a), fingerprint(b)
    merged = a.merge(b)
    merged.observe(np.full(5, 100.0), batch=2)
    a.merge(make(name)).observe(np.full(5, 100.0))
    assert (fingerprint(a), fingerprint(b)) == before


@each_of("name", NAMES)
def test_an_empty_observer_is_the_identity(name):
    full, empty = seen(name, [(0, np.linspace(-1, 2, 50))]), make(name)
    assert fingerprint(full.merge(empty)) == fingerprint(empty.merge(full)) == fingerprint(full)
    assert empty.merge(make(name)).empty


@each_of("scheme", [PER_TENSOR, PER_CHANNEL])
@each_of("name", NAMES)
def test_round_trips(name, scheme):
    rng = np.random.default_rng(0)
    full = seen(name, [(i, rng.normal(size=(4, 3, 5))) for i in range(3)], scheme)
    for observer in (make(name, scheme), full):
        file = io.BytesIO()
        np.savez(file, **observer.state_dict())
        file.seek(0)
        loaded = make(name, scheme)
        loaded.load_state_dict(dict(np.load(file, allow_pickle=False)))
        for again in (
            loaded,
            from_dict(json.loads(json.dumps(to_dict(observer)))),
            pickle.loads(pickle.dumps(observer)),
            copy.deepcopy(observer),
        ):
            assert fingerprint(again) == fingerprint(observer)
            assert again.empty == observer.empty
            more = rng.normal(size=(4, 3, 5)) * 9
            resumed, straight = copy.deepcopy(again), copy.deepcopy(observer)
            resumed.observe(more)
            straight.observe(more)
            assert fingerprint(resumed) == fingerprint(straight)


@each_of("name", NAMES)
def test_observers_without_data_raise_instead_of_giving_a_scale(name):
    observer = make(name)
    assert observer.empty
    for ask in (observer.range, observer.qparams):
        with pytest.raises(CalibrationError, match="no data"):
            ask()


BAD = {
    "nan": np.array([1.0, np.nan, 100.0]),
    "inf": np.array([1.0, np.inf]),
    "-inf": np.array([-np.inf, 1.0], np.float32),
    "float64 beyond float32": np.array([1.0, 1e300]),
    "empty": np.zeros((0, 3)),
    "integers": np.arange(3),
    "objects": np.array([None]),
}


@each_of("bad", BAD)
@each_of("name", NAMES)
def test_a_bad_batch_is_named_and_leaves_no_trace(name, bad):
    observer = seen(name, [(0, np.linspace(-1, 1, 10))])
    before = fingerprint(observer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CalibrationError, match=r"site conv1, batch 17: "):
            observer.observe(BAD[bad], batch=17, site="conv1")
        with pytest.raises(CalibrationError, match=r"batch 1: "):
            observer.observe(BAD[bad])
        with pytest.raises(CalibrationError):
            make(name).observe(BAD[bad])
    assert fingerprint(observer) == before


@each_of("name", NAMES)
def test_nan_in_one_channel_is_found(name):
    for shape in ((4, 3, 5), (1, 3, 5), (4, 3)):
        x = np.zeros(shape)
        x[-1, 1] = np.nan
        with pytest.raises(CalibrationError, match="NaN"):
            make(name, PER_CHANNEL).observe(x)


@each_of("name", NAMES)
def test_channels_must_stay(name):
    observer = seen(name, [(0, np.ones((2, 3)))], PER_CHANNEL)
    before = fingerprint(observer)
    with pytest.raises(CalibrationError, match="4 channels.*had 3"):
        observer.observe(np.ones((2, 4)))
    with pytest.raises(CalibrationError, match="lacks channel axis 1"):
        observer.observe(np.ones(3))
    with pytest.raises(CalibrationError, match="3 and 4 channels"):
        observer.merge(seen(name, [(0, np.ones((2, 4)))], PER_CHANNEL))
    assert fingerprint(observer) == before
    observer.observe(np.ones((2, 3, 4, 5)))


@each_of("name", NAMES)
def test_a_channel_is_treated_as_a_tensor_of_its_own(name):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(6, 7, 50)) * np.exp(rng.normal(size=(1, 7, 1)) * 3)).astype(np.float32)
    x[:, 2] = 0
    x[:, 3] = np.abs(x[:, 3])
    scheme = QScheme(axis=-2)
    together = seen(name, [(0, x), (1, x[:2] * 3)], scheme)
    lo, hi = together.range()
    assert lo.shape == hi.shape == (7,)
    assert lo.dtype == hi.dtype == np.float64
    assert together.qparams().scale.shape == (7,)
    for c in range(7):
        alone = seen(name, [(0, x[:, c]), (1, x[:2, c] * 3)])
        assert alone.range()[0].shape == ()
        assert (lo[c], hi[c]) == alone.range()


@each_of("name", NAMES)
def test_memory_layout_does_not_matter(name):
    x = np.random.default_rng(2).normal(size=(4, 6, 5)).astype(np.float32)
    for scheme in (PER_TENSOR, PER_CHANNEL):
        plain = fingerprint(seen(name, [(0, x)], scheme))
        assert fingerprint(seen(name, [(0, np.asfortranarray(x))], scheme)) == plain
        assert fingerprint(seen(name, [(0, np.repeat(x, 2, axis=2)[:, :, ::2])], scheme)) == plain
        assert fingerprint(seen(name, [(0, x.astype(np.float64))], scheme)) == plain
    assert make(name).observe(np.float32(3)) is None


@each_of("name", NAMES)
def test_options_and_mismatches_are_refused(name):
    cls = plugins.resolve(PACKAGE, name, Observer)
    with pytest.raises(ConfigError, match=rf"^unknown key 'bin' in {name}; "):
        cls(PER_TENSOR, bin=3)
    with pytest.raises(ConfigError, match="cannot merge"):
        make(name).merge(make("minmax" if name != "minmax" else "mse"))
    with pytest.raises(ConfigError, match="cannot merge.*int8"):
        make(name).merge(make(name, PER_CHANNEL))
    for key, field in cls.Options.model_fields.items():
        assert cls(PER_TENSOR).options[key] == field.default
        words = get_args(field.annotation)
        bounds = {name: value for m in field.metadata for name, value in vars_of(m).items()}
        valid = words or (bounds["ge"], bounds["le"])
        wrong = ["other", True, None, float("nan"), np.bool_(True), "3"]
        wrong += [bounds["ge"] - 1, bounds["le"] + 1] if bounds else []
        wrong += [100.5] if field.annotation is int else []
        for value in valid:
            assert cls(PER_TENSOR, **{key: value}).options[key] == value
        for value in wrong:
            with pytest.raises(ConfigError, match=rf"^{name}\.{key} must be "):
                cls(PER_TENSOR, **{key: value})
        other = next(value for value in valid if value != field.default)
        with pytest.raises(ConfigError, match="cannot merge"):
            cls(PER_TENSOR).merge(cls(PER_TENSOR, **{key: other}))


def vars_of(constraint: object) -> dict[str, float]:
    """The bounds that a constraint of pydantic sets."""
    return {name: getattr(constraint, name) for name in ("ge", "le") if hasattr(constraint, name)}


def test_numbers_of_numpy_are_options() -> None:
    mse = plugins.resolve(PACKAGE, "mse", Observer)(PER_TENSOR, bins=np.int64(128), sample=np.array(2))
    assert (mse.options["bins"], mse.options["sample"]) == (128, 2)
    assert {type(value) for value in mse.options.values()} == {int}
    percentile = plugins.resolve(PACKAGE, "percentile", Observer)(PER_TENSOR, percentile=np.float32(99))
    assert type(percentile.options["percentile"]) is float


@each_of("name", NAMES)
def test_a_foreign_state_is_refused(name):
    observer = seen(name, [(0, np.linspace(-1, 1, 9))])
    state = observer.state_dict()
    arrays = [key for key in state if key != "batches"]
    wrong = [
        {**state, "more": 1},
        {"batches": 3},
        {**state, "batches": 0},
        {**state, arrays[-1]: state[arrays[-1]].astype(np.complex64)},
        {**state, arrays[-1]: state[arrays[-1]][None]},
        {**state, arrays[-1]: np.concatenate([state[arrays[-1]]] * 2, axis=-1)},
    ]
    before = fingerprint(observer)
    for bad in wrong:
        with pytest.raises(ConfigError):
            observer.load_state_dict(bad)
    assert fingerprint(observer) == before

    saved = to_dict(observer)
    key = arrays[-1]
    for bad in (
        {},
        [],
        {**saved, "observer": "no_such"},
        {**saved, "options": None},
        {**saved, "options": {"x": 1}},
        {**saved, "state": {**saved["state"], key: {"dtype": "int64", "shape": [1], "zlib": "AAAA"}}},
        {**saved, "state": {**saved["state"], key: {"dtype": "nonsense"}}},
    ):
        with pytest.raises(ConfigError):
            from_dict(bad)
    with pytest.raises(SchemeError):
        from_dict({**saved, "scheme": {"bits": 99}})


@each_of("name", NAMES)
def test_never_wider_than_what_was_seen(name):
    x = np.random.default_rng(3).normal(size=500).astype(np.float32)
    for shift in (0, 5, -5):
        lo, hi = seen(name, [(0, x + np.float32(shift))]).range()
        low, high = min(0, x.min() + shift), max(0, x.max() + shift)
        if name == "power_of_two":  # the scale is rounded up to the next one
            assert hi - lo <= 2 * (high - low) + 1e-6
            continue
        assert lo >= low - 1e-6
        assert hi <= high + 1e-6


def test_a_class_is_abstract_or_final():
    """Nobody overrides a concrete method or derives from a concrete class, but for options."""
    for name in NAMES:
        cls = plugins.resolve(PACKAGE, name, Observer)
        assert not [c for c in cls.__subclasses__() if c.__module__.startswith("qtrace.")]
        line = [c for c in cls.__mro__ if issubclass(c, Observer)]
        for i, child in enumerate(line):
            own = {
                key
                for key, value in vars(child).items()
                if (callable(value) or isinstance(value, property)) and key != "Options"
            }
            for parent in line[i + 1 :]:
                concrete = set(vars(parent)) - Observer.__abstractmethods__ - parent.__abstractmethods__
                assert not own & concrete, (child, parent)
