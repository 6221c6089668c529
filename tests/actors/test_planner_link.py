import asyncio
import dataclasses
import os
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from support.demo_config import demo_config, demo_settings, write_config

from dataservice.actors.plan_messages import PlannedStep, StepRequest
from dataservice.actors.planner_link import PlannerProcess, _abort
from dataservice.config import Config, config_to_json, load_config
from dataservice.errors import (
    DataServiceError,
    DeadlineExceeded,
    ServiceUnavailable,
    StaleIndexError,
)
from dataservice.indexing import update_index
from dataservice.storage.manifest import MANIFEST_NAME
from dataservice.wire.messages import CursorState


def request(cursor: CursorState) -> StepRequest:
    return StepRequest(cursor=cursor, dp_size=2, micro_steps=2, packs_per_cell=1)


async def kill(link: PlannerProcess) -> None:
    process = link._process
    assert process is not None
    process.kill()
    await process.wait()


def test_a_new_process_gives_the_same_step(tmp_path: Path) -> None:
    config = demo_config(tmp_path)

    async def run() -> tuple[PlannedStep, PlannedStep]:
        link = PlannerProcess(deadline_s=60)
        info = await link.open(config_to_json(config))
        first = await link.step(request(info.start))
        await kill(link)
        again = await link.step(request(info.start))
        await link.close()
        return first, again

    first, again = asyncio.run(run())
    assert first.specs == again.specs
    assert first.pack_ids == again.pack_ids
    assert (first.micro_step, first.dp_rank) == (again.micro_step, again.dp_rank)


def test_a_new_process_on_another_index_is_refused(tmp_path: Path) -> None:
    settings = demo_settings(tmp_path)
    data = tmp_path / "data.jsonl"
    settings["sources"] = [{"name": "text", "records": str(data)}]

    def indexed(lines: int) -> Config:
        data.write_text('{"text": "one"}\n' * lines)
        config = load_config(str(write_config(tmp_path, settings)))
        update_index(config)
        return config

    async def run() -> None:
        link = PlannerProcess(deadline_s=60)
        info = await link.open(config_to_json(indexed(20)))
        indexed(21)
        await kill(link)
        with pytest.raises(StaleIndexError, match=info.digest):
            await link.step(request(info.start))
        await link.close()

    asyncio.run(run())


def test_an_error_of_the_process_is_told_and_ends_nothing(tmp_path: Path) -> None:
    config = demo_config(tmp_path)

    async def run() -> None:
        link = PlannerProcess(deadline_s=60)
        info = await link.open(config_to_json(config))
        bad = dataclasses.replace(info.start, lanes=((0, 0),), lane_homes=(-1,))
        with pytest.raises(DataServiceError, match="lanes"):
            await link.step(request(bad))
        assert not (await link.step(request(info.start))).end
        await link.close()

    asyncio.run(run())


def test_a_process_that_ends_in_an_answer_is_replaced(tmp_path: Path) -> None:
    config = demo_config(tmp_path)

    async def run() -> None:
        link = PlannerProcess(deadline_s=60)
        info = await link.open(config_to_json(config))
        await kill(link)
        link._process = await asyncio.create_subprocess_exec(
            "sleep", "1", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        with pytest.raises(ServiceUnavailable, match="ended with code 0"):
            await link.step(request(info.start))
        assert not (await link.step(request(info.start))).end
        await link.close()

    asyncio.run(run())


def test_a_silent_process_prints_its_stacks_and_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = demo_config(tmp_path)
    manifest = Path(config.index_dir) / MANIFEST_NAME
    manifest.unlink()
    os.mkfifo(manifest)  # opening it waits for a writer that never comes

    async def run() -> None:
        link = PlannerProcess(deadline_s=4)
        with pytest.raises(DeadlineExceeded, match="waited 4 s for the planning process"):
            await link.open(config_to_json(config))
        process = link._process
        assert process is not None
        assert process.returncode is not None
        await link.close()

    asyncio.run(run())
    assert 'planner.py", line' in capfd.readouterr().err


def test_a_process_that_ends_when_it_is_to_be_aborted_has_ended() -> None:
    async def run() -> int | None:
        process = await asyncio.create_subprocess_exec("true", stdin=PIPE, stdout=PIPE)
        assert process.stdout is not None
        await process.stdout.read()
        await process.wait()
        await asyncio.sleep(0)
        await _abort(process)
        return process.returncode

    assert asyncio.run(run()) == 0
