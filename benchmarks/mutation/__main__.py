"""Mutation score of the modules whose errors would be silent: how many small changes of the source fail a test.

    python -m benchmarks.mutation [weights conformal …] [--sample 200 --seed 0] [--jobs 2]

Each module is compared with its own test files. A first run of them records which test executes which line. Then every
mutant is tried in a forked process, on the tests that execute its lines, those of the module's first file and the
fastest ones first, until one fails. A mutant of a function replaces the code of the function objects, so that whoever
imported them sees it; one of the statements that run at import, default values and options of dataclasses is tried in a
process that imports everything anew. A test that takes ten times its usual time is a kill, too: a mutant may never end.

Results are kept in `.mutation`; an interrupted run continues, and only what changed is tried again. The table counts
mutants that change nothing a test could see (`equivalent.txt`, with reasons) apart, and `.mutation/survivors.txt` lists
those that no test noticed. Exit code 1: a score below 95 %.
"""

import argparse
import ast
import gc
import hashlib
import importlib
import inspect
import json
import mmap
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, TextIO

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # threads do not survive a fork

import pytest

from benchmarks.mutation.operators import Mutant, find_mutants, mutated

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".mutation"
SURVIVORS = FOLDER / "survivors.txt"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
MIN_SCORE = 0.95
TEST_SECONDS, MUTANT_SECONDS = 2.0, 20.0  # of processor time: tests that are used, and all tests of a mutant
MEMORY = 8 << 30  # more than a process of tests has
# Imported before the first fork, so that a process which imports the package anew pays for the package alone.
PRELOADED = ("torch", "torch._dynamo", "scipy.stats", "sklearn.linear_model", "hypothesis", "mpmath", "torchmetrics")
PRELOADED += ("torch.func", "torchvision", "transformers", "safetensors.torch", "lightning_fabric", "rich.progress")
# Without the rewriting of assertions: it would load a module that is named as a file of examples from its source again,
# without the change of the mutant.
OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "--assert=plain"]

DEFAULTS = "tests/core/test_defaults.py"
_SHARED = ("tests/golden", DEFAULTS)
_INFLUENCE = ("tests/methods/influence", "tests/methods/test_least_squares.py")
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {  # name: source, tests
    "weights": ("weights.py", ("tests/core/test_weights.py", "tests/methods/test_neuboots.py")),
    "generator": (
        "methods/neuboots.py",
        (
            "tests/methods/test_neuboots.py",
            "tests/methods/test_neuboots_generator.py",
            "tests/core/test_foreign_nets.py",
        ),
    ),
    "prediction": (
        "prediction.py",
        (
            "tests/core/test_prediction.py",
            "tests/core/test_statistics.py",
            "tests/methods/test_deterministic.py",
            "tests/core/test_limits.py",
        ),
    ),
    "conformal": (
        "evaluation/conformal.py",
        ("tests/evaluation/test_conformal.py", "tests/evaluation/test_independent.py"),
    ),
    "influence": ("methods/influence/__init__.py", _INFLUENCE),
    "influence head": ("methods/influence/_head.py", _INFLUENCE),
    "influence tangent": ("methods/influence/_tangent.py", _INFLUENCE),
    "training": ("training.py", ("tests/core/test_training.py", "tests/methods/test_base.py")),
}

CONSOLE: TextIO = sys.stderr  # a copy of it once the program runs: the output of forked processes is lost
KILLED, TIMEOUT, SURVIVED = "killed", "timeout", "survived"
IMPORT = "import"  # not tried yet: its functions need other variables of the enclosing scope


@dataclass
class Test:
    """What the first run of a test found.

    Attributes:
        digest: Of its source.
        seconds: Processor time.
        lines: Lines of the module that it executed.
    """

    digest: str
    seconds: float
    lines: list[int]


@dataclass
class Store:
    """Results of a module in a file: of each mutant, and what each test executed."""

    path: Path
    source: str = ""  # digest of the source that the tests executed
    tests: dict[str, Test] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Store":
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text())
        tests = {name: Test(**test) for name, test in content["tests"].items()}
        return cls(path, content["source"], tests, content["results"])

    def write(self) -> None:
        content = {"source": self.source, "tests": {k: vars(v) for k, v in self.tests.items()}, "results": self.results}
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, self.path)


