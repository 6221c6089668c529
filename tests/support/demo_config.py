"""A config over the demo data, its index built once a test run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import yaml

from dataservice.config import Config, load_config
from dataservice.indexing import update_index

DATA = Path(__file__).resolve().parent.parent / "data"


def demo_settings(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The YAML of a small job; `sections` are merged over its sections."""
    settings: dict[str, Any] = {
        "job": "test",
        "index_dir": str(folder / "index"),
        "state_dir": str(folder / "state"),
        "sources": [
            {"name": "text", "records": str(DATA / "text" / "*.jsonl")},
            {
                "name": "caption",
                "records": str(DATA / "caption" / "*.jsonl"),
                "images": str(DATA / "caption" / "*.zip"),
            },
            {
                "name": "multi",
                "records": str(DATA / "multi" / "*.jsonl"),
                "images": str(DATA / "multi" / "*.zip"),
            },
        ],
        "vision": {"patch": 14, "merge": 2, "max_pixels": 50176},
        "plan": {"pack_length": 2048, "lanes": 4, "window": 64, "epochs": 1},
        "staging": {"cache_dir": str(folder / "cache"), "budget_bytes": "1 GiB"},
        "workers": {"count": 1, "decode_threads": 1, "ready_bytes": "64 MiB"},
        "serving": {"port": 0, "lease_s": 1.0, "plan_ahead_steps": 6},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return settings


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def demo_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """Loaded, with its index up to date."""
    config = load_config(str(write_config(folder, demo_settings(folder, **sections))))
    os.makedirs(config.index_dir, exist_ok=True)
    update_index(config)
    return config


def own_config(base: Config, folder: Path, **staging: Any) -> Config:
    """`base` and its index, with state and cache in `folder` and other staging settings."""
    given: dict[str, Any] = {"cache_dir": str(folder / "cache"), **staging}
    return dataclasses.replace(
        base,
        state_dir=str(folder / "state"),
        staging=dataclasses.replace(base.staging, **given),
    )
