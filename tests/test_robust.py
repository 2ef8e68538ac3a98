"""Checkpoints of adversarially trained ImageNet networks, in every form in which such files were published: read as data only."""
import sys
import types

import dill
import pytest
import torch
from torch.hub import load_state_dict_from_url

from bump.encoders import ROBUST_FILES, encoder_identity, load_encoder
from bump.experiments import PAPER, missing_inputs, preset_inputs
from bump.files import sha256_of

NAME = "resnet50_l2_eps3"


@pytest.fixture(scope="module")
def attacker_model():
    """The library's own model, with weights that are not those of an initialisation."""
    vanished = types.ModuleType("torchvision.models.utils")
    vanished.load_state_dict_from_url = load_state_dict_from_url
    sys.modules["torchvision.models.utils"] = vanished
    from robustness.attacker import AttackerModel
    from robustness.datasets import ImageNet
    from robustness.imagenet_models import resnet50
    torch.manual_seed(5)
    model = AttackerModel(resnet50(), ImageNet("unused")).eval()
    for name, value in model.model.state_dict().items():
        if "running_var" in name:
            value.uniform_(.5, 2)
    return model


@pytest.fixture
def content(attacker_model):
    """What the library saves: the model as DataParallel names it, the optimiser, the schedule, the epoch."""
    state = {f"module.{name}": tensor for name, tensor in attacker_model.state_dict().items()}
    groups = [{"lr": .1, "momentum": .9, "params": [0, 1]}]
    return {"model": state, "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": groups},
            "schedule": {"base_lrs": [.1], "lr_lambdas": [None]}, "epoch": 90, "amp": None}


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """An empty folder that BUMP_WEIGHTS names, and the path of the file in it."""
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    monkeypatch.setitem(ROBUST_FILES, NAME, (ROBUST_FILES[NAME][0], ""))  # the checksum of what is made here isn't known
    return tmp_path / f"{NAME}.ckpt"


LEGACY, DILL = {"_use_new_zipfile_serialization": False}, {"pickle_module": dill}


@pytest.mark.parametrize("options, device", [
    pytest.param({}, "cpu", id="zip"), pytest.param({}, "cuda:0", id="zip-cuda"), pytest.param(LEGACY, "cuda:0", id="legacy-cuda"),
    pytest.param(DILL, "cpu", id="dill"), pytest.param({**LEGACY, **DILL}, "cuda:0", id="legacy-dill-cuda")])
def test_features_are_those_of_the_library(attacker_model, content, weights, options, device, monkeypatch):
    with monkeypatch.context() as saving:
        saving.setattr(torch.serialization, "location_tag", lambda storage: device)  # as if the tensors lay there
        kind = {"kind": dict} if "pickle_module" in options else {}  # a type, which dill writes in its own way
        torch.save({**content, **kind}, weights, **options)
    encoder, images = load_encoder(f"robust:{NAME}"), torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        _, expected = attacker_model.model(attacker_model.normalizer(images), with_latent=True)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-4, atol=1e-5)
    assert encoder.input_size == 224 and encoder.provenance["weights_sha256"] == sha256_of(weights)
    assert encoder_identity(f"robust:{NAME}")["sha256"] == sha256_of(weights)


def refused(content, weights, told):
    """Saving this content gives a file that isn't read."""
    torch.save(content, weights)
    with pytest.raises(ValueError, match=told):
        load_encoder(f"robust:{NAME}")


def changed(content, **tensors):
    """The content with some tensors replaced; dots are written as two underscores."""
    state = {**content["model"], **{f"module.{name.replace('__', '.')}": t for name, t in tensors.items()}}
    return {**content, "model": state}


def test_two_copies_that_differ(content, weights):
    refused(changed(content, attacker__model__fc__bias=torch.ones(1000)), weights, "model and attacker.model differ")


def test_another_normalisation(content, weights):
    half = torch.full((3, 1, 1), .5)
    refused(changed(content, normalizer__new_mean=half), weights, "otherwise than with ImageNet's mean")


def test_wrong_shapes_and_kinds(content, weights):
    for tensor, told in ((torch.zeros(64, 3, 3, 3), r"conv1.weight has shape \(64, 3, 3, 3\), not \(64, 3, 7, 7\)"),
                         (torch.zeros(64, 3, 7, 7, dtype=torch.int8), "conv1.weight holds torch.int8")):
        refused(changed(content, model__conv1__weight=tensor, attacker__model__conv1__weight=tensor), weights, told)


class Malice:
    """Pickled, it runs a command when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("options", [{}, LEGACY, DILL], ids=["zip", "legacy", "dill"])
def test_code_in_a_checkpoint_does_not_run(content, weights, options):
    torch.save({**content, "more": Malice(weights.with_name("crater"))}, weights, **options)
    with pytest.raises(ValueError, match="holds more than tensors and plain values"):
        load_encoder(f"robust:{NAME}")
    assert not weights.with_name("crater").exists()
    torch.load(weights, weights_only=False)
    assert weights.with_name("crater").exists(), "the file was harmless, so the test proved nothing"


@pytest.mark.parametrize("keep", [0, 1000, 10_000_000])
def test_a_file_cut_short(content, weights, keep):
    torch.save(content, weights)
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{NAME}.ckpt is damaged"):
        load_encoder(f"robust:{NAME}")


def test_a_missing_file_is_named_with_its_source(tmp_path, monkeypatch):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{NAME}.ckpt \(205 MB, sha256 380b14e6.* BUMP_WEIGHTS"):
        load_encoder(f"robust:{NAME}")
    told = [p for p in missing_inputs(preset_inputs(PAPER, [5])) if NAME in p]
    assert len(told) == 1 and "downloads it from https://huggingface.co/madrylab/robust-imagenet-models/resolve/" in told[0]


def test_another_file_under_the_name_is_told_by_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setenv("BUMP_WEIGHTS", str(tmp_path))
    (tmp_path / f"{NAME}.ckpt").write_bytes(b"something else")
    with pytest.raises(ValueError, match="differs from the published"):
        load_encoder(f"robust:{NAME}")
    told = [p for p in missing_inputs(preset_inputs(PAPER, [5])) if NAME in p]
    assert len(told) == 1 and f"sha256 {ROBUST_FILES[NAME][1]}" in told[0]


def test_the_family_of_the_paper_is_known():
    assert {member.removeprefix("robust:") for member in PAPER.family.values()} <= set(ROBUST_FILES)
    assert len(ROBUST_FILES) == 15 and all(len(sha) in (0, 64) for _, sha in ROBUST_FILES.values())
