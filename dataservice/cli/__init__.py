"""The `dataservice` command."""

from dataservice.cli.app import main

__all__ = ["main"]
