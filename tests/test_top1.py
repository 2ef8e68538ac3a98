"""An encoder that is used otherwise than it was made stops a run before anything is measured with it."""
import numpy as np
import pytest
import torch

import bump.runner
from bump.encoders import load_encoder, published_top1
from bump.experiments import Cell, preset_named
from bump.images import find_images
from bump.runner import labelled_images, measure_panels, require_top1, top1, top1_coordinates

LITE0, CPU = "pip:efficientnet_lite0", preset_named("cpu")


@pytest.fixture(autouse=True)
def nothing_remembered():
    labelled_images.cache_clear(), require_top1.cache_clear()


def labelled(monkeypatch, right):
    """Sixteen images, whose labels are Lite0's own answers for this share of them."""
    images = torch.rand(16, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        answers = load_encoder(LITE0).logits(images).argmax(1)
    wrong = torch.arange(16) >= round(16 * right)
    monkeypatch.setattr(bump.runner, "load_labelled", lambda *_: (images, torch.where(wrong, (answers + 1) % 1000, answers)))


def cell(encoder=LITE0, trained=True):
    return Cell(encoder, trained, "noise", 1, (("encoder", "E"),))


@pytest.mark.parametrize("right", [1, 12 / 16])  # 75 %; published are 74.8
def test_accurate_enough(right, monkeypatch, tmp_path):
    labelled(monkeypatch, right)
    assert top1_coordinates(cell(), CPU, tmp_path) == {"top1": 100 * right, "published_top1": published_top1(LITE0)}
    assert len(list(tmp_path.iterdir())) == 1, "kept for the next figure"


def test_too_far_below(monkeypatch, tmp_path):
    """11 of 16 are 68.75 %, 6 points below."""
    labelled(monkeypatch, 11 / 16)
    with pytest.raises(ValueError, match="efficientnet_lite0 gets 68.8 % of 16 images of imagenet photos right, more than 5 points below"):
        top1_coordinates(cell(), CPU, tmp_path)


def test_the_run_stops_before_it_measures(monkeypatch, tmp_path):
    labelled(monkeypatch, .5)
    cells = {"": [cell(trained=False), cell()]}
    monkeypatch.setattr(bump.runner, "figure_cells", lambda *_: cells)
    monkeypatch.setattr(bump.runner, "is_measured", lambda *_: False)
    monkeypatch.setattr(bump.runner, "measure_cell", lambda *_: pytest.fail("a cell was measured"))
    monkeypatch.setattr(bump.runner, "project_root", lambda: tmp_path)
    with pytest.raises(ValueError, match="points below"):
        measure_panels(3, CPU)


def test_where_nothing_can_be_said(tmp_path):
    for spec, trained in ((LITE0, False), ("timm:vit_small_patch14_dinov2.lvd142m", True)):
        found = top1_coordinates(cell(spec, trained), CPU, tmp_path)
        assert set(found) == {"top1", "published_top1"} and np.isnan(list(found.values())).all()
    assert top1_coordinates(cell("file:net.safetensors?arch=cifar:resnet18-16"), CPU, tmp_path) == {}
    assert top1_coordinates(cell(), preset_named("quick"), tmp_path) == {}


def test_wrong_preprocessing_is_noticed(tmp_path):
    """On real labelled images: as made, Lite0 passes; with pixels normalised twice, or from 0 to 255, it doesn't."""
    try:
        find_images("imagenet photos")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    images, labels = (part[:150] for part in labelled_images("imagenet photos", 224))
    encoder = load_encoder(LITE0)
    assert top1(encoder, images, labels) > published_top1(LITE0)
    for wrong in ((images - .5) / .5, 255 * images):
        assert top1(encoder, wrong, labels) < published_top1(LITE0) - 5
