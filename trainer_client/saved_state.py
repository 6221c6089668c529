"""Takes a stream's state out of a checkpoint of torch, as the JSON that `dataservice replay` reads:

    python -m trainer_client.saved_state CHECKPOINT.pt > state.json

Invariants: the checkpoint is loaded with `weights_only=True`, so nothing in it is run.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from dataservice.errors import DataServiceError
from dataservice.wire.schema import decode_plain, encode
from dataservice.wire.states import the_state_in


def state_of(path: str) -> str:
    """As JSON. WireError unless the checkpoint holds one state, however deep in dicts and lists;
    OSError or what torch raises for a file that is none."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    state = the_state_in(checkpoint, name=path)
    return json.dumps(decode_plain(encode(state), what="state"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer_client.saved_state")
    parser.add_argument("checkpoint", help="a file that torch.save wrote")
    try:
        sys.stdout.write(state_of(parser.parse_args().checkpoint) + "\n")
    except (DataServiceError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
