"""Small copies of what others publish, in their exact formats: image sets and weights."""
import shutil
from pathlib import Path

import numpy as np
import timm
import torch
import torchvision
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from bump.encoders import build_seeded

# A newcomer adds a line: how the files of a public set are named in its archive; {k} is the class, {i} the image.
LAYOUTS = {
    "imagenet": "val/{k}/ILSVRC2012_val_000{i}.JPEG",
    "imagenet-sketch": "sketch/{k}/sketch_{i}.JPEG",
    "imagenet-r": "imagenet-r/{k}/art_{i}.jpg",
    "dtd": "dtd/images/{k}/{k}_00{i}.jpg",
    "nih chest x-rays": "images/{k}_00{i}.png",
}
CLASSES = "n01440764", "n01443537", "n01484850"
FLAT = {"nih chest x-rays"}  # sets without classes


def photo(number: int, size=(50, 40)) -> Image.Image:
    """Noise."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8))


def sketch(number: int, size=(50, 40)) -> Image.Image:
    """Black lines on white paper."""
    image = Image.new("RGB", size[::-1], "white")
    ImageDraw.Draw(image).line(np.random.default_rng(number).integers(0, min(size), (6, 2)).flatten().tolist(), "black", 2)
    return image


def unpack(name: str, folder: Path, size=(50, 40)) -> Path:
    """Twelve images of three classes as the archive of a set has them, with what else lies about there."""
    for k, label in enumerate(CLASSES):
        for i in range(4):
            path = folder / LAYOUTS[name].format(k=label, i=i)
            path.parent.mkdir(parents=True, exist_ok=True)
            (sketch if "sketch" in name else photo)(10 * k + i, size).save(path)
    (folder / "README.txt").write_text("not an image")
    (path.parent / "._hidden.jpg").write_bytes(b"what macOS leaves behind")
    return folder


def pack(folder: Path, path: Path) -> Path:
    """The folder as zip, tar or tar.gz, by the name of the path."""
    kind = "zip" if path.suffix == ".zip" else "gztar" if path.suffix == ".gz" else "tar"
    shutil.move(shutil.make_archive(str(path.with_name("packed")), kind, folder), path)
    return path


def other_model(spec: str) -> torch.nn.Module:
    """The library's model, with weights that `bump` has never seen."""
    source, _, name = spec.partition(":")
    if source == "timm":
        return build_seeded(lambda: timm.create_model(name, pretrained=False), 11)
    return build_seeded(lambda: torchvision.models.get_model(name.partition(".")[0], weights=None), 11)


PARTS = [("patch_embed.proj", "conv1"), ("norm_pre", "ln_pre"), ("blocks.", "transformer.resblocks."), ("attn.proj", "attn.out_proj"),
         ("attn.qkv.", "attn.in_proj_"), ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), (".norm", ".ln_")]
WHOLE = {"norm.weight": "ln_post.weight", "norm.bias": "ln_post.bias", "cls_token": "class_embedding",
         "pos_embed": "positional_embedding", "head.weight": "proj"}
SHAPES = {"cls_token": lambda t: t[0, 0], "pos_embed": lambda t: t[0], "head.weight": lambda t: t.T}


def open_clip(tensors: dict) -> dict:
    """timm's CLIP image tower as OpenAI named it, beside a word of the text tower."""
    named = {"token_embedding.weight": torch.zeros(3, 2), "logit_scale": torch.zeros(())}
    for name in tensors.keys() - {"head.bias"}:
        theirs = WHOLE.get(name, name)
        for ours, part in PARTS:
            theirs = theirs.replace(ours, part)
        named[f"visual.{theirs}"] = SHAPES.get(name, lambda t: t)(tensors[name])
    return named


def write(model: torch.nn.Module, path):
    """As the library publishes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        tensors = open_clip(model.state_dict()) if "clip" in path.name else model.state_dict()
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    else:
        torch.save(model.state_dict(), path)
