"""The client needs only the base install, and `__all__` is what users see."""

from __future__ import annotations

import subprocess
import sys

import trainer_client

HEAVY = (
    "ray",
    "pydantic",
    "pyarrow",
    "numba",
    "PIL",
    "google.protobuf",
    "fsspec.core",
    "accelerate",
    "deepspeed",
    "megatron",
    "pytorch_lightning",
    "torchtitan",
    "transformers",
    "http.server",
    "dataservice.rpc.server",
    "dataservice.config",
    "dataservice.storage",
)
IMPORT = "import trainer_client, trainer_client.examples.train_tiny_vlm"


def printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_importing_the_client_pulls_in_nothing_heavy() -> None:
    loaded = f"print([name for name in {HEAVY!r} if name in sys.modules])"
    assert printed(f"import sys; {IMPORT}; {loaded}") == "[]"


def test_the_client_does_without_the_service_packages() -> None:
    missing = [name for name in HEAVY if not name.startswith("dataservice")]
    block = f"sys.modules.update(dict.fromkeys({missing!r}))"
    assert printed(f"import sys; {block}; {IMPORT}; print('fine')") == "fine"


def test_what_else_is_to_be_installed_is_said() -> None:
    stopped = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['typer'] = None; from dataservice.command import main; main()",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert stopped.returncode == 2
    assert stopped.stderr.startswith("error: the dataservice command needs typer, ")
    assert "pip install '.[service]'" in stopped.stderr
    stopped = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['grpc_health'] = None; import trainer_client.testing",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "pip install grpcio-health-checking" in stopped.stderr.splitlines()[-1]


def test_all_names_exist_and_are_sorted() -> None:
    names = trainer_client.__all__
    assert names == sorted(names)
    assert all(hasattr(trainer_client, name) for name in names)
