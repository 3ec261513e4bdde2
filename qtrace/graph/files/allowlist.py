"""The names that a model file may contain: exact names, one list for each use of a name in a file.

A name stands for one object, ``module:qualname`` as pickle and MegEngine store it; there are no prefixes and
no patterns. Which list a name is on decides what a file can do with it:

* ``TYPES`` and ``OPDEFS`` reach the loaded model as the types they are (the type of a leaf, a dtype, an op).
* ``OBJECTS`` and ``MODULES`` are classes of which instances are made, without running a constructor.
* ``REDUCERS`` are called while loading, each with arguments that ``rules.py`` checks.
* ``FUNCTIONS`` and ``TENSOR_METHODS`` are strings inside exprs; nothing but running the model calls them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from megengine.module import Module

from qtrace import plugins
from qtrace.errors import ConfigError
from qtrace.plugins import OP_RULES, installed


def _split(names: str) -> list[str]:
    return names.split()


def _names(table: dict[str, str]) -> frozenset[str]:
    return frozenset(f"{module}:{name}" for module, names in table.items() for name in _split(names))


TYPES = _names(
    {
        "abc": "ABCMeta",
        "builtins": "Ellipsis bool bytearray bytes dict float frozenset int list set slice str tuple type",
        "collections": "OrderedDict defaultdict",
        "inspect": "FullArgSpec",
        "numpy": """
            bool_ complex128 complex64 dtype float16 float32 float64 int16 int32 int64 int8 longlong
            ndarray uint16 uint32 uint64 uint8 ulonglong
        """,
        "numpy.dtypes": """
            BoolDType Complex128DType Complex64DType Float16DType Float32DType Float64DType Int16DType
            Int32DType Int64DType Int8DType LongLongDType UInt16DType UInt32DType UInt64DType UInt8DType
            ULongLongDType
        """,
        "megengine.core._imperative_rt": "pybfloat16 pyintb1 pyintb2 pyintb4",
        "megengine.core._imperative_rt.common": "CompNode",
        "megengine.core._imperative_rt.core2": "Tensor",
        "megengine.core._wrap": "Device",
        "megengine.core.tensor.dtype": "QuantDtypeMeta",
        "megengine.distributed.group": "Group",
        "megengine.module.module": "Module",
        "megengine.quantization.utils": "LSQParams QParams QuantMode",
        "megengine.tensor": "Parameter Tensor",
        "megengine.traced_module.node": "ModuleNode Node NodeMixin TensorNode",
        "megengine.traced_module.pytree": "ArgsIndex",
    }
)
"""Types (and Ellipsis) that may stand in a model as they are: whatever calls one of them does no harm.

