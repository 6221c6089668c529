"""Whether the folders that a config names can be written to.

Invariants: a folder that is not there is made, as the service would make it; nothing stays in it.
"""

from __future__ import annotations

import os
import tempfile

from dataservice.config.settings import Config
from dataservice.errors import ConfigError


def check_writable(field: str, folder: str) -> None:
    """ConfigError naming the field of the config, the folder and the remedy if files cannot be
    written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = f"{error.filename} is no folder"
        raise ConfigError(
            f"{field} {folder} cannot be written to ({reason}); name a folder on this machine "
            "that can be"
        ) from error


def check_service_folders(config: Config, *, is_data_node: bool) -> None:
    """Those that the service itself writes to: before anything slow is started for it.

    `is_data_node`: whether workers and stagers run here, too.
    """
    check_writable("state_dir", config.state_dir)
    if config.index == "lazy":
        check_writable("index_dir", config.index_dir)
    if is_data_node and config.staging.cache_dir is not None:
        check_writable("staging.cache_dir", config.staging.cache_dir)
