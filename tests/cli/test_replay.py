"""`dataservice replay`: the packs of a step are those delivered, before and after a state."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command import run as run_command
from support.demo_config import demo_settings, write_config
from support.harness import Delivery, read_ranks
from support.local_service import LocalService

from dataservice.actors.quarantine import QUARANTINE
from dataservice.actors.state_log import JOURNAL
from dataservice.cli.replay_run import replayed
from dataservice.config import Config, load_config
from dataservice.core.exclusions import ExcludedSample, SkippedSteps, exclusions
from dataservice.errors import ConfigError, ResumeRefused
from dataservice.indexing import update_index
from dataservice.wire.codec import pack_digest
from dataservice.wire.schema import decode_plain, encode
from dataservice.wire.states import sealed, the_state_in

JOB = "test"
HOSTILE = '</div><script>alert(1)</script><img src="http://example.com/x.png"> é 汉字 \x07\n'
SAVED_AT = 3


@dataclass
class Run:
    """Two ranks to the end of the data, saved and resumed in between."""

    config: Config
    config_path: Path
    deliveries: list[Delivery]
    state: dict[str, Any]
    folder: Path

    def state_file(self, name: str = "state.json", **changes: Any) -> str:
        path = self.folder / name
        state = the_state_in({**self.state, **changes}, name=name)
        plain = decode_plain(encode(sealed(state)), what="state")
        path.write_text(json.dumps({"epoch": 1, "stream": plain}))
        return str(path)

    def of_step(self, step: int) -> dict[tuple[int, int, str], tuple[Any, ...]]:
        return {
            (d.micro_step, d.dp_rank, pack_id): (d.numbers[i], d.digests[i], list(d.sample_keys[i]))
            for d in self.deliveries
            if d.step == step
            for i, pack_id in enumerate(d.pack_ids)
        }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "hostile.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} {HOSTILE}"}) + "\n" for i in range(8))
    )
    settings = demo_settings(
        folder,
        plan={"pack_length": 4096, "lanes": 2, "window": 200},
        staging={"cache_dir": None},
    )
    settings["sources"].append({"name": "hostile", "records": str(folder / "hostile.jsonl")})
    path = write_config(folder, settings)
    config = load_config(str(path))
    Path(config.index_dir).mkdir()
    update_index(config)
    found: list[Delivery] = []
    with LocalService(config, workers=1) as service:
        first = read_ranks(service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=SAVED_AT)
        then = read_ranks(
            service.endpoint, job=JOB, dp_size=2, micro_steps=2, steps=None, states=first.states
        )
    found = first.deliveries + then.deliveries
    assert any(d.holes for d in found)
    return Run(
        config=config,
        config_path=path,
        deliveries=found,
        state=first.states[0],
        folder=folder,
    )


def replay(run: Run, step: int, **given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and what was said."""
    said: list[str] = []
    options = {"state": run.state_file(), "rank": None, "holes": None, "out": None, **given}
    config = options.pop("config", run.config)
    return list(replayed(config, step=step, say=said.append, **options)), said


def by_place(rows: list[dict[str, Any]]) -> dict[tuple[int, int, str], tuple[Any, ...]]:
    return {
        (r["micro_step"], r["dp_rank"], r["pack_id"]): (r["number"], r["digest"], r["sample_keys"])
        for r in rows
    }


def test_every_step_before_and_after_the_state_is_the_one_delivered(run: Run) -> None:
    steps = sorted({d.step for d in run.deliveries})
    assert steps[0] == 0 and steps[-1] > SAVED_AT + 1
    holes: dict[int, set[str]] = {}
    for step in steps:
        rows, said = replay(run, step)
        assert by_place(rows) == run.of_step(step), step
        assert not any("warning" in text for text in said)
        holes[step] = {hole for row in rows for hole in row["holes"]}
    for step in steps:
        assert holes[step] == {h for d in run.deliveries if d.step == step for h in d.holes}
    with pytest.raises(ConfigError, match=f"--step {steps[-1] + 1}: the data ends before it"):
        replay(run, steps[-1] + 1)


def test_recorded_holes_are_applied_and_not_tried_again(run: Run, tmp_path: Path) -> None:
    """With the damaged picture repaired since, the bytes are those that the run had."""
    step = next(d.step for d in run.deliveries if d.holes)
    state = Path(run.config.state_dir)
    assert "journal" in replay(run, step)[1][-1]
    for file in (state / JOURNAL, state / QUARANTINE):
        rows, said = replay(run, step, holes=str(file))
        assert by_place(rows) == run.of_step(step)
        assert str(file) in said[-1]
    lines = (state / QUARANTINE).read_text().splitlines()
    key = json.loads(lines[0])["sample"]
    good = next(k for d in run.deliveries for pack in d.sample_keys for k in pack if k != key)
    other = {**json.loads(lines[0]), "sample": good.partition("[")[0], "image": None, "pack": 0}
    made_up = tmp_path / "holes.jsonl"
    made_up.write_text(json.dumps(other) + "\n")
    at = next(d.step for d in run.deliveries for pack in d.sample_keys if good in pack)
    rows, _ = replay(run, at, holes=str(made_up))
    assert by_place(rows) != run.of_step(at)
    assert any(f"{other['sample']}#record" in hole for row in rows for hole in row["holes"])
    made_up.write_text(json.dumps({**other, "pack": 10**9}) + "\n")  # met later than this pack
    assert by_place(replay(run, at, holes=str(made_up))[0]) == run.of_step(at)
    made_up.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"line 1 is no hole .* give a service's"):
        replay(run, at, holes=str(made_up))


