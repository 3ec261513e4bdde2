"""Configs: what they accept, what they refuse and in which words."""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtrace.config import Match, Observers, Preprocess, QConfig, Rule, SchemePatch, Spec, Subgraph, backends
from qtrace.errors import ConfigError, SchemeError
from qtrace.scheme import QScheme
from tests.each import each_of

IMAGE = {"size": [3, 8, 8], "mean": [0, 1, 2], "std": [1, 2, 3]}
ON = {"match": {}, "quantize": True}

_WORDS = st.text(min_size=1, max_size=12)
_NAMES = st.one_of(_WORDS, st.lists(_WORDS, min_size=1, max_size=3))
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), _FLOATS, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def _optional(**fields):
    return st.fixed_dictionaries({}, optional=fields)


def _specs(*names):
    options = st.dictionaries(_WORDS, _JSON, min_size=1, max_size=3)
    known = st.sampled_from([*names, "my.module:Class", "m:Outer.Inner"])
    return st.one_of(known, st.builds(lambda name, value: {name: value}, known, options))


_PATCHES = _optional(
    bits=st.integers(2, 16),
    signed=st.booleans(),
    symmetric=st.booleans(),
    narrow=st.booleans(),
    axis=st.one_of(st.none(), st.integers(-4, 4)),
    power_of_two=st.booleans(),
    rounding=st.sampled_from(["half_even", "half_away", "half_up"]),
)
_OBSERVERS = _optional(activation=_specs("mse", "minmax"), weight=_specs("percentile", "moving_average"))
_FAKEQUANTS = _specs("fixed", "lsq")
_MATCHES = _optional(
    op=_NAMES,
    name=_NAMES,
    depthwise=st.booleans(),
    position=st.sampled_from(["first", "last"]),
    before_output=st.booleans(),
    subgraph=st.fixed_dictionaries({"from": _WORDS, "to": _WORDS}),
)
_RULES = st.one_of(
    st.fixed_dictionaries({"match": _MATCHES, "quantize": st.just(False)}),
    st.fixed_dictionaries(
        {"match": _MATCHES, "quantize": st.just(True)},
        optional={
            "activation": _PATCHES,
            "weight": _PATCHES,
            "observers": _OBSERVERS,
            "fakequant": _FAKEQUANTS,
        },
    ),
)
_QATS = _optional(
    epochs=st.integers(1, 500),
    lr=st.floats(1e-12, 10),
    bn=_optional(fold=st.booleans(), freeze_after=st.floats(0, 1)),
)
CONFIGS = _optional(
    name=_WORDS,
    description=_WORDS,
    backend=st.sampled_from(["onnxruntime", "megengine"]),
    preprocess=st.just(IMAGE),
    activation=_PATCHES,
    weight=_PATCHES,
    observers=_OBSERVERS,
    fakequant=_FAKEQUANTS,
    rules=st.lists(_RULES, max_size=4),
    ptq=st.sampled_from([[], ["fuse_bn"]]),
    qat=_QATS,
    expect=st.fixed_dictionaries(
        {"metric": _WORDS, "max_drop": st.floats(0, 100)},
        optional={
            "min_sqnr": st.floats(-10, 100),
            "max_megabytes": st.floats(0.01, 100),
            "max_milliseconds": st.floats(0.01, 100),
        },
    ),
)


def _mistakes(**fields) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        QConfig(**fields)
    return str(caught.value).split("\n")


def test_the_default_is_int8_for_onnxruntime():
    config = QConfig()
    assert config.backend == "onnxruntime"
    assert (config.rules, config.ptq, config.qat, config.origin) == ((), None, None, "QConfig")
    assert config.activation_observer == Spec(name="mse")
    assert config.weight_observer == Spec(name="minmax")
    assert config.effective_fakequant == Spec(name="fixed")
    assert config.to_dict() == {}
    assert config == QConfig(backend="onnxruntime", observers={}, rules=None)


