"""The statistic on real architectures: what closed forms in the notebook can't show."""
import io
import zipfile

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

# Built before bump is imported, as a reader's own models are.
torch.manual_seed(0)
EARLY_TIMM_VIT = timm.create_model("vit_small_patch16_224", num_classes=0).eval()
EARLY_TORCHVISION_VIT = torchvision.models.VisionTransformer(64, 16, 2, 4, 96, 192).eval()
EARLY_TORCHVISION_VIT.heads = nn.Identity()  # zero at initialisation

from bump.encoders import load_encoder  # noqa: E402
from bump.files import find_file  # noqa: E402
from bump.images import load_images  # noqa: E402
from bump.response import dequantise, draw_directions, eta_ladder, exact_arithmetic, response_profile  # noqa: E402

SMALL = eta_ladder(1e-5, 1e-3, 1)


class Normalised(nn.Module):
    """Pixels in [0, 1] to the features of a model with ImageNet's mean and standard deviation."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor([.485, .456, .406])[:, None, None])
        self.register_buffer("std", torch.tensor([.229, .224, .225])[:, None, None])

    def forward(self, x):
        return self.model((x - self.mean) / self.std)


def crop(image, size):
    """Central crop of an 8-bit RGB image, the short side resized to `size`.

    In float64: in float32 the resized white of a page varies by 6e-8, which breaks ties at that scale only."""
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].double() / 255
    scale = size / min(x.shape[2:])
    x = nn.functional.interpolate(x, scale_factor=scale, mode="bicubic", antialias=True).clamp(0, 1).float()
    top, left = (x.shape[2] - size) // 2, (x.shape[3] - size) // 2
    return x[:, :, top:top + size, left:left + size]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def photos():
    """Two photographs without flat regions, (2, 3, 224, 224)."""
    data = pytest.importorskip("skimage.data")
    return torch.cat([crop(data.coffee(), 224), crop(data.cat(), 224)])


def resnet50():
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None)
    model.fc = nn.Identity()
    return Normalised(model).eval()


def convnext():
    torch.manual_seed(0)
    return Normalised(timm.create_model("convnext_tiny", num_classes=0)).eval()


ENCODERS = {"resnet50": resnet50, "convnext_tiny": convnext, "vit_small": lambda: Normalised(EARLY_TIMM_VIT).eval()}


def test_random_resnet50_is_linear_at_small_eta(photos):
    """Float32 reads 30 where the function is linear; the automatic precision reads 1."""
    encoder = resnet50()
    profile = response_profile(encoder, photos, SMALL, progress=False)
    assert profile.reliable.all() and not profile.kink.any()
    np.testing.assert_allclose(profile.response, 1, atol=.02)
    single = response_profile(encoder, photos, SMALL, precision="float32", progress=False)
    assert not single.reliable.any()
    assert (single.response[:, 0] > 5).all()


@pytest.mark.parametrize("name", ENCODERS)
def test_jvp_is_the_float64_central_difference(name, photos):
    """The forward-mode derivative, against an independent one, and its norm in float32."""
    encoder, x = ENCODERS[name](), photos[:1]
    u, h = draw_directions(x)[:, 0], 1e-5
    single = response_profile(encoder, x, [1.], precision="float32", progress=False).linear.item()
    with exact_arithmetic():
        encoder.double()
        jvp = torch.func.jvp(encoder, (x.double(),), (u,))[1]
        central = (encoder(x.double() + h*u) - encoder(x.double() - h*u)) / (2*h)
        encoder.float()
    assert (jvp - central).norm() < 1e-5 * jvp.norm()
    assert single == pytest.approx(jvp.norm().item(), rel=1e-3)


@pytest.mark.parametrize("name", ENCODERS)
def test_stored_error_covers_the_float32_error(name, photos):
    """Float32 against float64, point by point; `error` is an estimate of two standard deviations."""
    encoder, etas = ENCODERS[name](), [1e-3, 1e-2, 1e-1]
    single, exact = (response_profile(encoder, photos[:1], etas, precision=p, progress=False)
                     for p in ("float32", "float64"))
    deviation = abs(single.response / exact.response - 1).values.ravel()
    error = single.error.values.ravel()
    assert exact.error.max() < 1e-6
    assert (deviation < 2*error).all(), (deviation, error)
    assert (error < 20*deviation + 5e-4).any(), "an estimate that is far too large would send everything to float64"


def test_torchvision_vit_built_before_bump():
    """Its attention takes a fast path without a derivative, unless that is switched off, and only for the call."""
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.backends.mha.get_fastpath_enabled()
    profile = response_profile(EARLY_TORCHVISION_VIT, images, [1e-4, 1e-3, 1e-2], progress=False)
    assert torch.backends.mha.get_fastpath_enabled()
    assert profile.reliable.all()
    np.testing.assert_allclose(profile.response, 1, atol=.02)


def find(name, variable):
    """A file on a search path, or a visible skip."""
    try:
        return find_file(name, variable)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sketches():
    """Three line sketches on white paper, (3, 3, 224, 224)."""
    image = pytest.importorskip("PIL.Image")
    with zipfile.ZipFile(find("pacs_sketch.zip", "BUMP_DATA")) as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".png"))[::len(archive.namelist()) // 3][:3]
        return torch.cat([crop(image.open(io.BytesIO(archive.read(n))).convert("RGB"), 224) for n in names])


def squeezenet():
    """SqueezeNet's spatial mean of `features`, with its ImageNet weights."""
    from safetensors.torch import load_file
    model = torchvision.models.squeezenet1_1(weights=None)
    state = load_file(find("squeezenet1_1_from_ncnn.safetensors", "BUMP_WEIGHTS"))
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return Normalised(nn.Sequential(model.features, nn.AdaptiveAvgPool2d(1))).eval()


