"""The service on a real corpus, on a Ray cluster of two data nodes, from an origin with latency.

Needs DATASERVICE_CORPUS: a folder with text/, caption/, pages/ and photos/, each holding pairs of
NAME.jsonl (LLaVA records) and NAME.zip. Every delivered sample is compared with a reading of its
record by tests/support/reference.py, which imports nothing of the service.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import reference, slow_origin
from support.demo_config import write_config
from support.harness import (
    Readers,
    cluster_service,
    kill,
    listener,
    plan_of,
    read_ranks,
    worker_pids,
)

from dataservice.config import load_config
from dataservice.errors import ResumeRefused, ServiceUnavailable
from dataservice.indexing import update_index
from dataservice.rpc.client import DataClient, PackFrames

CORPUS = os.environ.get("DATASERVICE_CORPUS")
STEPS, DP_SIZE, MICRO_STEPS = 40, 4, 4
LATENCY_S = 0.02
BUDGET = 55_000_000
VISION = {"patch": 14, "merge": 2, "min_pixels": 3136, "max_pixels": 802816}
JOB = "corpus"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning"),
    pytest.mark.skipif(CORPUS is None, reason="DATASERVICE_CORPUS names no corpus"),
]


@pytest.fixture(scope="module")
def root() -> Path:
    assert CORPUS is not None
    return Path(CORPUS).resolve()


@pytest.fixture(scope="module")
def config_path(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("corpus")
    environment = slow_origin.install(folder / "fs", latency_s=LATENCY_S)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        slow_origin.activate_here(folder / "fs")
        weights = {"text": 0.2, "caption": 0.25, "pages": 0.15, "photos": 0.4}
        settings: dict[str, Any] = {
            "job": JOB,
            "index_dir": str(folder / "index"),
            "state_dir": str(folder / "state"),
            "sources": [
                {
                    "name": name,
                    "records": f"slow://{root}/{name}/*.jsonl",
                    "weight": weight,
                    **({} if name == "text" else {"images": f"slow://{root}/{name}/*.zip"}),
                }
                for name, weight in weights.items()
            ],
            "vision": VISION | {"exact": True},
            "plan": {
                "pack_length": 8192,
                "epochs": "endless",
                "lanes": 4,
                "window": 64,
                "oversize": "drop",
            },
            "staging": {"cache_dir": str(folder / "cache"), "budget_bytes": BUDGET},
            "workers": {"count": 2, "decode_threads": 1, "ready_bytes": "192 MiB", "max": 4},
            "serving": {"port": 0, "plan_ahead_steps": 6},
            "errors": {"max_hole_share": 0.05},
        }
        path = write_config(folder, settings)
        update_index(load_config(str(path)))
        yield path


class Checker:
    """Compares every sample of every batch with the reference; collects pieces of long ones."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._vision = reference.Vision(**VISION)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[str, list[Any]]] = OrderedDict()
        self._pieces: dict[str, set[tuple[int, int]]] = {}
        self.samples: Counter[str] = Counter()
        self.images = 0

    def expected(self, key: str) -> tuple[bytes, list[Any]]:
        with self._lock:
            if key in self._known:
                return self._known[key]
        record, shard = reference.record_of(self._root, key)
        images = reference.sample_images(record, shard, self._vision)
        text = reference.sample_text(record, [grid for _, grid in images], self._vision)
        with self._lock:
            self._known[key] = (text.encode(), images)
            while len(self._known) > 40:
                self._known.popitem(last=False)
        return self._known.get(key, (text.encode(), images))

    def __call__(self, batch: Any) -> None:
        (keys,) = batch.meta["sample_keys"]
        bounds = batch["cu_seqlens"].tolist()
        grids = batch["image_grid_thw"].tolist()
        owners = batch["image_doc_ids"].tolist()
        pixels = batch["pixel_values"].numpy()
        starts = np.cumsum([0, *(t * h * w for t, h, w in grids)])
        for number, key in enumerate(keys):
            ids = batch["input_ids"][bounds[number] : bounds[number + 1]].numpy()
            mine = [i for i, owner in enumerate(owners) if owner == number]
            whole, _, piece = key.partition("[")
            text, images = self.expected(whole)
            if piece:
                start, stop = map(int, piece.rstrip("]").split(":"))
                tokens = _spelled_slice(text, start, stop)
                assert reference.spelled(ids) == tokens, key
                assert mine == []
                with self._lock:
                    self._pieces.setdefault(whole, set()).add((start, stop))
            else:
                assert reference.spelled(ids) == text, key
            assert len(mine) == len(images), key
            for i, (patches, (rows, columns)) in zip(mine, images, strict=True):
                assert grids[i] == [1, rows, columns], key
                assert np.array_equal(pixels[starts[i] : starts[i + 1]], patches), key
            with self._lock:
                self.images += len(mine)
                self.samples[whole] += 1


