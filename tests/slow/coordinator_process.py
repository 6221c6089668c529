"""A coordinator in a process of its own, without Ray; prints its endpoint, ends with its input.

python tests/slow/coordinator_process.py CONFIG.yaml
"""

from __future__ import annotations

import asyncio
import sys

from dataservice.actors.coordinator import Coordinator
from dataservice.actors.planner_link import PlannerProcess
from dataservice.actors.state_log import open_state
from dataservice.config import load_config
from dataservice.rpc.server import start_server


async def serve(config_path: str) -> None:
    config = load_config(config_path)
    coordinator = Coordinator(config, PlannerProcess(), open_state(config))
    server = await start_server(coordinator=coordinator, bind="127.0.0.1:0")
    await coordinator.start()
    sys.stdout.write(f"{server.endpoint}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    await coordinator.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
