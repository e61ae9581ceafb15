"""The command `neuboots`: a subcommand is a frozen dataclass of options with `run()`, and one line in COMMANDS.

The commands for one's own files: fit, predict, evaluate, next. One file each; options with `run()`.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from neuboots.cli._console import Command, UsageError, silence_stream
from neuboots.cli.evaluate import Evaluate
from neuboots.cli.fit import Fit
from neuboots.cli.list import ListDatasets, ListMethods
from neuboots.cli.predict import Predict
from neuboots.cli.suggest import Suggest

COMMANDS: dict[str, Callable[..., Command]] = {
    "fit": Fit,
    "predict": Predict,
    "evaluate": Evaluate,
    "next": Suggest,
    "methods": ListMethods,
    "data": ListDatasets,
}


def _paper_commands() -> dict[str, Callable[..., Command]]:
    """The commands of `neuboots_paper`, imported only when they are needed."""
    from neuboots_paper.demo import Demo
    from neuboots_paper.report import Report
    from neuboots_paper.reproduce import Reproduce
    from neuboots_paper.scnas.command import Scnas
    from neuboots_paper.segment import Segment

    return {"demo": Demo, "segment": Segment, "scnas": Scnas, "reproduce": Reproduce, "report": Report}


ABOUT = "Honest bootstrap uncertainty for any PyTorch network, from one training run. For the version: --version."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and give its exit code: 1 what is needed is missing, 2 bad options, 130 interrupted."""
    args = sys.argv[1:] if argv is None else [*argv]
    if argv is None:
        signal.signal(signal.SIGTERM, _end)
    if args == ["--version"]:
        print("neuboots", version("neuboots"))
        return 0
    try:
        from tyro.conf import PositionalRequiredArgs
        from tyro.extras import subcommand_cli_from_dict

        commands = COMMANDS if args and args[0] in COMMANDS else COMMANDS | _paper_commands()
        chosen = subcommand_cli_from_dict(
            commands, prog="neuboots", description=ABOUT, args=args or ["--help"], config=(PositionalRequiredArgs,)
        )
        chosen.run()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as `head` has
        silence_stream()
    except UsageError as fault:
        return _fail(str(fault), 2)
    except ImportError as fault:
        if "pip install" in str(fault):  # whoever needs it has said so
            return _fail(str(fault), 1)
        if not isinstance(fault, ModuleNotFoundError) or fault.name is None or fault.name.startswith("neuboots"):
            raise
        package = fault.name.split(".")[0]
        extra = "gp" if package == "gpytorch" else "demo"
        return _fail(f"{package} is not installed; get it with: pip install 'neuboots[{extra}]'", 1)
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", 130)
    return 0


def _end(number: int, frame: object) -> None:
    """Whoever is asked to end clears away first what is half written."""
    raise SystemExit(128 + number)


def _fail(sentence: str, code: int) -> int:
    print(f"neuboots: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
