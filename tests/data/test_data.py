"""Data sources: what they give, in which order, and what they say about broken input."""

from __future__ import annotations

import io
import itertools
import re
import sys
import zipfile
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from qtrace.data import open_data
from qtrace.data.base import to_input
from qtrace.errors import DataError
from tests.each import each_of

RNG = np.random.default_rng(0)
_fresh = itertools.count()


def preprocess(size=(3, 8, 6), **changes):
    values = {"mean": (0.0,) * size[0], "std": (1.0,) * size[0], "channels": "bgr", "scale": 1.0}
    values |= {"resize": "stretch", "crop_fraction": 0.875, "interpolation": "linear", "layout": "nchw"}
    return SimpleNamespace(size=size, **{**values, **changes})


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module in the current directory under a name of its own; gives the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source):
        name = f"user_{next(_fresh)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def header(shape, dtype="<f4", fortran=False):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": fortran, "shape": shape})
    return stream.getvalue()


def only(batch):
    assert isinstance(batch, tuple)
    (array,) = batch
    return array


class TestArrays:
    def test_npy_in_batches_again_and_again(self, tmp_path):
        x = RNG.random((7, 2, 3)).astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        data = open_data(str(tmp_path / "x.npy"), batch_size=3)
        assert len(data) == 3
        for _ in range(2):
            batches = [only(batch) for batch in data]
            assert [len(batch) for batch in batches] == [3, 3, 1]
            np.testing.assert_array_equal(np.concatenate(batches), x)
            assert data.given == 3

    def test_max_batches(self, tmp_path):
        np.save(tmp_path / "x.npy", np.zeros((100, 2), np.float32))
        data = open_data(str(tmp_path / "x.npy"), batch_size=8, max_batches=2)
        assert len(data) == 2
        assert len(list(data)) == 2

    def test_fortran_order(self, tmp_path):
        x = np.asfortranarray(RNG.random((5, 3, 4)).astype(np.float32))
        np.save(tmp_path / "x.npy", x)
        np.savez(tmp_path / "x.npz", x)
        for name in ("x.npy", "x.npz"):
            data = open_data(str(tmp_path / name), batch_size=2)
            np.testing.assert_array_equal(np.concatenate([only(batch) for batch in data]), x)

    @each_of(
        ("stored", "given"),
        [
            ("<f2", "f4"), (">f4", "f4"), ("<f8", "f4"), ("u1", "f4"),
            ("i1", "i1"), (">i2", "i2"), ("<i4", "i4"), ("?", "?"), ("<i8", "i4"), ("<u4", "i4"),
        ],
    )  # fmt: skip
    def test_dtypes(self, tmp_path, stored, given):
        x = np.array([[0], [1]], stored)
        np.save(tmp_path / "x.npy", x)
        batch = only(next(iter(open_data(str(tmp_path / "x.npy")))))
        assert batch.dtype == np.dtype(given)
        assert batch.dtype.isnative
        np.testing.assert_array_equal(batch, x)
        batch += batch  # memory of its own

    def test_integers_that_megengine_would_wrap(self, tmp_path):
        np.save(tmp_path / "x.npy", np.array([[2**40]]))
        with pytest.raises(DataError, match="beyond 32 bits"):
            list(open_data(str(tmp_path / "x.npy")))

    def test_float64_overflow_becomes_inf(self):
        assert np.isinf(to_input(np.array([1e300]), "x")).all()

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_npz_with_one_array_is_positional(self, tmp_path, save):
        x = np.zeros((4, 2), np.float32)
        save(tmp_path / "d.npz", whatever=x, labels=np.arange(4))
        data = open_data(str(tmp_path / "d.npz"))
        np.testing.assert_array_equal(only(next(iter(data))), x)
        assert data.skipped == ["labels"]

    def test_npz_with_several_inputs_is_by_name_in_the_order_of_the_file(self, tmp_path):
        np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)), mask=np.ones((4, 3), bool), Y=np.arange(4))
        batches = list(open_data(str(tmp_path / "d.npz"), batch_size=3))
        assert [list(batch) for batch in batches] == [["x", "mask"]] * 2
        assert batches[1]["mask"].shape == (1, 3)
        assert batches[1]["mask"].dtype == bool

    def test_npz_whose_only_array_is_called_y(self, tmp_path):
        np.savez(tmp_path / "d.npz", y=np.zeros((4, 2)))
        assert only(next(iter(open_data(str(tmp_path / "d.npz"))))).shape == (4, 2)

    def test_npz_with_labels_only(self, tmp_path):
        np.savez(tmp_path / "d.npz", y=np.zeros(4), labels=np.zeros(4))
        with pytest.raises(DataError, match=r"only labels \(y, labels\)"):
            open_data(str(tmp_path / "d.npz"))

    def test_npz_with_different_numbers_of_samples(self, tmp_path):
        np.savez(tmp_path / "d.npz", a=np.zeros((4, 2)), b=np.zeros((5, 2)))
        with pytest.raises(DataError, match=r"numbers of samples \(a: 4, b: 5\)"):
            open_data(str(tmp_path / "d.npz"))

    def test_npz_with_strings(self, tmp_path):
        np.savez(tmp_path / "d.npz", x=np.zeros((2, 2)), names=np.array(["cat", "dog"]))
        with pytest.raises(DataError, match=r"d\.npz\[names\] has dtype <U3"):
            open_data(str(tmp_path / "d.npz"))

    def test_expected_shape(self, tmp_path):
        np.save(tmp_path / "x.npy", np.zeros((4, 2, 3)))
        assert len(open_data(str(tmp_path / "x.npy"), shape=(2, 3))) == 1
        with pytest.raises(DataError, match=r"samples of shape \(2, 3\), not \(3, 2\)"):
            open_data(str(tmp_path / "x.npy"), shape=(3, 2))

    def test_uint8_pixels_are_normalized_if_there_is_a_preprocess(self, tmp_path):
        x = RNG.integers(0, 256, (2, 3, 4, 4), np.uint8)
        np.save(tmp_path / "x.npy", x)
        source = str(tmp_path / "x.npy")
        np.testing.assert_array_equal(only(next(iter(open_data(source)))), x)
        how = preprocess(mean=(1.0, 2.0, 3.0), std=(2.0, 4.0, 8.0), scale=0.5)
        expected = (x * 0.5 - np.reshape(how.mean, (3, 1, 1))) / np.reshape(how.std, (3, 1, 1))
        batch = only(next(iter(open_data(source, preprocess=how))))
        assert batch.dtype == np.float32
        np.testing.assert_allclose(batch, expected, rtol=1e-6)

    def test_uint8_pixels_with_channels_last(self, tmp_path):
        np.save(tmp_path / "x.npy", np.zeros((2, 4, 4, 3), np.uint8))
        with pytest.raises(DataError, match="N x C x H x W"):
            open_data(str(tmp_path / "x.npy"), preprocess=preprocess())

    def test_floats_are_not_normalized(self, tmp_path):
        np.save(tmp_path / "x.npy", np.ones((2, 3, 4, 4), np.float32))
        data = open_data(str(tmp_path / "x.npy"), preprocess=preprocess(mean=(5.0, 5.0, 5.0)))
        assert (only(next(iter(data))) == 1).all()


