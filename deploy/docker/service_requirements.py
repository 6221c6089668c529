"""Prints what the service's image installs, one requirement a line: the base install without torch,
which the service does not import, its extras, and Ray with its dashboard and autoscaler.

Invariants: reads pyproject.toml alone; needs nothing but the standard library of Python 3.11.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXTRAS = ("service", "s3", "tracing")
LEFT_OUT = {"torch"}
RAY = "ray[default]"
"""The jobs, health checks and autoscaler that KubeRay asks Ray for come with this extra alone."""


def service_requirements(pyproject: Path = PYPROJECT) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
    ]
    return [*(line for line in wanted if name_of(line) not in LEFT_OUT), RAY]


def name_of(requirement: str) -> str:
    """As pip compares names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


if __name__ == "__main__":
    print("\n".join(service_requirements()))
