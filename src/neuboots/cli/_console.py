"""Dispatch and console of the commands: errors and warnings, tables as text, JSON.

A command is a frozen dataclass of options with a `run()` method. Commands are imported by name, so that
`neuboots predict` loads neither the other commands nor `neuboots_paper`.
"""

import difflib
import json
import math
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from neuboots._validation import ArgumentError

if TYPE_CHECKING:
    from neuboots.app.model import Format
    from neuboots.report.tables import Table


COMMANDS = {
    "fit": ("neuboots.cli.models:Fit", "Train a model on a table or a folder of images."),
    "predict": ("neuboots.cli.models:Predict", "Predict new rows or images, with uncertainty."),
    "evaluate": ("neuboots.cli.evaluate:Evaluate", "Evaluate a model on labeled data."),
    "suggest": ("neuboots.cli.suggest:Suggest", "Suggest rows of a pool to label next."),
    "list": ("neuboots.cli.list:List", "List methods or named datasets."),
    "demo": ("neuboots_paper.demo:Demo", "Train NeuBoots on digits and plot its uncertainty."),
    "reproduce": ("neuboots_paper.reproduce:Reproduce", "Reproduce an experiment of the paper."),
    "report": ("neuboots_paper.report:Report", "Make a page of reproduced experiments."),
    "segment": ("neuboots_paper.segment:Segment", "Train and evaluate a segmentation net."),
    "scnas": ("neuboots_paper.scnas.command:SearchCommand", "Search an architecture for volumes (SCNAS)."),
}
"""Class and summary of each command."""

_EXTRAS = {
    "gpytorch": "gp",
    "pandas": "tables",
    "pyarrow": "tables",
    "lightning_fabric": "train",
    "safetensors": "train",
}


class UsageError(ValueError):
    """An option or file that cannot be used; the message names it and says what to do."""


def argument(**options: Any) -> Any:
    """Settings of an argument for tyro."""
    try:
        from tyro.conf import arg
    except ImportError:  # `main` reports it; options can be constructed without tyro
        return None
    return arg(**options)


DataPath = Annotated[str, argument(metavar="DATA")]
ModelFolder = Annotated[str, argument(metavar="MODEL")]


# -- dispatch ------------------------------------------------------------------------------------------


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
    commands = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
    return f"""usage: neuboots COMMAND [OPTIONS]

Bootstrap uncertainty for PyTorch networks, from one training run.

commands:
{commands}

neuboots COMMAND --help lists the options of a command; neuboots --version prints the version."""


def _exit_on_signal(number: int, frame: object) -> None:
    """Turn SIGTERM into SystemExit, so that `finally` blocks remove temporary files."""
    raise SystemExit(128 + number)


def _fail(message: str, code: int) -> int:
    print(f"neuboots: {message}", file=sys.stderr)
    return code


# -- errors and warnings -------------------------------------------------------------------------------


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise errors about arguments, files and models as UsageError, with arguments written as options.

    Example:
        >>> with user_errors():
        ...     raise ArgumentError("max_error", 2, "a number in (0, 1)")
        Traceback (most recent call last):
        neuboots.cli._console.UsageError: --max-error is 2; expected a number in (0, 1)
    """
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except MemoryError:
        raise UsageError("not enough memory; use fewer rows or columns") from None
    except ArgumentError as error:
        hint = f": {error.hint}" if error.hint else ""
        raise UsageError(f"{option_name(error.name)} is {error.value}; expected {error.expected}{hint}") from None
    except (ValueError, OSError, OverflowError) as error:
        raise UsageError(" ".join(str(error).split()) or type(error).__name__) from None


def option_name(argument: str) -> str:
    """Return the option of an argument: "max_error" gives "--max-error"."""
    return "--" + argument.replace("_", "-")


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list that collects the library's own warnings, each once; those of other packages are dropped."""
    notes: list[str] = []

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, UserWarning) and f"{os.sep}neuboots{os.sep}" in filename and text not in notes:
            notes.append(text)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show  # type: ignore[assignment]
        yield notes


# -- text ----------------------------------------------------------------------------------------------


def echo(text: str, *, to_stderr: bool = False) -> None:
    """Print text; a closed or full stream, or one that cannot encode it, does not stop the command."""
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:
        silence_stream(stream)


def silence_stream(stream: TextIO | None = None) -> None:
    """Redirect standard output, or another stream, to the null device after a broken pipe."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), (stream or sys.stdout).fileno())


def echo_table(table: "Table", *, to_stderr: bool = False, max_rows: int = 10) -> None:
    """Print a table; long ones are cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE, show_edge=False, padding=(0, 2, 0, 0))
    for k, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if table.rows and table.is_numeric(k) else "left", overflow="fold")
    for row in table.rows[:max_rows]:
        drawn.add_row(*(cell.text for cell in row))
    console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(drawn)
    more = f"… and {len(table.rows) - max_rows:,} more rows" if len(table.rows) > max_rows else ""
    lines = [f"\n{table.title}", *([capture.get().rstrip("\n")] if table.rows else []), more, table.note]
    echo("\n".join(line for line in lines if line), to_stderr=to_stderr)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object in ASCII; NaN and infinities become null."""
    try:
        print(json.dumps(_to_json(value)), flush=True)
    except BrokenPipeError:
        silence_stream()
    except OSError as error:
        silence_stream()
        raise UsageError(f"cannot write to standard output ({error})") from None


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command_line(options: Any) -> str:
    """Return the command line that makes these options; the command is named like their class."""
    words = ["neuboots", type(options).__name__.lower()]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.default is MISSING:
            words.append(str(value))
        elif value != field.default:
            values = [] if value is True else value if isinstance(value, tuple) else [value]
            words += [option_name(field.name), *map(str, values)]
    return shlex.join(words)


# -- files ---------------------------------------------------------------------------------------------

_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def file_format(out: str, given: "Format | None") -> "Format":
    """Return the given format, else that of the suffix; standard output and devices are CSV.

    Example:
        >>> file_format("found.ndjson", None), file_format("-", None), file_format("-", "jsonl")
        ('jsonl', 'csv', 'jsonl')
    """
    from neuboots.app.model import is_device

    if given is not None or is_device(out):
        return given or "csv"
    if (suffix := Path(out).suffix.lower()) not in _SUFFIXES:
        raise UsageError(f"--out is {out}; expected a name that ends in {', '.join(_SUFFIXES)}, or --format")
    return _SUFFIXES[suffix]  # type: ignore[return-value]


def check_output_path(out: str, *inputs: str | Path) -> None:
    """Raise UsageError if a file cannot be written, or is one of the inputs."""
    from neuboots.app.model import is_device

    path = Path(out).expanduser()
    if out != "-" and path.is_dir():
        raise UsageError(f"--out is {out}, which is a folder; expected a file, such as {path}/predictions.csv")
    if is_device(out):
        return
    if path.exists() and any(_is_same_file(path, str(name)) for name in inputs):
        raise UsageError(f"--out is {out}, which is also the input; expected another name")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"--out is {out}, but {folder} is not a folder; create it first")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"--out is {out}, which is not writable")


def _is_same_file(path: Path, name: str) -> bool:
    with suppress(OSError, ValueError):
        return os.path.samestat(path.stat(), os.fstat(0) if name == "-" else os.stat(os.path.expanduser(name)))
    return False
