"""A coordinator that takes itself to be on another machine, one that no lock of this one reaches.

python tests/support/coordinator_elsewhere.py CONFIG.json PORT
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
from pathlib import Path


def main() -> None:
    from dataservice.actors import ownership
    from support import service_main

    ownership.machine = lambda: "elsewhere"
    fcntl.flock = lambda *_: None
    service_main.set_up_logs()
    asyncio.run(service_main.coordinate(Path(sys.argv[1]).read_text(), port=int(sys.argv[2])))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
