"""A folder with everything that a user can hand over, whole and with each fault that the tests know."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import cv2
import megengine.module as M
import numpy as np
from PIL import Image

import qtrace
from tests.nets import images, net

SHAPE = (6, 3, 8, 8)
X = images(*SHAPE)
SIDE = 8

RECIPE = "schema: qtrace/1\npreprocess: {size: [3, 8, 8], mean: [0, 0, 0], std: [255, 255, 255]}\n"

CODE = """
import numpy as np
import megengine.module as M

class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.conv = M.Conv2d(3, 4, 3)
    def forward(self, x):
        return self.conv(x)

def x(n=2): return np.ones((n, 3, 8, 8), "float32")
def whole(): return [x(), x(1)]
def nothing(): return []
def three(): return 3
def texts(): return ["text"]
def empty_batch(): return [x(0)]
def empty_dict(): return [{}]
def strings(): return [np.array(["a"])]
def objects(): return [np.array([None, {}], object)]
def wide(): return [np.full((2, 3, 8, 8), 2**40)]
def channels(): return [x()[:, :2]]
def names(): return [{"y": x()}]
def too_many(): return [(x(), x())]
def nan(): return [x() * np.nan]
def inf(): return [x(8), x() * np.inf]
def rank(): return [x()[0]]
def stops():
    yield x(8)
    raise RuntimeError("the disk\\nis gone")
def exits():
    yield x(8)
    raise SystemExit(3)
def leaves(): raise SystemExit("done")
def needs(more): return []
def no_module(): return {}
def broken(): raise KeyError("weights")
iterator = iter([x()])
class Partial(M.Module):
    pass