def test_sketches_have_kinks_until_dequantised(sketches):
    """White paper ties in max-pool: r stays far from 1 at every small η, until the ties are broken."""
    encoder = squeezenet()
    flat = response_profile(encoder, sketches, SMALL, progress=False)
    assert flat.kink.all()
    assert (abs(flat.response - 1) > .5).all()
    soft = response_profile(encoder, dequantise(sketches), SMALL, progress=False)
    assert not soft.kink.any() and soft.reliable.all()
    np.testing.assert_allclose(soft.response, 1, atol=.05)


@pytest.mark.parametrize("spoil, message", [
    (lambda x: (x * 255).byte(), "divide by 255"),
    (lambda x: x * 255, "outside"),
    (lambda x: x - .5, "outside"),
    (lambda x: torch.where(x > .99, torch.inf, x), "NaN or infinity"),
    (lambda x: x[0], "missing axis"),
    (lambda x: x[:0], "empty"),
    (lambda x: x.tolist(), "list"),
])
def test_unusable_images_are_refused_before_the_encoder_runs(spoil, message):
    def untouched(x):
        raise AssertionError("the encoder ran")
    images = torch.linspace(0, 1, 2*3*8*8).reshape(2, 3, 8, 8)
    with pytest.raises((ValueError, TypeError), match=message):
        response_profile(untouched, spoil(images), progress=False)


def test_training_mode_is_refused_and_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(.5))
    images = torch.rand(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"encode\.eval\(\)"):
        response_profile(model, images, progress=False)
    assert model.training and model[1].num_batches_tracked == 0
    response_profile(model.eval(), images, [.1], progress=False)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad,
                                     lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_readers_switches_change_nothing(context):
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten()), torch.rand(3, 3, 8, 8)
    expected = response_profile(model, images, [1e-3, 1], progress=False)
    with context():
        assert response_profile(model, images, [1e-3, 1], progress=False).identical(expected)


def test_failure_restores_the_switches():
    fastpath, cudnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.conv.fp32_precision
    with pytest.raises(ZeroDivisionError):
        response_profile(lambda x: 1 / 0, torch.rand(1, 3, 8, 8), precision="float32", progress=False)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath and torch.is_grad_enabled()
    assert torch.backends.cudnn.conv.fp32_precision == cudnn


def test_progress_names_what_is_measured(capsys):
    response_profile(nn.Flatten(), torch.rand(3, 3, 8, 8), [.1, 1], batch_size=2)
    shown = capsys.readouterr()
    assert not shown.out and "response of Flatten, 3 images: 100%" in shown.err and "pass/s" in shown.err
    response_profile(nn.Flatten(), torch.rand(3, 3, 8, 8), [.1, 1], progress=False)
    assert not capsys.readouterr().err


def test_float64_rescues_what_overflows_in_float32():
    """Beyond float32's range a point is not reliable there, and right in float64."""
    images, etas = torch.rand(2, 3, 4, 4), [1e-2, 30.]
    profile = response_profile(lambda x: torch.exp(12*x).flatten(1), images, etas, progress=False)
    single = response_profile(lambda x: torch.exp(12*x).flatten(1), images, etas, precision="float32", progress=False)
    u, x = draw_directions(images)[:, 0].flatten(1), images.double().flatten(1)
    expected = (torch.exp(12*(x + 30*u)) - torch.exp(12*x)).norm(dim=1) / (30 * (12*torch.exp(12*x)*u).norm(dim=1))
    assert expected.min() > 1e38 and not single.reliable[:, 0, 1].any()
    assert profile.reliable.all() and profile.in_float64[:, 0, 1].all()
    np.testing.assert_allclose(profile.response[:, 1], expected, rtol=1e-3)


def test_the_stated_error_covers_rounding_that_prefers_the_slope():
    """On images of noise, an EfficientNet's rounding lies along J u far more than chance would have it."""
    encoder = load_encoder("pip:efficientnet_lite0")
    images, etas = load_images("noise", 6, 224), eta_ladder(1e-3, 1e-1, 4)
    single, double = (response_profile(encoder, images, etas, precision=p, progress=False) for p in ("auto", "float64"))
    ratio = abs(single.response / double.response - 1) / single.error.isel(direction=0)
    assert single.reliable.all() and 0 < single.in_float64.mean() < .5
    assert ratio.max() < 3 and (ratio < 1).mean() > .7
