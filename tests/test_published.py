"""Weights that timm and torchvision publish: found in a folder or a cache, read as data only, put into the right place."""
import pytest
import timm
import torch
from published import other_model, write
from safetensors.torch import save_file

from bump.encoders import HUB_PINS, build_seeded, encoder_identity, load_encoder, published_file
from bump.files import sha256_of

# A newcomer adds a line: an encoder of timm or torchvision with a tag.
ENCODERS = ["timm:resnet50.tv_in1k", "timm:convnext_tiny.fb_in1k", "timm:vit_small_patch16_224.augreg_in1k",
            "timm:swin_tiny_patch4_window7_224.ms_in1k", "torchvision:resnet50.IMAGENET1K_V1", "torchvision:convnext_tiny.IMAGENET1K_V1",
            "timm:vit_small_patch14_dinov2.lvd142m", "timm:vit_base_patch32_clip_quickgelu_224.openai"]


@pytest.fixture
def unpinned(monkeypatch):
    """What is made here has other checksums than what is published."""
    monkeypatch.setattr("bump.encoders.HUB_PINS", {name: pin._replace(sha256="") for name, pin in HUB_PINS.items()})
    monkeypatch.setattr("bump.encoders.require_whole", lambda path, item: path)


@pytest.mark.parametrize("spec", ENCODERS)
def test_features_are_the_librarys_own(spec, tmp_path, monkeypatch, unpinned):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    model, path = other_model(spec), tmp_path / published_file(spec).name
    write(model, path)
    encoder = load_encoder(spec)
    images = torch.rand(2, 3, encoder.input_size, encoder.input_size)
    normal = (images - encoder.mean) / encoder.std
    with torch.no_grad():
        if spec.startswith("timm"):
            expected = model.forward_head(model.forward_features(normal), pre_logits=True)
        else:
            setattr(model, list(model.named_children())[-1][0], torch.nn.Identity())
            expected = model(normal)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-4, atol=1e-4)
    assert encoder.provenance["weights_sha256"] == encoder_identity(spec)["sha256"] == sha256_of(path)


def test_found_in_the_hubs_cache(tmp_path, monkeypatch, unpinned):
    """Laid out as the hub's client leaves it, also when only the branch is known there."""
    spec, folder = ENCODERS[0], tmp_path / "models--timm--resnet50.tv_in1k"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("BUMP_WEIGHTS", raising=False)
    write(other_model(spec), folder / "snapshots/0123456789/model.safetensors")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0123456789")
    assert load_encoder(spec).provenance["weights_sha256"] == sha256_of(folder / "snapshots/0123456789/model.safetensors")


def test_found_in_torchvisions_cache(tmp_path, monkeypatch, unpinned):
    spec = "torchvision:resnet50.IMAGENET1K_V1"
    monkeypatch.setattr("bump.files.get_dir", lambda: str(tmp_path))
    monkeypatch.delenv("BUMP_WEIGHTS", raising=False)
    write(other_model(spec), tmp_path / "checkpoints/resnet50-0676ba61.pth")
    assert load_encoder(spec).provenance["weights"] == "trained"


@pytest.mark.parametrize("spec, told", [(ENCODERS[0], "differs from the published resnet50.tv_in1k.safetensors"),
                                        ("torchvision:resnet50.IMAGENET1K_V1", "differs from the published resnet50-0676ba61.pth")])
def test_other_weights_under_a_pinned_name(spec, told, tmp_path, monkeypatch):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    (tmp_path / published_file(spec).name).write_bytes(b"of another training")
    with pytest.raises(ValueError, match=told):
        load_encoder(spec)


@pytest.mark.parametrize("spec", [ENCODERS[1], ENCODERS[5]])
def test_a_damaged_file_is_named(spec, tmp_path, monkeypatch, unpinned):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    path = tmp_path / published_file(spec).name
    write(other_model(spec), path)
    path.write_bytes(path.read_bytes()[:1_000_000])
    with pytest.raises(ValueError, match=path.name):
        load_encoder(spec)


def test_another_architecture_under_the_name(tmp_path, monkeypatch, unpinned):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    write(other_model("timm:resnet18.tv_in1k"), tmp_path / "resnet50.tv_in1k.safetensors")
    with pytest.raises(ValueError, match="resnet50.tv_in1k.safetensors does not hold the weights of resnet50.tv_in1k"):
        load_encoder(ENCODERS[0])


@pytest.mark.parametrize("spec, option, told", [(ENCODERS[2], {"img_size": 160}, "pos_embed in another size"),
                                                (ENCODERS[2], {"patch_size": 32}, "patch_embed.proj.weight in another size|pos_embed in"),
                                                (ENCODERS[3], {"window_size": 5}, "relative_position_bias_table in another size")])
def test_what_timm_would_resample_silently(spec, option, told, tmp_path, monkeypatch, unpinned):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    other = build_seeded(lambda: timm.create_model(spec.removeprefix("timm:"), pretrained=False, **option), 0)
    write(other, tmp_path / published_file(spec).name)
    with pytest.raises(ValueError, match=f"does not hold the weights of .*{told}"):
        load_encoder(spec)


def test_weights_of_timm_with_a_prefix_or_of_another_kind(tmp_path, monkeypatch, unpinned):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    model, path = other_model(ENCODERS[0]), tmp_path / published_file(ENCODERS[0]).name
    save_file({f"module.{name}": t for name, t in model.state_dict().items()}, path)
    assert torch.equal(load_encoder(ENCODERS[0]).network.conv1.weight, model.conv1.weight)
    save_file({**model.state_dict(), "conv1.weight": model.conv1.weight.to(torch.int8)}, path)
    with pytest.raises(ValueError, match="does not hold the weights of .*conv1.weight holds torch.int8"):
        load_encoder(ENCODERS[0])


def test_missing_weights_are_named_with_their_source(tmp_path, monkeypatch):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    monkeypatch.setattr("bump.files.cache_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="convnext_tiny.fb_in1k.safetensors .114 MB.* https://huggingface.co/timm/convnext_tiny"):
        load_encoder(ENCODERS[1])
