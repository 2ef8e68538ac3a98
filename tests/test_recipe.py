"""The recipe for the image sets of `cpu`: what can be checked without their public sources."""
import csv
import io
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bump.files import sha256_of
from bump.images import COLLECTIONS, find_images

RECIPE = Path(__file__).resolve().parents[1] / "data" / "recipe"
sys.path.insert(0, str(RECIPE))
import rebuild  # noqa: E402

with open(RECIPE / "image_sets.csv", newline="") as _file:
    ROWS = list(csv.DictReader(_file))


def ours(archive):
    """The zip that `cpu` reads, opened, and its index."""
    name = next(name for name, c in COLLECTIONS.items() if c.archive.name == archive)
    try:
        path = find_images(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    opened = zipfile.ZipFile(path)
    return path, opened, list(csv.DictReader(io.TextIOWrapper(opened.open("index.csv"))))


@pytest.mark.parametrize("archive", rebuild.SOURCES)
def test_the_list_is_that_of_the_zip(archive):
    _, _, index = ours(archive)
    listed = [(r["file"], r["source_path"], r["git_blob"]) for r in ROWS if r["archive"] == archive]
    assert listed == [(r["file"], r["source_path"], r["source_git_blob"]) for r in index]


@pytest.mark.parametrize("archive", rebuild.SOURCES)
def test_the_same_images_make_the_same_zip(archive, tmp_path):
    path, opened, index = ours(archive)
    rebuild.write_zip(tmp_path / "made.zip", archive, {r["file"]: opened.read(r["file"]) for r in index}, index)
    assert sha256_of(tmp_path / "made.zip") == sha256_of(path)


@pytest.mark.parametrize("archive", [name for name, (*_, native) in rebuild.SOURCES.items() if native])
def test_sets_of_unchanged_files_are_rebuilt_to_the_byte(archive, tmp_path):
    """From a clone, which is made here from the files in the zip: they are the source's own."""
    path, opened, index = ours(archive)
    clone = tmp_path / rebuild.SOURCES[archive][0].split("/")[1]
    for row in index:
        file = clone / row["source_path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(opened.read(row["file"]))
    told = rebuild.rebuild(archive, [r for r in ROWS if r["archive"] == archive], tmp_path, tmp_path / "out")
    assert told.endswith("the same bytes") and sha256_of(tmp_path / "out" / archive) == sha256_of(path)


@pytest.mark.parametrize("archive", [name for name, (*_, native) in rebuild.SOURCES.items() if not native])
def test_resizing_is_that_of_the_zip(archive):
    """Same sizes, JPEG tables and sampling for every image; the pixels need the sources."""
    _, opened, index = ours(archive)
    for row in index:
        theirs = Image.open(io.BytesIO(opened.read(row["file"])))
        blank = Image.new(theirs.mode, (int(row["source_width"]), int(row["source_height"])))
        made = Image.open(io.BytesIO(rebuild.resized(blank)))
        assert (made.size, made.mode, made.quantization, made.layer) == (theirs.size, theirs.mode, theirs.quantization, theirs.layer)


def test_another_file_is_refused(tmp_path):
    row = ROWS[0]
    clone = tmp_path / "imagenet-sample-images"
    clone.mkdir()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(clone / row["source_path"], "JPEG")
    with pytest.raises(ValueError, match=f"{row['source_path']} is not the file that was sampled"):
        rebuild.rebuild(row["archive"], [row], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_clones_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rebuild.py", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        rebuild.main()
    told = capsys.readouterr().err
    assert told.count("git clone https://github.com/") == 4 and "checkout bc69043e2862758a1906c6a24a792bb28c6bb2ff" in told


def test_the_list_is_whole():
    assert Counter(r["archive"] for r in ROWS) == {"imagenet_sample500.zip": 500, "textures_dtd10.zip": 200, "pacs_art_painting.zip": 154,
                                                   "pacs_sketch.zip": 154, "chestxray_nih.zip": 150}