``type`` and ``abc.ABCMeta`` are the types of leaves that are classes, such as a dtype or Tensor itself.
"""

OBJECTS = _names(
    {
        "megengine.traced_module.expr": "Apply CallFunction CallMethod Constant GetAttr Input",
        "megengine.traced_module.pytree": "LeafDef TreeDef",
        "megengine.traced_module.serialization": "_ModuleState",
        "megengine.traced_module.traced_module": "InternalGraph NameSpace TracedModule",
    }
)
"""The parts of a traced graph."""

REDUCERS = _names(
    {
        "builtins": "bytearray slice type",
        "collections": "OrderedDict defaultdict",
        "numpy": "dtype",
        "numpy.core": "_DType_reconstruct",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "megengine.quantization.utils": "QuantMode",
    }
)
"""What REDUCE may call; `type` is here for ``type(None)``."""

FUNCTIONS = _names(
    {
        "megengine.functional.elemwise": """
            abs acos acosh add asin asinh atan atan2 atanh ceil clip cos cosh div equal exp expm1 floor
            floor_div greater greater_equal left_shift less less_equal log log1p logaddexp logical_and
            logical_not logical_or logical_xor maximum minimum mod mul neg not_equal pow right_shift
            round sin sinh sqrt square sub tan tanh
        """,
        "megengine.functional.loss": """
            binary_cross_entropy cross_entropy ctc_loss hinge_loss l1_loss square_loss
        """,
        "megengine.functional.math": """
            argmax argmin argsort dot isinf isnan matinv matmul max mean min norm normalize prod sign
            sort std sum svd topk var
        """,
        "megengine.functional.metric": "topk_accuracy",
        "megengine.functional.nn": """
            adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d batch_norm conv1d conv2d conv3d
            conv_transpose2d conv_transpose3d deformable_conv2d deformable_psroi_pooling dropout
            embedding gelu general_norm group_norm hsigmoid hswish indexing_one_hot instance_norm
            layer_norm leaky_relu linear local_conv2d local_response_norm logsigmoid logsoftmax logsumexp
            max_pool2d multi_head_attention one_hot pad pixel_shuffle prelu region_restricted_conv relu
            relu6 sigmoid silu sliding_window sliding_window_transpose softmax softplus sync_batch_norm
        """,
        "megengine.functional.quantized": "batch_conv_bias_activation conv_bias_activation conv_transpose2d",
        "megengine.functional.tensor": """
            arange broadcast_to complex concat cond_take copy cumsum diag expand_dims eye flatten full
            full_like gather imag linspace meshgrid ones ones_like polar real repeat reshape roll scatter
            split squeeze stack swapaxes tile transpose where zeros zeros_like
        """,
        "megengine.functional.vision": """
            correlation cvt_color interpolate nms remap roi_align roi_pooling warp_affine
            warp_perspective
        """,
        "megengine.module.qat.module": "QATModule._apply_fakequant_with_observer",
    }
)
"""Functions that a CallFunction may name. Strings only: the unpickler itself can never reach or call one."""

MODULES = _names(
    {
        "megengine.module.activation": "GELU LeakyReLU PReLU ReLU SiLU Sigmoid Softmax",
        "megengine.module.adaptive_pooling": "AdaptiveAvgPool2d AdaptiveMaxPool2d",
        "megengine.module.batch_matmul_activation": "BatchMatMulActivation",
        "megengine.module.batchnorm": "BatchNorm1d BatchNorm2d SyncBatchNorm",
        "megengine.module.concat": "Concat",
        "megengine.module.conv": """
            Conv1d Conv2d Conv3d ConvRelu2d ConvTranspose2d ConvTranspose3d ConvTransposeRelu2d
            DeformableConv2d LocalConv2d RegionRestrictedConv
        """,
        "megengine.module.conv_bn": "ConvBn2d ConvBnRelu2d",
        "megengine.module.conv_transpose_bn": "ConvTransposeBn2d ConvTransposeBnRelu2d",
        "megengine.module.deformable_psroi_pooling": "DeformablePSROIPooling",
        "megengine.module.dropout": "Dropout",
        "megengine.module.elemwise": "Elemwise",
        "megengine.module.embedding": "Embedding",
        "megengine.module.identity": "Identity",
        "megengine.module.linear": "Linear LinearRelu",
        "megengine.module.linear_bn": "LinearBn1d LinearBnRelu1d",
        "megengine.module.lrn": "LocalResponseNorm",
        "megengine.module.module": "Module",
        "megengine.module.multiheadattn": "MultiHeadAttention",
        "megengine.module.normalization": "GeneralNorm GroupNorm InstanceNorm LayerNorm",
        "megengine.module.padding": "Pad",
        "megengine.module.pixel_shuffle": "PixelShuffle",
        "megengine.module.pooling": "AvgPool2d MaxPool2d",
        "megengine.module.qat.batch_matmul_activation": "BatchMatMulActivation",
        "megengine.module.qat.concat": "Concat",
        "megengine.module.qat.conv": "Conv2d ConvRelu2d ConvTranspose2d ConvTransposeRelu2d",
        "megengine.module.qat.conv_bn": "ConvBn2d ConvBnRelu2d",
        "megengine.module.qat.conv_transpose_bn": "ConvTransposeBn2d ConvTransposeBnRelu2d",
        "megengine.module.qat.elemwise": "Elemwise",
        "megengine.module.qat.linear": "Linear LinearRelu",
        "megengine.module.qat.linear_bn": "LinearBn1d LinearBnRelu1d",
        "megengine.module.qat.module": "QATModule",
        "megengine.module.qat.quant_dequant": "DequantStub QuantStub",
        "megengine.module.quant_dequant": "DequantStub QuantStub",
        "megengine.module.quantized.batch_matmul_activation": "BatchMatMulActivation",
        "megengine.module.quantized.concat": "Concat",
        "megengine.module.quantized.conv": "Conv2d ConvRelu2d ConvTranspose2d ConvTransposeRelu2d",
        "megengine.module.quantized.conv_bn": "ConvBn2d ConvBnRelu2d",
        "megengine.module.quantized.conv_transpose_bn": "ConvTransposeBn2d ConvTransposeBnRelu2d",
        "megengine.module.quantized.elemwise": "Elemwise",
        "megengine.module.quantized.linear": "Linear LinearRelu",
        "megengine.module.quantized.linear_bn": "LinearBn1d LinearBnRelu1d",
        "megengine.module.quantized.module": "QuantizedModule",
        "megengine.module.quantized.quant_dequant": "DequantStub QuantStub",
        "megengine.module.rnn": "LSTM LSTMCell RNN RNNCell",
        "megengine.module.sequential": "Sequential",
        "megengine.module.sliding_window": "SlidingWindow SlidingWindowTranspose",
        "megengine.quantization.fake_quant": "FakeQuantize LSQ TQT",
        "megengine.quantization.observer": """
            ExponentialMovingAverageObserver HistogramObserver MinMaxObserver Observer PassiveObserver
            SyncExponentialMovingAverageObserver SyncMinMaxObserver
        """,
        "megengine.traced_module.fake_quant": "FakeQuantize",
        "megengine.traced_module.utils": "_ModuleDict _ModuleList",
    }
)
"""Module classes of which a file may hold instances, and which a ModuleNode may name."""

OPDEFS = _names(
    {
        "megengine.core._imperative_rt.ops": """
            AdaptivePooling AddAxis Argmax Argmin Argsort AssertEqual BatchConvBias BatchNorm
            BatchNormBackward BatchedIncrMeshIndexing BatchedMatrixMul BatchedMeshIndexing
            BatchedSetMeshIndexing Broadcast CheckNonFinite Concat CondTake ConvBias Convolution
            Convolution3D Convolution3DBackwardData ConvolutionBackwardData Copy Correlation Cumsum
            CvtColor DeformableConv DeformablePSROIPooling Diag Dimshuffle Dot Elemwise ElemwiseMultiType
            Eye FakeQuant FastpathCopy Fill FillLike GeneralNorm GetVarShape GroupLocal GroupNorm
            Identity Images2Neibs IncrMeshIndexing IncrSubtensor IndexingIncrMultiAxisVec
            IndexingMultiAxisVec IndexingOneHot IndexingSetMultiAxisVec IndexingSetOneHot InstanceNorm
            LRN LSQ LSTM LSTMCell LayerNorm Linspace MaskedFill MatrixInverse MatrixMul MeshGrid
            MeshIndexing NMSKeep Padding PixelShuffle PixelShuffleBackward Pooling RNN RNNCell ROIAlign
            ROIPooling Reduce RegionRestrictedConvolution RegionRestrictedConvolutionBackwardData Remap
            RemoveAxis Reshape Resize Resize3D SVD SetMeshIndexing SetSubtensor SlidingWindowTranspose
            Softmax Split Stack Subtensor TQT TopK TypeCvt WarpAffine WarpPerspective
            WarpPerspectiveBackwardData WarpPerspectiveBackwardMat
        """
    }
)
"""The ops of an Apply."""

TENSOR_METHODS = frozenset(
    _split(
        """
            __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __neg__ __pos__ __abs__ __invert__ __round__
            __floor__ __ceil__ __add__ __sub__ __mul__ __matmul__ __truediv__ __floordiv__ __mod__
            __pow__ __lshift__ __rshift__ __and__ __or__ __xor__ __radd__ __rsub__ __rmul__ __rmatmul__
            __rtruediv__ __rfloordiv__ __rmod__ __rpow__ __rlshift__ __rrshift__ __rand__ __ror__
            __rxor__ __iadd__ __isub__ __imul__ __imatmul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
            __ilshift__ __irshift__ __iand__ __ior__ __ixor__ transpose astype reshape _broadcast flatten
            sum prod min max mean __getitem__ __setitem__ detach to
        """
    )
)
"""What a CallMethod may call on a tensor; on the class Tensor it is ``__new__``, on a module ``__call__``."""

QTRACE_FUNCTIONS = _names(
    {
        "qtrace.gradients.conv": "conv2d",
        "qtrace.graph.functions": """
            channel_shuffle erf gelu_tanh hard_sigmoid log_softmax mish rms_norm scale_and_shift
            scaled_dot_product_attention space_to_depth
        """,
        "qtrace.graph.recurrent": "gru lstm rnn stacked_lstm stacked_rnn",
    }
)
"""Functions of qtrace that a CallFunction may name."""

QTRACE_CLASSES = frozenset(
    {
        "qtrace.scheme:QParams",
        "qtrace.scheme:QScheme",
        # Modules outside the plugin folders or in private files, which the enumeration below leaves out.
        "qtrace.fakequant.base:FakeQuant",
        "qtrace.fakequant.following.bias:BiasQuant",
        "qtrace.fakequant.following.bn_fold:BnFold",
        "qtrace.fakequant.following.dynamic:DynamicQuant",
        "qtrace.graph.opaque:OpaqueOp",
        "qtrace.graph.recurrent:OnnxRecurrent",
        "qtrace.observers.base:Observer",
        "qtrace.preparation.passes.insert:Container",
    }
)
"""Classes of qtrace that a model may hold and that no public plugin file names in ``__all__``."""


MOVED = {
    "qtrace.fakequant._bias:BiasQuant": "qtrace.fakequant.following.bias:BiasQuant",
    "qtrace.fakequant._bn_fold:BnFold": "qtrace.fakequant.following.bn_fold:BnFold",
    "qtrace.passes.insert:Container": "qtrace.preparation.passes.insert:Container",
}
"""Names of our classes in files of earlier versions -> the names they have now. Entries are never removed."""


def current(key: str) -> str:
    """Returns the name that a class has in this version.

    Args:
        key: ``module:name`` as a file spells it.
    """
    return MOVED.get(key, key)


@lru_cache(maxsize=1)
def qtrace_classes() -> frozenset[str]:
    """The names of qtrace's own classes: ``QTRACE_CLASSES`` and what the installed plugin files export."""
    folders = ("qtrace.fakequant", "qtrace.observers")
    exported = (item for folder in folders for item in plugins.exported(folder, {}).items())
    return QTRACE_CLASSES | {f"{module}:{name}" for name, module in exported}


