"""One process of a service without Ray: coordinator, stager or worker, until SIGTERM or the end of
its input.

python tests/support/service_main.py ROLE FOLDER/config.json OPTIONS-AS-JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.stager import Stager
from dataservice.actors.state_log import StateLog
from dataservice.actors.worker import Worker
from dataservice.config import config_from_json
from dataservice.rpc.server import start_server

JOURNAL = "coordinator.journal"


def _on_end(loop: asyncio.AbstractEventLoop, stop: Callable[[], Any]) -> None:
    """Has `stop` called on SIGTERM and when the process that started this one is gone."""
    loop.add_signal_handler(signal.SIGTERM, stop)

    def wait_for_parent() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(stop)

    threading.Thread(target=wait_for_parent, name="parent", daemon=True).start()


async def coordinate(config_json: str, *, port: int) -> None:
    config = config_from_json(config_json)
    stopping = asyncio.Event()
    _on_end(asyncio.get_running_loop(), stopping.set)
    Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    log = StateLog(str(Path(config.state_dir) / JOURNAL))
    coordinator = Coordinator(config, PlannerProcess(), log)
    server = await start_server(coordinator=coordinator, bind=f"127.0.0.1:{port}")
    await coordinator.start()
    await stopping.wait()
    await server.turn_away()
    coordinator.wind_down()
    await server.stop(1.0)
    await coordinator.stop()


async def stage(config_json: str, *, coordinator: str, node: str) -> None:
    stager = Stager(coordinator=coordinator, node=node, host=node, config_json=config_json)
    _on_end(asyncio.get_running_loop(), stager.stop)
    await stager.run()


async def work(config_json: str, **options: Any) -> None:
    worker = Worker(**options)
    _on_end(asyncio.get_running_loop(), worker.stop)
    await worker.run()


def main() -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(process)d %(name)s: %(message)s")
    logging.getLogger("asyncio").setLevel("ERROR")
    roles = {"coordinator": coordinate, "stager": stage, "worker": work}
    role: Any = roles[sys.argv[1]]
    asyncio.run(role(Path(sys.argv[2]).read_text(), **json.loads(sys.argv[3])))


if __name__ == "__main__":
    main()
