"""Rebuild the five image sets of the preset `cpu` from clones of their public sources.

    git clone https://github.com/EliSchwartz/imagenet-sample-images CLONES/imagenet-sample-images   (and so on, see SOURCES)
    python data/recipe/rebuild.py CLONES OUT

`image_sets.csv` lists every image with its source file and that file's git blob, which is verified. What is written is
a stored zip with an `index.csv`; its sha256 is compared with the one that `bump` expects.
"""
import argparse
import csv
import hashlib
import io
import zipfile
from pathlib import Path, PurePosixPath

from PIL import Image
from tqdm import tqdm

from bump.files import sha256_of
from bump.images import COLLECTIONS
from bump.store import write_atomically

# archive -> repository, commit, and whether the source's own bytes are kept; else images are resized to 256 pixels
SOURCES = {
    "imagenet_sample500.zip": ("EliSchwartz/imagenet-sample-images", "bc69043e2862758a1906c6a24a792bb28c6bb2ff", False),
    "textures_dtd10.zip": ("pan8915/DeepTexture", "522f46f683af11e93673bff29f81df14f49edfb2", False),
    "pacs_art_painting.zip": ("MachineLearning2020/Homework3-PACS", "d586a6cf3db84896fb6cc465c7bf51bdaf6d65d8", True),
    "pacs_sketch.zip": ("MachineLearning2020/Homework3-PACS", "d586a6cf3db84896fb6cc465c7bf51bdaf6d65d8", True),
    "chestxray_nih.zip": ("muhammedtalo/COVID-19", "ee3e2cffc0824711bed675275506b26f19be7198", False),
}
COLUMNS = "file", "class_index", "class_name", "source_path", "source_width", "source_height", "width", "height", "source_git_blob"


def verified(path: Path, blob: str) -> bytes:
    """The bytes of a source file. Raises ValueError if it isn't the one that was sampled."""
    data = path.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() != blob:
        raise ValueError(f"{path} is not the file that was sampled (git blob {blob}); check out the commit that SOURCES names")
    return data


def resized(picture: Image.Image) -> bytes:
    """A JPEG whose short side has 256 pixels; grey stays grey."""
    picture = picture.convert("L" if picture.mode in ("L", "I", "I;16", "LA") else "RGB")
    scale = 256 / min(picture.size)
    picture = picture.resize([max(256, round(side * scale)) for side in picture.size], Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=92, subsampling=0)
    return buffer.getvalue()


def describe(row: dict, source: Image.Image, data: bytes) -> dict:
    """A line of index.csv."""
    path, (width, height) = PurePosixPath(row["source_path"]), Image.open(io.BytesIO(data)).size
    return {"file": row["file"], "class_index": int(row["file"][1:4]), "class_name": path.parent.name or path.stem,
            "source_path": row["source_path"], "source_width": source.width, "source_height": source.height,
            "width": width, "height": height, "source_git_blob": row["git_blob"]}


def write_zip(path: Path, archive: str, images: dict, index: list):
    """A stored zip whose bytes depend on nothing but its content. ImageNet's, made first, has another layout."""
    first, table = archive.startswith("imagenet"), io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\r\n" if first else "\n")
    writer.writeheader(), writer.writerows(index)
    entries = {"index.csv": table.getvalue().encode(), **images} if first else {**images, "index.csv": table.getvalue().encode()}
    with zipfile.ZipFile(path, "w") as made:
        for name, data in entries.items():
            info = zipfile.ZipInfo(name, (1980 if first else 2020, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, (0o600 if first else 0o644) << 16
            made.writestr(info, data)


def rebuild(archive: str, rows: list, clones: Path, out: Path) -> str:
    """Make one of the zips; returns what to tell about it."""
    repository, _, native = SOURCES[archive]
    images, index = {}, []
    for row in tqdm(rows, archive, unit="image"):
        data = verified(clones / repository.split("/")[1] / row["source_path"], row["git_blob"])
        with Image.open(io.BytesIO(data)) as source:
            images[row["file"]] = data if native else resized(source)
            index.append(describe(row, source, images[row["file"]]))
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / archive, lambda partial: write_zip(partial, archive, images, index))
    wanted = next(c.archive.sha256 for c in COLLECTIONS.values() if c.archive.name == archive)
    same = sha256_of(out / archive) == wanted
    return f"{out / archive}: " + ("the same bytes" if same else "other bytes than ours (another JPEG encoder?), so `bump` will refuse it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="folder of the clones")
    parser.add_argument("out", type=Path, help="folder for the zips; name it in BUMP_DATA")
    options = parser.parse_args()
    with open(Path(__file__).with_name("image_sets.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {options.clones / r.split("/")[1]: (r, commit) for r, commit, _ in SOURCES.values()}
    absent = [f"git clone https://github.com/{r} {path} && git -C {path} checkout {commit}" for path, (r, commit) in wanted.items()
              if not path.is_dir()]
    if absent:
        parser.exit(1, "clones are missing; make them with\n" + "\n".join(absent) + "\n")
    print("\n".join(rebuild(name, [r for r in rows if r["archive"] == name], options.clones, options.out) for name in SOURCES))


if __name__ == "__main__":
    main()