def test_files_hold_the_bytes_and_a_page_that_loads_nothing(run: Run, tmp_path: Path) -> None:
    step = next(
        d.step
        for d in run.deliveries
        for pack in d.sample_keys
        if any(k.startswith("hostile") for k in pack)
    )
    rows, _ = replay(run, step, rank=None, out=str(tmp_path / "out"))
    out = tmp_path / "out"
    assert json.loads((out / "replay.json").read_text())["packs"] == rows
    index = (out / "index.html").read_text()
    pages = {}
    for row in rows:
        with np.load(out / f"{row['file']}.npz") as arrays:  # without pickle by default
            assert pack_digest(dict(arrays)) == row["digest"]
        assert f'href="{row["file"]}.html"' in index
        pages[row["file"]] = (out / f"{row['file']}.html").read_text()
    for page in (index, *pages.values()):
        assert "default-src 'none'" in page
        assert not re.search(r"<script|https?://", page.replace("http://example.com", ""))
        sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
        own = {"index.html", *(f"{name}.html" for name in pages)}
        assert all(s.startswith("data:image/") or s in own for s in sources)
    row = next(r for r in rows if any(k.startswith("hostile") for k in r["sample_keys"]))
    shown = re.sub(r"<[^>]*>", "", pages[row["file"]])
    assert "alert(1)" in shown and "&lt;script&gt;" in shown
    assert "é 汉字 ␇" in shown
    assert sum(page.count("<img ") for page in pages.values()) == sum(r["num_images"] for r in rows)
    loss = [len(re.findall(r'<i class="l"', page)) for page in pages.values()]
    assert all(
        0 < n <= r["loss_tokens"] for n, r in zip(loss, rows, strict=True) if r["loss_tokens"]
    )
    mine, _ = replay(run, step, rank=1, out=str(tmp_path / "one"))
    assert [r for r in rows if r["dp_rank"] == 1] == mine


def test_the_command_says_what_it_did(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (run.config_path, "--state", run.state_file(), "--step", 1, "--rank", 0)
    assert run_command("replay", *given, "--json") == 0
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert by_place(lines) == {k: v for k, v in run.of_step(1).items() if k[1] == 0}
    assert run_command("replay", *given) == 0
    table = capsys.readouterr().out
    assert all(line["digest"][:12] in table for line in lines)
    assert run_command("replay", *given[:-1], 2) == 2
    assert "--rank 2: the state's run has ranks 0 to 1" in capsys.readouterr().err
    (tmp_path / "no.json").write_text("[1]")
    assert run_command("replay", run.config_path, "--state", tmp_path / "no.json", "--step", 1) == 2
    assert "holds no state of a PackStream" in capsys.readouterr().err


def test_a_state_comes_out_of_a_checkpoint_of_torch(run: Run, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    torch.save({"model": {"w": torch.ones(2)}, "loaders": [{"stream": run.state}]}, checkpoint)
    with pytest.raises(ConfigError, match=r"is no JSON.*trainer_client\.saved_state"):
        replay(run, 1, state=str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-m", "trainer_client.saved_state", str(checkpoint)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(run.state))
    (tmp_path / "state.json").write_text(done.stdout)
    assert by_place(replay(run, 1, state=str(tmp_path / "state.json"))[0]) == run.of_step(1)


def test_states_of_another_run_are_refused(run: Run) -> None:
    plan = dataclasses.replace(run.config.plan, seed=5)
    with pytest.raises(ResumeRefused, match="plan digest"):
        replay(run, 1, config=dataclasses.replace(run.config, plan=plan))
    with pytest.raises(ResumeRefused, match="has job test, this service other"):
        replay(run, 1, config=dataclasses.replace(run.config, job="other"))
    wide = run.state_file("wide.json", dp_size=4)
    with pytest.raises(ResumeRefused, match=r"step 1 lies before the state.*had others for a time"):
        replay(run, 1, state=wide)
    assert len(replay(run, SAVED_AT, state=wide)[0]) == 8
    bad = run.state_file("bad.json", decoder="pil; errors.bad_image whatever")
    with pytest.raises(ResumeRefused, match="bad_image whatever, should be one of hole"):
        replay(run, 1, state=bad)


def test_exclusions_that_come_later_change_nothing_before(run: Run) -> None:
    key = next(k for d in run.deliveries if d.step == 1 for k in d.sample_keys[0])
    sample = ExcludedSample(key=key.partition("[")[0], from_step=SAVED_AT)
    later = dataclasses.replace(
        run.config, exclude=exclusions([sample], [SkippedSteps(start=SAVED_AT, stop=SAVED_AT + 1)])
    )
    assert by_place(replay(run, 1, config=later)[0]) == run.of_step(1)
    moved, _ = replay(run, SAVED_AT, config=later)
    assert {p for *_, p in by_place(moved)} == {p for *_, p in run.of_step(SAVED_AT + 1)}
    earlier = dataclasses.replace(
        run.config, exclude=exclusions([dataclasses.replace(sample, from_step=1)], [])
    )
    with pytest.raises(
        ResumeRefused, match=r"excluded nothing before step 3, this service 1 sample"
    ):
        replay(run, 1, config=earlier)
