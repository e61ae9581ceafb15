"""Command line: `neuboots COMMAND …`.

A command is a frozen dataclass of options with a `run()` method. Commands are imported by name, so that
`neuboots predict` loads neither the other commands nor `neuboots_paper`.
"""

import difflib
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from neuboots.cli._console import UsageError, silence_stream

COMMANDS = {
    "fit": ("neuboots.cli.fit:Fit", "Train a model on a table or a folder of images."),
    "predict": ("neuboots.cli.predict:Predict", "Predict new rows or images, with uncertainty."),
    "evaluate": ("neuboots.cli.evaluate:Evaluate", "Evaluate a model on labeled data."),
    "suggest": ("neuboots.cli.suggest:Suggest", "Suggest rows of a pool to label next."),
    "list": ("neuboots.cli.list:List", "List methods or named datasets."),
    "demo": ("neuboots_paper.demo:Demo", "Train NeuBoots on digits and plot its uncertainty."),
    "reproduce": ("neuboots_paper.reproduce:Reproduce", "Reproduce an experiment of the paper."),
    "report": ("neuboots_paper.report:Report", "Make a page of reproduced experiments."),
    "segment": ("neuboots_paper.segment:Segment", "Train and evaluate a segmentation net."),
    "scnas": ("neuboots_paper.scnas.command:Scnas", "Search an architecture for volumes (SCNAS)."),
}
"""Class and summary of each command."""

_EXTRAS = {
    "gpytorch": "gp",
    "pandas": "tables",
    "pyarrow": "tables",
    "lightning_fabric": "train",
    "safetensors": "train",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 1 if a package is missing, 2 for a wrong option, 130 if interrupted.
    """
    args = sys.argv[1:] if argv is None else [*argv]
    if argv is None:
        signal.signal(signal.SIGTERM, _exit_on_signal)
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print("neuboots", version("neuboots"))
        return 0
    if args[0] not in COMMANDS:
        close = difflib.get_close_matches(args[0], COMMANDS, 1)
        return _fail(f"unknown command {args[0]!r}" + (f"; did you mean {close[0]}?" if close else ""), 2)
    try:
        import tyro

        module, _, name = COMMANDS[args[0]][0].partition(":")
        command = getattr(import_module(module), name)
        config = (tyro.conf.PositionalRequiredArgs,)
        tyro.cli(command, prog=f"neuboots {args[0]}", args=args[1:], config=config).run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has finished, as `head` does
        silence_stream()
    except UsageError as error:
        return _fail(str(error), 2)
    except ImportError as error:
        if error.name is None:  # raised with a hint by `import_optional`
            return _fail(str(error), 1)
        package = error.name.split(".")[0]
        if not isinstance(error, ModuleNotFoundError) or package == "neuboots":
            raise
        return _fail(f"{package} is not installed: pip install 'neuboots[{_EXTRAS.get(package, 'all')}]'", 1)
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", 130)
    return 0


def _help() -> str:
    lines = [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: neuboots COMMAND [OPTIONS]",
            "",
            "Bootstrap uncertainty for PyTorch networks, from one training run.",
            "",
            "commands:",
            *lines,
            "",
            "neuboots COMMAND --help lists the options of a command; neuboots --version prints the version.",
        ]
    )


def _exit_on_signal(number: int, frame: object) -> None:
    """Turn SIGTERM into SystemExit, so that `finally` blocks remove temporary files."""
    raise SystemExit(128 + number)


def _fail(message: str, code: int) -> int:
    print(f"neuboots: {message}", file=sys.stderr)
    return code
