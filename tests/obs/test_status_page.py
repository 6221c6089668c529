"""The status page in headless Chromium: what it shows is what the API answers, as text alone."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, browser_page, needs_browser
from support.demo_config import demo_config
from support.harness import read_ranks
from support.local_service import LocalService

from dataservice.obs.status_page import page_routes
from dataservice.obs.web import Answer, start_web
from dataservice.rpc.security import ServerSecurity

EVIL = '<img src=x onerror="window.pwned = 1"><script>window.pwned = 1</script>\'&amp;'


def worker(number: int, **figures: Any) -> dict[str, Any]:
    return {
        "id": f"w{number}",
        "node": f"n{number % 4}",
        "draining": False,
        "retiring": "",
        "ready_bytes": 5_000_000 * (number + 1),
        "ready_packs": 10 + number,
        "queued_packs": 2,
        "served_packs": 1234,
        "images_per_s": 12.5,
        "busy_share": 0.42,
        "read_origin_bytes": 100,
        "read_staged_bytes": 300,
        "stuck_reads": 0,
        "stuck_decodes": 0,
        "memory_bytes": 400_000_000,
    } | figures


def status(num_ranks: int = 6, num_workers: int = 3) -> dict[str, Any]:
    shares = [0.0, 0.05, 0.15, 0.45] + [0.01] * (num_ranks - 4)
    return {
        "state": "serving",
        "job": f"job {EVIL}",
        "version": "1.2.3",
        "now_s": time.time(),
        "started_s": time.time() - 4000,
        "http_port": 1,
        "plan_digest": "0123456789abcdef",
        "decoder": EVIL,
        "samples": 650,
        "pack_length": 8192,
        "fill": 0.98765,
        "rates": {
            "steps_per_s": 0.125,
            "packs_per_s": 1234.4,
            "images_per_s": 56.78,
            "decoded_bytes_per_s": 12_300_000,
            "staged_bytes_per_s": 0,
        },
        "session": {
            "generation": 1,
            "run_id": EVIL,
            "dp_size": num_ranks,
            "micro_steps": 2,
            "done_step": 1200,
            "next_step": 1206,
            "end_step": 5000,
            "waited_s": [17.4] * num_ranks,
            "waited_share": shares,
            "waited_workers_share": [share / 2 for share in shares],
            "done": [[1200, 1]] * num_ranks,
            "closed": [False] * num_ranks,
            "heard_s_ago": [2.2] * num_ranks,
        },
        "workers": [worker(number) for number in range(num_workers)],
        "workers_without_room": 0,
        "target_workers": num_workers,
        "scaling": {"reason": EVIL},
        "stagers": [
            {
                "node": "n0",
                "host": EVIL,
                "budget_bytes": 100_000_000_000,
                "cached_bytes": 25_000_000_000,
                "missing_bytes": 6_000_000_000,
                "missing_shards": 7,
                "bytes_per_s": 50_000_000.0,
                "left_s": 120.0,
                "hit_rate": 0.875,
                "lanes": [0, 1],
                "last_error": EVIL,
                "read_through_shards": 0,
                "stalls": 0,
            }
        ],
        "holes": 3,
        "holes_by_reason": {EVIL: 2, "truncated JPEG": 1},
        "worst_shards": {f"src/{EVIL}": 3},
        "hole_reasons": {f"src/{EVIL}@1#0": EVIL},
        "quarantine": f"/state/{EVIL}",
        "events": [
            {"at_s": 1.5, "kind": "started", "text": "first", "level": "info", "count": 1},
            {"at_s": 2.5, "kind": EVIL, "text": EVIL, "level": "warning", "count": 1200},
        ],
        "verdict": {"level": "warning", "text": f"Waits {EVIL}", "why": EVIL},
    }


def grid(num_ranks: int = 6) -> dict[str, Any]:
    return {
        "step": 1200,
        "micro_steps": 2,
        "dp_size": num_ranks,
        "sync_domain": num_ranks,
        "cost": [[10] * num_ranks, [20] * num_ranks],
        "cost_arrival": [[60] + [0] * (num_ranks - 1), [120] + [0] * (num_ranks - 1)],
        "idle_share": 0.0123,
        "idle_share_arrival": 0.8333,
        "fill": 0.9,
        "images": [[1] * num_ranks, [3] * num_ranks],
    }


@asynccontextmanager
async def page_of(folder: Path, answers: dict[str, Any]) -> AsyncIterator[Page]:
    """The page over answers of the test's own, by path, which it may change."""

    def handler(path: str) -> Any:
        async def handle(_query: Mapping[str, str]) -> Answer:
            return Answer(json.dumps(answers[path]).encode())

        return handle

    server = await start_web(
        page_routes() | {path: handler(path) for path in answers},
        host="127.0.0.1",
        port=0,
        security=ServerSecurity(),
    )
    try:
        async with browser_page(folder) as page:
            await page.look(width=1280)
            await page.open(server.url)
            await page.until("Number(document.body?.dataset.polls) > 0")
            yield page
            assert page.errors == []
            assert page.loaded
            assert all(url.startswith(server.url) for url in page.loaded)
    finally:
        await server.stop()


