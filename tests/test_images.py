"""Image sets as they are published: folders, zips, tars and what torchvision unpacks; and image files of every kind."""
import io
import shutil
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from published import FLAT, LAYOUTS, pack, unpack

from bump.experiments import PRESETS, missing_inputs, preset_inputs
from bump.files import fetch
from bump.images import COLLECTIONS, decode_image, find_images, load_images, load_labelled, sample_images


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A function that lays a small copy of a set out as its archive has it, and returns the folder."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("BUMP_DATA", str(data))
    monkeypatch.setattr("bump.files.cache_folder", lambda: tmp_path / "cache")

    return lambda name: unpack(name, tmp_path / "unpacked")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_public_set_is_read_as_archive_and_as_folder(name, unpacked, tmp_path):
    folder, data = unpacked(name), tmp_path / "data"
    path = pack(folder, data / COLLECTIONS[name].archive.name)
    assert find_images(name) == path
    packed = load_images(name, 6, 32)
    assert packed.shape == (6, 3, 32, 32) and len(set(packed.sha256.values)) == 6
    if name not in FLAT:
        assert set(Counter(s.split("/")[0] for s in packed.source.values).values()) == {2}, "the classes take turns"
    path.unlink()
    inside = folder / Path(LAYOUTS[name]).parents[0 if name in FLAT else 1]
    shutil.copytree(inside, data / COLLECTIONS[name].folder)
    assert find_images(name) == data / COLLECTIONS[name].folder
    assert load_images(name, 6, 32).identical(packed)
    assert load_images(name, 6, 32, seed=1).source.values.tolist() != packed.source.values.tolist()
    with pytest.raises(ValueError, match="13 images were asked for; the set holds 12"):
        load_images(name, 13, 32)


def test_every_set_of_every_preset_is_tested():
    sets = {s for preset in PRESETS.values() for s in preset.image_sets.values()} & COLLECTIONS.keys()
    assert sets <= {*LAYOUTS, *PRESETS["cpu"].image_sets.values()}