def installed_names(package: str) -> frozenset[str]:
    """Returns the names of what an installed package declares as plugins that a model may hold.

    These are observers, fake quants, and the functions and classes of op rules.

    Args:
        package: the top-level package of a name in a file; plugins of other packages are not imported.

    Raises:
        ConfigError: when a plugin of the package cannot be imported.
    """
    named: list[Any] = []
    for group in ("qtrace.fakequant", "qtrace.observers", OP_RULES):
        own = (name for name, value in installed(group).items() if re.split("[.:]", value)[0] == package)
        for plugin in (plugins.load_object(group, name, object) for name in own):
            for item in plugin if isinstance(plugin, tuple) else (plugin,):
                named += [target.callee for target in item.targets] if group == OP_RULES else [item]
    return frozenset(f"{item.__module__}:{item.__qualname__}" for item in named if callable(item))


# Resolves the names in a file to objects, within the limits of the allow-list.

DEPTH = 100
"""How deeply containers, argument structures and modules of a file may be nested."""

OBJECT_BYTES = sys.getsizeof({})
"""Bytes that an object of a file takes at least."""

ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")

_LISTS = {
    "type": TYPES,
    "object": OBJECTS,
    "module": MODULES,
    "opdef": OPDEFS,
    "reducer": REDUCERS,
}


