"""The service's settings: one YAML file, checked once, handed on as frozen values."""

from dataservice.config.settings import (
    Config,
    ErrorPolicy,
    ServingSettings,
    StagingSettings,
    WorkerSettings,
    config_from_json,
    config_to_json,
    load_config,
)

__all__ = [
    "Config",
    "ErrorPolicy",
    "ServingSettings",
    "StagingSettings",
    "WorkerSettings",
    "config_from_json",
    "config_to_json",
    "load_config",
]