def _spelled_slice(text: bytes, start: int, stop: int) -> bytes:
    """Tokens [start:stop) of a text in which special tokens stand by name."""
    names = {name.encode(): number for number, name in reference.SPECIALS.items()}
    tokens: list[bytes] = []
    at = 0
    while at < len(text) and len(tokens) < stop:
        special = next((n for n in names if text.startswith(n, at)), None)
        token = special if special is not None else text[at : at + 1]
        tokens.append(token)
        at += len(token)
    return b"".join(tokens[start:stop])


@pytest.fixture(scope="module")
def plan(config_path: Path) -> dict[int, list[str]]:
    """Sorted pack ids by step, as another process plans them."""
    steps = plan_of(str(config_path), steps=f"0:{STEPS}", dp_size=DP_SIZE, micro_steps=MICRO_STEPS)
    return {
        step["step"]: sorted(p["pack_id"] for cell in step["cells"] for p in cell["packs"])
        for step in steps
    }


@pytest.fixture(scope="module")
def undisturbed(config_path: Path, root: Path) -> tuple[Readers, Checker, dict[str, Any]]:
    checker = Checker(root)
    with cluster_service(load_config(str(config_path))) as (service, _):
        started = time.monotonic()
        readers = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=DP_SIZE,
            micro_steps=MICRO_STEPS,
            steps=STEPS,
            on_batch=checker,
        )
        status = service.status()
    print(f"\n{len(readers.deliveries)} packs in {time.monotonic() - started:.0f} s")
    print(json.dumps({"stagers": status["stagers"], "counters": status["counters"]}))
    return readers, checker, status


def test_every_sample_arrives_once_and_as_it_is(
    undisturbed: tuple[Readers, Checker, dict[str, Any]], plan: dict[int, list[str]]
) -> None:
    readers, checker, status = undisturbed
    assert readers.packs_of_step() == plan
    assert len({p for ids in plan.values() for p in ids}) == STEPS * DP_SIZE * MICRO_STEPS
    photos = Counter({k: n for k, n in checker.samples.items() if k.startswith("photos/")})
    print(f"{sum(checker.samples.values())} samples, {checker.images} images compared")
    assert max(photos.values()) >= 2 and len(photos) == 160
    assert status["holes"] == 0
    assert sum(s["read_through_shards"] for s in status["stagers"]) > 0
    assert len(status["stagers"]) == 2
    assert all(s["cached_bytes"] <= BUDGET for s in status["stagers"])


