"""The real CIFAR-10, where there is one."""
import pytest
import torch

from bump.images import load_cifar10, load_images


@pytest.fixture(scope="module")
def train_set():
    try:
        return load_cifar10(train=True)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_official_statistics(train_set):
    """The channel means that the literature quotes, and ten classes of equal size."""
    pixels, labels = train_set
    assert pixels.shape == (50000, 3, 32, 32) and (labels.bincount() == 5000).all()
    mean = pixels.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(mean, torch.tensor([.49139968, .48215841, .44653091]).double(), atol=1e-6, rtol=0)


def test_evaluation_images_are_the_first_of_the_test_set(train_set):
    images = load_images("cifar10", 4, 32)
    pixels, _ = load_cifar10(train=False)
    torch.testing.assert_close(torch.from_numpy(images.values), pixels[:4] / 255)
    assert images.source.values.tolist() == ["test 0", "test 1", "test 2", "test 3"]
