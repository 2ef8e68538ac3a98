"""Package metadata: everything is read from settings.ini, so that it stands in one place."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

config = ConfigParser(interpolation=None)
config.read(Path(__file__).with_name("settings.ini"))
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    author=cfg["author"],
    license="Apache-2.0",
    packages=[cfg["lib_path"]],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
)
