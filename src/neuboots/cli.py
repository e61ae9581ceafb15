"""The command `neuboots`: a subcommand is a frozen dataclass of options with `run()`, and one line in COMMANDS."""

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from neuboots.experiments import Experiment, UsageError
from neuboots.experiments.demo import Demo

COMMANDS: dict[str, Callable[..., Experiment]] = {
    "demo": Demo,
}

ABOUT = "Honest bootstrap uncertainty for any PyTorch network, from one training run. For the version: --version."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and give its exit code: 1 what is needed is missing, 2 bad options, 130 interrupted."""
    args = sys.argv[1:] if argv is None else list(argv)
    if args == ["--version"]:
        print("neuboots", version("neuboots"))
        return 0
    try:
        from tyro.extras import subcommand_cli_from_dict

        subcommand_cli_from_dict(COMMANDS, prog="neuboots", description=ABOUT, args=args or ["--help"]).run()
    except UsageError as fault:
        return _fail(str(fault), 2)
    except ModuleNotFoundError as fault:
        if fault.name is None or fault.name.startswith("neuboots"):
            raise
        return _fail(f"{fault.name.split('.')[0]} is not installed; get it with: pip install 'neuboots[demo]'", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(sentence: str, code: int) -> int:
    print(f"neuboots: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
