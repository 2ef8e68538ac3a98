"""What `make` promises: failures leave nothing that looks finished, and nothing is done twice."""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]

# A stand-in for a figure notebook: the same parameters, outputs in the same places, but nothing measured.
STANDIN = """
from bump.runner import figure_path, output_path
data, path = figure_path(3, preset), output_path(3, preset)
tables = path.with_name("fig3.csv"), path.with_name("fig3_claims.csv")  # the first is no target of make
for file in (data, path.with_suffix(".pdf"), path.with_suffix(".png"), *tables):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("done")
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the project's code in which Figure 3 is a stand-in."""
    for name in ("bump", "nbs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    write_figure3(tmp_path, STANDIN)
    return tmp_path


def write_figure3(project: Path, source: str):
    """Replace the body of nbs/fig3.ipynb, keeping its cell of parameters."""
    path = project / "nbs" / "fig3.ipynb"
    notebook = nbformat.read(path, 4)
    parameters = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    notebook.cells = [*parameters, nbformat.v4.new_code_cell(source)]
    nbformat.write(notebook, path)


def environment() -> dict:
    """The environment, with this test's own interpreter first and without an outer make's settings."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS")) and k not in ("SEEDS", "PRESET", "ENV")}
    return {**ours, "PATH": path}


def heed_interrupts():
    """A background job may have inherited that SIGINT is ignored; a terminal's job has not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def make(project: Path, *words: str) -> subprocess.CompletedProcess:
    """Run make in the project."""
    return subprocess.run(["make", "ENV=current", *words], cwd=project, capture_output=True, text=True, env=environment())


def results(project: Path) -> list[str]:
    """Names of visible results of the smoke preset."""
    return sorted(p.name for d in ("figures/smoke", "data/smoke") for p in (project / d).glob("fig*"))


def test_a_figure_is_made_once(project):
    first = make(project, "fig3", "PRESET=smoke")
    assert first.returncode == 0, first.stderr
    assert results(project) == ["fig3.csv", "fig3.ipynb", "fig3.nc", "fig3.pdf", "fig3.png", "fig3_claims.csv"]
    assert "Nothing to be done" in make(project, "fig3", "PRESET=smoke").stdout
    (project / "data/smoke/fig3.nc").unlink()
    assert make(project, "-q", "fig3", "PRESET=smoke").returncode == 1, "a deleted result must be made again"


def test_parameters_reach_the_notebook(project):
    write_figure3(project, STANDIN + "\nassert preset == 'smoke'\n")
    assert make(project, "fig3", "PRESET=smoke").returncode == 0


def test_seeds_reach_the_notebook_and_have_a_folder(project):
    write_figure3(project, STANDIN.replace("preset)", "preset, training_seeds=training_seeds)") + "\nassert training_seeds == [0, 1]\n")
    assert make(project, "fig3", "PRESET=smoke").returncode != 0, "without SEEDS the preset's own seeds count"
    made = make(project, "fig3", "PRESET=smoke", "SEEDS=0 1")
    assert made.returncode == 0, made.stderr
    assert (project / "figures/smoke/seeds-0-1/fig3.pdf").exists() and (project / "data/smoke/seeds-0-1/fig3.nc").exists()
    assert results(project) == [], "the preset's own results are another thing"


@pytest.mark.parametrize("seeds", ["x", "0;1", "-1"])
def test_seeds_that_are_none(project, seeds):
    failed = make(project, "fig3", f"SEEDS={seeds}")
    assert failed.returncode != 0 and f"SEEDS is '{seeds}'" in failed.stderr


@pytest.mark.parametrize("source", ["raise RuntimeError('early')", STANDIN + "\nraise RuntimeError('late')"])
def test_a_failing_notebook_fails_and_leaves_nothing(project, source):
    assert make(project, "fig3", "PRESET=smoke").returncode == 0
    write_figure3(project, source)
    failed = make(project, "fig3", "PRESET=smoke")
    assert failed.returncode != 0 and "figure 3 failed" in failed.stderr
    assert results(project) == []


def test_an_interrupt_after_the_last_file_leaves_nothing(project):
    """Ctrl-C reaches the whole process group, so the recipe's shell must clean up by itself."""
    write_figure3(project, STANDIN + "\nimport time\ntime.sleep(60)\n")
    running = subprocess.Popen(["make", "ENV=current", "fig3", "PRESET=smoke"], cwd=project, env=environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               preexec_fn=heed_interrupts)
    deadline = time.monotonic() + 120
    while "fig3_claims.csv" not in results(project) and time.monotonic() < deadline:
        time.sleep(.05)
    assert "fig3_claims.csv" in results(project), "the stand-in never wrote its files"
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(60) != 0 and results(project) == []


@pytest.mark.parametrize("preset", ["fast", "reference", "checkpoints", ""])
def test_an_unknown_preset_fails_with_its_name(project, preset):
    """Above all for `make clean`, which deletes the folders of that name."""
    for target in ("fig3", "clean"):
        failed = make(project, target, f"PRESET={preset}")
        assert failed.returncode != 0 and f"unknown preset '{preset}'" in failed.stderr
    assert (project / "nbs").is_dir() and not (project / "figures").exists()


def test_make_alone_lists_the_targets(project):
    listed = make(project).stdout
    targets = ("figures", "fig3", "list", "check", "render", "reference", "train", "ship", "export", "test",
               "smoke", "benchmark", "lab", "clean")
    assert all(f"make {target}" in listed for target in targets)
