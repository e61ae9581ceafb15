"""Between the library and whoever typed a command: faults and warnings become sentences, and sentences are printed."""

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from neuboots.experiments import UsageError

_NAMES = (
    "channels|classes|epochs|ignore|level|max_categories|max_error|max_width|method|num_samples|seed|size|target|task|test|"
    "void"
)
_OPTION = re.compile(rf"(?<![\w/'\"])({_NAMES})=(\[)?('[^']*'|[^\s,;:]+?)(\])?(?=[\s,;:.]|$)")


@contextmanager
def sentences() -> Iterator[None]:
    """What is wrong with a file, a model or an option is said in one line, and never with a traceback.

    >>> with sentences():
    ...     raise ValueError("column 'id' is no number; leave it out with ignore=['id']")
    Traceback (most recent call last):
    neuboots.experiments.UsageError: column 'id' is no number; leave it out with --ignore 'id'
    """
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except MemoryError:
        raise UsageError("the memory of this machine is too small for that; give fewer rows or columns") from None
    except (ValueError, OSError, OverflowError) as fault:
        raise UsageError(as_options(" ".join(str(fault).split()) or type(fault).__name__)) from None


@contextmanager
def warnings_as_notes() -> Iterator[list[str]]:
    """Gives a list that takes what the library itself warns of, each once; other libraries warn programmers."""
    notes: list[str] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        sentence = as_options(" ".join(str(message).split()))
        ours = issubclass(category, UserWarning) and f"{os.sep}neuboots{os.sep}" in filename
        if ours and sentence not in notes:
            notes.append(sentence)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield notes


def speak(words: str, *, aside: bool = False) -> None:
    """Print, to standard error if `aside`; what cannot be shown, or nobody reads any more, stops no work."""
    stream = sys.stderr if aside else sys.stdout
    if stream is None:  # it is closed
        return
    encoding = stream.encoding or "utf-8"
    try:
        print(words.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:  # a reader that is gone, a disk that is full
        hush(stream)


def hush(stream: TextIO | None = None) -> None:
    """Standard output, or another stream, goes nowhere from now on: whoever read it has enough."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), (stream or sys.stdout).fileno())


def as_options(sentence: str) -> str:
    """A sentence about arguments as one about options.

    >>> as_options("got test=0.1 of 2 rows; give test=0, or raise max_categories")
    'got --test 0.1 of 2 rows; give --test 0, or raise --max-categories'
    """
    named = _OPTION.sub(lambda found: f"--{found[1].replace('_', '-')} {found[3]}", sentence)
    return named.replace("raise max_categories", "raise --max-categories").replace(" a larger validation_fraction,", "")
