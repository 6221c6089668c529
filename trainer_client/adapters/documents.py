"""What several conventions derive alike from a micro-batch: shifted labels, fillers, pixels.

Invariants: nothing is changed in place.
"""

from __future__ import annotations

import torch

from dataservice.errors import ConfigError
from trainer_client.batch import IGNORE, MicroBatch
from trainer_client.device import normalize


def is_filler(batch: MicroBatch) -> torch.Tensor:
    """bool [T]: tokens that belong to no document: padding, and the filler behind documents."""
    return batch["doc_ids"] < 0


def shifted_labels(batch: MicroBatch) -> torch.Tensor:
    """int64 [T]: at t the label of token t + 1, so that no trainer shifts again.

    A document's first label is -100, so its predecessor's last token predicts nothing.
    """
    labels = batch["labels"]
    return torch.cat([labels[1:], labels.new_full((1,), IGNORE)])


def pixels(batch: MicroBatch, dtype: torch.dtype) -> torch.Tensor:
    """`pixel_values` in the processor's form, see `normalize`; as they are if already floats."""
    values = batch["pixel_values"]
    return values.to(dtype) if values.is_floating_point() else normalize(batch, dtype)


def require(batch: MicroBatch, *, tiles: bool, form: str) -> None:
    """ConfigError where the pictures were cut in a way that `form` does not know."""
    if bool(batch.vision.tile) is not tiles:
        has, wants = ("tiles", "patches") if not tiles else ("patches", "tiles")
        raise ConfigError(
            f"{form} wants {wants}, the service sends {has}; set vision.mode: {wants} in its config"
        )
