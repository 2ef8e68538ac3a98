"""Training under bad conditions: a clear error, nothing overwritten, no finished run lost; and the same bits after a kill."""
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bump.runner
from bump.encoders import read_checkpoint
from bump.experiments import CPU, checkpoint_spec, preset_named
from bump.runner import ship, train_preset
from bump.training import Condition, load_state, run_key, train

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
    train(TINY, small_set(), small_set(), folder / "checkpoints", folder / "runs")
    return folder


def test_a_finished_run_is_not_trained_again(finished, monkeypatch):
    before = content(finished)
    monkeypatch.setattr("bump.training.train_epoch", None)
    train(TINY, small_set(), small_set(), finished / "checkpoints", finished / "runs")
    assert content(finished) == before


@pytest.mark.parametrize("change", [{"width": 8}, {"seed": 1}, {"blur": 1.0}, {"n_images": 128}])
def test_a_checkpoint_of_another_run_is_not_overwritten(finished, change):
    before = content(finished)
    with pytest.raises(ValueError, match="tiny.safetensors was trained under another condition"):
        train(replace(TINY, **change), small_set(), small_set(), finished / "checkpoints", finished / "runs")
    with pytest.raises(ValueError, match="tiny.pt belongs to another condition; delete it"):
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
    assert load_state(tmp_path / "tiny.pt", run_key(TINY))["epoch"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny-step00000.safetensors", "tiny.pt"]


def test_a_diverging_run_stops(tmp_path):
    with pytest.raises(FloatingPointError, match="lower peak_lr"):
        train(replace(TINY, peak_lr=1e8, epochs=20), small_set(), small_set(), tmp_path, tmp_path)
    assert not (tmp_path / "tiny.safetensors").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB, with 60 kB on it that are another run's."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", tmp_path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk(small_disk):
    """The error names the file and the remedy; what was finished stays; with room, the run goes on."""
    (small_disk / "other.safetensors").write_bytes(b"x" * 60_000)
    wide = replace(TINY, width=8)
    with pytest.raises(OSError, match="the disk is full; make room") as caught:
        train(wide, small_set(), small_set(), small_disk, small_disk)
    assert caught.value.errno == errno.ENOSPC and "tiny" in str(caught.value.filename)
    assert (small_disk / "other.safetensors").read_bytes() == b"x" * 60_000
    assert not list(small_disk.glob(".*partial*")) and not (small_disk / "tiny.safetensors").exists()
    subprocess.run(["mount", "-o", "remount,size=10m", small_disk], check=True)
    assert train(wide, small_set(), small_set(), small_disk, small_disk).exists()


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
bump.training.train(TINY, small_set(), small_set(), Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_killed_and_started_again_gives_the_same_bits(finished, tmp_path):
    """SIGKILL in the middle of the second of three epochs."""
    where = tmp_path / "checkpoints", tmp_path / "runs"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    threads = str(torch.get_num_threads())
    done = subprocess.run([sys.executable, "-c", KILLED, *where], cwd=ROOT, check=False,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads})
    assert done.returncode == -9 and load_state(where[1] / "tiny.pt", run_key(TINY))["epoch"] == 1
    train(TINY, small_set(), small_set(), *where)
    for kind in ("checkpoints/*.safetensors", "runs/*.nc"):
        names = sorted(p.name for p in finished.glob(kind))
        assert names == sorted(p.name for p in tmp_path.glob(kind)) and names
        assert all((finished / kind).with_name(n).read_bytes() == (tmp_path / kind).with_name(n).read_bytes() for n in names)


# --- make train, make ship ---


@pytest.fixture
def tiny_preset(tmp_path, monkeypatch):
    """The preset `cpu` with one tiny condition and two seeds, in a project of its own."""
    monkeypatch.setattr(bump.runner, "project_root", lambda: tmp_path)
    monkeypatch.setattr("bump.encoders.project_root", lambda: tmp_path)
    monkeypatch.setattr("bump.runner.load_cifar10", lambda train: small_set())
    tiny = replace(CPU, controlled=(TINY,), family={}, training_seeds=(0, 1))
    monkeypatch.setitem(bump.experiments.PRESETS, "cpu", tiny)
    return tmp_path


def test_each_seed_has_its_folder_and_checksums(tiny_preset):
    train_preset("cpu", training_seeds=(1,))
    assert not (tiny_preset / "data/checkpoints/cpu/seed-0").exists()
    train_preset("cpu")
    folders = [tiny_preset / f"data/checkpoints/cpu/seed-{seed}" for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        assert read_checkpoint(folder / "tiny.safetensors")[1]["condition"]["seed"] == seed
        assert len((folder / "SHA256SUMS").read_text().splitlines()) == 3
    assert content(folders[0]) != content(folders[1])
    spec = checkpoint_spec(preset_named("cpu"), "tiny", 1)
    assert spec == "file:data/checkpoints/cpu/seed-1/tiny.safetensors?arch=cifar:resnet18-4"


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
