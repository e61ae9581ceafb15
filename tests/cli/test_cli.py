"""The command `neuboots`: its exit codes, and one clear sentence for whatever goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import neuboots
from neuboots.cli import main
from neuboots.methods import METHODS
from neuboots_paper.demo import Demo


def exit_code(*args: str) -> int:
    """What the shell would see."""
    try:
        return main(args)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"neuboots {neuboots.__version__}\n"


@pytest.mark.parametrize("args", [(), ("--help",), ("demo", "--help")])
def test_help(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*args) == 0
    assert "demo" in capsys.readouterr().out


def test_methods_lists_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert exit_code("methods") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in METHODS)
    assert exit_code("methods", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == list(METHODS)
    assert next(line for line in lines if line["name"] == "gp")["tasks"] == ["regression"]


def test_the_demos_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", "--help") == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--seed", "--epochs", "--num-samples", "--unknown", "--out"))


@pytest.mark.parametrize("args", [("dance",), ("demo", "--epochs", "x"), ("demo", "--colour")])
def test_what_cannot_be_parsed_is_named(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*args) == 2
    assert args[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--epochs", ["0"]),
        ("--epochs", ["-3"]),
        ("--num-samples", ["0"]),
        ("--num-samples", ["1000000"]),
        ("--seed", ["-1"]),
        ("--seed", [str(2**63)]),
        ("--unknown", [str(digit) for digit in range(10)]),
        ("--unknown", ["3", "10"]),
        ("--unknown", ["8", "8"]),
        ("--unknown", []),
        ("--out", ["figure.pdf"]),
        ("--out", ["/dev/null/figure.png"]),
    ],
)
def test_a_bad_value_gets_one_sentence(option: str, values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", option, *values) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"neuboots: {option} is {' '.join(values)}"), err
    assert err.count("\n") == 1


def test_out_may_not_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "figure.png"
    folder.mkdir()
    assert exit_code("demo", "--out", str(folder)) == 2
    assert capsys.readouterr().err.startswith("neuboots: --out is")


@pytest.mark.parametrize("module", ["tyro.extras", "rich", "lightning_fabric", "sklearn.datasets", "matplotlib.axes"])
def test_a_missing_extra_is_named(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "neuboots.report.plots", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert exit_code("demo", "--out", str(tmp_path / "figure.png")) == 1
    package = module.split(".")[0]
    assert capsys.readouterr().err == (
        f"neuboots: {package} is not installed; get it with: pip install 'neuboots[demo]'\n"
    )


def test_the_extra_of_gaussian_processes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,y\n" + "".join(f"{i},{i % 7 + 0.5}\n" for i in range(60)))
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    assert exit_code("fit", str(table), "--target", "y", "--method", "gp", "--out", str(tmp_path / "m")) == 1
    assert "gpytorch is not installed; get it with: pip install 'neuboots[gp]'\n" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(self: Demo) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "run", interrupt)
    assert exit_code("demo") == 130
    assert capsys.readouterr().err == "neuboots: interrupted\n"


def test_a_fault_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Demo) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Demo, "run", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["demo"])


def test_help_in_a_fresh_process_loads_nothing_slow() -> None:
    program = """
import sys
from neuboots.cli import main
try:
    main(["--help"])
finally:
    slow = sys.modules.keys() & {"lightning_fabric", "sklearn", "matplotlib"}
    assert not slow, f"--help loads {slow}"
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: neuboots")


def test_a_reader_that_has_enough_ends_a_list_quietly() -> None:
    command = [sys.executable, "-m", "neuboots.cli", "methods", "--json"]
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=unbuffered) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        said = running.stderr.read()
    assert (running.returncode, said) == (0, b"")
