"""Training under bad conditions: a clear error, nothing overwritten, no finished run lost; and the same bits after a kill."""
import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import bump.runner
from bump.encoders import build_seeded, cifar_resnet18, load_encoder, read_checkpoint, save_checkpoint
from bump.experiments import CPU, attacks_path, checkpoint_spec, figure_cells, missing_inputs, preset_inputs, preset_named
from bump.images import load_images
from bump.response import eta_ladder, response_profile
from bump.runner import measure_cell, measure_panels, robust_coordinates, robustness_record, ship, stack, train_preset, training_record
from bump.training import Condition, load_state, made_by, robust_accuracy, train

ROOT = Path(__file__).resolve().parents[1]
TINY = Condition("tiny", n_images=256, width=4, epochs=3, batch_size=64, peak_lr=.05, checkpoints=(0, .5))


def small_set(n: int = 256) -> tuple:
    """Images whose brightness tells the class."""
    labels = torch.arange(n) % 10
    noise = torch.randint(0, 20, (n, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return (noise + 23 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels


def content(*folders: Path) -> dict:
    """Every file below some folders, with its bytes."""
    return {p: p.read_bytes() for folder in folders for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: checkpoints, working state, curve."""
    folder = tmp_path_factory.mktemp("finished")
    train(TINY, small_set(), small_set(16), folder / "checkpoints", folder / "runs")
    return folder


def test_a_finished_run_is_not_trained_again(finished, monkeypatch):
    before = content(finished)
    monkeypatch.setattr("bump.training.train_epoch", None)
    train(TINY, small_set(), small_set(), finished / "checkpoints", finished / "runs")
    assert content(finished) == before


@pytest.mark.parametrize("change", [{"width": 8}, {"seed": 1}, {"blur": 1.0}, {"n_images": 128}])
def test_a_checkpoint_of_another_run_is_not_overwritten(finished, change):
    before = content(finished)
    with pytest.raises(ValueError, match="tiny.safetensors was trained under another condition or is another step"):
        train(replace(TINY, **change), small_set(), small_set(), finished / "checkpoints", finished / "runs")
    with pytest.raises(ValueError, match="tiny.pt was begun with .* instead of .*delete it to start afresh"):
        train(replace(TINY, **change), small_set(), small_set(), finished / "elsewhere", finished / "runs")
    assert content(finished) == before


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_a_damaged_state_is_named(finished, tmp_path, keep):
    (tmp_path / "tiny.pt").write_bytes((finished / "runs/tiny.pt").read_bytes()[:keep])
    with pytest.raises(ValueError, match="tiny.pt is damaged .*delete it to start the run afresh"):
        train(TINY, small_set(), small_set(), tmp_path, tmp_path)


def test_a_loss_that_becomes_nan_keeps_the_epochs_before(tmp_path, monkeypatch):
    """The last good state stays; no checkpoint of the broken network appears."""
    def poisoned(*args, calls=[]):
        calls.append(1)
        loss, hits = step(*args)
        return (float("nan") if len(calls) == 6 else loss), hits
    step = bump.training.train_step
    monkeypatch.setattr("bump.training.train_step", poisoned)
    with pytest.raises(FloatingPointError, match="tiny: the loss became nan in epoch 1; lower peak_lr"):
        train(TINY, small_set(), small_set(), tmp_path, tmp_path)
    assert load_state(tmp_path / "tiny.pt", made_by(TINY, small_set()))["epoch"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-step00000.safetensors", "tiny.pt"]


def test_a_diverging_run_stops(tmp_path):
    with pytest.raises(FloatingPointError, match="lower peak_lr"):
        train(replace(TINY, peak_lr=1e8, epochs=20), small_set(), small_set(), tmp_path, tmp_path)
    assert not (tmp_path / "tiny.safetensors").exists()


@pytest.fixture(params=["200k", "4m"])
def small_disk(tmp_path, request):
    """A small file system, with 60 kB on it that are another run's; on the larger one, much room is left when a write fails."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", tmp_path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    yield tmp_path, replace(TINY, epochs=1, n_images=64, width=8 if request.param == "200k" else 36)
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk(small_disk):
    """The error names the file and the remedy; what was finished stays; with room, the run goes on."""
    folder, wide = small_disk
    (folder / "other.safetensors").write_bytes(b"x" * 60_000)
    with pytest.raises(OSError, match="the disk is full; make room") as caught:
        train(wide, small_set(), small_set(16), folder, folder)
    assert caught.value.errno == errno.ENOSPC and "tiny" in str(caught.value.filename)
    assert (folder / "other.safetensors").read_bytes() == b"x" * 60_000
    assert not list(folder.glob(".*partial*")) and not (folder / "tiny.safetensors").exists()
    subprocess.run(["mount", "-o", "remount,size=200m", folder], check=True)
    assert train(wide, small_set(), small_set(16), folder, folder).exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import bump.training
from test_training import TINY, small_set
step, calls = bump.training.train_step, []
def killed(*args):
    calls.append(1)
    if len(calls) == 7: os.kill(os.getpid(), signal.SIGKILL)
    return step(*args)
bump.training.train_step = killed
bump.training.train(TINY, small_set(), small_set(16), Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_killed_and_started_again_gives_the_same_bits(finished, tmp_path):
    """SIGKILL in the middle of the second of three epochs."""
    where = tmp_path / "checkpoints", tmp_path / "runs"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    threads = str(torch.get_num_threads())
    done = subprocess.run([sys.executable, "-c", KILLED, *where], cwd=ROOT, check=False,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads})
    assert done.returncode == -9 and load_state(where[1] / "tiny.pt", made_by(TINY, small_set()))["epoch"] == 1
    train(TINY, small_set(), small_set(16), *where)
    for kind in ("checkpoints/*.safetensors", "runs/*.nc"):
        names = sorted(p.name for p in finished.glob(kind))
        assert names == sorted(p.name for p in tmp_path.glob(kind)) and names
        assert all((finished / kind).with_name(n).read_bytes() == (tmp_path / kind).with_name(n).read_bytes() for n in names)


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_only_where_the_cpu_has_it(native, monkeypatch):
    """Emulated, it would take ten times as long as float32; the two must not be taken for the same arithmetic."""
    monkeypatch.setattr(bump.training, "computes_in_bfloat16", lambda device="cpu": native)
    network, images = build_seeded(lambda: cifar_resnet18(4), 0), load_images("noise", 2, 32).values
    half, full = (bump.training.logits(network, torch.from_numpy(images), precision) for precision in ("bfloat16", "float32"))
    assert torch.equal(half, full) != native
    assert bump.training.arithmetic()["bfloat16"] == ("native" if native else "none")


# --- make train, make ship ---


@pytest.fixture
def tiny_preset(tmp_path, monkeypatch):
    """The preset `cpu` with one tiny condition and two seeds, in a project of its own."""
    monkeypatch.setattr(bump.runner, "project_root", lambda: tmp_path)
    monkeypatch.setattr("bump.encoders.project_root", lambda: tmp_path)
    monkeypatch.setattr("bump.runner.load_cifar10", lambda train: small_set(256 if train else 16))
    family = {0.0: TINY, **{e: replace(TINY, name=f"l2-{e:g}", epsilon=e, checkpoints=()) for e in (.5, 1.0)}}
    tiny = replace(CPU, controlled=(TINY,), family=family, training_seeds=(0, 1), course=(0, .5, 1), n_small=2,
                   ladder=(1e-1, 1e1, 2), small_sets={"noise": ("noise", 0.0)})
    monkeypatch.setitem(bump.experiments.PRESETS, "cpu", tiny)
    monkeypatch.setattr("bump.runner.attack_record", quick_record)
    return tmp_path


def quick_record(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> object:
    """The part of `attack_record` that figures show, with two steps for its twenty."""
    radii = [0, .25, .5, 1]
    return xr.Dataset({"robust_accuracy": ("radius", robust_accuracy(network, images, labels, radii, steps=2, restarts=1))},
                      {"radius": radii})


def test_each_seed_has_its_folder_and_checksums(tiny_preset):
    train_preset("cpu", training_seeds=(1,))
    assert not (tiny_preset / "data/checkpoints/cpu/seed-0").exists()
    train_preset("cpu")
    folders = [tiny_preset / f"data/checkpoints/cpu/seed-{seed}" for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        assert read_checkpoint(folder / "tiny.safetensors")[1]["condition"]["seed"] == seed
        assert len((folder / "SHA256SUMS").read_text().splitlines()) == 5, "three of the run itself, two of the family"
    assert content(folders[0]) != content(folders[1])
    spec = checkpoint_spec(preset_named("cpu"), "tiny", 1)
    assert spec == "file:data/checkpoints/cpu/seed-1/tiny.safetensors?arch=cifar:resnet18-4"


def test_training_in_pieces(tiny_preset):
    train_preset("cpu", only=("l2-1",))
    folder = tiny_preset / "data/checkpoints/cpu"
    found = {str(p.relative_to(folder)) for p in folder.rglob("*.*")}
    assert found == {f"seed-{s}/l2-1.{kind}" for s in (0, 1) for kind in ("safetensors", "attacks.nc")}
    with pytest.raises(ValueError, match="preset cpu trains no l2-3; it trains tiny, l2-0.5, l2-1"):
        train_preset("cpu", only=("l2-1", "l2-3"))


def test_a_changed_checkpoint_stops_the_training_of_all(tiny_preset):
    train_preset("cpu", training_seeds=(1,))
    path = tiny_preset / "data/checkpoints/cpu/seed-1/tiny-step00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="tiny-step00000.safetensors differs from its checksum"):
        train_preset("cpu")
    assert not (tiny_preset / "data/checkpoints/cpu/seed-0").exists()


def test_nothing_is_shipped_that_is_not_trained(tiny_preset):
    shipped = tiny_preset / "data/checkpoints/clean.safetensors"
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(b"before")
    with pytest.raises(FileNotFoundError, match="lacks .*clean.*make train PRESET=cpu SEEDS=0"):
        ship()
    assert shipped.read_bytes() == b"before"


# --- measuring what was trained ---


def course(preset: str) -> object:
    """Figure 1c of the tiny preset, on two images of noise."""
    chosen = preset_named(preset)
    cells = figure_cells(chosen, 1)["c"]
    return stack([(c.labels, measure_cell(c, chosen, bump.runner.project_root() / "cells")) for c in cells])


def test_seeds_and_batch_statistics_are_measured(tiny_preset):
    train_preset("cpu")
    panel = course("cpu")
    assert dict(panel.sizes) == {"training_seed": 2, "statistics": 2, "checkpoint": 3, "image": 2, "direction": 1, "eta": 5}
    assert panel.training_seed.values.tolist() == [0, 1] and panel.fraction.values.tolist() == [0, .5, 1]
    linear = panel.linear.squeeze("direction", drop=True)
    assert (linear.isel(training_seed=0) != linear.isel(training_seed=1)).all()
    running, recalibrated = (linear.sel(statistics=name) for name in ("running", "recalibrated"))
    assert (running != recalibrated).all(), "untrained statistics (mean 0, variance 1) fit no images"


def test_the_record_holds_curves_and_accuracies_of_every_seed(tiny_preset):
    train_preset("cpu")
    record = training_record("cpu")["tiny"].to_dataset()
    assert dict(record.sizes) == {"training_seed": 2, "epoch": 3} and record.final_train_accuracy.dims == ("training_seed",)
    assert (record.loss.isel(training_seed=0) != record.loss.isel(training_seed=1)).any()
    runs = tiny_preset / "data/runs/cpu"
    shutil.copy(runs / "seed-0/tiny.nc", runs / "seed-1/tiny.nc")
    with pytest.raises(ValueError, match="tiny.nc is another run's"):
        training_record("cpu")
    (runs / "seed-1/tiny.nc").unlink()
    with pytest.raises(FileNotFoundError, match="tiny.nc is missing; `make train` writes it"):
        training_record("cpu")


def test_a_replaced_checkpoint_is_measured_anew(tiny_preset):
    """In one process, as in JupyterLab: the encoder in memory must not be taken for the file's."""
    train_preset("cpu", training_seeds=(0,))
    chosen = preset_named("cpu", training_seeds=(0,))
    cell = figure_cells(chosen, 1)["c"][0]
    first = measure_cell(cell, chosen, tiny_preset / "cells")
    save_checkpoint(build_seeded(lambda: cifar_resnet18(4), 7), tiny_preset / "data/checkpoints/cpu/seed-0/tiny-step00000.safetensors", {})
    second = measure_cell(cell, chosen, tiny_preset / "cells")
    fresh = response_profile(load_encoder(cell.encoder), load_images("noise", 2, 32), eta_ladder(*chosen.ladder), progress=False)
    assert not np.allclose(first.linear, second.linear) and np.allclose(second.linear, fresh.linear)


@pytest.mark.parametrize("wrong, told", [("seed-0/tiny.safetensors", "another condition"),
                                         ("seed-1/tiny-step00000.safetensors", "another step"), ("", "is missing")])
def test_check_looks_into_checkpoints(tiny_preset, wrong, told):
    """A file of the right name with another seed's network, another step's, or none at all."""
    train_preset("cpu")
    folder = tiny_preset / "data/checkpoints/cpu"
    target = folder / "seed-1/tiny.safetensors"
    target.unlink()
    if wrong:
        shutil.copy(folder / wrong, target)
    (folder / "seed-1/SHA256SUMS").unlink()
    problems = missing_inputs(preset_inputs(preset_named("cpu"), [1]))
    assert [p for p in problems if "seed-1/tiny.safetensors" in p and told in p], problems


# --- the adversarial family ---


def test_panels_of_the_family_carry_accuracies_under_attack(tiny_preset):
    """Each number is that of its own network."""
    train_preset("cpu")
    chosen = preset_named("cpu")
    panel = measure_panels(5, chosen)[""]
    assert panel.robust_accuracy.dims == ("epsilon", "radius") and panel.epsilon.values.tolist() == [0, .5, 1]
    for epsilon, spec in zip(panel.epsilon, panel.encoder_spec.values):
        again = quick_record(load_encoder(str(spec)).network, *(small_set(16)[0] / 255, small_set(16)[1])).robust_accuracy
        assert np.array_equal(panel.robust_accuracy.sel(epsilon=epsilon), again)
    ends = robust_coordinates(figure_cells(chosen, 2)["a_seeds"], chosen)["robust_accuracy"]
    assert dict(ends.sizes) == {"training_seed": 2, "epsilon": 2, "radius": 4}
    assert not robust_coordinates(figure_cells(chosen, 1)["c"], chosen), "the course of training isn't attacked"


def test_a_network_is_attacked_once(tiny_preset, monkeypatch):
    train_preset("cpu")
    before = content(tiny_preset)
    monkeypatch.setattr("bump.runner.attack_record", None)
    train_preset("cpu")
    assert content(tiny_preset) == before


def test_accuracies_of_other_weights_are_refused(tiny_preset):
    train_preset("cpu", training_seeds=(0,))
    folder = tiny_preset / "data/checkpoints/cpu/seed-0"
    shutil.copy(attacks_path(folder / "l2-1.safetensors"), attacks_path(folder / "l2-0.5.safetensors"))
    with pytest.raises(ValueError, match="l2-0.5.attacks.nc was measured on other weights than those of l2-0.5.safetensors; delete it"):
        train_preset("cpu", training_seeds=(0,))
    attacks_path(folder / "l2-1.safetensors").unlink()
    problems = missing_inputs(preset_inputs(preset_named("cpu", training_seeds=(0,)), [5]))
    assert len([p for p in problems if "l2-0.5.attacks.nc was measured on other weights" in p]) == 1
    assert len([p for p in problems if "l2-1.attacks.nc are missing" in p]) == 1


def test_the_record_of_robustness(tiny_preset):
    train_preset("cpu")
    record = robustness_record("cpu")
    assert dict(record["seed-0"].sizes) == {"epsilon": 3, "source_epsilon": 3, "radius": 4}
    assert dict(record["seed-1"].sizes) == {"epsilon": 2, "source_epsilon": 2, "radius": 4}
    assert record["seed-0/weights_sha256"].dims == ("epsilon",)


def test_a_lost_curve_is_written_again(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    curve = tmp_path / "copy/runs/tiny.nc"
    before = curve.read_bytes()
    curve.unlink()
    train(TINY, small_set(), small_set(16), tmp_path / "copy/checkpoints", tmp_path / "copy/runs")
    assert curve.read_bytes() == before
    curve.unlink()
    (tmp_path / "copy/runs/tiny.pt").unlink()
    with pytest.raises(ValueError, match="tiny.nc is lost; delete the checkpoint"):
        train(TINY, small_set(), small_set(16), tmp_path / "copy/checkpoints", tmp_path / "copy/runs")


def test_training_on_other_images_does_not_resume(tmp_path):
    pixels, labels = small_set()
    with pytest.raises(FloatingPointError):
        train(replace(TINY, peak_lr=1e8), (pixels, labels), small_set(), tmp_path, tmp_path)
    train(TINY, (pixels, labels), small_set(), tmp_path / "a", tmp_path / "a")
    (tmp_path / "a/tiny.safetensors").unlink()
    with pytest.raises(ValueError, match="tiny.pt was begun with train_set"):
        train(TINY, (255 - pixels, labels), small_set(), tmp_path / "a", tmp_path / "a")


def test_a_step_checkpoint_of_another_run_is_not_adopted(finished, tmp_path):
    tmp_path.joinpath("tiny-step00006.safetensors").write_bytes((finished / "checkpoints/tiny-step00006.safetensors").read_bytes())
    with pytest.raises(ValueError, match="tiny-step00006.safetensors was trained under another condition"):
        train(replace(TINY, seed=3), small_set(), small_set(), tmp_path, tmp_path / "runs")