class Progress:
    """Shows how many of some tasks are done and how long the others will take."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.began, self.shown = title, total, 0, time.monotonic(), 0.0

    def advance(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.shown < (1 if CONSOLE.isatty() else 30) and self.done < self.total:
            return
        self.shown, left = now, (now - self.began) / self.done * (self.total - self.done)
        text = f"  {self.done} of {self.total} {self.title}, {left / 60:.1f} minutes left"
        print(f"\r{text}   " if CONSOLE.isatty() else f"{text}\n", end="", file=CONSOLE, flush=True)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- processes -----------------------------------------------------------------------------------------


def run_forked(
    tasks: Sequence[Any],
    run: Callable[[Any, Callable[[Any], None]], None],
    *,
    jobs: int,
    seconds: Callable[[Any], float],
) -> Iterator[tuple[Any, list[Any], bool]]:
    """Yield (task, what run(task, send) sent, whether it was stopped for its time), in forked processes."""
    waiting, running = list(reversed(tasks)), {}
    try:
        yield from _serve(waiting, running, run, jobs, seconds)
    finally:
        for child, *_ in running.values():
            _kill_group(child)


def _serve(
    waiting: list[Any],
    running: dict[int, tuple[int, Any, float, bytearray]],
    run: Callable[[Any, Callable[[Any], None]], None],
    jobs: int,
    seconds: Callable[[Any], float],
) -> Iterator[tuple[Any, list[Any], bool]]:
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop()
            reading, writing = os.pipe()
            sys.stdout.flush(), sys.stderr.flush()
            child = os.fork()
            if not child:
                _run_child(task, run, writing)
            os.close(writing)
            running[reading] = (child, task, time.monotonic() + seconds(task), bytearray())
        ready, _, _ = select.select(list(running), [], [], 0.2)
        for reading, (child, task, deadline, received) in list(running.items()):
            late = time.monotonic() > deadline
            if reading in ready:
                part = os.read(reading, 1 << 16)
                received += part
                if part:
                    continue
            elif not late:
                continue
            if late:
                _kill_group(child)
            os.close(reading)
            _, status = os.waitpid(child, 0)
            _kill_group(child)  # processes that a test left behind
            shutil.rmtree(_scratch_folder(child), ignore_errors=True)
            del running[reading]
            stopped = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU))
            yield task, [json.loads(line) for line in received.splitlines()], stopped


def _run_child(task: Any, run: Callable[[Any, Callable[[Any], None]], None], writing: int) -> None:
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        _scratch_folder(os.getpid()).mkdir(parents=True)
        tempfile.tempdir = str(_scratch_folder(os.getpid()))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        run(task, lambda value: _write_all(writing, json.dumps(value).encode() + b"\n"))
    except BaseException:
        if os.environ.get("MUTATION_DEBUG"):  # a mutant that cannot be imported is one that was noticed
            traceback.print_exc(file=CONSOLE)
    finally:
        CONSOLE.flush()
        os._exit(0)


def _write_all(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _kill_group(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _scratch_folder(process: int) -> Path:
    return Path(os.environ["MUTATION_SCRATCH"]) / str(process)


# -- tests ---------------------------------------------------------------------------------------------


class Session:
    """A pytest plugin that hands the collected tests over to a function instead of running them."""

    def __init__(self, use: Callable[[dict[str, pytest.Item]], None]) -> None:
        self.use = use

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False
        self.use({item.nodeid: item for item in session.items})
        return True


def collect(paths: Iterable[str], use: Callable[[dict[str, pytest.Item]], None]) -> None:
    """Collect the tests in these files, and call a function with them."""
    import hypothesis
    import hypothesis.configuration

    hypothesis.configuration.set_hypothesis_home_dir(os.environ["MUTATION_SCRATCH"])
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failure need not become smaller
    hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)
    hypothesis.settings.load_profile("mutation")
    code = pytest.main([*OPTIONS, *paths], plugins=[Session(use)])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {code!r}")


def run_test(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Run a test; whether it passed."""
    from _pytest.runner import runtestprotocol
    from _pytest.warnings import catch_warnings_for_item

    factory = getattr(item.config, "_tmp_path_factory", None)
    if factory is not None and factory._basetemp is None:
        factory._given_basetemp = _scratch_folder(os.getpid()) / "pytest"
    with catch_warnings_for_item(item.config, item.ihook, when="runtest", item=item):  # of the marks of the test
        reports = runtestprotocol(item, log=False, nextitem=following)
    return all(report.passed for report in reports)


def test_digest(item: pytest.Item) -> str:
    function = getattr(item, "function", None)
    return digest(
        inspect.getsource(inspect.unwrap(function)) if function else str(getattr(item, "dtest", "").docstring)
    )


