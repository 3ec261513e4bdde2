"""The allow-list cannot rot: what MegEngine can record is on it, or is left out by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from importlib.util import find_spec

import megengine.functional as F
import megengine.module as M
import pytest
from megengine.core._imperative_rt import OpDef
from megengine.core.ops import builtin
from megengine.traced_module.module_tracer import BUILTIN_ARRAY_METHOD, Patcher, module_tracer

import qtrace
from qtrace.graph.files import allowlist
from qtrace.graph.files.allowlist import AllowList, RefusedError, resolve
from tests.each import each_of

# Left out on purpose: they hand a blob of the file to a native runtime.
EXCLUDED_MODULES = allowlist._names(
    {
        "megengine.module.external": """
            AtlasRuntimeSubgraph CambriconRuntimeSubgraph ExternOprSubgraph MagicMindRuntimeSubgraph
            TensorrtRuntimeSubgraph
        """,
    }
)
# Left out on purpose: they talk to other processes, read global settings, or need a vendor's library.
EXCLUDED_FUNCTIONS = allowlist._names(
    {
        "megengine.distributed.functional": """
            all_gather all_reduce_max all_reduce_min all_reduce_sum all_to_all broadcast collective_comm
            gather reduce_scatter_sum reduce_sum remote_recv remote_send scatter
        """,
        "megengine.functional.debug_param": "get_execution_strategy",
        "megengine.functional.vision": "nvof",
    }
)
# Left out on purpose: native blobs; the network; ops whose state holds the address of a native handle, which
# no file can know; and what only optimizers, drivers or MegEngine's own runtime apply.
EXCLUDED_OPDEFS = allowlist._names(
    {
        "megengine.core._imperative_rt.ops": """
            AtlasRuntime CambriconRuntime ExternOpr MagicMindRuntime TensorRTRuntime CollectiveComm
            RemoteRecv RemoteSend BetaRNG Dropout GammaRNG GaussianRNG MultiHeadAttn PermutationRNG
            PoissonRNG ShuffleRNG UniformRNG Barrier Borrow InplaceAdd LAMBUpdate NvOf ParamPackConcat
            ParamPackSplit PyOpBase
        """
    }
)
LISTS = [
    name
    for name, value in vars(allowlist).items()
    if isinstance(value, frozenset) and not name.startswith("_") and name != "TENSOR_METHODS"
]


def key_of(member):
    return f"{member.__module__}:{member.__qualname__}"


def recordable_functions():
    """What the tracer patches while it traces; methods of Tensor are recorded as CallMethod, not here."""
    with Patcher(lambda function: function) as patcher:
        originals = {
            patched.origin_fn for patched in patcher.patched_fn if inspect.isfunction(patched.origin_fn)
        }
    methods = ("megengine.core.tensor.array_method:", "megengine.tensor:")
    return {key_of(function) for function in originals if not key_of(function).startswith(methods)}


def public_functions():
    """Every public function of the functional modules, patched or not."""
    keys = set()
    for module in (F, F.elemwise, F.loss, F.math, F.metric, F.nn, F.quantized, F.tensor, F.vision):
        for name in getattr(module, "__all__", dir(module)):
            member = getattr(module, name)
            if inspect.isfunction(member) and not name.startswith("_"):
                keys.add(key_of(member))
    return {key for key in keys if key.startswith("megengine.functional.")}


def test_every_recordable_function_is_listed_or_left_out_by_name():
    known = recordable_functions()
    user_wrapped = {
        key for key in known if not key.startswith("megengine.")
    }  # by other tests of this process
    assert known - user_wrapped == (allowlist.FUNCTIONS | EXCLUDED_FUNCTIONS)
    assert not allowlist.FUNCTIONS & EXCLUDED_FUNCTIONS


def test_every_public_function_is_listed_or_left_out_by_name():
    helpers = public_functions() - allowlist.FUNCTIONS - EXCLUDED_FUNCTIONS
    assert helpers - recordable_functions() == helpers  # whatever remains, tracing cannot record


def test_every_builtin_module_is_listed_or_left_out_by_name():
    builtin_modules = {
        key_of(cls) for cls in module_tracer._opaque_types if cls.__module__.startswith("megengine.")
    }
    listed = allowlist.MODULES | EXCLUDED_MODULES | {key_of(M.Module)}
    assert builtin_modules <= listed
    extra = listed - builtin_modules
    assert extra == {
        "megengine.module.sequential:Sequential",
        "megengine.traced_module.utils:_ModuleDict",
        "megengine.traced_module.utils:_ModuleList",
    }


def test_every_op_is_listed_or_left_out_by_name():
    ops = {
        key_of(member)
        for _, member in inspect.getmembers(builtin, inspect.isclass)
        if issubclass(member, OpDef)
    }
    assert ops - {key_of(OpDef)} == allowlist.OPDEFS | EXCLUDED_OPDEFS
    assert not allowlist.OPDEFS & EXCLUDED_OPDEFS


def test_listed_ops_hold_no_addresses_blobs_or_network_addresses():
    for key in allowlist.OPDEFS:
        assert not {"handle", "buf", "data", "addr", "port"} & set(resolve(key)().__getstate__()), key


def test_recordable_tensor_methods_are_listed():
    assert set(BUILTIN_ARRAY_METHOD) | {"detach"} <= allowlist.TENSOR_METHODS
    assert not {"numpy", "item", "__reduce__", "__class__", "__getattribute__"} & allowlist.TENSOR_METHODS


EXCLUDED = EXCLUDED_MODULES | EXCLUDED_FUNCTIONS | EXCLUDED_OPDEFS


@each_of("keys", [EXCLUDED, *(getattr(allowlist, name) for name in LISTS)])
def test_entries_are_exact_and_name_what_is_stored_in_files(keys):
    for key in keys:
        assert re.fullmatch(r"[\w.]+:[\w.]+", key), key
        member = resolve(key)
        if member is not Ellipsis and key not in ("numpy:longlong", "numpy:ulonglong"):
            assert not inspect.ismodule(member), key


def test_files_reach_no_function_through_the_unpickler():
    """Functions may stand in exprs, as strings; on the unpickler's stack they could be called at once."""
    names = AllowList()
    for key in allowlist.FUNCTIONS:
        with pytest.raises(RefusedError):
            names.find(*key.split(":"))


@each_of("key", sorted(EXCLUDED_FUNCTIONS | EXCLUDED_OPDEFS))
def test_left_out_names_are_refused(key):
    names = AllowList()
    for ask in (lambda *pair: names.find(*pair), lambda *pair: names.function(pair)):
        with pytest.raises(RefusedError, match=re.escape(key)):
            ask(*key.split(":"))


def test_every_module_that_qtrace_registers_is_listed():
    for info in pkgutil.walk_packages(qtrace.__path__, "qtrace."):
        needs_torch = ".torch." in info.name or ".torch_" in info.name
        if needs_torch and find_spec("torch") is None:
            continue
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
    registered = {key_of(cls) for cls in module_tracer._opaque_types if cls.__module__.startswith("qtrace.")}
    assert registered <= allowlist.qtrace_classes()


def test_qtraces_own_plugins_are_listed_by_exact_name():
    classes = allowlist.qtrace_classes()
    assert classes >= allowlist.QTRACE_CLASSES
    assert "qtrace.fakequant.base:FakeQuant" in classes
    assert "qtrace.observers.base:Observer" in classes
    for key in classes:
        assert key_of(resolve(key)) == key
