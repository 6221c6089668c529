"""A record that ends whatever worker renders it: its pack becomes holes, and nothing else does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.test_bad_pictures import make_source
from support.demo_config import demo_settings, write_config
from support.harness import Readers, read_ranks
from support.proof import clean_run, longest_gap, nothing_leaks, prove_same
from support.service_processes import ServiceProcesses

from dataservice.config import Config, load_config
from dataservice.core.suspicion import ALONE_ENDS
from dataservice.errors import RecordError
from dataservice.indexing import update_index

TIMEOUT_S = 200.0


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = demo_settings(
        tmp_path,
        plan={"pack_length": 256, "lanes": 2, "window": 20, "epochs": 1},
        staging={"cache_dir": None, "budget_bytes": "1 GiB"},
        errors={"max_hole_share": 0.2},
    )
    settings["sources"] = [make_source(tmp_path / "data")]
    config = load_config(str(write_config(tmp_path, settings)))
    Path(config.index_dir).mkdir(parents=True)
    update_index(config)
    return config


def read(endpoint: str) -> Readers:
    return read_ranks(
        endpoint, job="test", dp_size=2, micro_steps=1, steps=None, timeout_s=TIMEOUT_S
    )


def poisoned_pack(clean: Readers) -> tuple[str, Sequence[str]]:
    """Id and sample keys of one in the middle."""
    delivery = clean.deliveries[len(clean.deliveries) // 2]
    return delivery.pack_ids[0], delivery.sample_keys[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["hole", "fail"])
def test_its_pack_alone_is_lost(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    clean = clean_run(config, dp_size=2, micro_steps=1, steps=None)
    pack_id, samples = poisoned_pack(clean)
    errors = dataclasses.replace(config.errors, bad_image=policy)
    config = dataclasses.replace(config, errors=errors, state_dir=str(tmp_path / "other"))
    monkeypatch.setenv("TEST_POISON", samples[0])
    with nothing_leaks():
        with ServiceProcesses(config, tmp_path / "logs", workers=2, codecs=["none"]) as service:
            if policy == "fail":
                words = rf"{samples[0]}.*{ALONE_ENDS} workers ended while they built pack {pack_id}"
                with pytest.raises(RecordError, match=words):
                    read(service.endpoint)
                return
            readers = read(service.endpoint)
            status = service.status()
    others = [d for d in readers.deliveries if pack_id not in d.pack_ids]
    (lost,) = (d for d in readers.deliveries if pack_id in d.pack_ids)
    without = [d for d in clean.deliveries if pack_id not in d.pack_ids]
    prove_same(Readers(deliveries=without), others)
    assert len(others) == len(without)
    counters = status["counters"]
    assert counters["packs_condemned"] == 1
    assert 2 + ALONE_ENDS <= counters["workers_lost"] <= 4 + ALONE_ENDS
    assert {hole.partition("#")[0] for hole in lost.holes} == set(samples)
    assert all(f"{ALONE_ENDS} workers ended while they built" in hole for hole in lost.holes)
    print(f"recovered in {longest_gap(readers.deliveries):.1f} s")