@pytest.mark.parametrize("name", sorted(PRESETS["cpu"].image_sets.values()))
def test_the_sets_of_cpu(name):
    """The real files, where they are: every class once before any comes twice, and the same sample each time."""
    try:
        path = find_images(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    images = load_images(name, 8, 224)
    assert images.shape == (8, 3, 224, 224) and len(set(images.sha256.values)) == 8 and images.std() > .05
    _, names, classes = sample_images(path, 8, 32, 0)
    assert names == images.source.values.tolist()
    assert max(Counter(classes).values()) - min(Counter(classes).values()) <= 1


def test_what_torchvision_unpacks(unpacked, tmp_path):
    """DTD's own class finds its images in the folder that is read here, and gives the same pixels."""
    root = tmp_path / "data" / "dtd" / "dtd"
    shutil.copytree(unpacked("dtd") / "dtd/images", root / "images")
    names = sorted(p.relative_to(root / "images").as_posix() for p in root.rglob("*.jpg") if p.name[0] != ".")
    (root / "labels").mkdir()
    (root / "labels/test1.txt").write_text("\n".join(names) + "\n")
    theirs = torchvision.datasets.DTD(tmp_path / "data", split="test", download=False)
    ours = load_images("dtd", 12, 40)
    for path, (image, _) in zip(theirs._image_files, theirs):
        mine = ours.values[ours.source.values.tolist().index("/".join(path.parts[-2:]))]
        expected = torchvision.transforms.functional.center_crop(image, [40, 40])
        np.testing.assert_allclose(mine, np.moveaxis(np.asarray(expected), 2, 0) / 255, atol=1e-6)


def test_order_of_the_files_does_not_matter(unpacked, tmp_path):
    folder = unpacked("imagenet-r")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    samples = []
    for order, name in ((files, "a.tar"), (files[::-1], "b.tar")):
        with tarfile.open(tmp_path / name, "w") as archive:
            for file in order:
                archive.add(file, file.relative_to(folder))
        samples.append(load_images(f"files:{tmp_path / name}", 5, 32))
    assert samples[0].drop_attrs().identical(samples[1].drop_attrs())


@pytest.mark.parametrize("kind", ["", ":gz", ":bz2", ":xz"])
@pytest.mark.parametrize("keep", [0, .3, .6])
def test_a_damaged_tar_is_named(kind, keep, unpacked, tmp_path):
    path = tmp_path / "set.tar"
    with tarfile.open(path, f"w{kind}") as archive:
        archive.add(unpacked("imagenet-r"), ".")
    assert load_images(f"files:{path}", 3, 32).shape == (3, 3, 32, 32)
    path.write_bytes(path.read_bytes()[:int(keep * path.stat().st_size)])
    with pytest.raises(ValueError, match="set.tar is damaged, or no archive .*; get it again") as caught:
        load_images(f"files:{path}", 3, 32)
    assert "\n" not in str(caught.value)


@pytest.fixture
def eight(tmp_path):
    """A tar of eight images, and where each entry begins in it."""
    path = tmp_path / "eight.tar"
    with tarfile.open(path, "w") as archive:
        for i in range(8):
            data = encoded(GREY)
            entry = tarfile.TarInfo(f"{i}.png")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with tarfile.open(path) as archive:
        return path, [m.offset for m in archive]


@pytest.mark.parametrize("beyond", [0, 100, 512])
def test_a_tar_that_was_cut_is_no_smaller_set(eight, beyond):
    """Even where it was cut between two entries, or within a header."""
    path, starts = eight
    path.write_bytes(path.read_bytes()[:starts[4] + beyond])
    with pytest.raises(ValueError, match="eight.tar is damaged"):
        load_images(f"files:{path}", 4, 32)


def test_a_tar_with_a_damaged_header_is_no_smaller_set(eight):
    path, starts = eight
    data = bytearray(path.read_bytes())
    data[starts[4] + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="breaks off after 4 files"):
        load_images(f"files:{path}", 4, 32)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_entries_of_a_tar_that_are_no_files(kind, eight):
    """A link or folder that is called like an image is passed over, also where the image is there too."""
    path, _ = eight
    with tarfile.open(path, "a") as archive:
        for name in ("0.png", "link.png"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
    assert sorted(load_images(f"files:{path}", 8, 32).source.values) == [f"{i}.png" for i in range(8)]


@pytest.mark.parametrize("inside", ["", "./", "set/"])
def test_an_index_counts_wherever_it_lies(inside, tmp_path):
    path = tmp_path / "SET.TAR"
    files = {"a.png": encoded(GREY), "b.png": encoded(GREY), "index.csv": b"file,class_index\na.png,7\n"}
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(inside + name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    assert sample_images(path, 1, 32, 0)[1:] == (["a.png"], [7])
    with pytest.raises(ValueError, match="the set holds 1"):
        sample_images(path, 2, 32, 0)
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("other/index.csv"))
    with pytest.raises(ValueError, match="SET.TAR: it holds 2 files named index.csv; leave one"):
        sample_images(path, 1, 32, 0)


def test_places_that_are_no_sets(tmp_path, monkeypatch):
    GREY.save(tmp_path / "one.png")
    with pytest.raises(ValueError, match="one.png: this is one image; name the folder"):
        load_images(f"files:{tmp_path}/one.png", 1, 32)
    with pytest.raises(ValueError, match="files: names no images; write files:PATH"):
        load_images("files:", 1, 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").mkdir()
    GREY.save(tmp_path / ".cache/hidden.png")
    assert load_images("files:~", 1, 32).source.values.tolist() == ["one.png"]
    monkeypatch.setenv("BUMP_DATA", "~nobody-of-this-name/data")
    with pytest.raises(FileNotFoundError, match="name that folder in BUMP_DATA"):
        load_images("imagenet-r", 1, 32)


def test_labels_that_are_not_imagenets(unpacked, tmp_path):
    (tmp_path / "data/val").mkdir()
    GREY.save(tmp_path / "data/val/1.png")
    with pytest.raises(ValueError, match="val: class '' is not one of ImageNet's 1000; .* in a folder named by its WordNet id"):
        load_labelled("imagenet", 1, 32)
    with pytest.raises(ValueError, match="the images of elsewhere don't have ImageNet's labels"):
        load_labelled("elsewhere", 1, 32)
    shutil.rmtree(tmp_path / "data/val")
    (tmp_path / "data/imagenet_val.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match="imagenet_val.zip is damaged, or no archive"):
        load_labelled("imagenet", 1, 32)


def test_a_preset_says_where_to_get_a_set(monkeypatch, tmp_path):
    monkeypatch.setenv("BUMP_DATA", str(tmp_path))
    monkeypatch.setattr("bump.files.cache_folder", lambda: tmp_path / "cache")
    told = "\n".join(missing_inputs(preset_inputs(PRESETS["paper"], [3])))
    for words in ("image-net.org, after registration", "the folder val", "imagenet-r.tar (2191 MB, sha256 18c6bf49",
                  "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar", "name that folder in BUMP_DATA"):
        assert words in told
    with pytest.raises(FileNotFoundError, match="there are no images at .*nowhere"):
        load_images("files:nowhere", 1, 32)


# --- kinds of image files ---


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6  # held on its side
    return {"exif": exif}


GREY = Image.fromarray(np.linspace(0, 255, 48, dtype=np.uint8).reshape(6, 8))
DEEP = Image.fromarray(np.linspace(0, 4095, 48, dtype=np.uint16).reshape(6, 8))  # an X-ray of 12 bits
CLEAR = Image.new("RGBA", (8, 6), (9, 9, 9, 0))
KINDS = {  # file, what is expected in it
    "grey": (encoded(GREY), np.asarray(GREY) / 255),
    "16 bits": (encoded(DEEP), np.asarray(DEEP) / 65535),
    "16 bits, a grey of them transparent": (encoded(DEEP, transparency=0), np.where(np.asarray(DEEP) == 0, 1, np.asarray(DEEP) / 65535)),
    "16 bits, TIFF": (encoded(DEEP, "TIFF"), np.asarray(DEEP) / 65535),
    "palette": (encoded(GREY.convert("P")), np.asarray(GREY) / 255),
    "transparent": (encoded(CLEAR), np.ones((6, 8))),
    "black and white": (encoded(Image.new("1", (8, 6), 1)), np.ones((6, 8))),
    "CMYK": (encoded(Image.new("CMYK", (8, 6), (0, 0, 0, 255)), "TIFF"), np.zeros((6, 8))),
    "animated": (encoded(GREY, "WEBP", save_all=True, append_images=[Image.new("L", (8, 6))], lossless=True), np.asarray(GREY) / 255),
    "rotated": (encoded(GREY, "PNG", **rotated()), np.rot90(np.asarray(GREY), -1) / 255),
}


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """PostScript in a file that is called an image would be run by Ghostscript."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ValueError, match="a.png can't be read as an image"):
        decode_image(data, "a.png")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_image_files_of_every_kind(kind):
    data, expected = KINDS[kind]
    image = decode_image(data, kind)
    assert image.dtype == torch.float32
    np.testing.assert_allclose(image.numpy(), np.broadcast_to(expected, (3, *expected.shape)), atol=1e-6)


@pytest.mark.parametrize("image", [Image.new("F", (8, 6), .5), Image.fromarray(np.full((6, 8), 255, np.int32)), Image.new("LAB", (8, 6))])
def test_numbers_of_unknown_range_or_meaning_are_refused(image):
    with pytest.raises(ValueError, match="scan.tif can't be read .*no known range"):
        decode_image(encoded(image, "TIFF"), "scan.tif")


def test_a_strip_is_refused(tmp_path):
    """It would grow to 224 by 13 million pixels, from a file of a few hundred bytes."""
    Image.new("L", (60_000, 1)).save(tmp_path / "strip.png")
    with pytest.raises(ValueError, match=r"strip.png can't be read .*\(60000, 1\) pixels are a strip"):
        load_images(f"files:{tmp_path}", 1, 224)


def test_an_image_smaller_than_the_crop_is_enlarged(tmp_path):
    (tmp_path / "set").mkdir()
    GREY.save(tmp_path / "set/small.png")
    image = load_images(f"files:{tmp_path / 'set'}", 1, 64)
    assert image.shape == (1, 3, 64, 64) and abs(float(image.mean()) - np.asarray(GREY).mean() / 255) < .02


def test_a_fetched_archive_is_the_set(monkeypatch, unpacked, tmp_path):
    """From the table: downloaded into BUMP_DATA under the archive's name, then read there."""
    path = pack(unpacked("imagenet-r"), tmp_path / "source.tar")
    item = replace(COLLECTIONS["imagenet-r"].archive, sha256="", megabytes=0)
    monkeypatch.setitem(COLLECTIONS, "imagenet-r", replace(COLLECTIONS["imagenet-r"], archive=item))
    monkeypatch.setattr("bump.files.http_get", lambda url, file, **_: file.write(path.read_bytes()))
    assert fetch(item) == tmp_path / "data/imagenet-r.tar" == find_images("imagenet-r")
    assert load_images("imagenet-r", 3, 32).shape == (3, 3, 32, 32)