class TestBrokenArrays:
    @pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
    def test_empty(self, tmp_path, shape):
        np.save(tmp_path / "x.npy", np.zeros(shape))
        with pytest.raises(DataError, match=re.escape(f"is empty: its shape is {shape}; give data in which")):
            open_data(str(tmp_path / "x.npy"))

    def test_a_single_number(self, tmp_path):
        np.save(tmp_path / "x.npy", np.float32(1))
        with pytest.raises(DataError, match="single number"):
            open_data(str(tmp_path / "x.npy"))

    @each_of(
        "content",
        [
            b"",
            b"hello, I am text\n" * 9,
            b"\x93NUMPY\x01\x00\xff\xff{",
            b"\x93NUMPY\x01\x00\x0a\x00'descr': 1}",
            b"\x93NUMPY\x01\x00\x08\x00" + b"(" * 8,
            b"PK\3\4",
        ],
    )
    @each_of("suffix", [".npy", ".npz"])
    def test_files_of_other_content_are_refused_by_name(self, tmp_path, content, suffix):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(str(path))):
            open_data(str(path))

    def test_python_objects(self, tmp_path):
        array = np.array([{"a": 1}, None], object)
        np.save(tmp_path / "x.npy", array, allow_pickle=True)
        np.savez(tmp_path / "x.npz", x=array)
        for name in ("x.npy", "x.npz"):
            with pytest.raises(DataError, match="Python objects"):
                open_data(str(tmp_path / name))

    def test_structured_and_complex(self, tmp_path):
        for dtype in ("c8", [("a", "f4")], "M8[s]", "S3"):
            np.save(tmp_path / "x.npy", np.zeros(3, dtype))
            with pytest.raises(DataError, match="has dtype"):
                open_data(str(tmp_path / "x.npy"))

    def test_truncated_npy(self, tmp_path):
        path = tmp_path / "x.npy"
        np.save(path, np.zeros((10, 10)))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match="truncated"):
            open_data(str(path))

    def test_truncated_after_it_was_opened(self, tmp_path):
        path = tmp_path / "x.npy"
        np.save(path, np.zeros((10, 10)))
        data = open_data(str(path))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match="truncated"):
            list(data)

    @each_of("keep", [0.1, 0.5, 0.9, 0.99])
    def test_truncated_npz(self, tmp_path, keep):
        path = tmp_path / "x.npz"
        np.savez_compressed(path, a=RNG.random((10, 10)), b=RNG.random((10, 10)))
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(DataError, match="not a whole"):
            open_data(str(path))

    @pytest.mark.parametrize(("header", "flags", "name"), [(b"PK\3\4", 6, 30), (b"PK\1\2", 8, 46)])
    def test_npz_with_a_name_that_is_no_text(self, tmp_path, header, flags, name):
        path = tmp_path / "x.npz"
        np.savez(path, x=np.zeros((4, 3), np.float32))
        data = bytearray(path.read_bytes())
        start = data.index(header)
        data[start + flags + 1] |= 0x08  # names are UTF-8
        data[start + name] = 0xF8
        path.write_bytes(data)
        with pytest.raises(DataError, match="a name in it is not UTF-8"):
            open_data(str(path), batch_size=2)

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_flipped_bits_in_an_npz(self, tmp_path, save):
        path = tmp_path / "x.npz"
        save(path, a=RNG.random((40, 40)))
        content = bytearray(path.read_bytes())
        for position in range(2000, 2100):
            content[position] ^= 0x55
        path.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(str(path))):
            list(open_data(str(path), batch_size=40))

    @each_of("shape", [(10**6, 10**6), (2**62, 4), (10**30,)])
    def test_absurd_shape_is_not_believed(self, tmp_path, shape):
        content = header(shape) + bytes(64)
        (tmp_path / "x.npy").write_bytes(content)
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("x.npy", content)
        for name in ("x.npy", "x.npz"):
            with pytest.raises(DataError, match=r"takes \d+ bytes, the file has"):
                open_data(str(tmp_path / name))

    def test_negative_shape(self, tmp_path):
        (tmp_path / "x.npy").write_bytes(header((-1, 4)) + bytes(64))
        with pytest.raises(DataError, match="empty"):
            open_data(str(tmp_path / "x.npy"))

    def test_one_batch_beyond_memory(self, tmp_path):
        side = 2**20
        with (tmp_path / "x.npy").open("wb") as file:  # sparse: 8 TiB of zeros
            file.write(header((1, side * 2, side)))
            file.truncate(file.tell() + 2 * side * side * 4)
        with pytest.raises(DataError, match="GiB at once"):
            list(open_data(str(tmp_path / "x.npy")))

    def test_empty_npz_and_foreign_member(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "empty.npz", "w"):
            pass
        with pytest.raises(DataError, match="holds no array"):
            open_data(str(tmp_path / "empty.npz"))
        with zipfile.ZipFile(tmp_path / "notes.npz", "w") as archive:
            archive.writestr("notes.txt", "hello")
        with pytest.raises(DataError, match=r"\[notes.txt\] is not an array"):
            open_data(str(tmp_path / "notes.npz"))


