"""Command line: `neuboots COMMAND …`."""

from neuboots.cli._console import COMMANDS, UsageError, main

__all__ = ["COMMANDS", "UsageError", "main"]