def record(paths: Sequence[str], source: Path, store: Store) -> None:
    """Run each test once and record its time and the lines of the module that it executes."""

    def run(known: list[str], send: Callable[[Any], None]) -> None:
        collect(paths, lambda items: trace(items, known, send))

    def trace(items: dict[str, pytest.Item], known: list[str], send: Callable[[Any], None]) -> None:
        digests = {name: test_digest(item) for name, item in items.items()}
        send(digests)
        wanted = [item for name, item in items.items() if digests[name] not in known or name not in store.tests]
        name = str(source)
        seen = mmap.mmap(-1, 1 + len(source.read_bytes().splitlines()))  # by line; shared with forked processes

        def local(frame: types.FrameType, event: str, argument: Any) -> Any:
            seen[frame.f_lineno] = 1
            return local

        def tracer(frame: types.FrameType, event: str, argument: Any) -> Any:
            return local(frame, event, argument) if frame.f_code.co_filename == name else None

        progress = Progress("tests", len(wanted))
        for k, item in enumerate(wanted):
            seen[:] = bytes(len(seen))
            began = time.process_time()
            threading.settrace(tracer)
            sys.settrace(tracer)
            passed = run_test(item, wanted[k + 1] if k + 1 < len(wanted) else None)
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            progress.advance()
            lines = [number for number, byte in enumerate(seen[:]) if byte]
            send([item.nodeid, digests[item.nodeid], time.process_time() - began, lines, passed])

    now = digest(source.read_text())
    if store.source != now:
        store.tests = {}
    known = [test.digest for test in store.tests.values()]
    ((_, received, _),) = run_forked([known], run, jobs=1, seconds=lambda _: 3600)
    if not received:
        raise RuntimeError(f"the tests in {', '.join(paths)} cannot be collected")
    digests = received[0]
    store.tests = {name: test for name, test in store.tests.items() if digests.get(name) == test.digest}
    for name, its, seconds, lines, passed in received[1:]:
        if passed:
            store.tests[name] = Test(its, seconds, lines)
        else:
            print(f"\n  left out, as it fails without a mutant: {name}", file=CONSOLE)
    store.source = now
    store.write()


# -- mutants -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests that may notice it, fastest first."""

    key: str
    mutant: Mutant
    tests: list[str]


def choose_tests(mutant: Mutant, store: Store, killer: str | None, own: Sequence[str]) -> list[str]:
    """Names of the tests that execute a mutant: the one that killed it before, those of the first file, the fastest.

    A statement that runs at import is compared with the module's own tests, as all of them would be imported anew.
    """
    spans = [(mutant.first, mutant.last), (mutant.statement, mutant.last), mutant.outer]
    chosen = [name for name in store.tests if name.startswith((*own, "src/"))]
    if mutant.outer is not None:
        for first, last in filter(None, spans):
            chosen = [name for name, test in store.tests.items() if any(first <= line <= last for line in test.lines)]
            if chosen:
                break
    ordered, total = [], 0.0
    order = {name: (name != killer, not name.startswith(own[0]), store.tests[name].seconds) for name in chosen}
    for name in sorted(chosen, key=order.__getitem__):
        seconds = store.tests[name].seconds
        if not ordered or (seconds <= TEST_SECONDS and total + seconds <= MUTANT_SECONDS):
            ordered.append(name)
            total += seconds
    return ordered