def run(test: Any, timeout_s: float = 110.0) -> None:
    asyncio.run(asyncio.wait_for(test(), timeout_s))


async def rows(page: Page, table: str) -> list[list[str]]:
    found: list[list[str]] = await page.value(
        f"[...document.querySelectorAll('#{table} tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText.replace(/\\s+/g, ' ').trim()))"
    )
    return found


# ---- the files ----------------------------------------------------------------------------------


def test_the_files_load_nothing_and_write_no_markup() -> None:
    folder = files("dataservice.obs.status_page")
    names = ("page.html", "page.css", "page.js", "grid.js")
    sources = {name: folder.joinpath(name).read_text() for name in names}
    for name, source in sources.items():
        outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", source)
        assert [url for url in outside if "www.w3.org/2000/svg" not in url] == [], name
        for risk in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert risk not in source, name
    assert re.findall(r"\son\w+=", sources["page.html"]) == []
    ids = re.findall(r'\bid="([^"]+)"', sources["page.html"])
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:\$|\blist)\("([\w-]+)"', sources["page.js"]))
    assert used <= set(ids)


# ---- in the browser -----------------------------------------------------------------------------


@needs_browser
def test_every_figure_is_the_one_of_the_api(tmp_path: Path) -> None:
    async def check() -> None:
        async with page_of(tmp_path, {"/api/status": status(), "/api/step": grid()}) as page:
            shown = {
                "#steps-rate": "0.13",
                "#packs-rate": "1,234",
                "#images-rate": "56.8",
                "#decoded-rate": "12.3 MB of pixels/s",
                "#ready-packs": "33",
                "#ready-bytes": "30.0 MB on 3 workers",
                "#fill": "98.8 %",
                "#pack-length": "of 8,192 tokens",
                "#idle": "1.2 %",
                "#idle-arrival": "83.3 % before balancing",
                "#grid-step": "step 1,200",
                "#workers-count": "3 of 3 wanted",
                "#holes-count": "3",
                "#heard-text": "live, once a second",
            }
            assert {selector: await page.text(selector) for selector in shown} == shown
            assert "step 1,200 of 5,000, 6 ranks x 2 micro-steps" in await page.text("#run")
            assert "up for 67 min" in await page.text("#about")
            assert await rows(page, "ranks") == [
                ["3", "45.0 %", "22.5 %", "17 s", "1200.1", "2 s ago"],
                ["2", "15.0 %", "7.5 %", "17 s", "1200.1", "2 s ago"],
                ["1", "5.0 %", "2.5 %", "17 s", "1200.1", "2 s ago"],
            ]
            workers = await rows(page, "workers")
            assert workers[2] == [
                *("w2 n2", "serves", "12 (15.0 MB)", "2", "12.5", "42 %", "1,234", "400 MB", "75 %")
            ]
            (stager,) = await rows(page, "stagers")
            assert stager[1:7] == [
                *("25.0 GB of 100 GB", "6.00 GB 7 shards", "50.0 MB", "2 min", "88 %", "2")
            ]
            bars = await page.value(
                "[...document.querySelectorAll('#strip i')].map(bar => [bar.dataset.shade, "
                "bar.getBoundingClientRect().height / bar.parentElement.clientHeight])"
            )
            assert [shade for shade, _ in bars] == ["0", "1", "2", "3", "0", "0"]
            heights = [height for _, height in bars]
            assert heights[3] == pytest.approx(0.8 * 0.45 / 0.5, abs=0.02)
            assert heights[2] == pytest.approx(heights[3] / 3, abs=0.02)
            await page.value("document.querySelector('details:has(#rows)').open = true")
            assert await rows(page, "rows") == [
                ["0", "6.00 x", "1.00 x", "6"],
                ["1", "6.00 x", "1.00 x", "18"],
            ]

    run(check)


@needs_browser
def test_what_stands_in_the_data_is_text(tmp_path: Path) -> None:
    async def check() -> None:
        async with page_of(tmp_path, {"/api/status": status(), "/api/step": grid()}) as page:
            await page.value("document.querySelectorAll('details').forEach(d => d.open = true)")
            for part in ("#job", "#verdict-text", "#verdict-why", "#scaling", "#stagers", "#about"):
                assert EVIL in await page.text(part), part
            for part in ("#reasons", "#shards", "#examples", "#quarantine", "#events"):
                assert EVIL in await page.text(part), part
            assert "(and 1,199 more like it)" in await page.text("#events li")  # the newest first
            assert await page.value("window.pwned === undefined")
            assert (
                await page.value("document.querySelectorAll('img, script:not([src])').length") == 0
            )
            assert EVIL in await page.value("document.title")

    run(check)


@needs_browser
def test_it_is_read_by_keyboard_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    async def check() -> None:
        async with page_of(tmp_path, {"/api/status": status(20), "/api/step": grid(20)}) as page:
            await page.value("document.querySelector('#strip').focus()")
            for key, rank in (("ArrowRight", 1), ("End", 19), ("ArrowLeft", 18), ("Home", 0)):
                await page.press(key)
                assert (await page.text("#rank-detail")).startswith(f"rank {rank}: waits ")
            strip = "document.querySelector('#strip')"
            assert await page.value(f"{strip}.getAttribute('aria-valuetext')") == (
                await page.text("#rank-detail")
            )
            light = await page.value("getComputedStyle(document.body).backgroundColor")
            await page.look(width=390, height=844, dark=True)
            assert await page.value("getComputedStyle(document.body).backgroundColor") != light
            root = "document.documentElement"
            assert await page.value(f"{root}.scrollWidth - {root}.clientWidth") == 0
            unnamed = await page.value(
                "[...document.querySelectorAll('section, canvas, button, [tabindex]')].filter(node "
                "=> !node.hidden && !(node.getAttribute('aria-label') || node.innerText || "
                "node.getAttribute('aria-labelledby'))).map(node => node.outerHTML)"
            )
            assert unnamed == []

    run(check)


@needs_browser
def test_thousands_of_ranks_are_folded_and_many_workers_shown_on_demand(tmp_path: Path) -> None:
    async def check() -> None:
        answers = {"/api/status": status(3000, 300), "/api/step": grid(3000)}
        async with page_of(tmp_path, answers) as page:
            assert await page.value("document.querySelectorAll('#strip i').length") == 250
            assert "is the one of 12 ranks that waited most" in await page.text("#waits-lead")
            await page.value("document.querySelector('#strip').focus()")
            await page.press("Home")
            detail = await page.text("#rank-detail")
            assert detail.startswith("rank 3, the most of ranks 0 to 11: waits 45.0 % of its time")
            assert await page.value("document.querySelector('#after').width") == 500
            assert len(await rows(page, "workers")) == 16
            await page.value("document.querySelector('#more-workers').click()")
            assert [row[0] for row in await rows(page, "workers")][10] == "w10 n2"
            assert len(await rows(page, "workers")) == 300

    run(check)


@needs_browser
def test_empty_states_say_what_is_missing(tmp_path: Path) -> None:
    about = {"job": "j", "version": "1", "now_s": 5.0, "started_s": 1.0, "events": []}
    verdict = {"level": "idle", "text": "The service is opening its index", "why": ""}
    opening = {"state": "opening", **about, "verdict": verdict}
    answers = {"/api/status": opening, "/api/step": {"step": None}}

    async def check() -> None:
        async with page_of(tmp_path, answers) as page:
            assert await page.text("#verdict-text") == "The service is opening its index"
            assert await page.text("#waits-empty") == "The service is opening its index."
            assert await page.text("#workers-empty") == "No worker has joined."
            assert await page.text("#events-empty") == "Nothing has happened yet."
            assert await page.value("document.querySelector('#waits-body').hidden")
            answers["/api/status"] = status() | {"session": None, "stagers": [], "holes": 0}
            await page.until("document.querySelector('#fill').innerText === '98.8 %'")
            assert await page.text("#waits-empty") == "No trainer has come yet."
            assert (await page.text("#staging-empty")).startswith("No stager has joined")
            assert (await page.text("#holes-empty")).startswith("None")
            assert await page.text("#grid-empty") == "No step is handed out."

    run(check)


@needs_browser
@pytest.mark.timeout(280)
def test_it_follows_a_real_service_through_a_restart(tmp_path: Path) -> None:
    config = demo_config(tmp_path / "service")
    with LocalService(config, workers=2, nodes=("n0", "n1"), web=True) as service:
        reading = threading.Thread(
            target=read_ranks,
            args=(service.endpoint,),
            kwargs={"job": "test", "dp_size": 2, "micro_steps": 4, "steps": 12},
        )

        async def check() -> None:
            async with browser_page(tmp_path) as page:
                await page.look(width=1280)
                await page.open(service.page_url)
                reading.start()
                await asyncio.to_thread(reading.join, 150)
                text = "document.querySelector('#verdict-text').innerText"
                await page.until(f"{text} === 'Every rank has closed its stream'")
                await page.until("/every rank has closed/.test(document.body.innerText)")
                told = await asyncio.to_thread(service.status)
                await asyncio.sleep(1.5)
                served = {row[0].split()[0]: row[6] for row in await rows(page, "workers")}
                packs = {w["id"]: f"{w['served_packs']:,}" for w in told["workers"]}
                assert served == packs
                assert sum(w["served_packs"] for w in told["workers"]) >= 2 * 4 * 12
                assert f"step {told['session']['done_step']}" in await page.text("#run")
                events = await page.value("document.querySelectorAll('#events li').length")
                assert events == len(told["events"])

                await asyncio.to_thread(service.stop_coordinator)
                await page.until("document.body.classList.contains('lost')")
                assert await page.text("#verdict-text") == "The coordinator does not answer"
                await page.until("/last heard [3-9] s/.test(document.body.innerText)")
                await asyncio.to_thread(service.start_coordinator)
                await page.until("!document.body.classList.contains('lost')")
                await page.until("/started again/.test(document.body.innerText)")
                assert await page.text("#heard-text") == "live, once a second"
                assert page.errors == []

        run(check, 220.0)
