"""The bar: how much time is left, however long a step takes."""

import io

import pytest
from rich.console import Console

from neuboots.training import progress_bar


@pytest.mark.parametrize("done", [0, 5])
def test_the_first_step_tells_the_time_left_of_slow_ones(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [0.0], io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, get_time=lambda: now[0])
    for place in ("rich.get_console", "rich.progress.get_console"):
        monkeypatch.setattr(place, lambda: console)
    with progress_bar("slow", done + 4, done=done) as step:
        now[0] = 120.0
        step("slow")
        now[0] = 240.0
        step("slow")
    assert f"{done + 2}/{done + 4}" in out.getvalue()
    assert "0:04:00" in out.getvalue()  # two more of two minutes each; what was done before took no time
