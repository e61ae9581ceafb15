"""The command `neuboots`: a subcommand is a frozen dataclass of options with `run()`, and one line in COMMANDS."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from neuboots.commands.boundary import hush
from neuboots.commands.evaluate import Evaluate
from neuboots.commands.fit import Fit
from neuboots.commands.next import Next
from neuboots.commands.predict import Predict
from neuboots.commands.sets import Sets
from neuboots.experiments import Experiment, UsageError
from neuboots.experiments.demo import Demo
from neuboots.experiments.report import Report
from neuboots.experiments.reproduce import Reproduce
from neuboots.experiments.scnas import Scnas
from neuboots.experiments.segment import Segment
from neuboots.methods import METHODS


@dataclass(frozen=True)
class Methods:
    """List the methods: what each is, what it can do, and what it costs."""

    json: bool = False
    """One JSON object a line, for machines."""

    def run(self) -> None:
        if self.json:
            shown = ("name", "summary", "tasks", "train_cost", "predict_cost", "reference")
            for entry in METHODS.values():
                print(json.dumps({key: getattr(entry, key) for key in shown}, ensure_ascii=False))
            return
        from rich import box, get_console
        from rich.table import Table

        table = Table(
            box=box.SIMPLE, caption="Costs in the passes L of one net and the number K of members or replicates."
        )
        table.add_column("method", no_wrap=True)
        for head in ("what it is", "tasks", "training", "prediction"):
            table.add_column(head, overflow="fold", min_width=26 if head == "what it is" else None)
        for entry in METHODS.values():
            tasks = "all" if len(entry.tasks) == 3 else ", ".join(entry.tasks)
            table.add_row(entry.name, entry.summary, tasks, entry.train_cost, entry.predict_cost)
        get_console().print(table)


COMMANDS: dict[str, Callable[..., Experiment]] = {
    "fit": Fit,
    "predict": Predict,
    "evaluate": Evaluate,
    "next": Next,
    "methods": Methods,
    "data": Sets,
    "demo": Demo,
    "segment": Segment,
    "scnas": Scnas,
    "reproduce": Reproduce,
    "report": Report,
}

ABOUT = "Honest bootstrap uncertainty for any PyTorch network, from one training run. For the version: --version."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and give its exit code: 1 what is needed is missing, 2 bad options, 130 interrupted."""
    args = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        signal.signal(signal.SIGTERM, _end)
    if args == ["--version"]:
        print("neuboots", version("neuboots"))
        return 0
    try:
        from tyro.conf import PositionalRequiredArgs
        from tyro.extras import subcommand_cli_from_dict

        chosen = subcommand_cli_from_dict(
            COMMANDS, prog="neuboots", description=ABOUT, args=args or ["--help"], config=(PositionalRequiredArgs,)
        )
        chosen.run()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as `head` has
        hush()
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
