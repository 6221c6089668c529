"""The image holds what the service needs, in the versions that are tested, and no trainer's own.

No image can be built here; test_pods runs its steps in a virtual environment, and what they made.
"""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

from support.image import DOCKER, DOCKERFILE, ROOT

from dataservice import __version__


def requirements_script() -> ModuleType:
    path = DOCKER / "service_requirements.py"
    spec = importlib.util.spec_from_file_location("service_requirements", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    name_of = requirements_script().name_of
    return {name_of(name): pin for name, _, pin in (line.partition("==") for line in lines)}


def test_the_image_has_every_requirement_in_the_tested_version() -> None:
    held, tested = pins(DOCKER / "service.lock"), pins(ROOT / "requirements.lock")
    script = requirements_script()
    wanted = {script.name_of(line) for line in script.service_requirements()}
    assert wanted <= held.keys()
    assert {n: held[n] for n in held & tested.keys()} == {
        n: tested[n] for n in held & tested.keys()
    }
    assert len(held.keys() & tested.keys()) > 50


def test_the_image_has_no_torch_no_cuda_and_no_test_tools() -> None:
    held = pins(DOCKER / "service.lock").keys()
    assert not [name for name in held if name.startswith(("torch", "nvidia", "cuda", "triton"))]
    assert not held & {"pytest", "moto", "boto3", "mypy", "ruff", "pillow-simd"}


def test_what_is_copied_into_the_build_is_let_in() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    let_in = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert len(sources) >= 7
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in let_in), source
    for secret in (".venv", ".git", "tests", "run.yaml", "token"):
        assert not any(fnmatch(secret, name) for name in let_in)


def test_image_and_manifests_name_one_user_and_version() -> None:
    version = __version__.partition(".dev")[0]
    assert f"ARG VERSION={version}\n" in DOCKERFILE
    assert f"-t dataservice:{version} " in DOCKERFILE or f"-t dataservice:{version} ." in DOCKERFILE
    assert "\nUSER 10001:10001\n" in DOCKERFILE