class RefusedError(Exception):
    """The file asks for something that no file may have; the message names it."""


class DamagedError(Exception):
    """The file cannot be read; the message gives the reason."""


class Ref:
    """Stands for a listed object on the unpickler's stack.

    A Ref cannot be called and has nothing to set: wherever a file puts it, it is a piece of lifeless data.
    Only the unpickler's own rules look at what it stands for.
    """

    __slots__ = ("key", "target")

    def __init__(self, key: str, target: Any) -> None:
        self.key, self.target = key, target


class LoadBudget:
    """The memory and the work that a file may cause; both limits are linear in its size.

    A pickle can name what it has stored again and again, each time with a few bytes. What a saved model makes
    is never larger than the file, so that a file that makes much more is refused before memory or time is
    spent.

    Args:
        size: bytes of the file.
    """

    __slots__ = ("_left", "_steps")

    def __init__(self, size: int) -> None:
        self._left = 4 * size + (1 << 20)  # data as bytes, array and tensor, and tables of small things
        self._steps = 4 * size + (1 << 19)

    def take(self, size: int) -> None:
        """Takes ``size`` bytes, or entries of a table.

        Raises:
            RefusedError: when nothing is left.
        """
        self._left -= size
        if self._left < 0:
            raise RefusedError("it would take far more memory than the file is long")

    def work(self, steps: int) -> None:
        """Takes ``steps`` elementary steps, each about a microsecond of Python.

        Raises:
            RefusedError: when nothing is left.
        """
        self._steps -= steps
        if self._steps < 0:
            raise RefusedError("it would take far more work to read than the file is long")


