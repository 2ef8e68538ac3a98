"""The shipped networks are what the table of experiments says, and as good as they must be."""
import json
from dataclasses import asdict

import pytest

from bump.encoders import load_encoder, read_checkpoint, sha256_of
from bump.experiments import QUICK, checkpoint_spec, recorded_sha256, run_steps
from bump.images import load_cifar10
from bump.store import project_root
from bump.training import accuracy

FOLDER = project_root() / QUICK.checkpoints
CONDITIONS = {c.name: c for c in QUICK.conditions}


def about(name: str) -> dict:
    """The header of a finished checkpoint."""
    return read_checkpoint(FOLDER / f"{name}.safetensors")[1]


@pytest.mark.parametrize("name", CONDITIONS)
def test_trained_under_the_condition_of_the_table(name):
    assert about(name)["condition"] == json.loads(json.dumps(asdict(CONDITIONS[name])))
    assert about(name)["step"] == about(name)["total_steps"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.safetensors")), ids=lambda p: p.name)
def test_recorded_checksum(path):
    assert recorded_sha256(path) == sha256_of(path)


def test_exactly_the_networks_that_are_measured():
    wanted = {*CONDITIONS, *run_steps(CONDITIONS["clean"]).values()}
    assert {p.stem for p in FOLDER.glob("*.safetensors")} == wanted
    assert sum(p.stat().st_size for p in FOLDER.glob("*.safetensors")) < 25e6


def test_floors():
    assert about("clean")["test_accuracy"] >= .65
    assert about("random-labels")["train_accuracy"] >= .99 and about("random-data")["train_accuracy"] >= .99
    for name, epsilon in (("l2-0.25", "0.25"), ("l2-1", "1")):
        metric = f"pgd20_accuracy_l2_{epsilon}"
        assert about(name)[metric] > about("clean")[metric] + .2, "robust networks must be clearly above the clean one"


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