def try_tests(names: Sequence[str], items: dict[str, pytest.Item], store: Store, send: Callable[[Any], None]) -> None:
    """Run tests until one fails, and send its name; then, or if all pass, end."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    for k, name in enumerate(names):
        limit = 5 + 10 * store.tests[name].seconds
        send({"running": name})
        signal.setitimer(signal.ITIMER_REAL, 4 * limit)  # a test that waits
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + limit + 1), resource.RLIM_INFINITY))
        if not run_test(items[name], items[names[k + 1]] if k + 1 < len(names) else None):
            send({"killed": name})
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
    send({"survived": True})


def find_functions(path: Path) -> dict[tuple[str, int], list[types.FunctionType]]:
    """The function objects of a source file, by qualified name and first line."""
    found: dict[tuple[str, int], list[types.FunctionType]] = {}
    for value in gc.get_objects():
        if type(value) is types.FunctionType and value.__code__.co_filename == str(path):
            found.setdefault((value.__code__.co_qualname, value.__code__.co_firstlineno), []).append(value)
    return found


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def patch(code: types.CodeType, functions: dict[tuple[str, int], list[types.FunctionType]]) -> bool:
    """Give the functions of a module the code of its mutant; False if one has other free variables now."""
    for part in codes_of(code):
        for function in functions.get((part.co_qualname, part.co_firstlineno), []):
            if function.__code__.co_freevars != part.co_freevars:
                return False
            if function.__code__ != part:
                function.__code__ = part
    return True


def interpret(sent: list[Any], stopped: bool) -> tuple[str, str | None]:
    """Outcome of a trial, and the test that noticed."""
    last = sent[-1] if sent else {}
    if "survived" in last:
        return SURVIVED, None
    test = last.get("killed") or last.get("running")
    return (TIMEOUT if stopped else KILLED), test  # without a message: it could not even be imported


def run_module(name: str, jobs: int, sample: int | None, seed: int) -> None:
    """Try the mutants of one module whose results are not known."""
    source, tests = MODULES[name]
    path = ROOT / "src" / "neuboots" / source
    paths = [str(ROOT / test) for test in (*tests, *_SHARED)] + [str(path)]
    store = Store.read(store_path(name))
    record(paths, path, store)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    listed = equivalents().get(name, {})
    all_tests = digest(json.dumps(sorted((key, test.digest) for key, test in store.tests.items())))
    trials = []
    for mutant, key in select_mutants(tree, path, sample, seed):
        known = store.results.get(key, {})
        if mutant.key in listed or is_current(known, store, all_tests):
            continue
        killer = known.get("test") if known.get("test") in store.tests else None
        trials.append(Trial(key, mutant, choose_tests(mutant, store, killer, (tests[0], DEFAULTS))))
    progress, saved = Progress("mutants", len(trials)), time.monotonic()

    def keep(trial: Trial, status: str, test: str | None) -> None:
        nonlocal saved
        its = store.tests[test].digest if test in store.tests else all_tests
        store.results[trial.key] = {"status": status, "test": test, "digest": its}
        progress.advance()
        if time.monotonic() - saved > 5:
            store.write()
            saved = time.monotonic()

    def compiled(trial: Trial) -> types.CodeType:
        with mutated(trial.mutant):
            return compile(tree, str(path), "exec", dont_inherit=True)

    def seconds(trial: Trial) -> float:
        return 120 + 10 * sum(store.tests[test].seconds for test in trial.tests)

    def import_anew(trial: Trial, send: Callable[[Any], None]) -> None:
        code, original = compiled(trial), SourceFileLoader.get_code

        def get_code(self: SourceFileLoader, module: str) -> types.CodeType | None:
            return code if self.path == str(path) else original(self, module)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
        files = sorted({test.split("::")[0] for test in trial.tests})
        collect(
            [str(ROOT / file) for file in files],
            lambda items: try_tests([t for t in trial.tests if t in items], items, store, send),
        )

    for trial in [trial for trial in trials if not trial.tests]:
        keep(trial, SURVIVED, None)
    tried = [trial for trial in trials if trial.tests]
    at_import = [trial for trial in tried if trial.mutant.outer is None]
    for trial, sent, stopped in run_forked(at_import, import_anew, jobs=jobs, seconds=seconds):
        keep(trial, *interpret(sent, stopped))

    def in_functions(items: dict[str, pytest.Item]) -> None:
        functions = find_functions(path)
        gc.freeze()  # memory that is shared with the forked processes

        def run(trial: Trial, send: Callable[[Any], None]) -> None:
            if patch(compiled(trial), functions):
                try_tests(trial.tests, items, store, send)
            else:
                send({IMPORT: True})

        bodies = [trial for trial in tried if trial.mutant.outer is not None]
        for trial, sent, stopped in run_forked(bodies, run, jobs=jobs, seconds=seconds):
            keep(trial, *((IMPORT, None) if sent and IMPORT in sent[0] else interpret(sent, stopped)))
        store.write()

    if len(at_import) < len(tried):  # in another process, so that this one can still import everything anew
        wait_for(lambda: collect(paths, in_functions))
        store = Store.read(store_path(name))
        rest = [trial for trial in tried if store.results[trial.key]["status"] == IMPORT]
        progress = Progress("mutants", len(rest))
        for trial, sent, stopped in run_forked(rest, import_anew, jobs=jobs, seconds=seconds):
            keep(trial, *interpret(sent, stopped))
    store.write()


def wait_for(run: Callable[[], Any]) -> None:
    """Run a function in a forked process; raise SystemExit if it fails."""
    process = os.fork()
    if not process:
        code = 1
        try:
            run()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc(file=CONSOLE)
        finally:
            CONSOLE.flush()
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit(os.waitstatus_to_exitcode(status))


def is_current(known: dict[str, Any], store: Store, all_tests: str) -> bool:
    """Whether the test that killed the mutant is the same as then, or all are that it survived."""
    if not known:
        return False
    test = known["test"]
    return bool(known["digest"] == (store.tests[test].digest if test in store.tests else all_tests))


def select_mutants(tree: ast.Module, path: Path, sample: int | None, seed: int) -> list[tuple[Mutant, str]]:
    """Mutants of a module, or a sample of them, with the names of their results: they change with the function."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for mutant in find_mutants(tree):
        first, last = mutant.outer or (mutant.statement, mutant.last)
        found.append((mutant, digest("\n".join([*mutant.key, *lines[first - 1 : last]]))))
    if sample is not None and sample < len(found):
        found = random.Random(seed).sample(found, sample)
    return found


