"""What is installed: Python, the packages of the service, Ray and how it is protected, decoders.

Invariants: Ray is not imported, and nothing is started; no secret is printed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping

from dataservice import __version__
from dataservice.cli.doctor_finding import Finding, ok, problem, warning
from dataservice.errors import ConfigError

PYTHONS = ((3, 11), (3, 13))
DISTRIBUTION = "vlm-dataservice"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*(?:>=([0-9.]+))?")
RAY = (2, 52)


def software_findings() -> list[Finding]:
    return [
        python(sys.version_info[:3]),
        packages(_requirements(), _installed),
        ray(_installed("ray"), os.environ),
        decoders(),
        compiled(),
    ]


def python(version: tuple[int, ...]) -> Finding:
    words = f"{'.'.join(map(str, version))}; dataservice {__version__}"
    least, most = PYTHONS
    if version[:2] < least or version[:2] > most:
        shown = " to ".join(".".join(map(str, bound)) for bound in PYTHONS)
        return problem("Python", words, f"use Python {shown}")
    return ok("Python", words)


# ---- packages ------------------------------------------------------------------------------------


def _requirements() -> list[str]:
    """Of the service, as installed; empty where it runs from a checkout that is not."""
    try:
        wanted = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        requirement.partition(";")[0].strip()
        for requirement in wanted
        if "extra ==" not in requirement or re.search(r"extra == ['\"]service['\"]", requirement)
    ]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages(requirements: list[str], installed: Callable[[str], str | None]) -> Finding:
    """`installed`: name -> version or None."""
    if not requirements:
        return warning(
            "packages",
            "the package is not installed, so what it needs is not known",
            "pip install '.[service]' in the repository",
        )
    lacking, old = [], []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        assert match is not None
        name, least = match.groups()
        found = installed(name)
        if found is None:
            lacking.append(name)
        elif least is not None and _numbers(found) < _numbers(least):
            old.append(f"{name} {found} (at least {least})")
    if lacking or old:
        words = [f"lacking: {', '.join(lacking)}"] * bool(lacking)
        words += [f"too old: {', '.join(old)}"] * bool(old)
        return problem("packages", "; ".join(words), "pip install '.[service]' in the repository")
    return ok("packages", f"all {len(requirements)} that the service needs are there")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


# ---- Ray -----------------------------------------------------------------------------------------


def ray(version: str | None, environment: Mapping[str, str]) -> Finding:
    if version is None:
        return problem("Ray", "not installed", "pip install '.[service]' in the repository")
    if _numbers(version) < RAY:
        least = ".".join(map(str, RAY))
        return problem("Ray", version, f"install {least} or later, the same on every node")
    mode = environment.get("RAY_AUTH_MODE")
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    if mode not in (None, "token"):
        return warning(
            "Ray",
            f"{version}; RAY_AUTH_MODE is {mode}: who reaches the cluster runs code on it",
            "RAY_AUTH_MODE=token on every node, with the same token at RAY_AUTH_TOKEN_PATH",
        )
    if path is not None and "RAY_AUTH_TOKEN" not in environment:
        return _token(version, path)
    if mode is None:
        return ok(
            "Ray",
            f"{version}; a cluster that serve starts is for a token of its own, one that it "
            "joins wants RAY_AUTH_MODE=token here, too",
        )
    return ok("Ray", f"{version}; for those who have the token")


def _token(version: str, path: str) -> Finding:
    try:
        with open(path, "rb") as file:
            text = file.read(4096).strip()
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        return problem(
            "Ray",
            f"{version}; RAY_AUTH_TOKEN_PATH {path} cannot be read ({error.strerror}), with which "
            "Ray does not start",
            "make the file with `openssl rand -hex 32`, or unset the variable",
        )
    if not text:
        remedy = "put the cluster's token into it"
        return problem("Ray", f"{version}; RAY_AUTH_TOKEN_PATH {path} is empty", remedy)
    if mode & 0o077:
        return warning(
            "Ray",
            f"{version}; the token at {path} may be read by others (mode {mode:04o})",
            f"chmod 600 {path}",
        )
    return ok("Ray", f"{version}; for those who have the token at {path}")


# ---- decoders ------------------------------------------------------------------------------------


def decoders() -> Finding:
    """They are run once, on small pictures."""
    try:
        from dataservice.pipeline.images import check_decoders, decoder_fingerprint

        check_decoders()
        return ok("decoders", decoder_fingerprint())
    except ConfigError as error:
        return problem("decoders", str(error), "see there; the same on every node")
    except ImportError as error:
        remedy = "pip install '.[service]' in the repository"
        return problem("decoders", f"cannot be loaded: {error}", remedy)


def compiled() -> Finding:
    version = _installed("numba")
    if version is None:
        return warning(
            "planning",
            "numba is not installed: large plans are made in pure numpy",
            "pip install numba, which plans the same and faster",
        )
    return ok("planning", f"compiled with numba {version}")
