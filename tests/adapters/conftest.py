"""A service for the trainers' examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.trainer_examples import PACKS

from trainer_client.testing import FakeService, synthetic_packs


@pytest.fixture
def endpoint() -> Iterator[str]:
    with FakeService(synthetic_packs(PACKS)) as service:
        yield service.endpoint
