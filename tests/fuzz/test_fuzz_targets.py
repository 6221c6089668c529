"""Inputs that fuzzing has found, and a short look for more."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.targets import SEEDS, TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FOUND = Path(__file__).parent / "found"
KEPT = [
    pytest.param(path.parent.name, path, id=f"{path.parent.name}-{path.name}")
    for path in sorted(FOUND.glob("*/*"))
]


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@pytest.mark.parametrize(("name", "path"), KEPT)
def test_inputs_found_before(name: str, path: Path) -> None:
    TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_changed_seeds(name: str, data: st.DataObject) -> None:
    """A seed with bytes replaced, cut out or put in."""
    seed = bytearray(data.draw(st.sampled_from(SEEDS[name])))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(seed)))
        taken = data.draw(st.integers(0, 8))
        seed[at : at + taken] = data.draw(st.binary(max_size=8))
    TARGETS[name](bytes(seed))
