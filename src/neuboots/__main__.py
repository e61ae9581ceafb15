"""Command line entry point: `python -m neuboots`."""

import sys

from neuboots.cli import main

if __name__ == "__main__":
    sys.exit(main())