class TestImages:
    @staticmethod
    def write(path, image, *options):
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), image, *options)

    def test_order_and_values(self, tmp_path):
        images = {}
        for name in ("b/2.png", "b/10.bmp", "a.PNG", "c.ppm", "d.webp"):
            images[name] = RNG.integers(0, 256, (8, 6, 3), np.uint8)
            self.write(tmp_path / name, images[name], [cv2.IMWRITE_WEBP_QUALITY, 101])
        self.write(tmp_path / ".hidden/x.png", images["a.PNG"])
        (tmp_path / "._a.png").write_bytes(b"not an image")
        (tmp_path / "notes.txt").write_text("not an image")
        data = open_data(str(tmp_path), preprocess=preprocess(), batch_size=2)
        assert len(data) == 3
        for _ in range(2):
            got = np.concatenate([only(batch) for batch in data])
            expected = [images[name] for name in ("a.PNG", "b/10.bmp", "b/2.png", "c.ppm", "d.webp")]
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, np.stack(expected).transpose(0, 3, 1, 2))

    def test_normalization_and_rgb(self, tmp_path):
        image = RNG.integers(0, 256, (8, 6, 3), np.uint8)
        self.write(tmp_path / "x.png", image)
        how = preprocess(channels="rgb", scale=1 / 255, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
        got = only(next(iter(open_data(str(tmp_path), preprocess=how))))
        expected = (image[..., ::-1] / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
        np.testing.assert_allclose(got[0], expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)
        assert got.flags.c_contiguous

    def test_grey_alpha_palette_and_16_bit(self, tmp_path):
        grey = RNG.integers(0, 256, (8, 6), np.uint8)
        self.write(tmp_path / "1-grey.png", grey)
        self.write(tmp_path / "2-alpha.png", np.dstack([grey, grey, grey, 255 - grey]))
        self.write(tmp_path / "3-deep.png", grey.astype(np.uint16) * 257)
        three = only(next(iter(open_data(str(tmp_path), preprocess=preprocess()))))
        one = only(next(iter(open_data(str(tmp_path), preprocess=preprocess((1, 8, 6))))))
        assert three.shape == (3, 3, 8, 6)
        assert one.shape == (3, 1, 8, 6)
        np.testing.assert_array_equal(three, np.broadcast_to(grey, three.shape))
        np.testing.assert_array_equal(one, np.broadcast_to(grey, one.shape))

    def test_exif_orientation(self, tmp_path):
        image = np.zeros((16, 32, 3), np.uint8)
        image[:, :16] = 255
        _, encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 100])
        body = encoded.tobytes()
        tag = b"\x12\x01\x03\x00\x01\x00\x00\x00\x06\x00\x00\x00"  # orientation 6: turn right
        exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + tag + bytes(4)
        segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
        (tmp_path / "x.jpg").write_bytes(body[:2] + segment + body[2:])
        got = only(next(iter(open_data(str(tmp_path), preprocess=preprocess((3, 32, 16))))))
        assert got[0, :, :12].min() > 200
        assert got[0, :, 20:].max() < 50

    @each_of("shape", [(8, 6), (100, 30), (5, 200), (1, 1)])
    @each_of("resize", ["stretch", "center_crop"])
    @each_of("channels", [1, 3])
    def test_every_size_fits(self, tmp_path, shape, resize, channels):
        self.write(tmp_path / "x.png", np.full(shape, 7, np.uint8))
        how = preprocess((channels, 8, 6), resize=resize)
        got = only(next(iter(open_data(str(tmp_path), preprocess=how))))
        assert got.shape == (1, channels, 8, 6)
        assert (got == 7).all()

    def test_center_crop_keeps_the_aspect(self, tmp_path):
        image = np.zeros((40, 80, 3), np.uint8)
        image[:, 20:60] = 200
        self.write(tmp_path / "x.png", image)
        crop = preprocess((3, 20, 20), resize="center_crop", crop_fraction=1.0, interpolation="area")
        assert (only(next(iter(open_data(str(tmp_path), preprocess=crop)))) == 200).all()
        stretch = preprocess((3, 20, 20))
        assert only(next(iter(open_data(str(tmp_path), preprocess=stretch)))).min() == 0

    @each_of("suffix", [".jpg", ".png", ".bmp", ".webp", ".ppm"])
    @each_of("keep", [0.0, 0.05, 0.5, 0.98])
    def test_truncated_image(self, tmp_path, suffix, keep):
        path = tmp_path / f"x{suffix}"
        self.write(path, RNG.integers(0, 256, (64, 64, 3), np.uint8))
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(DataError, match=re.escape(str(path))):
            list(open_data(str(tmp_path), preprocess=preprocess()))

    def test_bytes_after_a_jpeg_do_no_harm(self, tmp_path):
        path = tmp_path / "x.jpg"
        self.write(path, np.full((8, 6, 3), 9, np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
        path.write_bytes(path.read_bytes() + b"a film that the camera adds")
        assert len(list(open_data(str(tmp_path), preprocess=preprocess()))) == 1

    def test_skip_bad(self, tmp_path, caplog):
        for name in ("a.png", "c.png", "d.png"):
            self.write(tmp_path / name, np.zeros((8, 6, 3), np.uint8))
        (tmp_path / "b.jpg").write_bytes(b"nonsense")
        data = open_data(str(tmp_path), preprocess=preprocess(), batch_size=3, skip_bad=True)
        for _ in range(2):
            assert [len(only(batch)) for batch in data] == [2, 1]  # it makes its batch smaller
            assert data.skipped == [str(tmp_path / "b.jpg")]
            assert len(data) == 2
        assert [record.getMessage() for record in caplog.records] == [
            f"left out: {tmp_path / 'b.jpg'} is not an image that qtrace reads (PNG, JPEG, BMP, WebP or "
            "PPM), or its header is damaged."
        ]

    def test_numbered_batches_are_read_only_where_they_are_wanted(self, tmp_path):
        for name in ("a.png", "c.png", "e.png"):
            self.write(tmp_path / name, np.full((8, 6, 3), ord(name[0]), np.uint8))
        (tmp_path / "b.jpg").write_bytes(b"nonsense")
        data = open_data(str(tmp_path), preprocess=preprocess(), batch_size=1)
        whole = dict(data.numbered(lambda number: number != 1))  # the bad image is not read
        assert list(whole) == [0, 2, 3]
        assert data.given == 3
        (only_one,) = data.numbered(lambda number: number == 2)
        np.testing.assert_array_equal(only(only_one[1]), only(whole[2]))
        with pytest.raises(DataError, match="^batch 1: .*b.jpg is not an image"):
            list(data.numbered())

    def test_nothing_but_bad_images(self, tmp_path):
        (tmp_path / "b.jpg").write_bytes(b"nonsense")
        with pytest.raises(DataError, match="gives no batch"):
            list(open_data(str(tmp_path), preprocess=preprocess(), skip_bad=True))

    def test_folder_without_images_is_refused(self, tmp_path):
        (tmp_path / "x.gif").write_bytes(b"GIF89a")
        with pytest.raises(DataError, match="holds no image"):
            open_data(str(tmp_path), preprocess=preprocess())

    def test_no_preprocess(self, tmp_path):
        with pytest.raises(DataError, match="key `preprocess`"):
            open_data(str(tmp_path))

    def test_links(self, tmp_path):
        inside, outside = tmp_path / "in", tmp_path / "out"
        self.write(inside / "real/a.png", np.zeros((8, 6, 3), np.uint8))
        self.write(outside / "b.png", np.zeros((8, 6, 3), np.uint8))
        (inside / "z.png").symlink_to("real/a.png")
        (inside / "again").symlink_to("real")
        data = open_data(str(inside), preprocess=preprocess())
        assert only(next(iter(data))).shape[0] == 2
        for target in ("../out", "../out/b.png"):
            (inside / "link.png").symlink_to(target)
            with pytest.raises(DataError, match=r"link\.png is a link that leaves"):
                open_data(str(inside), preprocess=preprocess())
            (inside / "link.png").unlink()
        (tmp_path / "alias").symlink_to("in")
        assert len(open_data(str(tmp_path / "alias"), preprocess=preprocess())) == 1

    def test_broken_link(self, tmp_path):
        (tmp_path / "a.png").symlink_to("gone.png")
        with pytest.raises(DataError, match=r"a\.png cannot be read"):
            list(open_data(str(tmp_path), preprocess=preprocess()))

    def test_with_a_recipe(self, tmp_path):
        from qtrace.config import Preprocess

        how = Preprocess(size=(3, 8, 6), mean=(1, 1, 1), std=(2, 2, 2), resize="center_crop")
        self.write(tmp_path / "x.png", np.full((20, 20, 3), 5, np.uint8))
        assert (only(next(iter(open_data(str(tmp_path), preprocess=how)))) == 2).all()


class TestLoader:
    def test_a_generator_function_is_called_again(self, user_module):
        name = user_module(
            "import numpy as np\n"
            "def loader():\n"
            "    for index in range(3):\n"
            "        yield np.full((2, 4), index, 'float64')\n"
        )
        data = open_data(f"{name}:loader", max_batches=2)
        assert not hasattr(data, "__len__")
        for _ in range(2):
            batches = [only(batch) for batch in data]
            assert [batch[0, 0] for batch in batches] == [0, 1]
            assert batches[0].dtype == np.float32

    def test_kinds_of_batches(self, user_module):
        name = user_module(
            "import numpy as np, megengine as mge\n"
            "x = np.zeros((2, 4), 'float32')\n"
            "batches = [x, mge.Tensor(x), (x, mge.Tensor(x)), [x], {'a': x, 'b': mge.Tensor(x)}]\n"
        )
        data = open_data(f"{name}:batches")
        assert len(data) == 5
        batches = list(data)
        assert [len(batch) for batch in batches] == [1, 1, 2, 1, 2]
        assert list(batches[4]) == ["a", "b"]
        arrays = [array for batch in batches[:4] for array in batch] + list(batches[4].values())
        assert all(type(array) is np.ndarray and array.shape == (2, 4) for array in arrays)

    def test_class_and_dotted_name(self, user_module):
        name = user_module(
            "import numpy as np\n"
            "class Set:\n"
            "    def __iter__(self):\n"
            "        return iter([np.zeros((1, 2))])\n"
            "    @staticmethod\n"
            "    def make():\n"
            "        return Set()\n"
        )
        for attribute in ("Set", "Set.make"):
            assert len(list(open_data(f"{name}:{attribute}"))) == 1

    def test_an_iterator_cannot_start_again(self, user_module):
        name = user_module("loader = iter([])")
        with pytest.raises(DataError, match="only once"):
            open_data(f"{name}:loader")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("loader = 3", "neither iterable nor a function"),
            ("def loader(): return 3", "returned int"),
            ("def loader(): return []", "gives no batch"),
            ("def loader(): return ['text']", "batch 0 is of type str"),
            ("def loader(): return [()]", "batch 0 is an empty tuple"),
            ("def loader(): return [{}]", "batch 0 is an empty dict"),
            ("def loader(): return [{'a': [1]}]", r"batch 0\['a'\] is of type list"),
            (
                "import numpy\ndef loader(): return [(numpy.zeros((0, 3)),)]",
                r"batch 0\[0\] has shape \(0, 3\); the first axis must count at least one sample",
            ),
            (
                "import numpy\ndef loader(): return [(numpy.zeros((3, 2, 0)),)]",
                r"batch 0\[0\] has shape \(3, 2, 0\) without a value; give data in which each axis has",
            ),
            ("import numpy\ndef loader(): return [numpy.array(['a'])]", "has dtype <U1"),
            ("def loader(x): return []", "calling it raised TypeError: loader.. missing"),
            (
                "def loader():\n    return 1 / 0",
                r"calling it raised ZeroDivisionError: .* at .*user_\d+\.py:2",
            ),
            ("def loader():\n    yield 1 / 0", r"making batch 0 raised ZeroDivisionError: .*:2"),
            ("1 / 0", r"importing its module raised ZeroDivisionError: .*user_\d+\.py:1"),
            ("import does_not_exist_at_all", r"importing its module raised ModuleNotFoundError: .*:1"),
            ("def loader(:", "importing its module raised SyntaxError"),
            ("", "lacks 'loader'"),
        ],
    )
    def test_wrong_loaders_are_refused_by_name(self, user_module, source, message):
        name = user_module(source)
        with pytest.raises(DataError, match=message) as caught:
            list(open_data(f"{name}:loader"))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)

    @each_of("module", ["does_not_exist_at_all", "does_not_exist_at_all.deeper", "json.nothing"])
    def test_no_such_module(self, module):
        with pytest.raises(DataError, match="there is no module"):
            open_data(f"{module}:loader")


@each_of("source", ["", "nothing", "some.txt", "a:b:c", "no/such/folder", "1x:y", "x.npz", "x.npy"])
def test_other_sources(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("text")
    with pytest.raises(DataError, match="npy or .npz file, a folder of images, or pkg.mod:loader") as caught:
        open_data(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", [{"batch_size": 0}, {"max_batches": 0}])
def test_impossible_options(option):
    with pytest.raises(DataError, match="at least 1"):
        open_data("x.npy", **option)
