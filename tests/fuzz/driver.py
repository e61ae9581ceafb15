"""Runs random cases in forked children, classifies what happens, and prints the table of outcomes.

    outcome:  correct  |  clear error  |  flagged (a note, or the model abstains)  |  a failure

A case is a plain value that hypothesis draws; a seed and a number of cases determine all of them. Each case runs in a
child that is forked after the imports and the training of small models, in a folder of its own, below limits of time
and memory. A failure is kept: its seed, its number, its description and its files.

The cases of an area must be able to tell what is right: the truth from which a table was written, a plain NumPy formula
of a metric, the predictions of the undamaged model. Whatever differs from it without a message is a wrong answer.
"""

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from neuboots._validation import ArgumentError
from neuboots.data import CorruptFileError, DatasetNotFoundError
from neuboots.serialization import ArtifactError

CORRECT, ERROR, FLAGGED = "correct", "clear error", "flagged"
FAILURES = (
    "wrong answer",
    "raw exception",
    "hang",
    "crash",
    "memory",
    "leftovers",
    "input changed",
    "state changed",
    "output",
)
"""Kinds of failures: the last one is text for people with control characters, markup or formulas from data."""

CASES, SEED = 2000, 0
SECONDS = 20.0  # limit of one case
MEMORY = 1 << 30  # limit of the memory of one case, in bytes
_ADDRESS_SPACE = 3 << 30  # beyond which an allocation fails
_MIN_WARMED = 20  # fewer cases are not worth it
_POLL, _MAX_IDLE = 0.5, 0.25  # seconds between looks at a child, and the fraction of its time that it may sleep
_MAX_MESSAGE = 4000  # characters of an error
_LIBRARY = f"{os.sep}neuboots{os.sep}"
_DOCUMENTED = (ArgumentError, ArtifactError, CorruptFileError, DatasetNotFoundError, FileNotFoundError, FileExistsError)
_OWN = (
    ValueError,
    TypeError,
    FloatingPointError,
    NotImplementedError,
    IndexError,
)  # documented if the library raises them


class Failure(Exception):  # noqa: N818 (a finding, not an error)
    """What a case found wrong, of one of the kinds in `FAILURES`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


class Outcome(NamedTuple):
    """What happened in a case."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Area:
    """A kind of input.

    Attributes:
        name: Name.
        share: Fraction of the cases.
        prepare: Makes what all cases need, such as trained models, in a folder; runs once.
        cases: Strategy of the descriptions of cases, given what was prepared.
        run: Runs a case in a workspace and returns the kind of its outcome; raises `Failure`, or the library's errors.
        usual: Cases that are run first in this process, so that their imports are done once.
    """

    name: str
    share: float
    prepare: Callable[[Path], Any]
    cases: Callable[[Any], st.SearchStrategy[Any]]
    run: Callable[[Any, Any, "Workspace"], str]
    usual: Sequence[Any] = ()


# -- one case ------------------------------------------------------------------------------------------


