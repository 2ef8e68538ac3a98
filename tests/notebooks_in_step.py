"""Fail unless bump/ is what nbdev exports from nbs/, and the notebooks are clean. Works on a copy, so nothing is changed."""
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NBDEV = Path(sys.executable).parent


def differing(folder: Path, copy: Path, pattern: str) -> list[str]:
    """Names that exist on one side only, or differ."""
    names = {p.name for side in (folder, copy) for p in side.glob(pattern)}
    return sorted(n for n in names if not (folder / n).is_file() or not (copy / n).is_file()
                  or not filecmp.cmp(folder / n, copy / n, shallow=False))


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        shutil.copy(ROOT / "settings.ini", copy)
        for name in ("nbs", "bump"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
        for command in ("nbdev_clean", "nbdev_export"):
            subprocess.run([NBDEV / command], cwd=copy, check=True, env={**os.environ, "PYTHONPATH": temporary})
        problems = [f"bump/{n} is not what the notebooks export: run nbdev_export"
                    for n in differing(ROOT / "bump", copy / "bump", "*.py")]
        problems += [f"nbs/{n} is not clean: run nbdev_clean" for n in differing(ROOT / "nbs", copy / "nbs", "*.ipynb")]
    print("\n".join(problems) or "notebooks and modules are in step")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