def shown(value: object, limit: int = 100) -> str:
    """Formats ``value`` for an error message.

    Names may be long or contain line breaks. Objects of a half-loaded model are only named by their type,
    because their own repr may not work yet.
    """
    plain = (str, int, float, bytes, type(None))
    if isinstance(value, str) and value.isprintable():
        text = value
    elif all(type(item) in plain for item in (value if isinstance(value, (tuple, list)) else [value])):
        text = ascii(value)
    else:
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}..."


class AllowList:
    """Looks names up, exactly, in the lists of this file and in the caller's own.

    Args:
        extra: the caller's entries, ``"pkg.mod:Qual.Name"``.

    Raises:
        ConfigError: when an entry is not of that form.
    """

    def __init__(self, extra: Iterable[str] = ()) -> None:
        if isinstance(extra, str):
            raise ConfigError(f"allow is a list of names such as 'pkg.mod:Name', not the string {extra!r}.")
        self.extra = frozenset(extra)
        for entry in self.extra:
            if not ENTRY.match(entry if isinstance(entry, str) else ""):
                raise ConfigError(f"allow entry {shown(entry)!r} is not of the form 'pkg.mod:Qual.Name'.")
        self._resolved: dict[tuple[str, str], Any] = {}

    def kind(self, key: str) -> str | None:
        """Returns the list of ``key``: extra, type, opdef, object, module, qtrace, reducer, or None."""
        own = qtrace_classes() if key.startswith("qtrace.") else ()
        lists = {**_LISTS, "extra": self.extra, "qtrace": own}
        kind = next((kind for kind, keys in lists.items() if key in keys), None)
        return "qtrace" if kind is None and _is_installed(key) else kind

    def find(self, module: object, name: object) -> Any:
        """Returns what the unpickler puts on its stack for a global name: a harmless type, or a `Ref`.

        Raises:
            RefusedError: when the name is on no list.
        """
        if type(module) is not str or type(name) is not str:
            raise RefusedError("it builds the name of an import from things that are not strings")
        if (module, name) in self._resolved:
            return self._resolved[module, name]
        key = current(f"{module}:{name}")
        kind = self.kind(key)
        if kind is None:
            raise refused("names", key)
        target = resolve(key)
        value = target if kind in ("type", "opdef", "extra") else Ref(key, target)
        self._resolved[module, name] = value
        return value

    def function(self, pair: object) -> Any:
        """The function of a CallFunction, held to the list before anything is imported."""
        key = _pair(pair, "the function of a CallFunction")
        listed = FUNCTIONS | QTRACE_FUNCTIONS | self.extra
        if key not in listed and not _is_installed(key):
            raise refused("would call the function", key)
        return resolve(key)

    def module_type(self, pair: object, instance: bool = False) -> Any:
        """A module class named by a string; ``instance`` when one is going to be made of it.

        MegEngine restores a TracedModule only as an object of its own, so none is made from a string.
        """
        key = _pair(pair, "a module type")
        listed = self.kind(key) in ("module", "qtrace", "extra") or key == "megengine.module.module:Module"
        if not listed and (instance or key != "megengine.traced_module.traced_module:TracedModule"):
            raise refused("names the module class", key)
        cls = resolve(key)
        if not isinstance(cls, type) or not issubclass(cls, Module):
            raise RefusedError(f"it names {shown(key)} as a module class, which it is not")
        return cls


def _is_installed(key: str) -> bool:
    """Returns whether a name belongs to a plugin of an installed package, whose user needs no `allow`."""
    return key in installed_names(re.split("[.:]", key)[0])


def refused(does: str, key: str) -> RefusedError:
    """The refusal of a name, and what to do about it."""
    hint = (
        f"; if you trust the file, allow it with --allow {key}, in Python with load(..., allow=[{key!r}])"
        if ENTRY.match(key) and shown(key) == key
        else ""
    )
    return RefusedError(f"it {does} {shown(key)}, which is not on the allow-list{hint}")


def resolve(key: str) -> Any:
    """Imports what a listed key names.

    Raises:
        DamagedError: when it cannot be imported here.
    """
    module, _, name = key.partition(":")
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise DamagedError(f"it needs {key}, which cannot be imported here ({error})") from error
    return target


def _pair(pair: object, title: str) -> str:
    if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str:
        raise RefusedError(f"{title} in it is not a pair of module and name but {shown(pair)}")
    return current(f"{pair[0]}:{pair[1]}")
