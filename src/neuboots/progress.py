"""Progress with the time left: one bar for everything that takes long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(title: str, total: int | None, *, show: bool = True, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each of `total` steps (None: unknown) with the text to stand before the bar.

    >>> with bar("counting", 2, show=False) as step:
    ...     step("one")
    ...     step("two")
    """
    if not show:
        yield lambda text: None
        return
    from rich import get_console
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
    )
    quiet = not get_console().is_terminal  # into a file or a pipe a bar would print blank lines
    period = float("inf")  # steps may take minutes, and rich forgets after half a minute
    with rich.Progress(*columns, transient=True, disable=quiet, speed_estimate_period=period) as progress:
        task = progress.add_task(title, total=total, completed=done)
        progress.advance(task, 0)  # from here time is taken, so that the first step tells how long the rest will be
        yield lambda text: progress.update(task, advance=1, description=text)
