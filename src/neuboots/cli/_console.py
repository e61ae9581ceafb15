"""Dispatch and console of the commands: errors and warnings, tables as text, JSON.

A command is a frozen dataclass of options with a `run()` method. Commands are imported by name, so that
`neuboots predict` loads neither the other commands nor `neuboots_paper`.
"""

import difflib
import errno
import io
import json
import math
import os
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from neuboots._validation import ArgumentError, escape_text

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
_FILE_PACKAGES = {"PIL", "pandas", "pyarrow", "safetensors", "struct", "zipfile", "zlib", "_lzma"}
_MAX_LINE = 4_000  # characters of a line on the terminal
_MAX_CELL = 200


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
    """Run a command. Every exception becomes one line on standard error that begins with "neuboots:".

    With the environment variable NEUBOOTS_TRACEBACK=1 its traceback is printed before.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0; 1 if a package is missing or an error was not expected; 2 if an option, a file or the system does
        not allow what was asked for; 130 if interrupted; 143 if terminated.
    """
    args = sys.argv[1:] if argv is None else [*argv]
    if argv is None:
        signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:  # the reader of the pipe has finished, as `head` does
        silence_stream()
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("NEUBOOTS_TRACEBACK", "0") != "0":
            echo(*"".join(traceback.format_exception(error)).splitlines(), to_stderr=True)
        message, code = describe_error(error)
        echo(f"neuboots: {' '.join(message.split())}", to_stderr=True)
        return code
    return 0


