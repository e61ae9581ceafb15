"""`python -m tests.fuzz`: see `driver.main`."""

import sys

from .driver import main

if __name__ == "__main__":
    sys.exit(main())
