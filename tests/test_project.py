"""The project's own rules: pins, settings, figure notebooks, floors of the library, documentation, clean text files."""
import ast
import csv
import json
import re
import subprocess
import sys
import tokenize
from configparser import ConfigParser
from pathlib import Path

import pytest
import xarray as xr
import yaml

import bump

ROOT = Path(__file__).resolve().parents[1]
FLOORS = [{"response"}, {"store", "peaks"}, {"files"}, {"images"}, {"encoders"}, {"training"}, {"experiments"}, {"runner"},
          {"claims", "plots"}]  # from the ground up
WITHOUT_TORCH = ["store", "peaks", "claims", "plots"]
MODULES = sorted(p for p in (ROOT / "bump").glob("*.py") if not p.stem.startswith("_"))
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
FIGURES = sorted((ROOT / "nbs").glob("fig[1-5].ipynb"))


def named(paths):
    "Parametrise over files, under their names."
    return pytest.mark.parametrize("path", paths, ids=lambda p: p.stem)


def cells(path):
    "Cells of a notebook as (type, source, tags, raw dict)."
    return [(c["cell_type"], "".join(c["source"]), c["metadata"].get("tags", []), c)
            for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def settings():
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "settings.ini")
    return config["DEFAULT"]


# --- pins and settings ---