def _run(args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        echo(*_help().split("\n"))
    elif args[0] == "--version":
        echo(f"neuboots {version('neuboots')}")
    elif args[0] not in COMMANDS:
        close = difflib.get_close_matches(args[0], COMMANDS, 1)
        raise UsageError(f"unknown command {args[0]!r}" + (f"; did you mean {close[0]}?" if close else ""))
    else:
        _parse(args[0], args[1:]).run()


def _parse(name: str, args: Sequence[str]) -> Any:
    """Return the command with its options; SystemExit after a help text or a message about wrong options."""
    import tyro

    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(import_module(module), attribute)
    config = (tyro.conf.PositionalRequiredArgs,)
    out, error = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(sys.stdout or out), redirect_stderr(error):  # its messages repeat the arguments
            options = tyro.cli(command, prog=f"neuboots {name}", args=args, config=config)
    finally:
        if error.tell():
            echo(*re.sub("\x1b\\[[0-9;]*m", "", error.getvalue()).splitlines(), to_stderr=True)
    for field in fields(options):
        if field.default is MISSING and getattr(options, field.name) == "":  # as a path, the working directory
            raise UsageError(f"{field.name.upper()} is empty; expected a file or folder")
    return options


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
    return f"""usage: neuboots COMMAND [OPTIONS]

Bootstrap uncertainty for PyTorch networks, from one training run.

commands:
{commands}

neuboots COMMAND --help lists the options of a command; neuboots --version prints the version.
NEUBOOTS_TRACEBACK=1 in the environment prints the traceback of an error."""


def _exit_on_signal(number: int, frame: object) -> None:
    """Turn SIGTERM into SystemExit, so that `finally` blocks remove temporary files."""
    raise SystemExit(128 + number)


# -- errors and warnings -------------------------------------------------------------------------------


def describe_error(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code of an exception, from its type and its fields.

    Args:
        error: The exception.

    Returns:
        Message and exit code.

    Example:
        >>> describe_error(ArgumentError("max_error", 2, "a number in (0, 1)"))
        ('--max-error is 2; expected a number in (0, 1)', 2)
        >>> describe_error(OSError(errno.ENOENT, "No such file or directory", "t.csv"))
        ('t.csv: No such file or directory', 2)
        >>> describe_error(ZeroDivisionError("division by zero"))[1]
        1
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    first_line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, KeyboardInterrupt):
        return first_line or "interrupted", 130
    if isinstance(error, ArgumentError):
        hint = f": {error.hint}" if error.hint else ""
        return f"{option_name(error.name)} is {error.value}; expected {error.expected}{hint}", 2
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return "not enough memory; use fewer rows, columns or replicates", 2
    if isinstance(error, RecursionError):
        return "a file is nested too deeply", 2
    if isinstance(error, UnicodeDecodeError):
        return f"a text is not {error.encoding}: byte {error.object[error.start]:#04x} at position {error.start}", 2
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return f"{where}{error.strerror}" + ("; free some space, or write to another place" if full else ""), 2
    if isinstance(error, ImportError) and error.name is None:  # raised with a hint by `import_optional`
        return str(error), 1
    if isinstance(error, ModuleNotFoundError) and (package := str(error.name).split(".")[0]) != "neuboots":
        return f"{package} is not installed: pip install 'neuboots[{_EXTRAS.get(package, 'all')}]'", 1
    if isinstance(error, ValueError | OSError | OverflowError):
        return str(error) or type(error).__name__, 2
    if isinstance(error, EOFError) or packages & _FILE_PACKAGES:
        return f"a file cannot be read or written: {first_line or type(error).__name__}", 2
    hint = "run the command with NEUBOOTS_TRACEBACK=1 in the environment to see where"
    return f"unexpected {type(error).__name__}: {first_line}; {hint}", 1


def _show_warning(message: Warning | str, *_: Any) -> None:
    echo(f"warning: {' '.join(str(message).split())}", to_stderr=True)


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


def echo(*lines: str, to_stderr: bool = False, optional: bool = False) -> None:
    """Print lines, with escapes for what is not printable; very long ones are cut.

    Everything that a command prints is printed here, except JSON, which is ASCII. A full standard output is an error
    unless the lines are optional, as where the result is in a file; a closed stream is none, nor is one that cannot
    encode the text.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    half = _MAX_LINE // 2
    shown = [line if len(line) <= _MAX_LINE else f"{line[:half]} … {line[-half:]}" for line in map(escape_text, lines)]
    try:
        print("\n".join(shown).encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError) as error:
        silence_stream(stream)
        if isinstance(error, OSError) and not (optional or to_stderr or isinstance(error, BrokenPipeError)):
            raise UsageError(f"cannot write to standard output ({error})") from None


def echo_rich(part: Any = "", *, style: str = "") -> None:
    """Print a text in a style, with escapes for what is not printable, or a table of rich."""
    from rich import get_console
    from rich.text import Text

    if isinstance(part, str):
        part = Text("\n".join(map(escape_text, part.split("\n"))), style)
    get_console().print(part, highlight=False, markup=False, soft_wrap=True)


def silence_stream(stream: TextIO | None = None) -> None:
    """Redirect standard output, or another stream, to the null device after a broken pipe."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), (stream or sys.stdout).fileno())


def echo_table(table: "Table", *, to_stderr: bool = False, max_rows: int = 10) -> None:
    """Print a table; long ones are cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE, show_edge=False, padding=(0, 2, 0, 0))
    for k, column in enumerate(table.columns):
        drawn.add_column(
            Text(_shorten(column)), justify="right" if table.rows and table.is_numeric(k) else "left", overflow="fold"
        )
    for row in table.rows[:max_rows]:
        drawn.add_row(*(Text(_shorten(cell.text)) for cell in row))
    console = Console(file=(sys.stderr if to_stderr else sys.stdout) or io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    more = f"… and {len(table.rows) - max_rows:,} more rows" if len(table.rows) > max_rows else ""
    lines = [table.title, *(capture.get().rstrip("\n").split("\n") if table.rows else []), more, table.note]
    echo("", *(line for line in lines if line), to_stderr=to_stderr)


def _shorten(text: str) -> str:
    """Return a text for a cell: escaped, and cut to a few lines."""
    text = escape_text(text)
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object in ASCII; NaN and infinities become null. Output that is lost is an error."""
    if sys.stdout is None:
        raise UsageError("cannot write to standard output (it is closed)")
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