def test_takes_plain_data():
    config = QConfig(
        backend="onnxruntime",
        observers={"activation": {"percentile": {"q": 99.9}}, "weight": "minmax"},
        fakequant="lsq",
        rules=[{"match": {"op": "conv2d"}, "weight": {"bits": 4}}],
    )
    assert config.activation_observer == Spec(name="percentile", options={"q": 99.9})
    assert config.weight_observer == Spec(name="minmax")
    assert config.effective_fakequant == Spec(name="lsq")
    assert config.rules == (Rule(match=Match(op=["conv2d"]), weight=SchemePatch(bits=4)),)
    assert config.rules[0].match.op == ("conv2d",)


def test_takes_models_as_well():
    rule = Rule(match={"subgraph": Subgraph(from_="a", to="b")}, fakequant="lsq")
    config = QConfig(observers=Observers(weight="mse"), rules=(rule,), preprocess=Preprocess(**IMAGE))
    assert config.to_dict() == {
        "preprocess": {"size": [3, 8, 8], "mean": [0.0, 1.0, 2.0], "std": [1.0, 2.0, 3.0]},
        "observers": {"weight": "mse"},
        "rules": [{"match": {"subgraph": {"from": "a", "to": "b"}}, "fakequant": "lsq"}],
    }


@settings(deadline=None)
@given(CONFIGS)
def test_to_dict_round_trip(data):
    config = QConfig(**data)
    again = QConfig(**json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_dict() == config.to_dict()


def test_to_dict_has_only_what_was_set_and_shares_nothing():
    config = QConfig(fakequant={"lsq": {"a": [1]}}, qat=None, weight={"bits": None, "axis": None})
    data = config.to_dict()
    assert data == {"fakequant": {"lsq": {"a": [1]}}, "weight": {"axis": None}}
    data["fakequant"]["lsq"]["a"].append(2)
    assert config.fakequant.options == {"a": [1]}


def test_options_are_copied():
    options = {"a": [1]}
    spec = Spec(name="mse", options=options)
    options["a"].append(2)
    assert spec.options == {"a": [1]}


@each_of("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_equal(duplicate):
    config = QConfig(rules=[ON]).with_origin("my.yaml", ["my.yaml:7"])
    again = duplicate(config)
    assert again == config
    assert (again.origin, again.rules[0].origin) == ("my.yaml", "my.yaml:7")


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        QConfig().backend = "megengine"


@each_of(
    ("one", "other"),
    [
        ({}, {"backend": "megengine"}),
        ({"fakequant": "lsq"}, {"fakequant": {"lsq": {"a": 1}}}),
        ({"weight": {"bits": 4}}, {"weight": {"bits": 4, "axis": None}}),
        ({"weight": {"axis": 0}}, {"weight": {"axis": None}}),
        ({"rules": [ON]}, {"rules": [ON, ON]}),
        ({"ptq": None}, {"ptq": []}),
    ],
)
def test_inequality(one, other):
    assert QConfig(**one) != QConfig(**other)


# -- schemes ------------------------------------------------------------------------------------------


def test_patch_changes_what_is_given():
    scheme = QScheme(bits=8, signed=True, symmetric=True, narrow=True, axis=0)
    assert SchemePatch().apply(scheme) == scheme
    assert SchemePatch(bits=4, narrow=False).apply(scheme) == QScheme(
        bits=4, signed=True, symmetric=True, narrow=False, axis=0
    )
    assert SchemePatch(bits=None).changes == {}


def test_patch_with_axis_none_means_one_scale_per_tensor():
    scheme = QScheme(axis=0)
    assert SchemePatch(axis=None).apply(scheme).axis is None
    assert SchemePatch(bits=4).apply(scheme).axis == 0


@given(_PATCHES)
def test_patch_applies_to_any_scheme(data):
    patched = SchemePatch(**data).apply(QScheme())
    assert patched == QScheme(**data)


def test_patch_knows_the_attributes_of_a_scheme():
    assert list(SchemePatch.model_fields) == list(QScheme(axis=0, block=32).to_dict())
    with pytest.raises(SchemeError):
        QScheme(bits=17)
    with pytest.raises(ConfigError, match=r"bits must be at most 16, not 17\."):
        SchemePatch(bits=17)


def test_a_whole_scheme_in_the_place_of_changes():
    scheme = QScheme(bits=4, signed=True, axis=0)
    config = QConfig(
        weight=scheme, rules=[Rule(match={}, activation=scheme), {"match": {}, "weight": scheme}]
    )
    assert config.weight.changes == scheme.to_dict()
    assert config.weight.apply(QScheme(bits=8, narrow=True)) == scheme
    assert (config.rules[0].activation, config.rules[1].weight) == (config.weight, config.weight)
    assert QConfig(**json.loads(json.dumps(config.to_dict()))) == config


# -- plugins ------------------------------------------------------------------------------------------


@each_of(
    ("given_as", "name", "options"),
    [
        ("mse", "mse", {}),
        ({"mse": {"bins": 2048}}, "mse", {"bins": 2048}),
        ({"mse": {}}, "mse", {}),
        ({"mse": None}, "mse", {}),
        ({"name": "mse", "options": {"bins": 1}}, "mse", {"bins": 1}),
        ("pkg.mod:Class", "pkg.mod:Class", {}),
        ({"pkg.mod:Class": {"deep": {"er": (1, 2)}}}, "pkg.mod:Class", {"deep": {"er": [1, 2]}}),
        (OrderedDict(mse={"bins": 1}), "mse", {"bins": 1}),
    ],
)
def test_spec_forms(given_as, name, options):
    spec = QConfig(observers={"activation": given_as}).activation_observer
    assert (spec.name, spec.options) == (name, options)


def test_own_class_is_not_imported_by_the_config():
    assert QConfig(fakequant="no_such_package.at_all:Thing").effective_fakequant.name.startswith("no_such")


def test_effective_fakequant():
    assert QConfig(qat={"fakequant": "lsq"}).effective_fakequant.name == "lsq"
    assert QConfig(fakequant="lsq", qat={"epochs": 1}).effective_fakequant.name == "lsq"
    assert QConfig(fakequant="lsq", qat={"fakequant": "lsq"}).effective_fakequant.name == "lsq"
    assert _mistakes(fakequant="lsq", qat={"fakequant": "fixed"}) == [
        "fakequant is 'lsq' but qat.fakequant is 'fixed': give one of them."
    ]


# -- rules --------------------------------------------------------------------------------------------


def test_rules_are_numbered():
    rule = Rule(**ON)
    config = QConfig(rules=[rule, rule, ON])
    assert [r.origin for r in config.rules] == ["rules[0]", "rules[1]", "rules[2]"]
    assert QConfig(rules=[ON, *config.rules]).rules[3].origin == "rules[3]"


def test_origin_from_a_file_stays_and_is_no_part_of_equality():
    rule = Rule(**ON).with_origin("my.yaml:12")
    config = QConfig(rules=[ON, rule])
    assert config.rules[1].origin == "my.yaml:12"
    assert config.rules[0] == config.rules[1]
    assert hash(config.rules[0]) == hash(config.rules[1])
    assert "origin" not in str(config.to_dict())


def test_an_empty_match_is_every_op():
    assert QConfig(rules=[ON]).rules[0].match == Match()


def test_match_to_dict_is_short():
    match = Match(op=["add", "mul"], name=["head.*"], subgraph={"from": "a", "to": "b"})
    assert match.to_dict() == {"op": ["add", "mul"], "name": "head.*", "subgraph": {"from": "a", "to": "b"}}


# -- mistakes -----------------------------------------------------------------------------------------

MISTAKES = [
    ({"zzz": 1, "backend": "onnxruntime"}, "unknown key 'zzz'; known: name, description, backend, "),
    ({"bakend": "x"}, "unknown key 'bakend'; did you mean 'backend'?"),
    ({"backend": "tensor_rt"}, "backend: unknown backend 'tensor_rt'; did you mean 'tensorrt'?"),
    ({"backend": "onnxruntim"}, "backend: unknown backend 'onnxruntim'; did you mean 'onnxruntime'?"),
    ({"backend": None}, "backend must be text, not empty."),
    ({"backend": 3}, "backend must be text, not 3."),
    ({"name": ""}, "name must be text that is not empty, not ''."),
    ({"rules": 5}, "rules must be a list, not 5."),
    ({"rules": [5]}, "rules[0] must be a mapping with keys such as match, quantize, activation, not 5."),
    ({"rules": [{"quantize": False}]}, "'match' is missing in rules[0]."),
    ({"rules": [{1: 2, **ON}]}, "the key 1 in rules[0] must be text."),
    ({"rules": [{**ON, "weigth": {}}]}, "unknown key 'weigth' in rules[0]; did you mean 'weight'?"),
    ({"rules": [{**ON, "weight": {"bit": 4}}]}, "unknown key 'bit' in rules[0].weight; did you mean 'bits'?"),
    (
        {"rules": [{"match": {"from": "a"}, "quantize": True}]},
        "unknown key 'from' in rules[0].match; known: op, name,",
    ),
    (
        {"rules": [{"match": {}}]},
        "rules[0]: the rule changes nothing: give it one of quantize, activation, weight, ",
    ),
    ({"rules": [{"match": {}, "weight": {}}]}, "rules[0]: the rule changes nothing"),
    ({"rules": [{"match": {}, "observers": {}}]}, "rules[0]: the rule changes nothing"),
    (
        {"rules": [{"match": {}, "quantize": False, "weight": {"bits": 4}}]},
        "rules[0]: with quantize: false the ops stay float, so weight does nothing.",
    ),
    ({"rules": [{**ON, "match": {"op": []}}]}, "rules[0].match.op must be a list of 1 or more, not []."),
    ({"rules": [{**ON, "match": {"op": 3}}]}, "rules[0].match.op must be a list, not 3."),
    ({"rules": [{**ON, "match": {"op": ["a", 3]}}]}, "rules[0].match.op[1] must be text, not 3."),
    ({"rules": [{**ON, "match": {"name": ""}}]}, "rules[0].match.name[0] must be text that is not empty"),
    (
        {"rules": [{**ON, "match": {"depthwise": "yes"}}]},
        "rules[0].match.depthwise must be true or false, not 'yes'.",
    ),
    (
        {"rules": [{**ON, "match": {"depthwise": 1}}]},
        "rules[0].match.depthwise must be true or false, not 1.",
    ),
    (
        {"rules": [{**ON, "match": {"position": "frst"}}]},
        "rules[0].match.position must be 'first', 'last' or 'tail', not",
    ),
    (
        {"rules": [{**ON, "match": {"subgraph": {"from": "a"}}}]},
        "'to' is missing in rules[0].match.subgraph.",
    ),
    (
        {"rules": [{**ON, "match": "all"}]},
        "rules[0].match must be a mapping with keys such as op, name, depthwise, not",
    ),
    ({"rules": [{**ON, "match": None}]}, "rules[0].match must be a mapping with keys such as op, name, "),
    ({"weight": {"bits": True}}, "weight.bits must be a whole number, not true."),
    ({"weight": {"bits": "4"}}, "weight.bits must be a whole number, not '4'."),
    ({"weight": {"bits": 4.0}}, "weight.bits must be a whole number, not 4.0."),
    ({"weight": {"bits": 1}}, "weight.bits must be at least 2, not 1."),
    ({"weight": {"signed": "true"}}, "weight.signed must be true or false, not 'true'."),
    (
        {"weight": {"rounding": "up"}},
        "weight.rounding must be 'half_even', 'half_away' or 'half_up', not 'up'.",
    ),
    (
        {"observers": {"activation": "msee"}},
        "observers.activation: unknown observer 'msee'; did you mean 'mse'?",
    ),
    (
        {"observers": {"weight": "lsq"}},
        "observers.weight: unknown observer 'lsq'; known: aciq, cosine, kl, ",
    ),
    (
        {"observers": {"activation": "histogram"}},
        "observers.activation: unknown observer 'histogram'; did you mean 'mse'? Known: aciq, cosine, kl, ",
    ),
    (
        {"fakequant": "ste"},
        "fakequant: unknown fakequant 'ste'; did you mean 'fixed'? Known: dorefa, fixed, ",
    ),
    ({"observers": {"weight": "base"}}, "observers.weight: unknown observer 'base'"),
    ({"observers": {"weight": "_search"}}, "observers.weight: unknown observer '_search'"),
    ({"observers": "mse"}, "observers must be a mapping with keys such as activation, weight, not 'mse'."),
    ({"fakequant": "mse"}, "fakequant: unknown fakequant 'mse'; known: dorefa, fixed, learned_range, lsq, "),
    ({"fakequant": "pkg:1x"}, "fakequant: 'pkg:1x' is not of the form pkg.mod:Class."),
    ({"fakequant": ":"}, "fakequant: ':' is not of the form pkg.mod:Class."),
    ({"fakequant": {"lsq": 1, "fixed": 2}}, "fakequant: give one name, with options under it, not 2 keys."),
    (
        {"fakequant": 5},
        "fakequant: give a name such as mse, or a mapping such as {mse: {bins: 2048}}, not 5.",
    ),
    ({"fakequant": {"lsq": 5}}, "fakequant.options: options are a mapping such as {bins: 2048}, not 5."),
    (
        {"fakequant": {"lsq": {"a": float("nan")}}},
        "fakequant.options: the option value nan is not a finite number.",
    ),
    (
        {"fakequant": {"lsq": {"a": object}}},
        "fakequant.options: the option value <class 'object'> is not plain data",
    ),
    ({"fakequant": {"lsq": {3: 1}}}, "fakequant.options: the option 3 must be text."),
    (
        {"fakequant": {"name": "lsq", "optoins": {}}},
        "unknown key 'optoins' in fakequant; did you mean 'options'?",
    ),
    ({"ptq": ["fuse"]}, "ptq[0]: unknown algorithm 'fuse'; did you mean 'fuse_bn'?"),
    ({"ptq": ["hessian"]}, "ptq[0]: unknown algorithm 'hessian'; known: absorb, adaround, bias_correction, "),
    ({"ptq": "fuse_bn"}, "ptq must be a list, not 'fuse_bn'."),
    ({"qat": {"epochs": 0}}, "qat.epochs must be greater than 0, not 0."),
    ({"qat": {"lr": "1e-4"}}, "qat.lr must be a number, not '1e-4'."),
    ({"qat": {"lr": True}}, "qat.lr must be a number, not true."),
    ({"qat": {"lr": float("inf")}}, "qat.lr must be a finite number, not inf."),
    ({"qat": {"bn": {"fold": "on"}}}, "qat.bn.fold must be true or false, not 'on'."),
    ({"qat": {"bn": {"freeze_after": 1.5}}}, "qat.bn.freeze_after must be at most 1.0, not 1.5."),
    ({"expect": {"metric": "top1"}}, "expect: metric and max_drop belong together: give both"),
    ({"expect": {"max_drop": 1}}, "expect: metric and max_drop belong together: give both"),
    ({"expect": {}}, "expect: it lacks a limit: give metric, max_drop, min_sqnr, max_megabytes, max_mill"),
    ({"expect": {"max_megabytes": 0}}, "expect.max_megabytes must be greater than 0.0, not 0."),
    ({"expect": {"max_ms": 1}}, "unknown key 'max_ms' in expect"),
    ({"expect": {"metric": "top1", "max_drop": -1}}, "expect.max_drop must be at least 0.0, not -1."),
    (
        {"preprocess": {**IMAGE, "size": [3, 8]}},
        "preprocess: size must be [channels, height, width] with 1 or 3",
    ),
    (
        {"preprocess": {**IMAGE, "size": [4, 8, 8]}},
        "preprocess: size must be [channels, height, width] with 1 or 3",
    ),
    ({"preprocess": {**IMAGE, "size": [3, 0, 8]}}, "preprocess.size: every number must be greater than 0."),
    ({"preprocess": {**IMAGE, "size": 224}}, "preprocess.size must be a list, not 224."),
    ({"preprocess": {**IMAGE, "mean": [1]}}, "preprocess: mean has 1 numbers for 3 channels."),
    ({"preprocess": {**IMAGE, "std": [1] * 4}}, "preprocess: std has 4 numbers for 3 channels."),
    ({"preprocess": {**IMAGE, "std": [1, 0, 1]}}, "preprocess.std: every number must be greater than 0."),
    ({"preprocess": {**IMAGE, "channels": "RGB"}}, "preprocess.channels must be 'bgr' or 'rgb', not 'RGB'."),
    ({"preprocess": {**IMAGE, "scale": 0}}, "preprocess.scale must be greater than 0.0, not 0."),
    (
        {"preprocess": {**IMAGE, "crop_fraction": 0.9}},
        "preprocess: crop_fraction does nothing with resize: stretch.",
    ),
    ({"preprocess": {"size": [3, 8, 8], "mean": [0, 0, 0]}}, "'std' is missing in preprocess."),
]


@each_of(("fields", "beginning"), MISTAKES, ids=[str(sentence) for _, sentence in MISTAKES])
def test_config_mistake_is_one_sentence(fields, beginning):
    (sentence,) = _mistakes(**fields)
    assert sentence.startswith(beginning)
    assert sentence[-1] in ".?"


def test_every_mistake_has_a_line():
    assert _mistakes(
        backend="x", weight={"bits": 99, "signed": 1}, rules=[{"match": {}}, {**ON, "qq": 1}], zzz=0
    ) == [
        f"backend: unknown backend 'x'; known: {', '.join(backends.known())}.",
        "weight.bits must be at most 16, not 99.",
        "weight.signed must be true or false, not 1.",
        "rules[0]: the rule changes nothing: give it one of quantize, activation, weight, output, "
        "quantize_output, observers, fakequant, share, placement, method.",
        "unknown key 'qq' in rules[1]; known: match, quantize, activation, weight, output, quantize_output, "
        "observers, fakequant, share, placement, method, backends, optional.",
        "unknown key 'zzz'; known: name, description, backend, preprocess, activation, weight, observers, "
        "fakequant, rules, region, placement, method, float, cost_table, ptq, qat, expect.",
    ]


def test_long_values_are_cut():
    for fields in ({"backend": ["x"] * 1000}, {"fakequant": [3] * 1000}, {"qat": {"lr": 10**400}}):
        (sentence,) = _mistakes(**fields)
        assert len(sentence) < 150


@each_of(
    ("build", "sentence"),
    [
        (
            lambda: QConfig("onnxruntime"),
            "QConfig('onnxruntime'): values are given by name, such as QConfig(backend='onnxruntime'); a "
            "recipe is read by qtrace.load_recipe.",
        ),
        (lambda: SchemePatch(4), "SchemePatch(4): values are given by name, as one of bits, signed, "),
        (lambda: SchemePatch(bits=1), "bits must be at least 2, not 1."),
        (lambda: Spec(nam="mse", x=1), "give one name, with options under it, not 2 keys."),
        (lambda: Rule(match={}), "the rule changes nothing"),
        (lambda: Match(ops="conv2d"), "unknown key 'ops'; did you mean 'op'?"),
        (lambda: QConfig.model_validate([1]), "a config must be a mapping with keys such as name"),
    ],
)
def test_parts_raise_the_same_error(build, sentence):
    with pytest.raises(ConfigError) as caught:
        build()
    assert type(caught.value) is ConfigError
    assert str(caught.value).startswith(sentence)


# -- the neighbourhood --------------------------------------------------------------------------------


@each_of("name", backends.known())
def test_every_backend_is_accepted(name):
    assert QConfig(backend=name).backend == name
