"""Tests of neuboots.cli: dispatch, exit codes and imports."""

import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import neuboots
from neuboots.cli import COMMANDS, main
from neuboots.cli.list import List


def exit_code(*args: str) -> int:
    """The exit code as a shell sees it."""
    try:
        return main(args)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"neuboots {neuboots.__version__}\n"


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*args) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    assert callable(getattr(import_module(module), attribute).run)
    assert exit_code(name, "--help") == 0
    assert "usage: neuboots" in capsys.readouterr().out


@pytest.mark.parametrize("args", [("dance",), ("fit", "t.csv", "--epochs", "x"), ("fit", "t.csv", "--colour")])
def test_unknown_command_or_option_is_named(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*args) == 2
    assert args[-1] in capsys.readouterr().err


@pytest.mark.parametrize(("package", "extra"), [("tyro", "all"), ("gpytorch", "gp"), ("pyarrow", "tables")])
def test_missing_package_is_named(
    package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (table := tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i},{i % 7 + 0.5}\n" for i in range(60)))
    monkeypatch.setitem(sys.modules, package, None)
    options = ("--target", "y", "--method", "gp", "--out", str(tmp_path / "m"))
    if package == "pyarrow":
        from neuboots.app import model

        def write(*_: Any) -> None:
            model._to_arrow(None)  # type: ignore[arg-type]

        monkeypatch.setattr(List, "run", write)
        assert exit_code("list", "methods") == 1
    else:
        assert exit_code("fit", str(table), *options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert package in error
    assert f"neuboots[{extra}]" in error
    assert not (tmp_path / "m").exists()


def test_interruption_has_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(self: List) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(List, "run", interrupt)
    assert exit_code("list", "methods") == 130
    assert capsys.readouterr().err == "neuboots: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("by\nzero"), 1), (RuntimeError("\x1b[2J"), 1), (ValueError("a"), 2)]
)
@pytest.mark.parametrize("show", [False, True])
def test_traceback_is_printed_on_request_only(
    error: Exception, code: int, show: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: List) -> None:
        raise error

    monkeypatch.setattr(List, "run", fail)
    monkeypatch.setenv("NEUBOOTS_TRACEBACK", "1" if show else "0")
    assert exit_code("list", "methods") == code
    out, text = capsys.readouterr()
    assert out == ""
    assert text.splitlines()[-1].startswith("neuboots: ")
    assert ("Traceback" in text and "in fail" in text) == show
    assert show or text.count("\n") == 1
    assert "\x1b" not in text


def test_warning_is_one_escaped_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warn(self: List) -> None:
        warnings.simplefilter("always")
        warnings.warn("column\n\x1b[2J", stacklevel=1)

    monkeypatch.setattr(List, "run", warn)
    assert exit_code("list", "methods") == 0
    assert capsys.readouterr().err == "warning: column \\x1b[2J\n"


@pytest.mark.parametrize("args", [("\x1b[31m",), ("fit", "t.csv", "--epochs", "\x1b]0;x\x07"), ("fit", "--\u202ecol")])
def test_messages_about_options_are_escaped(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*args) == 2
    assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


@pytest.mark.parametrize("args", [(), ("--version",), ("fit", "--help"), ("fit", "--colour"), ("list", "methods")])
def test_closed_streams_do_not_matter(args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert exit_code(*args) == (2 if "--colour" in args else 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("args", [("list", "methods"), ("list", "methods", "--json"), ("--help",)])
def test_output_that_is_lost_is_an_error(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch, open("/dev/full", "w", encoding="utf-8") as full:
        patch.setattr(sys, "stdout", full)
        assert exit_code(*args) == 2
    assert "standard output" in capsys.readouterr().err


def test_empty_argument_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """As a path it would be the working directory."""
    assert exit_code("predict", "model", "") == 2
    assert "DATA is empty" in capsys.readouterr().err


def run_python(program: str) -> None:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_help_and_lists_import_no_slow_packages() -> None:
    run_python("""
import sys
from neuboots.cli import main
main(["--help"])
main(["list", "datasets", "--json"])
slow = sys.modules.keys() & {"lightning_fabric", "sklearn", "matplotlib", "datasets", "pandas", "kornia", "PIL"}
assert not slow, slow
""")


@pytest.mark.slow
def test_predict_imports_neither_studies_nor_plots() -> None:
    run_python("""
import sys
import neuboots.cli.models, neuboots.app.tabular
ours = [name for name in sys.modules if name.split(".")[0] in ("neuboots", "neuboots_paper")]
bad = [name for name in ours if name.startswith(("neuboots_paper", "neuboots.report", "neuboots.app.images"))]
assert not bad, bad
assert "matplotlib" not in sys.modules
""")


@pytest.mark.slow
def test_closed_pipe_ends_a_list_without_an_error() -> None:
    command = [sys.executable, "-m", "neuboots", "list", "methods", "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")
