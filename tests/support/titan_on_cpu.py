"""Lets torchtitan run on the CPU, where torchtitan itself asks for a GPU.

Only the device's module is stood in for, and Triton where it is missing, whose kernels are not run;
model, trainer, loss and checkpoints are torchtitan's.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.nn.attention import flex_attention
from torchtitan.tools import utils


def stand_in() -> SimpleNamespace:
    nothing = {"allocated_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}
    own = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "memory_stats": lambda *_: dict.fromkeys(
            (*nothing, "active_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0
        ),
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
        "manual_seed_all": torch.manual_seed,
    }
    module = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    module.__dict__.update(own)
    return module


def uncompiled(function: Any = None, **_: Any) -> Any:
    """Compiled, flexible attention has no backward pass on CPUs."""
    return (lambda given: given) if function is None else function


def prepare() -> None:
    """Before torchtitan's models or its trainer are imported."""
    utils.device_type, utils.device_module = "cpu", stand_in()
    torch.compile = uncompiled
    flex_attention._validate_device = lambda *_: None
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan wants a torch of tomorrow
        torch.distributed.set_timeout = lambda *_: None
    if importlib.util.find_spec("triton") is None:
        importlib.import_module("torch._inductor.compile_fx")  # looks for Triton itself
        triton = {"triton": MagicMock(), "triton.language": MagicMock()}
        sys.modules.update(triton)
        importlib.import_module("torchtitan.models.common")
        for name in triton:
            del sys.modules[name]