class KillInMidStream:
    """Kills the worker that streams a pack after its second frame, until a stream breaks by it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kills = 0
        self.broken = False
        original = DataClient.stream_pack
        outer = self

        def stream_pack(client: DataClient, request: Any, timeout_s: float) -> Any:
            frames = original(client, request, timeout_s)
            return _Watched(frames, client.endpoint, outer) if outer.armed else frames

        self.armed = False
        patch.setattr(DataClient, "stream_pack", stream_pack)


class _Watched(PackFrames):
    def __init__(self, frames: PackFrames, endpoint: str, killer: KillInMidStream) -> None:
        self.__dict__.update(frames.__dict__)
        self._endpoint, self._killer, self._seen = endpoint, killer, 0
        self._shot = False

    def __next__(self) -> bytes:
        try:
            frame = super().__next__()
        except ServiceUnavailable:
            self._killer.broken = self._killer.broken or self._shot
            raise
        self._seen += 1
        if self._seen == 2 and self._killer.armed and not self._killer.broken:
            self._killer.armed = False
            self._killer.kills += 1
            self._shot = True
            kill(listener(self._endpoint))
        return frame


def test_killed_workers_and_a_lost_node_change_nothing(
    undisturbed: tuple[Readers, Checker, dict[str, Any]],
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean = undisturbed[0].digests_of_packs()
    killer = KillInMidStream(monkeypatch)
    rng = random.Random(4)
    done = threading.Event()
    killed: list[float] = []
    with cluster_service(load_config(str(config_path)), data_nodes=2) as (service, cluster):

        def chaos() -> None:
            while service.status()["session"] is None:
                time.sleep(0.2)
            for _ in range(2):
                done.wait(rng.uniform(2.0, 6.0))
                while not (pids := worker_pids(service)) and not done.wait(0.2):
                    pass  # those of before are not replaced yet
                if done.is_set():
                    break
                kill(rng.choice(pids))
                killed.append(time.monotonic())
            killer.armed = True
            while not killer.broken and not done.wait(1.0):
                killer.armed = True
            cluster.remove_node(sorted(cluster.worker_nodes, key=id)[-1], allow_graceful=False)

        thread = threading.Thread(target=chaos)
        thread.start()
        readers = read_ranks(
            service.endpoint,
            job=JOB,
            dp_size=DP_SIZE,
            micro_steps=MICRO_STEPS,
            steps=STEPS,
            timeout_s=180,
            pause_s=0.2,
            local=False,  # a kill between two frames takes frames
        )
        done.set()
        thread.join()
        counters = service.status()["counters"]
    print(f"\nkills: {len(killed)} + {killer.kills} in mid-stream; {counters}")
    assert len(killed) == 2
    assert killer.broken
    assert counters["packs_rebuilt"] > 0
    assert readers.digests_of_packs() == clean


def test_resume_at_other_sizes(
    undisturbed: tuple[Readers, Checker, dict[str, Any]], config_path: Path
) -> None:
    whole = undisturbed[0].packs_of_step()
    with cluster_service(load_config(str(config_path))) as (service, _):

        def read(dp_size: int, micro_steps: int, steps: int, state: Any) -> Readers:
            return read_ranks(
                service.endpoint,
                job=JOB,
                dp_size=dp_size,
                micro_steps=micro_steps,
                steps=steps,
                states=None if state is None else dict.fromkeys(range(dp_size), state),
            )

        first = read(DP_SIZE, MICRO_STEPS, 20, None)
        state = first.states[0]
        assert all(s == state for s in first.states.values())
        assert len(json.dumps(state)) < 8192
        same = read(2, 8, 20, state)
        assert same.packs_of_step() == {s: whole[s] for s in range(20, 40)}
        other = read(3, 5, 21, state)
        flat = [p for s in range(20, 40) for p in numbered(undisturbed[0], s)]
        mine = [p for s in range(20, 41) for p in numbered(other, s)]
        assert mine == flat[: len(mine)]
        forged = json.loads(json.dumps(state).replace(state["plan_digest"], "0" * 64))
        forged["cursor"]["phase_digest"] = "0" * 64
        with pytest.raises(ResumeRefused) as refused:
            read(2, 8, 1, forged)
        assert state["plan_digest"] in str(refused.value) and "0" * 64 in str(refused.value)
        assert "new run" in str(refused.value)


def numbered(readers: Readers, step: int) -> list[str]:
    """Pack ids of a step in global order."""
    packs = [
        (number, pack_id)
        for d in readers.deliveries
        if d.step == step
        for number, pack_id in zip(d.numbers, d.pack_ids, strict=True)
    ]
    return [pack_id for _, pack_id in sorted(packs)]
