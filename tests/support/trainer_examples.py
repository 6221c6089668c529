"""The trainers' examples as their guide calls them, and what they must print.

Invariants: every process started here ends here; a run that was stopped and continued, also on
another number of ranks, must print what one uninterrupted loop in plain torch prints.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from trainer_client import ParallelLayout
from trainer_client.examples.tiny_trainers import TensorVLM, describe, open_stream, tensors

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "trainer_client/README.md").read_text(encoding="utf-8")
PACKS, STEPS, CUT = 40, 5, 3


def guide_command(module: str) -> list[str]:
    """The words of the guide's command for an example."""
    (line,) = re.findall(rf"^.* -m trainer_client\.examples\.{module} .*$", GUIDE, re.MULTILINE)
    return shlex.split(line)


def arguments(module: str, endpoint: str, folder: Path) -> list[str]:
    """What the guide gives the example, at this endpoint and in this folder."""
    words = guide_command(module)
    words = words[words.index(f"trainer_client.examples.{module}") + 1 :]
    words[words.index("--endpoint") + 1] = endpoint
    return [word.replace("$DEMO_DIR", str(folder)) for word in words]


def run(command: list[str], *, timeout_s: float = 110, **environment: str) -> str:
    """What it prints; its output is shown where it fails. No process of its group stays."""
    own = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        env=os.environ | own | quiet | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its ranks, which are in other groups
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
    assert process.returncode == 0, output[-6000:]
    return output


def in_one_process(module: str, runs: list[list[str]], **environment: str) -> str:
    script = str(ROOT / "tests/support/run_trainer.py")
    return run([sys.executable, script, module, json.dumps(runs)], **environment)


def in_this_process(module: str, runs: list[list[str]]) -> str:
    """The same where the library is loaded here anyway, which takes most of the time."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for words in runs:
            importlib.import_module(f"trainer_client.examples.{module}").main(words)
    return output.getvalue()


def launched(module: str, endpoint: str, folder: Path, *extra: str) -> str:
    """The guide's command with its launcher, from the environment that runs this."""
    words = guide_command(module)
    launcher = words[: words.index(f"trainer_client.examples.{module}") + 1]
    program = str(Path(sys.executable).with_name(launcher[0]))
    if launcher[0] == "torchrun":
        launcher.insert(1, "--standalone")  # a port of its own
    return run([program, *launcher[1:], *arguments(module, endpoint, folder), *extra])


def losses(output: str) -> dict[int, float]:
    """By step; a step that was trained twice is an error."""
    found = re.findall(r"step (\d+) loss ([\d.]+)", output)
    by_step = {int(step): float(loss) for step, loss in found}
    assert len(by_step) == len(found), output
    return by_step


def expected_losses(endpoint: str, micro_steps: int) -> dict[int, float]:
    """Of one rank in plain torch, without an interruption."""
    args = argparse.Namespace(endpoint=endpoint, job="reference", micro_steps=micro_steps)
    layout = ParallelLayout()
    model = TensorVLM(describe(args, layout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    by_step: dict[int, float] = {}
    with open_stream(args, layout) as stream:
        for batch in stream:
            if batch.step == STEPS:
                break
            loss = model(**tensors(batch)) / batch.meta["loss_tokens"]
            loss.backward()
            by_step[batch.step] = by_step.get(batch.step, 0.0) + loss.item()
            if batch.is_last_micro_step:
                optimizer.step()
                optimizer.zero_grad()
    return by_step
