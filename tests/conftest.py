"""Puts this folder on the path, so that tests import `_nets`, `_reference` and other helpers by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