def store_path(name: str) -> Path:
    return FOLDER / f"{name.replace(' ', '_')}.json"


# -- report --------------------------------------------------------------------------------------------


def equivalents() -> dict[str, dict[tuple[str, str, str], str]]:
    """Mutants that change nothing a test could see, with the reason: by module, then by scope, before and after.

    The file holds paragraphs of three lines: `module scope: reason`, `- before` and `+ after`.
    """
    found: dict[str, dict[tuple[str, str, str], str]] = {name: {} for name in MODULES}
    text = EQUIVALENT.read_text(encoding="utf-8") if EQUIVALENT.exists() else ""
    for paragraph in text.strip().split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        if len(lines) < 3:
            continue
        where, reason = lines[0].split(": ", 1)
        name = max((name for name in MODULES if f"{where} ".startswith(f"{name} ")), key=len)
        for before, after in zip(lines[1::2], lines[2::2], strict=True):
            found[name][where[len(name) :].strip(), before[2:], after[2:]] = reason
    return found


def report(names: Sequence[str], sample: int | None, seed: int) -> int:
    """Print the table and write the survivors; return the exit code."""
    listed, low = equivalents(), []
    rows = [("module", "mutants", "killed", "timeout", "equivalent", "survived", "score")]
    survivors, totals = [], [0, 0, 0, 0, 0]
    for name in names:
        path = ROOT / "src" / "neuboots" / MODULES[name][0]
        store, counts = Store.read(store_path(name)), {KILLED: 0, TIMEOUT: 0, SURVIVED: 0}
        mutants = select_mutants(ast.parse(path.read_text(encoding="utf-8")), path, sample, seed)
        same = sum(mutant.key in listed[name] for mutant, _ in mutants)
        for mutant, key in mutants:
            if mutant.key in listed[name]:
                continue
            status = store.results[key]["status"]
            counts[status] += 1
            if status == SURVIVED:
                where = f"{name} {mutant.scope}".strip()
                survivors.append(f"{where}: line {mutant.first}\n- {mutant.before}\n+ {mutant.after}\n")
        if sample is None:
            known = {mutant.key for mutant, _ in mutants}
            for scope, before, after in listed[name].keys() - known:
                print(f"not a mutant any more: {name} {scope}\n- {before}\n+ {after}")
        numbers = [len(mutants), counts[KILLED], counts[TIMEOUT], same, counts[SURVIVED]]
        totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        score = (numbers[1] + numbers[2]) / max(1, numbers[0] - same)
        low += [name] if score < MIN_SCORE else []
        rows.append((name, *map(str, numbers), f"{score:.1%}"))
    rows.append(("all", *map(str, totals), f"{(totals[1] + totals[2]) / max(1, totals[0] - totals[3]):.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    SURVIVORS.write_text("\n".join(survivors), encoding="utf-8")
    print(f"survivors: {SURVIVORS.relative_to(ROOT)}")
    if low:
        print(f"below {MIN_SCORE:.0%}: {', '.join(low)}")
    return int(bool(low))


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="module", help=f"{', '.join(MODULES)} (default: all)")
    parser.add_argument("--sample", type=int, help="number of mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    options = parser.parse_args(argv)
    unknown = set(options.modules) - set(MODULES)
    if unknown:
        parser.error(f"unknown modules {', '.join(sorted(unknown))}; expected {', '.join(MODULES)}")
    names = options.modules or list(MODULES)
    global CONSOLE
    CONSOLE = os.fdopen(os.dup(2), "w")
    FOLDER.mkdir(exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background; tests raise it
    sys.dont_write_bytecode = False  # compiled files make importing everything anew several times faster
    sys.path.insert(0, str(ROOT / "src"))
    for module in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)
    for name in names:
        print(name, file=CONSOLE, flush=True)
        scratch = tempfile.mkdtemp(prefix="mutation-")
        os.environ["MUTATION_SCRATCH"] = scratch
        try:  # in a process that has imported nothing of the package
            wait_for(partial(run_module, name, options.jobs, options.sample, options.seed))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return report(names, options.sample, options.seed)


if __name__ == "__main__":
    sys.exit(main())
