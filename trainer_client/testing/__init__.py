"""A FakeService and made-up data for the tests of clients and trainers, without Ray and files.

Needs grpcio-health-checking besides the base install (the `test` extra has it).
"""

from __future__ import annotations

from trainer_client.testing.checks import assert_resume_identical, assert_same_batches, read_all
from trainer_client.testing.plan import FAKE_PLAN
from trainer_client.testing.samples import FakeSample, made_up_samples
from trainer_client.testing.service import FakeService
from trainer_client.testing.steps import arrival_order, balanced
from trainer_client.testing.synthetic import (
    FAKE_INFO,
    FakePack,
    padding_pack,
    synthetic_packs,
    with_hole,
)

__all__ = [
    "FAKE_INFO",
    "FAKE_PLAN",
    "FakePack",
    "FakeSample",
    "FakeService",
    "arrival_order",
    "assert_resume_identical",
    "assert_same_batches",
    "balanced",
    "made_up_samples",
    "padding_pack",
    "read_all",
    "synthetic_packs",
    "with_hole",
]