def test_every_requirement_is_pinned():
    lines = [s.strip() for s in (ROOT / "requirements.txt").read_text().splitlines()]
    lines = [s for s in lines if s and not s.startswith("#")]
    loose = [s for s in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", s)]
    assert lines and not loose, f"requirements.txt: write name==version in {loose}"
    names = [re.sub("[-_.]+", "-", s.split("==")[0].lower()) for s in lines]
    assert len(set(names)) == len(names), "requirements.txt names a package twice"


def test_conda_environment_defers_to_requirements():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = f"python={settings()['min_python']}"
    assert environment["dependencies"] == [python, "pip", {"pip": ["-r requirements.txt"]}]


def test_settings_repeat_the_runtime_pins():
    lines = [s.strip() for s in (ROOT / "requirements.txt").read_text().splitlines() if s.strip() and s[0] != "#"]
    development = {"pytest", "ruff", "nbformat", "PyYAML", "dill"}
    assert settings()["requirements"].split() == [s for s in lines if s.split("==")[0] not in development]


@pytest.mark.parametrize("name, value", [("allowed_cell_metadata_keys", "tags"), ("tst_flags", "notest"),
                                         ("jupyter_hooks", "False"), ("update_pyproject", "False"),
                                         ("custom_sidebar", "True"),
                                         ("version", bump.__version__)])
def test_nbdev_settings(name, value):
    assert settings()[name] == value


# --- figure notebooks ---


def test_five_figures():
    assert [p.stem for p in FIGURES] == [f"fig{n}" for n in range(1, 6)]


def papermill_parameters():
    "Names that the Makefile passes to papermill with -p or -y."
    recipes = (ROOT / "Makefile").read_text().replace("\\\n", " ").splitlines()
    calls = [line for line in recipes if "$(PAPERMILL)" in line or line.lstrip().startswith("KNOBS")]
    return {name for line in calls for name in re.findall(r" -[py] '?(\w+)", line)}


@named(FIGURES)
def test_figure_has_one_cell_of_parameters(path):
    found = [source for kind, source, tags, _ in cells(path) if kind == "code" and "parameters" in tags]
    assert len(found) == 1
    assigned = {t.id for node in ast.parse(found[0]).body if isinstance(node, ast.Assign) for t in node.targets}
    assert {"preset", "training_seeds"} <= papermill_parameters() <= assigned


@named(FIGURES)
def test_figure_is_skipped_by_nbdev_test(path):
    kind, source, _, _ = cells(path)[0]
    lines = source.splitlines()
    assert kind == "raw" and lines[0] == lines[-1] == "---" and "skip_exec: true" in lines


# --- every notebook ---


@named(NOTEBOOKS)
def test_notebook_holds_no_results(path):
    code = [cell for kind, _, _, cell in cells(path) if kind == "code"]
    assert code and not any(c["outputs"] or c["execution_count"] is not None for c in code)


@named(NOTEBOOKS)
def test_notebook_cells_are_short_and_explicit(path):
    for kind, source, _, _ in cells(path):
        if kind != "code":
            continue
        assert len(source.splitlines()) <= 40, f"a cell of {len(source.splitlines())} lines: {source[:80]!r}"
        python = "\n".join(line for line in source.splitlines() if not line.startswith("%"))  # no IPython magics
        imports = [n for n in ast.walk(ast.parse(python)) if isinstance(n, ast.ImportFrom)]
        assert not [n.module for n in imports if any(alias.name == "*" for alias in n.names)]


# --- modules ---


def imported_modules(path):
    "Modules of this package that a module imports, at its top or inside a function."
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            base = "bump." * (node.level > 0) + (node.module or "")
            names = [f"{base.rstrip('.')}.{n}" for n in names] if base.rstrip(".") == "bump" else [base]
        yield from (n.split(".")[1] for n in names if n.startswith("bump."))


def test_every_module_has_a_floor():
    assert {p.stem for p in MODULES} == set.union(*FLOORS)


@named(MODULES)
def test_module_imports_only_lower_floors(path):
    floor = next(n for n, names in enumerate(FLOORS) if path.stem in names)
    assert set(imported_modules(path)) <= set().union(*FLOORS[:floor])


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_module_needs_no_torch(module):
    code = f"import sys, bump.{module}; sys.exit('torch' in sys.modules and 'torch was imported')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def public_definitions(path):
    "Functions and classes of __all__, with their syntax trees."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = next(ast.literal_eval(n.value) for n in tree.body
                  if isinstance(n, ast.Assign) and n.targets[0].id == "__all__")
    kinds = ast.FunctionDef, ast.ClassDef
    return {n.name: n for n in tree.body if isinstance(n, kinds) and n.name in public}


@named(MODULES)
def test_public_names_have_docstrings(path):
    assert not [name for name, node in public_definitions(path).items() if not ast.get_docstring(node)]


@named(MODULES)
def test_public_parameters_are_documented(path):
    with tokenize.open(path) as file:
        commented = {t.start[0] for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT}
    bare = []
    for name, node in public_definitions(path).items():
        if isinstance(node, ast.FunctionDef):
            a = node.args
            for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
                if arg.lineno not in commented:
                    bare.append(f"{name}({arg.arg})")
    assert not bare, f"{len(bare)} parameters without a comment"


# --- the README ---


@pytest.mark.parametrize("path", sorted((ROOT / "figures/reference").glob("*/fig?_claims.csv")),
                         ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_readme_tells_the_committed_verdicts(path):
    """Word for word, so that no number in it is older than the data sets."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert f"| {row['verdict']} | {row['evidence']} |" in text


# --- the committed data sets ---


@pytest.mark.parametrize("path", sorted((ROOT / "data/reference").glob("*/*.nc")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_networks_tell_how_to_build_them_again(path):
    """Their texts are whole (xarray cut them once) and tell a checksum; see data/README.md on shortened ones."""
    with xr.open_datatree(path) as tree:
        pairs = [(str(spec), json.loads(str(text))) for group in tree.subtree if "encoder_provenance" in group.coords
                 for spec, text in zip(*(values.values.ravel() for values in xr.broadcast(group.encoder_spec, group.encoder_provenance)))]
    for spec, about in pairs:
        assert spec == about["spec"]
        trained_here = about.get("weights") == "trained" and "training" in about
        assert not trained_here or re.fullmatch("[0-9a-f]{36,64}", about.get("weights_sha256_begins", about.get("weights_sha256")))


# --- text files ---


def text_files():
    "Every file that git tracks or would track, with its text; binary files are left out."
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git, or not a git checkout")
    for path in (ROOT / name for name in listed.stdout.split("\0") if name):
        try:
            yield path, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # binary, or deleted but not committed yet
            continue


def test_no_absolute_paths():
    private = re.compile(r"(?<![\w.-])(?:/(?:home|work|root|Users)/|[A-Z]:\\+Users\\)\w")
    found = {str(path.relative_to(ROOT)): private.findall(text) for path, text in text_files()}
    assert not {name: paths for name, paths in found.items() if paths}
