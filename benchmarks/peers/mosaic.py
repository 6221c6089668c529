"""MosaicML's package `streaming`, imported also beside a torch without CUDA.

It needs torchvision, whose wheels on the package index are built for torch with CUDA. Beside
another torch their compiled operators are missing, and the import fails for the lack of two. They
are declared here; nobody calls them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

try:
    importlib.import_module("torchvision")
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    importlib.import_module("torchvision")

streaming: Any = importlib.import_module("streaming")
