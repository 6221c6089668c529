"""What the image holds, in a virtual environment here: the Dockerfile's own build steps."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")


def build_image_venv(folder: Path) -> Path:
    """The build stage's RUN lines, word for word, with folders of our own in place of its; takes
    a minute or two, and an index of packages."""
    venv, source = folder / "venv", folder / "build"
    source.mkdir()
    for name in ("dataservice", "trainer_client"):
        without_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=without_caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(DOCKER, source / "deploy" / "docker")
    build_stage = DOCKERFILE.split("\nFROM ")[1].replace("\\\n", "")
    steps = re.findall(r"^RUN (.+)$", build_stage, re.MULTILINE)
    assert len(steps) == 3
    for step in steps:
        mine = re.sub(r"^python ", f"{sys.executable} ", step.replace("/opt/venv", str(venv)))
        subprocess.run(["bash", "-ec", mine], cwd=source, check=True, timeout=600)
    return venv


def image_environment(venv: Path, **more: str) -> dict[str, str]:
    """The Dockerfile's ENV, with `venv` in its place."""
    service_stage = DOCKERFILE.split("\nFROM ")[2].replace("\\\n", "")
    (line,) = re.findall(r"^ENV (.+)$", service_stage, re.MULTILINE)
    given = dict(pair.split("=", 1) for pair in line.split())
    return {name: value.replace("/opt/venv", str(venv)) for name, value in given.items()} | more
