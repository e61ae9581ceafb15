"""A fresh Python process, for what can be measured only once in a process: imports and peak memory."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def numbers(*args: str, env: Mapping[str, str] | None = None) -> list[float]:
    """The numbers that `python *args` prints."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same neuboots as here
    command = [sys.executable, *args]
    out = subprocess.run(command, cwd=ROOT, env=inherited | dict(env or {}), check=True, stdout=subprocess.PIPE)
    return [float(word) for word in out.stdout.split()]
