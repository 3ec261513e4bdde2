"""Files that are no model, a user's own names, and what a failing save leaves behind."""

from __future__ import annotations

import os
import pickle
import sys

import megengine as mge
import megengine.module as M
import megengine.traced_module as tm
import numpy as np
import pytest

from qtrace.errors import ConfigError, DataError, GraphError, UnsafeFileError
from qtrace.graph.files import serialize
from qtrace.graph.files.serialize import load, save
from tests.each import each_of
from tests.graph.files.hostile import net_input, traced_net


def write_plugin(folder, name):
    (folder / f"{name}.py").write_text(
        "import megengine.module as M, megengine.functional as F, megengine.traced_module as tm\n"
        "class Outer:\n"
        "    class Scale(M.Module):\n"
        "        def forward(self, x): return x * 3\n"
        "class Twice(M.Module):\n"
        "    def forward(self, x): return x * 2\n"
        "def shift(x): return x + 1\n"
        "tm.register_as_builtin(Twice)\n"
        "tm.wrap(shift)\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.twice = Twice()\n"
        "    def forward(self, x): return shift(self.twice(x))\n"
    )


def test_a_users_own_names_need_to_be_allowed(tmp_path, monkeypatch):
    write_plugin(tmp_path, "user_plugin_a")
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_plugin_a

    x = net_input()
    traced = tm.trace_module(user_plugin_a.Net(), x)
    expected = traced(x)
    path = tmp_path / "net.mge"
    save(traced, path)
    monkeypatch.delitem(sys.modules, "user_plugin_a")
    for allow, named in (
        ([], "user_plugin_a:"),
        (["user_plugin_a:Twice"], "user_plugin_a:shift"),
        (["user_plugin_a:shift"], "user_plugin_a:Twice"),
        (["user_plugin_a:Twic", "user_plugin_a:shift"], "user_plugin_a:Twice"),
    ):
        with pytest.raises(UnsafeFileError, match=named) as caught:
            load(path, allow=allow)
        assert "allow=[" in str(caught.value)
        assert str(path) in str(caught.value)
    loaded = load(path, allow=["user_plugin_a:Twice", "user_plugin_a:shift"])
    np.testing.assert_array_equal(loaded(x).numpy(), expected.numpy())


@each_of("allow", ["pkg.mod:Name", ["pkg.mod.Name"], ["pkg:*"], [3], ["os:system\n"]])
def test_malformed_allow_entries_are_refused(tmp_path, allow):
    with pytest.raises(ConfigError, match="allow"):
        load(tmp_path / "any", allow=allow)


def npz(path):
    with open(path, "wb") as file:
        np.savez(file, a=np.ones(3))


BAD_FILES = {
    "missing": (lambda p: None, "No such file"),
    "folder": (lambda p: p.mkdir(), "is a folder"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "text": (lambda p: p.write_text("hello world"), "not a saved model"),
    "zip": (npz, "zip archive"),
    "protocol 2": (lambda p: p.write_bytes(pickle.dumps({"a": 1}, 2)), "protocol is 2"),
    "dict": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "holds a dict, not a TracedModule"),
    "state dict": (lambda p: mge.save(M.Linear(2, 2).state_dict(), str(p)), "holds a OrderedDict"),
    "header only": (lambda p: p.write_bytes(b"\x80\x04"), "cut short"),
    "noise": (lambda p: p.write_bytes(b"\x80\x04" + bytes(range(256)) * 4), "damaged|cannot be loaded"),
    "unhashable key": (lambda p: p.write_bytes(b"\x80\x04}]Ns."), "damaged"),
}


@each_of("name", BAD_FILES)
def test_what_is_no_saved_model_gets_one_sentence(tmp_path, name):
    make, expected = BAD_FILES[name]
    path = tmp_path / "bad.mge"
    make(path)
    with pytest.raises(DataError, match=expected) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_reported(tmp_path):
    path = tmp_path / "net.mge"
    save(traced_net(), path)
    whole = path.read_bytes()
    for size in [*range(1, 60), *range(60, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            load(path)


def _damaged(whole, rng):
    damaged = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randint(len(damaged))] = rng.randint(256)
    return bytes(damaged)


def test_any_damage_is_reported_and_changes_no_number(tmp_path):
    path = tmp_path / "net.mge"
    save(traced_net(), path)
    whole, rng = path.read_bytes(), np.random.RandomState(3)
    for _ in range(100):
        path.write_bytes(_damaged(whole, rng))
        if path.read_bytes() != whole:
            with pytest.raises((DataError, UnsafeFileError)):
                load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="it is damaged: it has"):
        load(path)
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match="it is cut short: it has"):
        load(path)
    path.write_bytes(whole[:-9] + bytes(9))
    with pytest.raises(DataError, match="it is damaged: its bytes are not those"):
        load(path)


def test_damage_without_a_checksum_never_escapes_as_another_error(tmp_path):
    path = tmp_path / "net.mge"
    mge.save(traced_net(), str(path))
    whole, rng = path.read_bytes(), np.random.RandomState(3)
    for _ in range(100):
        path.write_bytes(_damaged(whole, rng))
        try:
            loaded = load(path)
        except (DataError, UnsafeFileError):
            continue
        assert isinstance(loaded, tm.TracedModule)


def test_save_takes_only_traced_modules_and_leaves_nothing_half_written(tmp_path):
    path = tmp_path / "net.mge"
    with pytest.raises(GraphError, match="TracedModule, not a Linear"):
        save(M.Linear(2, 2), path)
    traced = traced_net()
    save(traced, path)
    whole = path.read_bytes()
    traced.callback = lambda x: x
    with pytest.raises(GraphError, match="cannot be saved"):
        save(traced, path)
    assert path.read_bytes() == whole
    with pytest.raises(DataError, match="cannot be written"):
        save(traced_net(), tmp_path / "no" / "such" / "folder.mge")
    assert os.listdir(tmp_path) == ["net.mge"]


def test_save_refuses_folders_and_pipes(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(DataError, match=f"{name} is a {'device or a pipe' if name == 'pipe' else name}"):
            save(traced_net(), tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_the_error_behind_a_damaged_file_is_kept(tmp_path, monkeypatch):
    def faulty(model, rules):
        raise ZeroDivisionError("a fault")

    save(traced_net(), tmp_path / "net.mge")
    monkeypatch.setattr(serialize, "_finish", faulty)
    with pytest.raises(
        DataError, match=r"is no saved model, or damaged \(ZeroDivisionError: a fault\)"
    ) as caught:
        load(tmp_path / "net.mge")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
