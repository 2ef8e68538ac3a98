"""The whole grid of the paper at small size: its three encoders on its five image sets, from files in the published formats.

The weights are random, since the real ones can't be had here; everything else is what a run of the paper goes through."""
from dataclasses import replace

import numpy as np
import pytest
from published import CLASSES, LAYOUTS, other_model, pack, unpack, write

import bump.runner
from bump.claims import judge
from bump.encoders import HUB_PINS, published_file
from bump.experiments import NAMED, PAPER, PRESETS, missing_inputs, preset_inputs
from bump.images import COLLECTIONS
from bump.plots import figure3
from bump.runner import measure
from bump.store import load

SMALL = dict(ladder=(1e-1, 1e2, 1), n_images=4, encoders=NAMED)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders with the weights of three encoders, and with the archives of five image sets."""
    weights, data = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("data")
    for spec in NAMED.values():
        write(other_model(spec), weights / published_file(spec).name)
    for name in LAYOUTS:
        folder = unpack(name, tmp_path_factory.mktemp("unpacked"), (240, 300))
        pack(folder, data / COLLECTIONS[name].archive.name)
    return weights, data


@pytest.fixture
def paper(files, tmp_path, monkeypatch):
    """The preset at small size, in a project of its own."""
    monkeypatch.setenv("BUMP_WEIGHTS", str(files[0]))
    monkeypatch.setenv("BUMP_DATA", str(files[1]))
    monkeypatch.setattr("bump.runner.project_root", lambda: tmp_path)
    monkeypatch.setattr("bump.encoders.HUB_PINS", {name: pin._replace(sha256="") for name, pin in HUB_PINS.items()})
    for name in LAYOUTS:
        archive = COLLECTIONS[name].archive
        monkeypatch.setitem(COLLECTIONS, name, replace(COLLECTIONS[name], archive=replace(archive, sha256="")))
    small = replace(PAPER, **SMALL)
    monkeypatch.setitem(PRESETS, "paper", small)
    return small


def test_random_weights_are_not_taken_for_the_published(paper):
    with pytest.raises(ValueError, match="gets .* of 12 images of imagenet right, more than 5 points below the published"):
        measure(3, "paper")


def test_the_grid(paper, monkeypatch, tmp_path):
    monkeypatch.setattr(bump.runner, "MARGIN", 100)
    assert missing_inputs(preset_inputs(paper, [3])) == []
    data = measure(3, "paper")
    assert dict(data.sizes) == {"encoder": 3, "image_set": 5, "image": 4, "direction": 1, "eta": 4}
    assert data.encoder.values.tolist() == list(NAMED) and data.image_set.values.tolist() == list(PAPER.image_sets)
    assert data.reliable.all() and np.isfinite(data.response).all() and (data.linear > 0).all()
    sources = data.source.transpose("image_set", "image").values
    assert all(len(set(row)) == 4 and any(label in row[0] for label in CLASSES) for row in sources)
    assert np.isfinite(data.published_top1).all() and np.isfinite(data.top1).all()
    verdicts = judge(3, data)
    assert verdicts.claim.tolist() == ["C7"] and verdicts.verdict[0] != "not measured"
    assert len(figure3(data).axes) == 15
    assert load(tmp_path / "data/paper/fig3.nc").identical(data)
