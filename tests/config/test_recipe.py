"""Recipe files: what they may say, and every mistake at its file and line."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qtrace.config import QConfig, Spec, recipe
from qtrace.config.recipe import as_qconfig, config_or_default, dump_recipe, load_recipe, recipe_names
from qtrace.config.written import resolve_recipe
from qtrace.errors import ConfigError, QtraceError
from tests.each import each_of

RECIPES = Path(__file__).parents[2] / "recipes"
HEAD = "schema: qtrace/1\n"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Relative names, so that messages and origins have no folder in them."""
    monkeypatch.chdir(tmp_path)


def _load(body: str | bytes, name: str = "my.yaml", head: str = HEAD, **options: bool) -> QConfig:
    _write(body, name, head)
    return load_recipe(name, **options)


def _write(body: str | bytes, name: str, head: str = HEAD) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    if isinstance(body, bytes):
        Path(name).write_bytes(body)
    else:
        Path(name).write_text(head + body, encoding="utf-8")


def _mistakes(body: str | bytes, head: str = HEAD) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _load(body, head=head)
    return str(caught.value).split("\n")


def test_reads_every_key():
    config = _load(
        """\
name: demo
description: all keys
backend: onnxruntime
preprocess: {size: [3, 8, 8], mean: [0, 0, 0], std: [57.375, 57.12, 58.395], channels: rgb, scale: 0.5}
activation: {bits: 8}
weight: {bits: 4, axis: null}
observers: {activation: {mse: {bins: 2048}}, weight: minmax}
rules:
  - {match: {op: conv2d, depthwise: true}, weight: {bits: 8, axis: 0}}
  - {match: {position: first}, activation: {bits: 8}}
  - {match: {name: "head.*"}, quantize: false}
  - match: {op: [add, mul], subgraph: {from: a, to: b}, before_output: false}
    observers: {activation: pkg.mod:Own}
    fakequant: fixed
ptq: [fuse_bn]
qat: {fakequant: lsq, epochs: 10, lr: 1.0e-4, bn: {fold: true, freeze_after: 0.5}}
expect: {metric: top1, max_drop: 0.5}
""",
        allow_code=True,
    )
    assert config.weight.changes == {"bits": 4, "axis": None}
    assert config.activation_observer == Spec(name="mse", options={"bins": 2048})
    assert config.qat.lr == 1e-4
    assert config.rules[3].match.subgraph.from_ == "a"
    assert [rule.origin for rule in config.rules] == ["my.yaml:10", "my.yaml:11", "my.yaml:12", "my.yaml:13"]
    assert config.origin == "my.yaml"
    assert QConfig(**config.to_dict()) == config


def test_tells_where_a_key_was_written():
    _write("weight:\n  bits: 4\nactivation: {bits: 8}\n", "base.yaml", HEAD)
    config = _load("imports: [base.yaml]\nobservers:\n  weight: mse\nactivation: {signed: true}\n")
    assert config.place("weight") == "base.yaml:2"
    assert config.place("observers.weight") == "my.yaml:4"
    assert config.place("activation") == "my.yaml:5"
    assert config.place("observers.activation", "activation") == "my.yaml:5"
    assert config.place("fakequant") == "my.yaml"
    assert QConfig(**config.to_dict()).place("weight") == "QConfig"


def test_the_smallest_recipe_is_the_default():
    assert _load("") == QConfig()
    assert _load("rules:\nimports:\nobservers:\n") == QConfig()


# -- YAML ---------------------------------------------------------------------------------------------


@each_of("text", ["1e-4", "1.0e-4", "1E-04", ".0001", "0.0001", "+1e-4"])
def test_numbers_as_people_write_them(text):
    assert _load(f"qat: {{lr: {text}}}").qat.lr == 1e-4


