"""The shipped networks are what the table of experiments says, as good as they must be, and none the worse for 16 bits."""
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from bump.encoders import load_encoder, read_checkpoint, split_file_spec
from bump.experiments import CPU, QUICK, attacks_path, checkpoint_spec, family_members, load_attacks, recorded_sha256, training_runs
from bump.files import sha256_of
from bump.images import load_cifar10, load_images
from bump.peaks import describe, median_profile
from bump.response import eta_ladder, response_profile
from bump.runner import checkpoint_folder, runs_folder, shipped_names
from bump.store import load
from bump.training import TRIAL_RADIUS, accuracy, require_checkpoint, robust_accuracy, steps_per_epoch

FOLDER = checkpoint_folder(QUICK, 0)
CONDITIONS = {c.name: c for c in training_runs(QUICK)}
BUMPS = ["clean", "clean-step02925", "blur-1", "blur-2", "true-labels", "l2-1"]


def about(name: str) -> dict:
    """The header of a finished checkpoint."""
    return read_checkpoint(FOLDER / f"{name}.safetensors")[1]


def under_attack(name: str) -> object:
    """Accuracies of a network of the family on all test images, by the radius of the attack."""
    return load_attacks(FOLDER / f"{name}.safetensors").robust_accuracy


@pytest.mark.parametrize("name", CONDITIONS)
def test_trained_under_the_condition_of_the_table(name):
    assert about(name)["condition"] == json.loads(json.dumps(asdict(CONDITIONS[name])))
    assert about(name)["step"] == about(name)["total_steps"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.safetensors")), ids=lambda p: p.name)
def test_recorded_checksum(path):
    assert recorded_sha256(path) == sha256_of(path)


def test_exactly_the_networks_that_are_measured():
    assert {p.stem for p in FOLDER.glob("*.safetensors")} == set(shipped_names())
    assert sum(p.stat().st_size for p in FOLDER.glob("*.safetensors")) < 30e6


def test_the_family_of_cpu_lies_where_make_train_puts_it():
    """Each member but ε = 0 with its training curve, so that `make train` trains none again, and with its accuracies under attack."""
    shipped = 0
    for condition in family_members(CPU).values():
        path = checkpoint_folder(CPU, condition.seed) / f"{condition.name}.safetensors"
        if not condition.epsilon or not path.exists():
            continue
        shipped += 1
        require_checkpoint(condition, condition.epochs * steps_per_epoch(condition), path)
        if attacks_path(path).exists():
            assert load_attacks(path).robust_accuracy.sel(radius=0) == pytest.approx(read_checkpoint(path)[1]["test_accuracy"], abs=.002)
        curve = load(runs_folder(CPU, condition.seed) / f"{condition.name}.nc")
        assert json.loads(curve.condition) == read_checkpoint(path)[1]["condition"] and curve.sizes["epoch"] == condition.epochs
        if condition.seed == 0 and condition.name in CONDITIONS:
            assert sha256_of(path) == sha256_of(FOLDER / path.name)
    assert shipped >= 4


def test_floors():
    assert about("clean")["test_accuracy"] >= .90
    assert about("random-labels")["train_accuracy"] >= .99 and about("random-data")["train_accuracy"] >= .99
    for name in ("blur-1", "blur-2"):
        assert about(name)["test_accuracy"] < about(name)["test_accuracy_blurred"] - .1, "sharp images are foreign to it"
    for name, epsilon in (("l2-0.25", .25), ("l2-1", 1)):
        robust, clean = (under_attack(n).sel(radius=epsilon) for n in (name, "clean"))
        assert robust > clean + .2, "robust networks must be clearly above the clean one"
    assert under_attack("clean").sel(radius=1) < .01


def test_randomised_networks_differ_from_their_twin_in_one_thing():
    twin = asdict(CONDITIONS["true-labels"])
    for name, changed in (("random-labels", {"labels": "random"}), ("random-data", {"labels": "random", "images": "noise"})):
        assert asdict(CONDITIONS[name]) == {**twin, **changed, "name": name}


@pytest.mark.parametrize("name", ["clean", "l2-1"])
def test_accuracy_on_real_images(name):
    """The recorded accuracy is that of the file as shipped: half precision and all."""
    try:
        pixels, labels = load_cifar10(train=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    network = load_encoder(checkpoint_spec(QUICK, name)).network
    assert abs(accuracy(network, pixels[:2000] / 255, labels[:2000]) - about(name)["test_accuracy"]) < .03


@pytest.mark.parametrize("epsilon", QUICK.family)
def test_accuracy_under_attack_on_real_images(epsilon):
    """One attempt on 200 images, by another seed, against the record of one attempt on 500."""
    try:
        pixels, labels = load_cifar10(train=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    spec = checkpoint_spec(QUICK, QUICK.family[epsilon].name)
    found, = robust_accuracy(load_encoder(spec).network, pixels[:200] / 255, labels[:200], [TRIAL_RADIUS], restarts=1, seed=7)
    recorded = load_attacks(split_file_spec(spec)[0]).by_restarts.sel(restarts=1)
    assert abs(found - recorded) < .08
    assert abs(under_attack(QUICK.family[epsilon].name).sel(radius=0) - about(QUICK.family[epsilon].name)["test_accuracy"]) < .002


def unrounded(encoder: torch.nn.Module) -> torch.nn.Module:
    """A network whose weights are not halves, but round to those of `encoder`: what may have been stored."""
    draw = torch.Generator().manual_seed(0)
    for name, tensor in encoder.network.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() > 4096:
            half = tensor.half()
            gap = torch.nextafter(half, torch.tensor(torch.inf, dtype=torch.half)).float() - tensor
            moved = tensor + .49 * gap * (2 * torch.rand(tensor.shape, generator=draw) - 1)
            assert (moved.half() == half).float().mean() > .99 and (moved != tensor).float().mean() > .9, name
            tensor.copy_(moved)
    return encoder


@pytest.mark.parametrize("name", BUMPS)
def test_half_precision_moves_no_peak(name):
    """By more than 2 % in height, or from its place on the ladder; on images as the network was trained on."""
    images, spec = load_images("photo crops", 32, 32, blur=about(name)["condition"]["blur"]), checkpoint_spec(QUICK, name)
    peaks = [describe(median_profile(response_profile(encoder, images, eta_ladder(1e-4, 1e2, 8), progress=False)))
             for encoder in (load_encoder(spec), unrounded(load_encoder(spec)))]
    assert all(p.kind == "bump" for p in peaks)
    np.testing.assert_allclose(*[p.peak_response for p in peaks], rtol=.02)
    assert abs(np.log10(peaks[0].peak_eta / peaks[1].peak_eta)) < .126, "at most one point of the ladder"
