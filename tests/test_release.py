"""What is released: both archives hold what they should, and the wheel works in an environment that
has nothing else."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

import dataservice

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dataservice", "trainer_client")
CLIENT = """
import sys
import trainer_client, trainer_client.redistribute, trainer_client.timing, trainer_client.vision
import trainer_client.examples.train_tiny_vlm
import trainer_client.adapters.dummy, trainer_client.adapters.internvl
import trainer_client.adapters.padded, trainer_client.adapters.qwen_vl
heavy = [name for name in ("ray", "pydantic", "pyarrow", "PIL", "aiohttp") if name in sys.modules]
assert not heavy, heavy
print(trainer_client.__file__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What it prints, both streams."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, the wheel built from the other one, as `make dist` does it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def files_below(*folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def test_the_wheel_holds_both_packages_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        names = set(wheel.namelist())
        info = f"vlm_dataservice-{dataservice.__version__}.dist-info"
        metadata = BytesParser().parsebytes(wheel.read(f"{info}/METADATA"))
    assert {name for name in names if not name.startswith(info)} == files_below(*PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert metadata["Version"] == dataservice.__version__
    assert {"service", "s3", "tracing"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_source_archive_holds_what_tests_and_guides_need(dist: Path) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = files_below(*PACKAGES, "benchmarks", "deploy", "tests", ".ci", ".github")
    assert wanted - names == set()
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "requirements.lock"} <= names


def test_the_version_stands_in_one_place() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text and "\nversion =" not in text
    released = dataservice.__version__.partition(".dev")[0]
    assert f"\n## {released}" in (ROOT / "CHANGELOG.md").read_text()
    files = (path for path in (ROOT / "deploy").rglob("*") if path.is_file())
    named = (path.read_text() for path in files if path.suffix != ".png")
    images = set(re.findall(r"(?<![\w-])dataservice:(\d+\.[\w.]*)", "".join(named)))
    assert images <= {released}, "images of the manifests: the version that comes"


def interpreter(minor: int) -> str:
    """Of Python 3.`minor`; skips where this machine has none."""
    name = f"python3.{minor}"
    by_pyenv = glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/{name}"))
    for path in [shutil.which(name), *by_pyenv]:
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    pytest.skip(f"no {name} on this machine")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_the_wheel_works_in_a_clean_environment(minor: int, dist: Path, tmp_path: Path) -> None:
    """First as a trainer has it, then with the service; versions are those of requirements.lock."""
    python = tmp_path / "venv/bin/python"
    wheel, demo = only(dist, "*.whl"), ROOT / "deploy/demo.yaml"
    run(interpreter(minor), "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "requirements.lock"]
    try:
        run(*pip, wheel, cwd=tmp_path)
        assert str(tmp_path) in run(python, "-c", CLIENT, cwd=tmp_path)
        without = subprocess.run(
            [tmp_path / "venv/bin/dataservice", "--version"], capture_output=True, text=True
        )
        assert without.returncode == 2 and "pip install '.[service]'" in without.stderr
        run(*pip, f"{wheel}[service]", cwd=tmp_path)
        run(python, "-m", "pip", "check", cwd=tmp_path)
        command = [tmp_path / "venv/bin/dataservice"]
        assert dataservice.__version__ in run(*command, "--version", cwd=tmp_path)
        plan = ["plan", demo, "--steps", "0:2", "--dp-size", "2", "--micro-steps", "4"]
        assert "step" in run(*command, *plan, cwd=tmp_path, DEMO_DIR=str(tmp_path / "demo"))
    finally:
        shutil.rmtree(tmp_path / "venv")  # gigabytes