@each_of(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("Off", "Off"),
        ("n", "n"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("=", "="),
        ("True", True),
        ("false", False),
        ("~", None),
        ("null", None),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-3", -3),
        ("1e3", 1000.0),
        ("'1e3'", "1e3"),
        ("!!str 12", "12"),
        ("!!float 3", 3.0),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    found = _load(f"fakequant: {{lsq: {{x: {text}}}}}").fakequant.options["x"]
    assert found == value
    assert type(found) is type(value)


def test_recipe_loader_does_not_patch_pyyaml():
    assert yaml.safe_load("[yes, 1e-4, 010]") == [True, "1e-4", 8]
    assert yaml.safe_dump("1e-4") == "1e-4\n...\n"


def test_recipe_may_use_yaml_anchors():
    config = _load("activation: &four {bits: 4}\nweight: *four\n")
    assert config.weight.bits == config.activation.bits == 4


def test_byte_order_mark_and_windows_line_ends():
    assert _load(b"\xef\xbb\xbfschema: qtrace/1\r\nfakequant: lsq\r\n").fakequant.name == "lsq"


def test_yml_is_a_recipe_too():
    assert _load("fakequant: lsq", name="my.yml").origin == "my.yml"


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

# The body, which begins in line 2, and the sentence.
MISTAKES = [
    ("fakequant: [", "my.yaml:2: not valid YAML: while parsing a flow node, "),
    ("a: b: c", "my.yaml:2: not valid YAML: mapping values are not allowed here."),
    (
        "rules:\n\t- a",
        "my.yaml:3: not valid YAML: while scanning for the next token, found character '\\t' that cannot ",
    ),
    ("rules:\n  - {match: {name: *}}", "my.yaml:3: not valid YAML: while scanning an alias, "),
    (
        "fakequant: *lsq",
        "my.yaml:2: not valid YAML: found undefined alias 'lsq'; quote text that begins with *.",
    ),
    ("---\na: 1", "my.yaml:2: not valid YAML: a second document begins; a file holds one."),
    ("name: \x07", "my.yaml:2: the character U+0007 is not allowed in YAML."),
    (
        "fakequant: lsq\nptq: []\nfakequant: fixed",
        "my.yaml:4: duplicate key 'fakequant', first given in line 2.",
    ),
    ("weight:\n  bits: 4\n  bits: 5", "my.yaml:4: duplicate key 'bits', first given in line 3."),
    ("1: 2", "my.yaml:2: the key '1' must be text."),
    ("[a]: 2", "my.yaml:2: the key must be text."),
    ("~: 2", "my.yaml:2: the key '~' must be text."),
    ("weight: {<<: {bits: 4}}", "my.yaml:2: merge keys (<<) are not supported; use imports."),
    (
        "fakequant: {lsq: {x: !!python/name:os.system x}}",
        "my.yaml:2: the tag tag:yaml.org,2002:python/name:os.system is not supp",
    ),
    (
        "fakequant: {lsq: {x: !!python/object/apply:os.abort []}}",
        "my.yaml:2: the tag tag:yaml.org,2002:python/object/apply:os.abort",
    ),
    (
        "fakequant: {lsq: {x: !own {a: b}}}",
        "my.yaml:2: the tag !own is not supported; recipes are plain data.",
    ),
    ("name: !!binary aGVsbG8=", "my.yaml:2: the tag tag:yaml.org,2002:binary is not supported"),
    ("fakequant: {lsq: {x: !!set {a, b}}}", "my.yaml:2: the tag tag:yaml.org,2002:set is not supported"),
    ("fakequant: {lsq: {x: !!int b}}", "my.yaml:2: 'b' cannot be read as int."),
    ("fakequant: {lsq: {x: !!bool 1}}", "my.yaml:2: '1' cannot be read as bool."),
    ('fakequant: {lsq: {x: "\\ud800"}}', "my.yaml:2: '\\ud800' cannot be read as str."),
    ('name: "\\UFFFFFFFF"', "my.yaml:1: not valid YAML: an escape or a number in it is impossible."),
    ("%YAML 2.0\n---\nname: a", "my.yaml:2: not valid YAML: "),
    (BOMB, "my.yaml:"),
    ("name: &a [*a]", "my.yaml:2: more than 50 levels of nesting."),
    ("name: &a {b: *a}", "my.yaml:2: more than 50 levels of nesting."),
    ("name: " + "[" * 60 + "]" * 60, "my.yaml:2: more than 50 levels of nesting."),
    ("name: " + "[" * 5000, "my.yaml:2: more than 50 levels of nesting."),
    ("weigth: {bits: 4}", "my.yaml:2: unknown key 'weigth'; did you mean 'weight'?"),
    (
        "rules:\n  - match: {}\n    weigth: {bits: 4}",
        "my.yaml:4: unknown key 'weigth' in rules[0]; did you mean 'weight'?",
    ),
    (
        "rules:\n  - match: {}\n    weight:\n      bits: 40",
        "my.yaml:5: rules[0].weight.bits must be at most 16, not 40.",
    ),
    ("rules:\n\n  - weight: {bits: 4}", "my.yaml:4: 'match' is missing in rules[0]."),
    ("rules:\n  - match: {op: add}\n", "my.yaml:3: rules[0]: the rule changes nothing: give it one of"),
    (
        "rules:\n  - match:\n    quantize: false",
        "my.yaml:3: rules[0].match must be a mapping with keys such as op, ",
    ),
    ("rules: {match: {}}", "my.yaml:2: rules must be a list, not {'match': {}}."),
    (
        "rules:\n- match: {op: [add,\n   3]}\n  quantize: true",
        "my.yaml:4: rules[0].match.op[1] must be text, not 3.",
    ),
    ("qat:\n  bn: {fold: yes}", "my.yaml:3: qat.bn.fold must be true or false, not 'yes'."),
    ("qat: {lr: .inf}", "my.yaml:2: qat.lr must be a finite number, not inf."),
    ("qat: {lr: '1e-4'}", "my.yaml:2: qat.lr must be a number, not '1e-4'."),
    (
        "qat: {epochs: 1" + "0" * 400 + "}\nbackend: x",
        "my.yaml:2: qat.epochs is a whole number of 1329 bits: give one of 64.",
    ),
    ("\nbackend: tensor_rt", "my.yaml:3: backend: unknown backend 'tensor_rt'; did you mean 'tensorrt'?"),
    ("backend:", "my.yaml:2: backend must be text, not empty."),
    (
        "observers:\n  activation:\n    msee: {bins: 1}",
        "my.yaml:3: observers.activation: unknown observer 'msee'; did",
    ),
    ("qat: {fakequant: lsq}\nfakequant: fixed", "my.yaml:1: fakequant is 'fixed' but qat.fakequant is 'lsq'"),
    (
        "ptq: [fuse_bn,\n      hessian]",
        "my.yaml:3: ptq[1]: unknown algorithm 'hessian'; known: absorb, adaround, bias_correction, ",
    ),
    ("imports: resnet", "my.yaml:2: imports must be a list of recipe names and paths."),
    ("imports: [onnxruntime, 3]", "my.yaml:2: imports[1] must be a recipe's name or path."),
    ("imports: [resnet19]", "my.yaml:2: there is no recipe 'resnet19'; did you mean 'resnet18'?"),
    ("imports: [backend/ncn]", "my.yaml:2: there is no recipe 'backend/ncn'; did you mean 'backend/ncnn'?"),
    ("imports: [qnn]", "my.yaml:2: there is no recipe 'qnn'; did you mean 'backend/qnn'?"),
    ("imports:\n  - ./no.yaml", "my.yaml:3: no.yaml: there is no such file."),
    ("imports: [./my.yaml]", "my.yaml:2: the imports go in a circle: my.yaml -> my.yaml."),
    ("imports: [../x]", "my.yaml:2: ../x: the name of a recipe file ends with .yaml or .yml."),
]


@each_of(("body", "beginning"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_recipe_mistake_is_one_sentence(body, beginning):
    (sentence,) = _mistakes(body)
    assert sentence.startswith(beginning)
    assert sentence[-1] in ".?"
    assert len(sentence) < 300


@each_of(
    ("text", "beginning"),
    [
        ("", "my.yaml:1: the file is empty."),
        ("# only a comment\n\n", "my.yaml:1: the file is empty."),
        ("\n- a\n- b\n", "my.yaml:2: a recipe is a mapping that begins with 'schema: qtrace/1'."),
        ("just text", "my.yaml:1: a recipe is a mapping that begins with 'schema: qtrace/1'."),
        ("~", "my.yaml:1: a recipe is a mapping"),
        ("\nfakequant: lsq", "my.yaml:2: 'schema: qtrace/1' is missing; a recipe begins with it."),
        (
            "fakequant: lsq\nschema: qtrace/2",
            "my.yaml:2: schema 'qtrace/2' is not supported; this version reads 'qt",
        ),
        ("schema: 1", "my.yaml:1: schema 1 is not supported; this version reads 'qtrace/1'."),
        ("schema: [qtrace/1]", "my.yaml:1: schema ['qtrace/1'] is not supported"),
    ],
)
def test_not_a_recipe(text, beginning):
    (sentence,) = _mistakes(text, head="")
    assert sentence.startswith(beginning)


def test_recipe_with_exploding_aliases_is_refused():
    (sentence,) = _mistakes(BOMB)
    assert "more than 10000 values" in sentence


def test_every_mistake_has_a_line():
    body = """\
backend: x
backend: y
weight: {bits: 99, signed: 1}
rules:
  - {match: {}, quantize: false}
  - {match: {}, zzz: 1}
imports: [no_such_thing]
"""
    assert [sentence.partition(": ")[0] for sentence in _mistakes(body)] == [
        "my.yaml:3",
        "my.yaml:8",
        "my.yaml:2",
        "my.yaml:4",
        "my.yaml:4",
        "my.yaml:7",
    ]


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=25)
def test_any_text_gives_a_config_or_a_config_error(text):
    _never_crashes((HEAD + text).encode("utf-8"))


@given(st.binary(max_size=40))
@settings(deadline=None, max_examples=30)
def test_any_bytes_give_a_config_or_a_config_error(data):
    _never_crashes(HEAD.encode() + data)


@given(st.text(alphabet=list("abm: \n-[]{},&*!'\"#|>%@0.~"), max_size=50))
@settings(deadline=None, max_examples=40)
def test_yaml_like_text_gives_a_config_or_a_config_error(text):
    _never_crashes((HEAD + "rules: " + text).encode())


def _never_crashes(data: bytes) -> None:
    lines = []
    try:
        _load(data)
    except ConfigError as error:
        lines = str(error).split("\n")
    assert all(line.startswith("my.yaml:") for line in lines)


# -- files --------------------------------------------------------------------------------------------


def test_missing_file():
    with pytest.raises(ConfigError, match=r"^no\.yaml: there is no such file\.$"):
        load_recipe("no.yaml")
    with pytest.raises(ConfigError, match=r"^no/such\.yaml: there is no such file\.$"):
        load_recipe(Path("no/such.yaml"))


@pytest.mark.parametrize("name", ["resnet18", "backend/qnn"])
def test_missing_file_that_resembles_a_packaged_recipe(name):
    with pytest.raises(ConfigError, match=rf"no such file\. The packaged recipe is called '{name}'\.$"):
        load_recipe(f"{name}.yaml")


def test_directory():
    Path("dir.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"^dir\.yaml: this is not a file\.$"):
        load_recipe("dir.yaml")


def test_device_is_not_read():
    Path("zero.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"^zero\.yaml: this is not a file\.$"):
        load_recipe("zero.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file():
    _write("", "my.yaml")
    Path("my.yaml").chmod(0)
    with pytest.raises(ConfigError, match=r"^my\.yaml: the file cannot be read: Permission denied\.$"):
        load_recipe("my.yaml")


def test_file_name_that_no_system_takes():
    with pytest.raises(ConfigError, match=r"^'a\\x00b\.yaml' cannot be the name of a file\.$"):
        load_recipe("a\0b.yaml")


def test_binary_file():
    assert _mistakes(b"schema: qtrace/1\n\nname: \xff\xfe\n") == ["my.yaml:3: the file is not UTF-8 text."]


def test_huge_file():
    assert _mistakes(b"#" * (1 << 20) + b"\n") == ["my.yaml: the file is larger than 1 MiB; recipes are not."]


@pytest.mark.parametrize("name", ["MY.YAML", "My.Yml"])
def test_a_suffix_in_upper_case(name):
    _write("imports: [OTHER.YML]\n", name, HEAD)
    _write("placement: balanced\n", "OTHER.YML", HEAD)
    config = load_recipe(name)
    assert (config.placement, config.origin) == ("balanced", name)


@each_of("name", ["resnet", Path("no/such"), "no/such", "dir/resnet.txt"])
def test_names_and_paths(name):
    if name == "resnet":
        assert load_recipe(name).origin == "qtrace/recipes/resnet.yaml"
    else:
        with pytest.raises(ConfigError, match=r"the name of a recipe file ends with \.yaml or \.yml\.$"):
            load_recipe(name)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", ["mobilenet_v2+tflite", "tflite+mobilenet_v2", "mobilenet_v2 + backend/tflite"]
)
def test_a_family_and_a_target_are_one_recipe_whose_target_comes_last(name):
    config, written = load_recipe(name), _load("imports: [mobilenet_v2, backend/tflite]\n")
    assert {**config.to_dict(), "description": ""} == {**written.to_dict(), "description": ""}
    assert (config.backend, config.description) == ("tflite", "mobilenet_v2 + backend/tflite")
    assert config.rules[-1].origin.startswith("qtrace/recipes/backend/tflite.yaml:")
    assert "# qtrace/recipes/common/depthwise.yaml:" in resolve_recipe(name).text()


def test_several_targets_stay_in_their_order():
    config = load_recipe("generic_w4+resnet+onnxruntime")
    assert (config.backend, config.weight.bits) == ("onnxruntime", 4)
    assert load_recipe("onnxruntime+resnet+generic_w4").backend == "generic"


@each_of(
    ("name", "begin"),
    [
        (
            "vit+tensort",
            "'vit+tensort': there is no recipe 'tensort'; did you mean 'tensorrt'? Targets are esp_dl,",
        ),
        ("vot+tensorrt", "'vot+tensorrt': there is no recipe 'vot'; did you mean 'vit'? Targets are esp_dl,"),
        ("vit+", "'vit+': there is no recipe ''; a file of yours imports what it builds on instead. Targets"),
        ("vit+a/b", "'vit+a/b': there is no recipe 'a/b'; a file of yours imports"),
        ("vit+a\nb", r"'vit+a\\nb': there is no recipe 'a\\nb'"),
    ],
)
def test_a_misspelt_part_is_one_sentence_with_the_names(name, begin):
    with pytest.raises(ConfigError) as error:
        load_recipe(name)
    text = str(error.value)
    assert text.startswith(begin.replace("\\\\", "\\"))
    assert "\n" not in text
    assert "; the others are atss, " in text


def test_a_file_with_a_plus_in_its_name_is_a_file(tmp_path):
    path = tmp_path / "a+b.yaml"
    path.write_text("schema: qtrace/1\nimports: [resnet]\n")
    assert load_recipe(str(path)).origin == str(path)


def test_unknown_name():
    with pytest.raises(ConfigError, match=r"^there is no recipe 'resnet19'; did you mean 'resnet18'\?"):
        load_recipe("resnet19")
    with pytest.raises(
        ConfigError, match=r"^there is no recipe ''; `qtrace recipes list` shows those there are"
    ):
        load_recipe("")
    with pytest.raises(ConfigError, match="by text or a path, not by int"):
        load_recipe(3)


# -- imports ------------------------------------------------------------------------------------------


def test_imports_merge_mappings_and_append_rules():
    _write(
        """\
description: base
observers: {activation: {mse: {bins: 1024}}, weight: minmax}
ptq: [fuse_bn]
qat: {lr: 0.1, bn: {fold: false, freeze_after: 0.5}}
rules:
  - {match: {op: add}, quantize: false}
""",
        "base.yaml",
    )
    config = _load(
        """\
imports: [./base.yaml]
observers: {activation: {percentile: {p: 99}}}
ptq: []
qat: {bn: {freeze_after: 0.25}, epochs: 3}
rules:
  - {match: {op: mul}, quantize: false}
"""
    )
    assert config.to_dict() == {
        "description": "base",
        "observers": {"activation": {"percentile": {"p": 99}}, "weight": "minmax"},
        "rules": [
            {"match": {"op": "add"}, "quantize": False},
            {"match": {"op": "mul"}, "quantize": False},
        ],
        "ptq": [],
        "qat": {"epochs": 3, "lr": 0.1, "bn": {"fold": False, "freeze_after": 0.25}},
    }
    assert [rule.origin for rule in config.rules] == ["base.yaml:7", "my.yaml:7"]
    assert config.origin == "my.yaml"


def test_later_imports_win():
    _write("fakequant: fixed\nweight: {bits: 4}\nrules: [{match: {op: a}, quantize: true}]\n", "a.yaml")
    _write("fakequant: lsq\nrules: [{match: {op: b}, quantize: true}]\n", "b.yaml")
    config = _load("imports: [a.yaml, b.yaml]\nrules:\n")
    assert config.fakequant.name == "lsq"
    assert config.weight.bits == 4
    assert [rule.origin for rule in config.rules] == ["a.yaml:4", "b.yaml:3"]


def test_plugins_with_options_are_replaced():
    _write("fakequant: {lsq: {a: 1}}\n", "a.yaml")
    assert _load("imports: [a.yaml]\nfakequant: {lsq: {b: 2}}").fakequant.options == {"b": 2}


def test_null_removes_imported_values():
    _write("qat: {fakequant: lsq}\nweight: {bits: 4, axis: 0}\n", "a.yaml")
    config = _load("imports: [a.yaml]\nqat: null\nweight: {axis: null}\n")
    assert config.qat is None
    assert config.weight.changes == {"bits": 4, "axis": None}


def test_paths_are_relative_to_the_importing_file():
    _write("imports: [../top.yaml, other.yml]\n", "sub/inner.yaml")
    _write("rules: [{match: {}, fakequant: lsq}]\n", "sub/other.yml")
    _write("rules: [{match: {}, fakequant: fixed}]\n", "top.yaml")
    config = _load("imports: [sub/inner.yaml]\n")
    assert [rule.origin for rule in config.rules] == ["top.yaml:2", "sub/other.yml:2"]


def test_packaged_recipes_can_be_imported():
    config = _load("imports: [mobilenet_v2]\nrules:\n  - {match: {position: last}, quantize: false}\n")
    origins = [rule.origin for rule in config.rules]
    assert origins[-1] == "my.yaml:4"
    files = {origin.partition(":")[0].rpartition("/")[2] for origin in origins[:-1]}
    assert files == {"default.yaml", "depthwise.yaml"}


def test_what_is_imported_twice_counts_once():
    _write("rules: [{match: {op: base}, quantize: true}]\nweight: {bits: 8}\n", "base.yaml")
    _write("imports: [base.yaml]\nweight: {bits: 4}\nrules: [{match: {op: a}, quantize: true}]\n", "a.yaml")
    _write("imports: [base.yaml]\nrules: [{match: {op: b}, quantize: true}]\n", "b.yaml")
    config = _load("imports: [a.yaml, b.yaml]\n")
    assert [rule.match.op[0] for rule in config.rules] == ["base", "a", "b"]
    assert config.weight.bits == 4


def test_circular_imports_of_recipes_are_refused():
    _write("imports: [sub/b.yaml]\n", "a.yaml")
    _write("\nimports:\n  - ../a.yaml\n", "sub/b.yaml")
    with pytest.raises(ConfigError) as caught:
        load_recipe("a.yaml")
    assert str(caught.value) == ("sub/b.yaml:4: the imports go in a circle: a.yaml -> sub/b.yaml -> a.yaml.")


def test_circles_through_links_are_refused():
    Path("link.yaml").symlink_to("my.yaml")
    assert _mistakes("imports: [link.yaml]") == [
        "my.yaml:2: the imports go in a circle: my.yaml -> link.yaml."
    ]


def test_mistakes_are_reported_where_they_stand():
    _write("rules:\n  - {match: {}, weight: {bits: 1}}\nzzz: 1\n", "base.yaml")
    sentences = _mistakes("imports: [./base.yaml]\nrules:\n  - {match: {}, weight: {bits: 99}}\n")
    assert sentences[0] == "base.yaml:3: rules[0].weight.bits must be at least 2, not 1."
    assert sentences[1] == "my.yaml:4: rules[0].weight.bits must be at most 16, not 99."
    assert sentences[2].startswith("base.yaml:4: unknown key 'zzz'")
    assert len(sentences) == 3


@pytest.mark.parametrize(("base", "own", "where"), [("5", "[]", "base.yaml:2"), ("[]", "5", "my.yaml:3")])
def test_import_does_not_hide_rules_of_a_wrong_type(base, own, where):
    _write(f"rules: {base}\n", "base.yaml")
    assert _mistakes(f"imports: [base.yaml]\nrules: {own}\n") == [f"{where}: rules must be a list, not 5."]


def test_mistakes_in_the_form_of_an_imported_file():
    _write("rules: [", "broken.yaml")
    _write("", "old.yaml", head="schema: qtrace/0\n")
    Path("latin.yaml").write_bytes(b"# caf\xe9")
    sentences = _mistakes("imports:\n- broken.yaml\n- old.yaml\n- latin.yaml\n- missing.yaml\nzzz: 1")
    assert [s.partition(": ")[0] for s in sentences] == [
        "broken.yaml:2",
        "old.yaml:1",
        "my.yaml:5",
        "my.yaml:6",
        "my.yaml:7",
    ]
    assert sentences[2] == "my.yaml:5: latin.yaml:1: the file is not UTF-8 text."


# -- writing ------------------------------------------------------------------------------------------


def _configs():
    """The strategy of the config's own tests."""
    path = Path(__file__).with_name("test_qconfig.py")
    spec = importlib.util.spec_from_file_location("_configs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CONFIGS


@settings(deadline=None)
@given(_configs())
def test_dump_round_trip(data):
    config = QConfig(**data)
    text = dump_recipe(config)
    again = _load(text.encode("utf-8"), allow_code=True)
    assert again == config
    assert dump_recipe(again) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None)
def test_dump_keeps_every_float(value):
    config = QConfig(fakequant={"lsq": {"x": value}})
    found = _load(dump_recipe(config), head="").fakequant.options["x"]
    assert found == value
    assert type(found) is float
    assert math.copysign(1, found) == math.copysign(1, value)


@each_of(
    "text",
    ["yes", "1e-4", "0o17", "010", "1:30", "2024-01-01", "~", "null", "", " a ", "a: b", "\n", "é\x07", "<<"],
)
def test_dump_quotes_what_readers_disagree_about(text):
    config = QConfig(fakequant={"lsq": {"x": text}})
    written = dump_recipe(config)
    assert _load(written, head="") == config
    assert yaml.safe_load(written)["fakequant"]["lsq"]["x"] == text


def test_dump_is_readable():
    config = QConfig(rules=[{"match": {"op": "conv2d"}, "weight": {"bits": 4}}], fakequant="lsq")
    assert dump_recipe(config) == (
        "schema: qtrace/1\nfakequant: lsq\nrules:\n- match:\n    op: conv2d\n  weight:\n    bits: 4\n"
    )


# -- as_qconfig ---------------------------------------------------------------------------------------


def test_as_qconfig():
    config = QConfig(fakequant="lsq")
    assert as_qconfig(config) is config
    assert as_qconfig({"fakequant": "lsq"}) == config
    assert as_qconfig("resnet18") == load_recipe("resnet18")
    _write("fakequant: lsq", "my.yaml")
    assert as_qconfig("my.yaml") == as_qconfig(Path("my.yaml")) == config


@each_of("wrong", [None, 3, ["resnet18"], {3: 4}, {"zzz": 1}, {"rules": 5}])
def test_as_qconfig_refuses_other_types(wrong):
    with pytest.raises(ConfigError):
        as_qconfig(wrong)


# -- the packaged recipes -----------------------------------------------------------------------------


def test_names():
    files = (path.relative_to(RECIPES).with_suffix("") for path in RECIPES.rglob("*.yaml"))
    assert recipe_names() == tuple(sorted(file.as_posix() for file in files))
    assert {"onnxruntime", "megengine", "resnet18", "mobilenet_v2", "backend/ncnn"} <= set(recipe_names())


def test_errors_are_the_users():
    assert issubclass(ConfigError, QtraceError)


# -- code ---------------------------------------------------------------------------------------------

NAMES_CODE = {
    "observers:\n  activation: own_code:X\n": "my.yaml:3: observers.activation",
    "observers:\n  weight: {own_code:X : {bins: 8}}\n": "my.yaml:3: observers.weight",
    "fakequant: own_code:X\n": "my.yaml:2: fakequant",
    "qat:\n  epochs: 3\n  fakequant: own_code:X\n": "my.yaml:4: qat.fakequant",
    "ptq:\n  - fuse_bn\n  - own_code:X\n": "my.yaml:4: ptq[1]",
    "rules:\n  - match: {op: relu}\n    fakequant: own_code:X\n": "my.yaml:4: rules[0].fakequant",
    "rules:\n  - match: {op: relu}\n    observers: {weight: own_code:X}\n": (
        "my.yaml:4: rules[0].observers.weight"
    ),
}


@each_of("body", NAMES_CODE)
def test_code_is_refused_unless_allowed(body, monkeypatch):
    Path("own_code.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.syspath_prepend(".")
    (sentence,) = _mistakes(body)
    assert sentence.startswith(f"{NAMES_CODE[body]} names code, 'own_code:X', which would be run")
    assert "--allow-code" in sentence
    with pytest.raises(ConfigError, match="names code"):
        as_qconfig("my.yaml")
    with pytest.raises(ConfigError, match="names code"):
        resolve_recipe("my.yaml")
    config = load_recipe("my.yaml", allow_code=True)
    assert as_qconfig(config.to_dict()) == config  # what is written in Python may name code
    assert not Path("ran").exists()


def test_code_in_an_import_is_reported_with_its_place():
    _write("fakequant: own_code:X\n", "base.yaml", HEAD)
    assert _mistakes("imports: [base.yaml]\n")[0].startswith("base.yaml:2: fakequant names code")
    # What the importing file replaces is not named any more.
    assert _load("imports: [base.yaml]\nfakequant: lsq\n").fakequant == Spec(name="lsq")


def test_imports_are_relative():
    _write("description: shared\n", "shared/base.yaml", HEAD)
    _write("imports: [../shared/base.yaml]\n", "mine/my.yaml", HEAD)
    assert load_recipe("mine/my.yaml").description == "shared"
    absolute = str(Path("shared/base.yaml").resolve())
    (sentence,) = _mistakes(f"imports: [{absolute}]\n")
    assert sentence.startswith("my.yaml:2: imports[0] is the absolute path")


def test_empty_configs_mean_the_default_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "DEFAULT_RECIPE", "int8")
    default = load_recipe("int8")
    assert all(config_or_default(said) == default for said in (None, QConfig(), {}))
    explicit = QConfig(backend="onnxruntime")
    assert config_or_default(explicit) is explicit
    assert config_or_default("onnxruntime") == load_recipe("onnxruntime")


@each_of(
    ("name", "imported"),
    [
        ("mine.yaml", "../mine.yaml"),
        ("MINE.YML", "../MINE.YML"),
        ("resnet50", "resnet50"),
        ("int8+qnn", "int8+qnn"),
    ],
)
def test_a_file_is_imported_relative_to_the_folder_of_the_importing_one(name: str, imported: str) -> None:
    assert recipe.importable(name, Path("int8")) == imported
