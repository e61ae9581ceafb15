"""Tests of the benchmarks: ratios, bounds, results file and exit code. No wall-clock time is asserted."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import costs, measure, memory
from benchmarks.__main__ import main
from benchmarks.measure import Parts, Row, Scale, Series, Watch, Watched, interleave, stop_after_step
from benchmarks.topics import TOPICS
from neuboots.methods import METHODS, find_method


def ticking() -> Callable[[], float]:
    """A clock on which every look takes one second."""
    count = itertools.count()
    return lambda: float(next(count))


def of(*whole: float) -> list[Parts]:
    return [Parts(0.0, seconds) for seconds in whole]


# -- timing --------------------------------------------------------------------------------------------


def test_ratio_has_the_minimum_of_each_part() -> None:
    series = Series({"a": [Parts(10.0, 3.0), Parts(30.0, 2.0)], "b": [Parts(9.0, 5.0), Parts(20.0, 1.0)]})
    assert series.ratio("a", "b") == pytest.approx((9.0 + 2.0) / (9.0 + 1.0))
    assert series.whole_ratio("a", "b") == pytest.approx(13.0 / 14.0)


def test_watch_separates_the_shared_part() -> None:
    watch = Watch(clock=ticking())

    def run() -> None:
        for _ in range(3):  # looks: start, stop; start, stop; start, stop
            watch.start()
            watch.stop()

    runner = watch.timed(run)
    assert runner() == Parts(shared=3.0, own=4.0)  # from the first look to the eighth: 7 seconds
    assert runner() == Parts(shared=3.0, own=4.0)  # each run starts at zero


def test_runners_are_warmed_up_and_interleaved() -> None:
    calls: list[str] = []

    def runner(name: str) -> Parts:
        calls.append(name)
        return Parts(0.0, float(len(calls)))

    names = ("a", "b", "c")
    series = interleave({name: (lambda name=name: runner(name)) for name in names}, repeats=4)
    assert calls[:3] == ["a", "b", "c"]
    rounds = [calls[i : i + 3] for i in range(3, len(calls), 3)]
    assert [sorted(turn) for turn in rounds] == [["a", "b", "c"]] * 4
    assert len({tuple(turn) for turn in rounds}) > 1
    assert {name: len(parts) for name, parts in series.runs.items()} == dict.fromkeys(names, 4)


def test_watched_layers_are_timed_forward_and_backward() -> None:
    watch = Watch(clock=ticking())
    net = nn.Sequential(Watched(nn.Linear(3, 4), watch, training=True), nn.Linear(4, 1))
    optimizer = stop_after_step(torch.optim.SGD(net.parameters(), lr=0.1), watch)
    loss = net(torch.ones(2, 3)).sum()
    assert watch.seconds == 1.0
    loss.backward()
    assert watch.seconds == 1.0
    optimizer.step()
    assert watch.seconds == 2.0


# -- fresh processes and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("case", memory.CASES)
def test_memory_cases_have_the_right_output_shape(case: str) -> None:
    made = memory.CASES[case](quick=True)
    axes = {"flat": 2, "upsampled": 4, "labelled": 2, "deeplab": 4, "volume": 5, "tiles": 5}[case]
    assert made.net(made.x).ndim == axes
    if axes > 2:
        assert made.net(made.x).shape[2:] == made.x.shape[2:]
    slack = 2**22  # the kernel adds up pages thread by thread, and now and then
    assert 0 < memory.resident("VmRSS") <= memory.resident("VmHWM") + slack
    assert memory.extra(made, 3) >= -slack


# -- rows, table, file, exit code ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "bound", "holds"),
    [
        (Row("r", 1.02, at_most=1.03), "≤ 1.03", True),
        (Row("r", 1.031, at_most=1.03), "≤ 1.03", False),
        (Row("r", 5.0, at_least=5.0), "≥ 5", True),
        (Row("r", 4.99, at_least=5.0), "≥ 5", False),
        (Row("r", 9.0), "", None),
        (Row("r", float("nan"), at_most=1.0), "≤ 1", False),
    ],
)
def test_row_compares_with_its_bound(row: Row, bound: str, holds: bool | None) -> None:
    assert row.bound == bound
    assert row.holds is holds


def faked(monkeypatch: pytest.MonkeyPatch, *found: Row) -> None:
    monkeypatch.setitem(TOPICS, "mlp", lambda scale: list(found))


@pytest.mark.parametrize(("ratio", "code"), [(1.2, 1), (1.1, 0)])
def test_violated_bound_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float, code: int
) -> None:
    faked(monkeypatch, Row("other", 7.0), Row("bounded", ratio, at_most=1.1))
    out = tmp_path / "results.json"
    assert main(["--only", "mlp", "--repeats", "3", "--out", str(out)]) == code
    results = json.loads(out.read_text())
    assert results["command"] == f"python -m benchmarks --only mlp --repeats 3 --out {out}"
    assert results["torch"] == torch.__version__
    assert results["threads"] == torch.get_num_threads()
    assert (results["seed"], results["repeats"], results["quick"]) == (measure.SEED, 3, False)
    assert "T" in results["date"]
    assert [row["holds"] for row in results["rows"]] == [None, code == 0]
    assert results["rows"][1] | {"note": ""} == {
        **{"name": "bounded", "ratio": ratio, "at_most": 1.1, "at_least": None},
        **{"whole_runs": None, "note": "", "holds": code == 0},
    }
    assert list(tmp_path.iterdir()) == [out]


def test_failed_run_keeps_the_old_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(scale: Scale) -> list[Row]:
        raise RuntimeError("no memory left")

    monkeypatch.setitem(TOPICS, "mlp", fail)
    out = tmp_path / "r.json"
    out.write_text("old")
    with pytest.raises(RuntimeError, match="no memory left"):
        main(["--only", "mlp", "--out", str(out)])
    assert out.read_text() == "old"


@pytest.mark.parametrize(("argv", "named"), [(["--only", "gpu"], "gpu"), (["--repeats", "0"], "--repeats 0")])
def test_invalid_option_is_rejected(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert named in capsys.readouterr().err


def test_quick_scale_has_all_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All benchmarks run, except in new processes."""
    monkeypatch.setattr(measure, "run_python", lambda *args, env=None: [3.0, 0.5])
    monkeypatch.setattr(memory, "extra", None)  # not in this process
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    out = tmp_path / "r.json"
    assert main(["--quick", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["rows"]
    assert len(found) == 47
    assert all(row["ratio"] > 0 for row in found)
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in found)
    assert len({row["name"] for row in found}) == len(found)
    assert [*tmp_path.iterdir()] == [out]  # the cache of images is removed


# -- what each method costs ------------------------------------------------------------------------------


def test_cost_table_shows_the_committed_rows() -> None:
    text = costs.PAGE.read_text(encoding="utf-8")
    assert costs.page_with(text, costs.read_rows()) == text


def test_committed_costs_cover_every_method_and_k() -> None:
    found = {(row["net"], row["method"], row["K"]) for row in costs.read_rows()}
    wanted = {
        (net, name, K)
        for net in costs.NETS
        for name in METHODS
        if costs.NETS[net](True).can(find_method(name))
        for K in costs.KS
    }
    assert found == wanted