"""


def png(image: np.ndarray) -> bytes:
    return cv2.imencode(".png", image)[1].tobytes()


def picture(channels: int = 3, height: int = 6, width: int = 4) -> np.ndarray:
    """Dark on the left, bright on the right; the first row is black."""
    row = np.linspace(40, 220, width).astype(np.uint8)
    image = np.repeat(np.broadcast_to(row, (height, width))[..., None], channels, axis=2).copy()
    image[0] = 0
    return image


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a name is there twice
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def lying_zip() -> bytes:
    """An archive whose directory says that 2 KB hold 200 MB."""
    data = bytearray(zipped([("x.npy", npy(np.zeros((8, 64), np.float32)))]))
    entry = data.rfind(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<I", 200 << 20)
    return bytes(data)


def holes(image: np.ndarray) -> np.ndarray:
    """A batch with one NaN."""
    image = image.copy()
    image[3, 1, 2, 2] = np.nan
    return image


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def arrays() -> dict[str, bytes]:
    """Name of a file -> what is in it: every fault of .npy and .npz."""
    whole = npz(x=X)
    return {
        "cut.npz": cut(whole),
        "cut.npy": npy(X)[:-1],
        "empty.npz": b"",
        "empty.npy": b"",
        "text.npz": b"hello, I am text",
        "text.npy": b"hello, I am text\n" * 9,
        "wrong.npy": whole,
        "wrong.npz": npy(X),
        "channels.npz": npz(x=X[:, :2]),
        "rank.npz": npz(x=X[:, 0]),
        "size.npz": npz(x=X[..., :2]),
        "complex.npz": npz(x=X.astype(np.complex64)),
        "strings.npz": npz(x=np.array(["cat", "dog"])),
        "objects.npy": npy(np.array([None, {}], object)),
        "wide.npz": npz(x=np.full(SHAPE, 2**40)),
        "nan.npz": npz(x=holes(X)),
        "inf.npy": npy(np.where(np.isnan(holes(X)), np.inf, X).astype(np.float32)),
        "none.npz": npz(x=X[:0]),
        "nothing.npz": zipped([]),
        "single.npy": npy(np.float32(1)),
        "unequal.npz": npz(x=X, z=X[:2]),
        "names.npz": npz(a=X, b=X),
        "labels.npz": npz(label=np.arange(6), targets=np.arange(6)),
        "twice.npz": zipped([("x.npy", npy(X)), ("x.npy", npy(X))]),
        "same.npz": zipped([("x.npy", npy(X)), ("x", npy(X))]),
        "huge.npy": header((2**40, 2**20)),
        "huge.npz": zipped([("x.npy", header((2**40,)))]),
        "negative.npy": header((-1, 3, 8, 8)) + bytes(768),
        "bomb.npz": lying_zip(),
        "other.npz": zipped([("readme.txt", b"no array")]),
        "axes.npy": npy(np.zeros((4, *[1] * 29), np.float32)),
        "more_axes.npy": header((4, *[1] * 39)) + bytes(16),
        "members.npz": zipped([(f"a{i}.npy", npy(np.zeros((4, 1), np.float32))) for i in range(100)]),
        "pixels.npy": npy(np.zeros((2, 8, 8, 3), np.uint8)),
    }


def recipes() -> dict[str, bytes]:
    """Every fault of a recipe file."""
    head = b"schema: qtrace/1\n"
    return {
        "empty.yaml": b"",
        "cut.yaml": head + b"observers: {activation: ",
        "latin1.yaml": head + "description: caf\xe9\n".encode("latin-1"),
        "binary.yaml": bytes(range(256)),
        "huge.yaml": head + b"# " + b"x" * (1 << 20),
        "list.yaml": b"- a\n- b\n",
        "schema.yaml": b"schema: qtrace/9\n",
        "noschema.yaml": b"backend: ncnn\n",
        "key.yaml": head + b"observer: mse\n",
        "type.yaml": head + b"rules: 3\n",
        "nan.yaml": head + b"preprocess: {size: [3, 8, 8], mean: [.nan, 0, 0], std: [1, 1, 1]}\n",
        "zero.yaml": head + b"preprocess: {size: [3, 0, 8], mean: [0, 0, 0], std: [1, 1, 1]}\n",
        "channels.yaml": head + b"preprocess: {size: [4, 8, 8], mean: [0, 0, 0], std: [1, 1, 1]}\n",
        "duplicate.yaml": head + b"backend: ncnn\nbackend: tflite\n",
        "tag.yaml": head + b"description: !!python/object/apply:os.system [touch ran]\n",
        "bomb.yaml": head + b"a: &a [x, x, x]\n" + b"".join(
            b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (c, c, c - 1, c - 1, c - 1, c - 1) for c in range(98, 112)
        ),
        "deep.yaml": head + b"description: " + b"[" * 100_000 + b"\n",
        "code.yaml": head + b"fakequant: own_code:Own\n",
        "circle.yaml": head + b"imports: [circle.yaml]\n",
        "lost.yaml": head + b"imports: [nowhere.yaml]\n",
        "absolute.yaml": head + b"imports: [/etc/passwd.yaml]\n",
        "unmet.yaml": head + b"rules: [{match: {op: lstm}, quantize: false}]\n",
        "bits.yaml": head + b"activation: {bits: 99}\n",
        "digits.yaml": head + b"activation: {bits: " + b"9" * 5000 + b"}\n",
        "long.yaml": head + b"qat: {epochs: " + b"9" * 4000 + b"}\n",
        "hex.yaml": head + b"activation: {bits: 0x" + b"f" * 100_000 + b"}\n",
        "vast.yaml": head + b"preprocess: {size: [3, 1000000, 1000000], mean: [0, 0, 0], std: [1, 1, 1]}\n",
        "imports.yaml": head + b"imports: [" + b", ".join(b"n%d" % i for i in range(3000)) + b"]\n",
        "keys.yaml": head + b"".join(b"key%d: 1\n" % i for i in range(3000)),
        **{f"chain{i}.yaml": head + b"imports: [chain%d.yaml]\n" % (i + 1) for i in range(60)},
        "text.txt": b"schema: qtrace/1\n",
    }  # fmt: skip


def pictures() -> dict[str, dict[str, bytes]]:
    """Name of a folder -> its images: every fault of an image."""
    colour = png(picture())
    jpeg = cv2.imencode(".jpg", picture(3, 64, 64))[1].tobytes()
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 2**15, 2**15) + bytes(30)
    bad = {
        "cutpng": ("b.png", cut(colour)),
        "cutjpeg": ("b.jpg", cut(jpeg)),
        "badjpeg": ("b.jpg", _spoilt(jpeg)),
        "badpng": ("b.png", _other_pixels(colour)),
        "emptyimage": ("b.png", b""),
        "textimage": ("b.png", b"hello"),
        "bombimage": ("b.png", bomb),
    }
    folders = {name: {"a.png": colour, file: data} for name, (file, data) in bad.items()}
    return {
        **folders,
        "noimages": {"notes.txt": b"hello"},
        "onlybad": {"a.png": b"hello", "b.jpg": b""},
        "mixed": {"a.png": colour, "b.png": b"hello", "c.jpg": cut(jpeg), "d.png": colour},
    }


def _spoilt(jpeg: bytes) -> bytes:
    """Bits of the pixels fell over; every segment is there."""
    start = jpeg.rfind(b"\xff\xda") + 40
    return jpeg[:start] + b"\xf8" * 40 + jpeg[start + 40 :]


def _other_pixels(image: bytes) -> bytes:
    """A PNG whose checksums fit, but not its pixels."""
    start, end = image.find(b"IDAT"), image.find(b"IEND") - 4
    body = b"IDAT" + zlib.compress(b"\x09" * 9)
    return (
        image[: start - 4]
        + struct.pack(">I", len(body) - 4)
        + body
        + struct.pack(">I", zlib.crc32(body))
        + image[end:]
    )


def good_pictures() -> dict[str, bytes]:
    """Images of other kinds than usual, all of the same picture, upright."""
    colour = Image.fromarray(picture())
    kinds = {
        "grey.png": png(picture(1)),
        "grey16.png": png(picture(1).astype(np.uint16) * 257),
        "alpha.png": png(np.dstack([picture(), np.full((6, 4), 9, np.uint8)])),
        "misnamed.jpg": png(picture()),
    }
    for name, form, image, options in (
        ("cmyk.jpg", "JPEG", colour.convert("CMYK"), {"quality": 100}),
        ("palette.png", "PNG", colour.convert("P"), {}),
        ("bits.bmp", "BMP", colour, {}),
        ("rotated.jpg", "JPEG", colour.rotate(90, expand=True), {"quality": 100, "exif": exif(6)}),
    ):
        stream = io.BytesIO()
        image.save(stream, form, **options)
        kinds[name] = stream.getvalue()
    return kinds


def exif(orientation: int) -> bytes:
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + entry + bytes(4)


def build(folder: Path) -> None:
    """Fills ``folder``; what stands in it besides is whole."""
    traced = qtrace.trace(net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 4, 3)), X, check=False)
    prepared = qtrace.prepare(traced)
    qtrace.save(traced, folder / "float.mge")
    qtrace.save(qtrace.calibrate(prepared, [X], progress=False), folder / "prepared.mge")
    quantized = qtrace.convert(prepared)
    qtrace.save(quantized, folder / "quantized.mge")
    qtrace.export(quantized, folder / "model.onnx")
    for name, data in {**arrays(), **recipes(), "x.npz": npz(x=X), "img.yaml": RECIPE.encode()}.items():
        (folder / name).write_bytes(data)
    for name, files in {**pictures(), "good": {"a.png": png(picture()), "b.png": png(picture())}}.items():
        (folder / name).mkdir()
        for file, data in files.items():
            (folder / name / file).write_bytes(data)
    _links(folder)
    model = (folder / "float.mge").read_bytes()
    changed = {"cut.mge": cut(model), "empty.mge": b"", "text.mge": b"hello", "zip.mge": npz(x=X)}
    changed["evil.mge"] = b"\x80\x04cposix\nsystem\n(X\x09\0\0\0touch rantR."
    changed["protocol.mge"] = b"\x80\x02" + model[2:]
    changed["list.mge"] = b"\x80\x04]."
    for name, data in changed.items():
        (folder / name).write_bytes(data)
    for name, change in (("cut.onnx", cut), ("empty.onnx", lambda data: b""), ("text.onnx", lambda d: b"x")):
        _changed(folder / "model.onnx", folder / name, change)
    _onnx_files(folder)
    (folder / "dir.mge").mkdir()
    (folder / "dir.npy").mkdir()
    (folder / "dir.yaml").mkdir()


def _onnx_files(folder: Path) -> None:
    """ONNX files that keep a tensor elsewhere, lack one, or are larger than any."""
    import onnx

    places = {
        "outside.onnx": {"location": "../secret.bin", "offset": "0", "length": "4"},
        "root.onnx": {"location": "/etc/hostname"},
        "noplace.onnx": {},
        "offset.onnx": {"location": "model.onnx", "offset": "first"},
        "before.onnx": {"location": "model.onnx", "offset": "-5", "length": "9"},
    }
    for name, place in places.items():
        model = onnx.load(folder / "model.onnx")
        tensor = model.graph.initializer[0]
        for field in ("raw_data", "float_data", "int32_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in place.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
        (folder / name).write_bytes(model.SerializeToString())
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            del node.input[2:]
    (folder / "nozero.onnx").write_bytes(model.SerializeToString())
    with open(folder / "sparse.onnx", "wb") as file:
        file.truncate(5 << 30)


def _changed(source: Path, target: Path, change: Callable[[bytes], bytes]) -> None:
    target.write_bytes(change(source.read_bytes()))


def _links(folder: Path) -> None:
    outside = folder / "noimages" / "secret.png.txt"
    outside.write_bytes(png(picture()))
    for name, to in (("leaving", outside), ("absolute", Path("/etc/hostname")), ("circle", Path("b.png"))):
        (folder / name).mkdir()
        (folder / name / "a.png").write_bytes(png(picture()))
        (folder / name / "b.png").symlink_to(to)
    (folder / "dangling").mkdir()
    (folder / "dangling" / "b.png").symlink_to("nowhere.png")
    (folder / "pipes").mkdir()
    os.mkfifo(folder / "pipes" / "b.png")
    for suffix in ("npy", "mge", "yaml", "onnx"):
        os.mkfifo(folder / f"pipe.{suffix}")
