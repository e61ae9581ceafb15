"""Processes that are killed: what they leave behind, and what the next one does with it."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

_WATCHED = ("open", "os.", "shutil.", "ctypes.", "fcntl.")


def run_in_fork(work: Callable[[], object]) -> int:
    """Run a function in a copy of this process; return the exit code, or the negative signal that ended it."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_every_step(work: Callable[[], object]) -> Iterator[int]:
    """Run a function in forks that die before their first, second, … access to a file, until one ends; yield each."""
    for last in count(1):

        def killed(last: int = last) -> None:
            steps = count(1)

            def hook(event: str, args: Any) -> None:
                if event.startswith(_WATCHED) and next(steps) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            work()

        code = run_in_fork(killed)
        if code == 0:
            return
        assert code == -signal.SIGKILL, code
        yield last