@dataclass
class Workspace:
    """Folders of one case: `inputs` are written by the case and must not change, `outputs` by the library.

    Attributes:
        root: Folder above both.
        nets: Nets of the user, which must not change.
    """

    root: Path
    nets: list[torch.nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in (self.inputs, self.outputs, self.temporary):
            folder.mkdir(parents=True)

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def outputs(self) -> Path:
        return self.root / "outputs"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def canary(self) -> Path:
        """A file that exists if code from data was run."""
        return self.root / "canary"

    @contextlib.contextmanager
    def guard(self, *expected: str, inputs_may_change: bool = False, may_draw: bool = False) -> Iterator[None]:
        """Check the side effects of a call of the library, whether it succeeds or raises.

        Args:
            *expected: Names in `outputs` that a successful call may leave; one that raises may leave nothing.
            inputs_may_change: Whether the call writes to its inputs, as a resumed training does.
            may_draw: Whether the user's own code draws random numbers.
        """
        before = _snapshot(self.inputs)
        state, nets = _global_state(), [_net_state(net) for net in self.nets]
        present = {*os.listdir(self.outputs)}
        allowed = present | {*expected}
        try:
            yield
        except BaseException:
            allowed = present
            raise
        finally:
            gc.collect()
            if self.canary.exists():
                raise Failure("wrong answer", "code from data was run")
            if not inputs_may_change and (after := _snapshot(self.inputs)) != before:
                changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
                raise Failure("input changed", ", ".join(changed[:5]))
            left = [*({*os.listdir(self.outputs)} - allowed), *os.listdir(self.temporary)]
            left += {*os.listdir(self.root)} - {"inputs", "outputs", "tmp"}
            if left:
                raise Failure("leftovers", ", ".join(sorted(left)[:5]))
            if changed := [name for name, value in _global_state().items() if value != state[name] and not may_draw]:
                raise Failure("state changed", ", ".join(changed))
            if any(_net_state(net) != old for net, old in zip(self.nets, nets, strict=True)):
                raise Failure("state changed", "a parameter, buffer, mode or hook of the user's net")


def _snapshot(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, folders, files in os.walk(os.fsencode(folder)):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            content: Any = os.readlink(path) if os.path.islink(path) else None
            if os.path.isfile(path) and not os.path.islink(path) and status.st_size < 1 << 24:
                with open(path, "rb") as file:
                    content = hash(file.read())
            found[os.fsdecode(path)] = (status.st_mode, status.st_size if os.path.isfile(path) else 0, content)
    return found


def _global_state() -> dict[str, Any]:
    torch_state = hash(torch.get_rng_state().numpy().tobytes())
    numpy_state: Any = np.random.get_state()
    os.umask(mask := os.umask(0))
    return {
        "random state of torch": torch_state,
        "random state of NumPy": (hash(numpy_state[1].tobytes()), numpy_state[2:]),
        "random state of Python": hash(random.getstate()),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "working directory": os.getcwd(),
        "umask": mask,
    }


def _net_state(net: torch.nn.Module) -> Any:
    tensors = [(name, str(t.dtype), hash(t.detach().contiguous().view(-1).numpy().tobytes()), t.requires_grad)
               for name, t in (*net.named_parameters(), *net.named_buffers())]  # fmt: skip
    modules = [(name, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in net.named_modules()]
    return tensors, modules


def classify_error(error: BaseException) -> Outcome:
    """Tell a clear error from a raw one: a documented type, or a type that the library itself raised."""
    if isinstance(error, Failure):
        return Outcome(error.kind, error.detail)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    text = f"{type(error).__name__}: {error} ({where})"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return Outcome("memory", text)
    ours = bool(frames) and _LIBRARY in frames[-1].filename and "site-packages" not in frames[-1].filename
    raised = ours and (frames[-1].line or "").startswith("raise ")  # by a statement, not by an operation
    in_net = any(frame.name in ("_call_impl", "_engine_run_backward") for frame in frames)  # torch describes it well
    clear = isinstance(error, _DOCUMENTED) or (raised and isinstance(error, _OWN)) or in_net
    if clear and not str(error).strip():
        return Outcome("raw exception", f"{type(error).__name__} without a message ({where})")
    if clear and not in_net and len(str(error)) > _MAX_MESSAGE:
        return Outcome("output", f"an error of {len(str(error)):,} characters ({where})")
    if not clear and frames:
        library = [frame for frame in frames if _LIBRARY in frame.filename and "site-packages" not in frame.filename]
        text += "".join(f" ← {Path(frame.filename).name}:{frame.lineno}" for frame in library[:-4:-1])
    return Outcome(ERROR if clear else "raw exception", text)


def run_case(area: Area, prepared: Any, case: Any, root: Path) -> Outcome:
    """Run a case in this process and classify it."""
    workspace = Workspace(root)
    tempfile.tempdir = str(workspace.temporary)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome(area.run(prepared, case, workspace))
    except BaseException as error:
        return classify_error(error)


def fork_case(area: Area, prepared: Any, case: Any, root: Path, *, seconds: float = SECONDS) -> Outcome:
    """Run a case in a forked child with limits of time and memory, and classify it.

    Args:
        area: The area.
        prepared: What it prepared.
        case: The case.
        root: Folder of the case, which does not exist.
        seconds: Limit of its time.

    Returns:
        The outcome.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    gc.freeze()  # the child would copy the memory that its collector touches
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about forks of processes with threads
        pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(read)
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            faulthandler.disable()
            limit = _memory("VmSize") + _ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            base = _memory("VmRSS")
            outcome = run_case(area, prepared, case, root)
            os.write(write, json.dumps([base, outcome.kind, outcome.detail[:3000]]).encode())
            code = 0
        finally:
            os._exit(code)
    gc.unfreeze()
    os.close(write)
    received, end, part = b"", time.monotonic() + seconds, None
    used, idle = -1, 0.0  # a process that waits for ever uses no time of the processor
    while time.monotonic() < end and idle < _MAX_IDLE * seconds:
        ready, _, _ = select.select([read], [], [], _POLL)
        if ready:
            part = os.read(read, 1 << 16)
            received += part
            if not part:
                break
        else:
            before, used = used, _processor_time(pid)
            idle = idle + _POLL if used == before else 0.0
    os.close(read)
    if part != b"":
        part = None
    if part is None:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # children that it left
    if part is None:
        return Outcome("hang", f"not finished after {seconds:g} s")
    if not received:
        signals = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {status}"
        return Outcome("crash", signals)
    base, *parts = json.loads(received)
    outcome = Outcome(*parts)
    used = usage.ru_maxrss * 1024 - base
    if outcome.kind not in FAILURES and used > MEMORY:
        return Outcome("memory", f"{used / 2**20:,.0f} MiB more than before")
    return outcome


def _processor_time(pid: int) -> int:
    """Processor time of a process, in ticks."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _memory(name: str) -> int:
    """Memory of this process in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))


# -- the command line in process -----------------------------------------------------------------------


class Console(NamedTuple):
    """What a command printed."""

    code: int
    out: str
    err: str


def run_command(*args: str, stdin: bytes = b"", data_on_stdout: bool = False) -> Console:
    """Run `neuboots` in this process; raise `Failure` for a traceback, an unclear error or control characters.

    Args:
        *args: Arguments.
        stdin: Standard input.
        data_on_stdout: Whether standard output is data for a program, which may have any characters.

    Returns:
        Exit code, standard output and standard error.
    """
    from neuboots.cli import main

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict") for _ in range(2)]
    before, drawn = (sys.stdin, sys.stdout, sys.stderr), random.getstate()
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(stdin)), *streams  # type: ignore[assignment]
    try:
        code = main([*args])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        random.setstate(drawn)  # the parser of options draws
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in streams)  # type: ignore[attr-defined]
    check_terminal_text(err if data_on_stdout else out + err)
    if code not in (0, 2):
        raise Failure("raw exception", f"exit code {code}: {err[-500:]}")
    if "Traceback (most recent call last)" in err:
        raise Failure("raw exception", err[-1000:])
    if code == 2:
        lines = [line for line in err.splitlines() if line.startswith("neuboots: ")]
        if len(lines) != 1:
            raise Failure("output", f"{len(lines)} error messages: {err[-500:]}")
        if "not enough memory" in lines[0]:
            raise Failure("memory", lines[0])
        if len(lines[0]) > _MAX_MESSAGE:
            raise Failure("output", f"an error of {len(lines[0]):,} characters")
    return Console(code, out, err)


def check_terminal_text(text: str) -> None:
    """Raise `Failure` if a text for the terminal has control characters."""
    for character in text:
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"):
            at = text.index(character)
            raise Failure("output", f"a control character in {text[max(0, at - 40) : at + 40]!r}")


# -- all cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A failed case."""

    area: str
    number: int
    case: Any
    outcome: Outcome


@dataclass
class Results:
    """Outcomes of all cases."""

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there was no failure."""
        return not self.findings

    def table(self) -> str:
        """Return the table of outcomes."""
        kinds = [CORRECT, ERROR, FLAGGED]
        kinds += [kind for kind in FAILURES if any(count[kind] for count in self.counts.values())]
        rows = [["area", "cases", *kinds, "seconds"]]
        for name, count in self.counts.items():
            rows.append([name, str(count.total()), *(str(count[kind]) for kind in kinds), f"{self.seconds[name]:.0f}"])
        total = sum(self.counts.values(), Counter[str]())
        rows.append(
            ["all", str(total.total()), *(str(total[kind]) for kind in kinds), f"{sum(self.seconds.values()):.0f}"]
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *cells in rows:
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *numbers]))
        failed = sum(total[kind] for kind in FAILURES)
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], f"{failed} failures in {total.total():,} cases"])


def run_area(
    area: Area,
    count: int,
    results: Results,
    folder: Path,
    *,
    only: int | None = None,
    seconds: float = SECONDS,
    report: Callable[[int, int, Finding | None], None] = lambda done, count, finding: None,
) -> None:
    """Run the cases of an area and add their outcomes to the results.

    Args:
        area: The area.
        count: Number of cases.
        results: Where outcomes are added.
        folder: Temporary folder; the files of failed cases stay there.
        only: Number of a single case to run.
        seconds: Limit of the time of a case.
        report: Called after each case.
    """
    place = folder / area.name.replace(" ", "-")
    start, counts = time.monotonic(), results.counts.setdefault(area.name, Counter())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = area.prepare(place / "prepared") if count else None
        for k, case in enumerate(area.usual if count > _MIN_WARMED else ()):
            run_case(area, prepared, case, place / f"usual {k}")
    number = 0

    def run(case: Any) -> None:
        nonlocal number
        number += 1
        if only is not None and number != only:
            return
        root = place / str(number)
        outcome = fork_case(area, prepared, case, root, seconds=seconds)
        counts[outcome.kind] += 1
        finding = None
        if outcome.kind in FAILURES:
            finding = Finding(area.name, number, case, outcome)
            results.findings.append(finding)
            root.mkdir(exist_ok=True)
            text = f"seed {results.seed}, {area.name}, case {number}\n{outcome.kind}: {outcome.detail}\n\n{case!r}\n"
            (root / "failure.txt").write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            shutil.rmtree(root, ignore_errors=True)
        report(number, count, finding)

    if count:
        _draw(area.cases(prepared), count, results.seed, run)
    results.seconds[area.name] = time.monotonic() - start


def _draw(cases: st.SearchStrategy[Any], count: int, seed: int, run: Callable[[Any], None]) -> None:
    """Call `run` with cases that the seed determines."""
    options = hypothesis.settings(
        max_examples=count,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def take(case: Any) -> None:
        run(case)

    hypothesis.seed(seed)(options(hypothesis.given(cases)(take)))()


def all_areas() -> list[Area]:
    """Return all areas."""
    from . import api, checkpoints, images, models, tables

    return [tables.AREA, models.AREA, images.AREA, checkpoints.AREA, api.AREA]


def run_all(
    count: int, seed: int, folder: Path, *, areas: Iterable[Area] | None = None, verbose: bool = False
) -> Results:
    """Run `count` cases, divided among the areas by their shares.

    Args:
        count: Number of cases.
        seed: Seed of all cases.
        folder: Temporary folder.
        areas: The areas; None takes all.
        verbose: Whether to print progress and failures.

    Returns:
        The outcomes.
    """
    chosen = [*(all_areas() if areas is None else areas)]
    torch.set_num_threads(1)
    total = sum(area.share for area in chosen)
    shares = [round(count * area.share / total) for area in chosen]
    shares[-1] += count - sum(shares)
    results, start = Results(seed), time.monotonic()
    for k, (area, number) in enumerate(zip(chosen, shares, strict=True)):
        before, last = sum(shares[:k]), [start]

        def report(
            done: int,
            _: int,
            finding: Finding | None,
            *,
            area: Area = area,
            before: int = before,
            last: list[float] = last,
        ) -> None:
            now, cases = time.monotonic(), before + done
            if finding is not None:
                print(
                    f"{finding.outcome.kind} in {area.name}, case {finding.number}: {finding.outcome.detail[:600]}",
                    flush=True,
                )
            if now - last[0] > 5 or cases == count:
                left = (now - start) / cases * (count - cases)
                print(f"{cases:,} of {count:,} cases ({area.name}), {left:,.0f} s left", file=sys.stderr, flush=True)
                last[0] = now

        run_area(area, number, results, folder, **({"report": report} if verbose else {}))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print the table; return 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES, help="number of cases (default %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the cases (default %(default)s)")
    parser.add_argument("--area", help="run one area only")
    parser.add_argument("--only", type=int, help="run one case of the area, without a fork, and show its traceback")
    parser.add_argument("--folder", type=Path, help="folder of failed cases (default: a temporary one)")
    options = parser.parse_args(argv)
    areas = [area for area in all_areas() if options.area in (None, area.name)]
    if not areas:
        parser.error(f"--area is one of {', '.join(area.name for area in all_areas())}")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_fast_folder())) if options.folder is None else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if options.only is not None:
        return _run_one(areas[0], options.only, options.cases, options.seed, folder)
    results = run_all(options.cases, options.seed, folder, areas=areas, verbose=True)
    print(results.table())
    if results.ok:
        shutil.rmtree(folder)
        return 0
    print("\nTo run a failed case again, with its traceback:")
    shares = {area.name: results.counts[area.name].total() for area in areas}
    for finding in results.findings[:20]:
        print(
            f"  python -m tests.fuzz --seed {options.seed} --area '{finding.area}' --cases {shares[finding.area]} "
            f"--only {finding.number}"
        )
    print(f"Their files are in {folder}.")
    return 1


def _fast_folder() -> str | None:
    """A folder in memory if there is one, where waiting for the disk takes no time."""
    folder = "/dev/shm"
    large = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > MEMORY
    return folder if large else None


def _run_one(area: Area, only: int, count: int, seed: int, folder: Path) -> int:
    """Run one case in this process; print it, its traceback and its outcome."""
    prepared, number = area.prepare(folder / "prepared"), 0
    found: list[Any] = []

    def keep(case: Any) -> None:
        nonlocal number
        number += 1
        if number == only:
            found.append(case)

    _draw(area.cases(prepared), count, seed, keep)
    print(found[0])
    try:
        outcome = Outcome(area.run(prepared, found[0], Workspace(folder / str(only))))
    except BaseException as error:
        traceback.print_exc()
        outcome = classify_error(error)
    print(f"{outcome.kind}: {outcome.detail}\nfiles: {folder}")
    return int(outcome.kind in FAILURES)
