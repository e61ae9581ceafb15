"""Tables: rows of known values in many spellings, damaged, through the model of a table and the commands."""

import csv
import io
import json
import re
from dataclasses import dataclass, replace
from datetime import date, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import torch
from hypothesis import strategies as st

from neuboots.app.model import load_model
from neuboots.app.tabular import TabularModel, fit_table

from .driver import CORRECT, ERROR, FLAGGED, Area, Failure, Workspace, run_command

COLUMNS = ("size", "count", "member", "since", "town")
TOWNS = ("Bonn", "Rome", "São Paulo", "a,b;c", "<img src=x onerror=alert(1)>", "=1+1", "$\\foo{$", "01", 'say "hi"')
CLASSES = ("cat", "dog, small", "<script>alert(1)</script>", "=HYPERLINK(1)", "$\\alpha{$")
EPOCH = date(1970, 1, 1)
SPELLINGS = 40  # more than there are of any kind
Row = dict[str, Any]
GARBAGE = object()  # a value that is not of its column's kind: an error, or missing with a note


# -- rows and their spellings --------------------------------------------------------------------------


def make_rows(seed: int, count: int) -> list[Row]:
    """Rows with the columns of the models and both targets."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = round(float(rng.normal(3, 10)), int(rng.integers(1, 5)))
        town = int(rng.integers(len(TOWNS)))
        row: Row = {
            "size": size,
            "count": None if rng.random() < 0.1 else int(rng.integers(-5, 2000)),
            "member": bool(rng.random() < 0.5),
            "since": EPOCH + timedelta(int(rng.integers(9000, 20000))),
            "town": TOWNS[town],
        }
        row["price"] = round(size * 3 + town + float(rng.normal()), 3)
        row["kind"] = CLASSES[int(size > 3) + int(rng.integers(len(CLASSES) - 1))]
        rows.append(row)
    return rows


def spell(value: Any, k: int) -> tuple[str, Any]:
    """Text of a value in spelling k, and what it means."""
    if value is None:
        texts = ["", "NA", "?", "null", "NaN", " "]
        return texts[k % len(texts)], None
    options: list[tuple[str, Any]]
    if isinstance(value, bool):
        other = str(value).upper(), str(value).lower(), str(int(value))
        options = [(text, value) for text in (str(value), *other, f" {value} ", "yes" if value else "no")]
        options += [("2", GARBAGE), ("maybe", GARBAGE), ("0.5", GARBAGE), ("", None), ("-1", GARBAGE)]
    elif isinstance(value, date):
        iso = value.isoformat()
        options = [(iso, value), (f" {iso} ", value), (f"{iso} 00:00:00", value), (f"{iso}T00:00:00Z", value)]
        options += [
            (value.strftime(form), value) for form in ("%d.%m.%Y", "%m/%d/%Y", "%Y%m%d", "%d %b %Y", "%Y/%m/%d")
        ]
        wrong = "2023-02-30", "2024-13-01", "99999-01-01", "today", "-1", "2024-W01"
        options += [*((text, GARBAGE) for text in wrong), ("NaT", None), ("", None)]
        options += [("9999-12-31", date(9999, 12, 31)), ("0001-01-01", date(1, 1, 1)), (iso[2:], value)]
    elif isinstance(value, int | float):
        whole = float(round(min(value, 1e9) * 1000 + 1234))
        options = [(repr(value), value), (f"{value:e}", float(f"{value:e}")), (f" {value!r} ", value)]
        options += [(f"{value:+}", value), (f"{whole:,.0f}", whole), (f"{whole:,.2f}", whole), (f"{whole:.0f}", whole)]
        options += [(f"{whole:,.2f}".replace(",", " "), whole), (f"{whole:,.2f}".replace(",", "'"), whole)]
        options += [(f"{whole:_.0f}", whole), (f"{value:.3f}".replace(".", ","), float(f"{value:.3f}"))]
        options += [(f"{whole:,.2f}".translate({44: 46, 46: 44}), whole), (f"{whole:.0f}\N{NO-BREAK SPACE}", whole)]
        options += [(f"{whole:.0f}".translate({48 + i: 0xFF10 + i for i in range(10)}), whole)]
        options += [(f"{whole:.0f}".translate({48 + i: 0x660 + i for i in range(10)}), whole)]
        options += [("1e39", 1e39), ("-1e39", -1e39), ("1e308", 1e308), ("1e-320", 1e-320), ("-0", 0.0), ("007", 7.0)]
        wrong = "inf", "-inf", "1e400", "1.2.3", "12-", "(12)", "$12", "12%", "0x1F", "abc", "-", "1e", "TRUE", "12 kg"
        options += [*((text, GARBAGE) for text in (*wrong, "2024-01-01", "9" * 400)), ("", None), ("NA", None)]
        options += [("9" * 30, float("9" * 30)), ("12\u200b", 12.0), ("0.1" + "0" * 60, 0.1), ("nan", None)]
    else:
        options = [
            (value, value),
            (f" {value} ", value),
            (value.upper(), value.upper()),
            ("new\x1b[31m town", "new\x1b[31m town"),
        ]
        options += [
            ("@cmd", "@cmd"),
            ("\u202etown", "\u202etown"),
            ("x" * 3000, "x" * 3000),
            ("line\nbreak", "line\nbreak"),
        ]
        options += [("", None), ("NA", None), ("1", "1"), ("1.0", "1.0"), ("True", "True"), ("\x07bell", "\x07bell")]
    return options[k % len(options)]


@dataclass(frozen=True)
class Style:
    """How a table is written."""

    form: str = "csv"
    separator: str = ","
    newline: str = "\n"
    quote_all: bool = False
    bom: bool = False
    decimal: str = "."


@dataclass(frozen=True)
class TableCase:
    """A table, and what is done with it."""

    action: str
    target: str
    seed: int
    count: int
    style: Style
    edits: tuple[tuple[int, int, int], ...]  # row, column, spelling
    damage: tuple[str, int, int] | None
    extra: int
    option: int


STYLES = st.builds(
    Style,
    form=st.sampled_from(["csv", "csv", "csv", "jsonl", "parquet"]),
    separator=st.sampled_from([",", ",", ";", "\t", "|"]),
    newline=st.sampled_from(["\n", "\n", "\r\n"]),
    quote_all=st.booleans(),
    bom=st.booleans(),
    decimal=st.sampled_from([".", ".", ","]),
).map(lambda style: replace(style, decimal="." if style.separator == "," else style.decimal))

DAMAGE = ("byte", "byte", "insert", "delete", "quote", "truncate", "short row", "long row", "empty row", "all missing",
          "repeat column", "drop column", "encoding", "nul", "blank lines")  # fmt: skip
ACTIONS = ("read", "read", "read", "predict", "predict", "evaluate", "suggest", "permute", "fit")
CASES = st.builds(
    TableCase,
    action=st.sampled_from(ACTIONS),
    target=st.sampled_from(["price", "kind"]),
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 30),
    style=STYLES,
    edits=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 4), st.integers(0, SPELLINGS)), max_size=3).map(tuple),
    damage=st.none() | st.tuples(st.sampled_from(DAMAGE), st.integers(0, 1 << 16), st.integers(0, 255)),
    extra=st.integers(0, 3),
    option=st.integers(0, 1 << 16),
)


class Written(NamedTuple):
    """A written table: its truth, and the rows that damage may have changed without a trace."""

    path: Path
    rows: list[Row]
    touched: frozenset[int]
    changed: bool  # whether anything but plain spellings was written
    ends_early: bool


def write_table(case: TableCase, path: Path, *, plain: bool = False) -> Written:
    """Write the rows of a case; plainly, or with its style, edits and damage."""
    rows = make_rows(case.seed, case.count)
    texts = [{name: spell(value, 0)[0] for name, value in row.items()} for row in rows]
    style = Style() if plain else case.style
    for i, column, k in case.edits:
        name, i = COLUMNS[column], i % case.count
        if rows[i][name] is not GARBAGE:
            texts[i][name], rows[i][name] = spell(rows[i][name], k)
    if plain:
        for row, cells in zip(rows, texts, strict=True):
            cells |= {name: "" if row[name] is GARBAGE else spell(row[name], 0)[0] for name in COLUMNS}
    order = np.random.default_rng(case.seed).permutation([*COLUMNS, "price", "kind"]).tolist()
    extra = {} if plain else {f"extra {k}": ["=cmd()", "\x1b[2J", "<b>", "@x"][k] for k in range(case.extra)}
    order = [*order, *extra]
    damage, at, value = case.damage if case.damage and not plain else ("", 0, 0)
    touched = {at % case.count} if damage in ("short row", "long row", "all missing") else set[int]()
    if damage == "all missing":
        rows[at % case.count] |= dict.fromkeys(COLUMNS)
        texts[at % case.count] |= dict.fromkeys(COLUMNS, "")
        touched.clear()
    if style.form == "jsonl":
        data = _to_jsonl(case, rows, texts, order, extra)
    elif style.form == "parquet":
        data = _to_parquet(case, rows, texts, order, extra)
    else:
        data = _to_csv(style, texts, order, extra, damage, at % case.count)
    ends_early = damage == "truncate"
    if damage in ("byte", "insert", "delete", "quote", "truncate", "nul", "encoding"):
        data, line = _damage_bytes(data, damage, at, value)
        touched = {line - 1, *([line - 2] if style.bom else [])} if line else set()
    path.write_bytes(data)
    return Written(path, rows, frozenset(touched), bool(case.edits or damage or style != Style()), ends_early)


def _to_csv(style: Style, texts: list[Any], order: list[str], extra: Row, damage: str, at: int) -> bytes:
    file = io.StringIO()
    quoting = csv.QUOTE_ALL if style.quote_all else csv.QUOTE_MINIMAL
    writer = csv.writer(file, delimiter=style.separator, lineterminator=style.newline, quoting=quoting)
    names = (
        [*order, order[0]]
        if damage == "repeat column"
        else [n for n in order if damage != "drop column" or n != "since"]
    )
    writer.writerow(names)
    for i, row in enumerate(texts):
        cells = [{**row, **extra}[name] for name in names]
        if style.decimal == ",":
            decimals = [
                n in ("size", "price") and re.fullmatch(r"-?\d+\.\d+", c) for n, c in zip(names, cells, strict=True)
            ]
            cells = [c.replace(".", ",") if decimal else c for c, decimal in zip(cells, decimals, strict=True)]
        if i == at and damage == "short row":
            cells = cells[: max(1, len(cells) // 2)]
        if i == at and damage == "long row":
            cells += ["1"]
        writer.writerow(cells)
        if i == at and damage in ("empty row", "blank lines"):
            file.write(style.newline * (1 if damage == "empty row" else 3))
    return (b"\xef\xbb\xbf" if style.bom else b"") + file.getvalue().encode()


def _native(value: Any, text: str) -> Any:
    """A value as JSON has it; the text where it was spelled in another way."""
    if value is GARBAGE or text != spell(value, 0)[0] or isinstance(value, date):
        return text
    return value


def _to_jsonl(case: TableCase, rows: list[Row], texts: list[Any], order: list[str], extra: Row) -> bytes:
    lines = []
    for i, (row, cells) in enumerate(zip(rows, texts, strict=True)):
        record = {name: _native({**row, **extra}[name], {**cells, **extra}[name]) for name in order}
        if case.option % 7 == i % 7:
            record = {name: value for name, value in record.items() if value is not None}
        lines.append(json.dumps(record, ensure_ascii=bool(case.option % 2)))
    return "\n".join(lines).encode() + b"\n"


def _to_parquet(case: TableCase, rows: list[Row], texts: list[Any], order: list[str], extra: Row) -> bytes:
    columns: Row = {}
    for k, name in enumerate(order):
        values = [{**row, **extra}[name] for row in rows]
        spelled = [{**cells, **extra}[name] for cells in texts]
        choice = (case.option >> k) % 6
        if any(
            v is GARBAGE or (isinstance(v, float) and not 1e-6 < abs(v) < 1e9) or t != spell(v, 0)[0]
            for v, t in zip(values, spelled, strict=True)
        ):
            columns[name] = pyarrow.array([t if t else None for t in spelled])
            continue
        array = pyarrow.array(values)
        kinds: dict[str, list[Any]] = {
            "size": [pyarrow.float64(), pyarrow.string()],
            "count": [pyarrow.int64(), pyarrow.int32(), pyarrow.float64(), pyarrow.decimal128(21, 2)],
            "since": [
                pyarrow.date32(),
                pyarrow.date64(),
                pyarrow.timestamp("us"),
                pyarrow.timestamp("ns", "UTC"),
                pyarrow.string(),
            ],
            "town": [
                pyarrow.string(),
                pyarrow.large_string(),
                pyarrow.string_view(),
                pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
            ],
        }
        options = kinds.get(name, [array.type])
        columns[name] = array.cast(options[choice % len(options)])
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, row_group_size=1 + case.option % 20)
    return sink.getvalue()


def _damage_bytes(data: bytes, damage: str, at: int, value: int) -> tuple[bytes, int]:
    """Damaged bytes, and the number of the line that was damaged; the first is 0."""
    if damage == "encoding":
        text = data.decode("utf-8", "replace")
        return text.encode(("utf-16", "latin-1", "cp1252", "utf-7")[value % 4], "replace"), 0
    at %= len(data)
    while damage != "truncate" and data[at : at + 1] in (b"\n", b"\r") and at:  # lines stay
        at -= 1
    new = {"byte": bytes([value]), "insert": bytes([value]) + data[at : at + 1], "delete": b"", "truncate": b"",
           "quote": b'"' + data[at : at + 1], "nul": b"\0"}[damage]  # fmt: skip
    rest = b"" if damage == "truncate" else data[at + 1 :]
    return data[:at] + new + rest, data[:at].count(b"\n")


# -- what is right -------------------------------------------------------------------------------------


def encode_rows(model: TabularModel, rows: list[Row]) -> np.ndarray[Any, Any]:
    """Encode true rows as the schema says; NaN stands for garbage, which no encoding has."""
    schema, columns = model.schema, []
    for column in schema.numbers:
        values = [_as_number(row[column.name]) for row in rows]
        low, high = (column.mean + sign * 1e6 * column.std for sign in (-1, 1))
        columns.append([column.mean if v is None else min(max(v, low), high) for v in values])
    for column in schema.numbers:
        if column.missing:
            columns.append([float(row[column.name] is None) for row in rows])
    for text in schema.categories:
        columns += [[float(row[text.name] == value) for row in rows] for value in text.values]
        if text.missing:
            columns.append([float(row[text.name] is None) for row in rows])
    return np.array(columns, dtype=float).T


def _as_number(value: Any) -> float | None:
    if value is GARBAGE:
        return float("nan")
    return float((value - EPOCH).days) if isinstance(value, date) else None if value is None else float(value)


def same_inputs(a: Any, b: Any) -> bool:
    """Whether encoded rows agree, up to the rounding of a decimal number."""
    return a.shape == b.shape and bool(np.isclose(a, b, rtol=1e-12, atol=1e-12).all())


class Prepared(NamedTuple):
    """Models of both targets."""

    models: dict[str, TabularModel]
    folders: dict[str, Path]


_MADE: list[Prepared] = []  # of this process


def prepare(folder: Path) -> Prepared:
    """Train a model of each target, once in a process."""
    if _MADE and all(path.exists() for path in _MADE[0].folders.values()):
        return _MADE[0]
    folder.mkdir(parents=True)
    case = TableCase("", "", 0, 150, Style(), (), None, 0, 0)
    path = write_table(case, folder / "train.csv", plain=True).path
    models, folders = {}, {}
    for target, other in (("price", "kind"), ("kind", "price")):
        model = fit_table(path, target, ignore=[other], epochs=1, num_samples=8, progress=False)
        model.save(folder / target)
        models[target], folders[target] = load_model(folder / target), folder / target
    _MADE[:] = [Prepared(models, folders)]  # type: ignore[arg-type]
    return _MADE[0]


# -- actions -------------------------------------------------------------------------------------------


def run(prepared: Prepared, case: TableCase, workspace: Workspace) -> str:
    """Write the table and do with it what the case says."""
    if case.action == "fit":
        return _fit(case, workspace)
    suffix = {"csv": ".csv", "jsonl": ".jsonl", "parquet": ".parquet"}[case.style.form]
    written = write_table(case, workspace.inputs / f"table{suffix}")
    plain = write_table(case, workspace.inputs / "plain.csv", plain=True)
    return ACTION[case.action](prepared, case, written, plain, workspace)


def _read_all(model: TabularModel, path: Path, **options: Any) -> tuple[Any, tuple[str, ...], list[Any]]:
    batches = [*model.read(path, **options)]
    x = torch.cat([batch.x for batch in batches]).numpy().astype(float)
    return x, batches[-1].notes, batches


def _read(prepared: Prepared, case: TableCase, written: Written, plain: Written, workspace: Workspace) -> str:
    """Reading gives the true values, or a note, or an error."""
    model = prepared.models[case.target]
    with workspace.guard():
        x, notes, batches = _read_all(model, written.path)
        columns = [model.predict(batch, num_samples=4).columns for batch in batches]
    abstain = np.concatenate([part["abstain"] for part in columns])
    _, usual, _ = _read_all(model, plain.path)
    return judge_inputs(model, case, written, x, notes, usual, abstain)


def judge_inputs(
    model: TabularModel, case: TableCase, written: Written, x: Any, notes: Any, usual: Any, abstain: Any
) -> str:
    """Compare encoded rows with the truth."""
    rows, truth = written.rows, encode_rows(model, written.rows)
    if written.ends_early:
        count = max(0, len(x) - 1)
        rows, truth, x = rows[:count], truth[:count], x[:count]
    if case.style.form == "parquet" and case.damage and case.damage[0] in ("byte", "insert", "delete", "quote", "nul"):
        return CORRECT  # values in Parquet files have no checksum
    flagged = {*notes} - {*usual}
    if len(x) != len(truth):
        if flagged:
            return FLAGGED
        raise Failure("wrong answer", f"{len(x)} rows of {len(truth)} were read, without a note")
    kept = np.array([i not in written.touched for i in range(len(truth))], dtype=bool)
    if not same_inputs(x[kept], truth[kept]):
        if flagged:
            return FLAGGED
        row, k = np.argwhere(~np.isclose(x, truth, rtol=1e-12, atol=1e-12) & kept[:, None])[0].tolist()
        raise Failure(
            "wrong answer", f"{model.schema.features[k]!r} of row {row + 1}: {x[row, k]!r} is not {truth[row, k]!r}"
        )
    known = {column.name: column.values for column in model.schema.categories}
    odd = [
        row
        for row in rows
        if any(v is None or (n in known and v not in known[n]) for n, v in row.items() if n in COLUMNS)
    ]
    if odd and not notes:
        raise Failure("wrong answer", "missing values or new categories without a note")
    for i, row in enumerate(rows):
        if all(row[name] is None for name in COLUMNS) and i not in written.touched and not abstain[i]:
            raise Failure("wrong answer", f"row {i + 1} has no value, but the model does not abstain")
    return FLAGGED if flagged else CORRECT


def _predict(prepared: Prepared, case: TableCase, written: Written, plain: Written, workspace: Workspace) -> str:
    """The written file has the predictions of the true rows."""
    model, form = prepared.models[case.target], ("csv", "jsonl", "parquet")[case.option % 3]
    out = workspace.outputs / f"found.{form}"
    arguments = [
        "predict",
        str(prepared.folders[case.target]),
        str(written.path),
        "--out",
        str(out),
        "--num-samples",
        "4",
    ]
    keep = [] if case.option % 4 else ["town", *(["extra 0"] if case.extra else [])]
    arguments += ["--keep", *keep] if keep else []
    arguments += ["--probabilities"] if case.target == "kind" and case.option % 5 == 0 else []
    with workspace.guard(out.name):
        console = run_command(*arguments)
        if console.code:
            if out.exists():
                raise Failure("leftovers", out.name)
            return ERROR
    columns = _read_output(out, form)
    if form == "csv":
        check_cells(out.read_text(encoding="utf-8"))
    x, notes, _ = _read_all(model, written.path)
    _, usual, _ = _read_all(model, plain.path)
    kind = judge_inputs(model, case, written, x, notes, usual, np.array(columns["abstain"]))
    truth = model.predict(_join(model, written.path), num_samples=4).columns
    for name, values in truth.items():
        _compare(name, columns[name], values.tolist(), form, single=values.dtype == np.float32)
    for name in keep:
        expected = [row.get(name, "=cmd()") for row in written.rows]
        found = columns.get(name, [])
        if not case.edits and not case.damage and [*map(_undo, found)] != expected:
            raise Failure("wrong answer", f"column {name!r} was copied as {found[:3]}")
    return kind


def _join(model: TabularModel, path: Path) -> Any:
    batches = [*model.read(path)]
    keys = {name: np.concatenate([batch.keys[name] for batch in batches]) for name in batches[0].keys}
    return replace(batches[0], keys=keys, x=torch.cat([batch.x for batch in batches]))


def _undo(cell: Any) -> Any:
    """A text without the apostrophe that neutralises a formula."""
    return cell[1:] if isinstance(cell, str) and cell[:1] == "'" and cell[1:2] in tuple("=+-@\t\r") else cell


def _compare(name: str, found: list[Any], expected: list[Any], form: str, single: bool) -> None:
    if len(found) != len(expected):
        raise Failure("wrong answer", f"{len(found)} of {len(expected)} rows were written")
    for got, value in zip(found, expected, strict=True):
        if form == "csv" and isinstance(value, bool):
            same = got == str(value).lower()
        elif isinstance(value, float):
            same = np.isclose(float(got), value, rtol=1e-6 if single else 1e-9, atol=1e-9)
        else:
            same = _undo(got) == (str(value) if form == "csv" else value)
        if not same:
            raise Failure("wrong answer", f"column {name!r} has {got!r} instead of {value!r}")


def _read_output(path: Path, form: str) -> dict[str, list[Any]]:
    if form == "parquet":
        return pyarrow.parquet.read_table(path).to_pydict()  # type: ignore[no-any-return]
    if form == "jsonl":
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        with path.open(encoding="utf-8", newline="") as file:
            records = [*csv.DictReader(file)]
    columns = {name: [record[name] for record in records] for name in records[0]}
    if form == "csv" and "abstain" in columns:
        return columns | {"abstain": columns["abstain"]}
    return columns


def check_cells(text: str) -> None:
    """Raise `Failure` if a cell of a CSV starts like a formula and is no number."""
    for row in csv.reader(io.StringIO(text, newline="")):
        for cell in row:
            if cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
                try:
                    float(cell)
                except ValueError:
                    raise Failure("output", f"a cell that is a formula: {cell[:60]!r}") from None


def _evaluate(prepared: Prepared, case: TableCase, written: Written, plain: Written, workspace: Workspace) -> str:
    """Counts and errors are those of the true rows; rows of new classes are counted or noted."""
    model = prepared.models[case.target]
    changed = case.option % 3 == 0 and case.target == "kind" and case.style.form != "parquet" and not case.damage
    if changed:  # a class that was never seen
        rows = make_rows(case.seed, case.count)
        text = written.path.read_text(encoding="utf-8-sig")
        written.path.write_text(text.replace("cat", "new class"), encoding="utf-8")
        unseen = sum(row["kind"] == "cat" for row in rows)
    else:
        unseen = 0
    page = workspace.outputs / "page.html"
    with_page = case.option % 40 == 0
    arguments = ["evaluate", str(prepared.folders[case.target]), str(written.path), "--num-samples", "4"]
    with workspace.guard(page.name):
        console = run_command(*arguments, *(["--out", str(page)] if with_page else ["--json"]))
    if console.code:
        return ERROR
    if with_page:
        check_page(page.read_text(encoding="utf-8"))
        return CORRECT
    found = json.loads(console.out)
    x, _, batches = _read_all(model, written.path, with_labels=True)
    if found["rows"]["read"] != len(x):
        raise Failure("wrong answer", f"{found['rows']['read']} rows of {len(x)} were evaluated")
    if unseen and case.count > unseen:
        counted = found["rows"]["counted"] + found["rows"]["without label"]
        if not found["notes"] and counted == len(x):
            raise Failure("wrong answer", f"{unseen} rows of a new class are neither counted nor noted")
        return FLAGGED
    y = torch.cat([batch.y for batch in batches])
    if case.target == "price" and not case.damage:
        truth = np.array([row["price"] for row in written.rows])
        if not np.allclose(y.numpy()[:, 0], truth):
            raise Failure("wrong answer", "the labels are not the true ones")
        prediction = np.concatenate([model.predict(batch, num_samples=4).columns["prediction"] for batch in batches])
        rmse = float(np.sqrt(np.square(prediction - truth).mean()))
        if not np.isclose(found["metrics"]["rmse"], rmse, rtol=1e-5):
            raise Failure("wrong answer", f"rmse {found['metrics']['rmse']} is not {rmse}")
    return judge_inputs(model, case, written, x, found["notes"], _read_all(model, plain.path)[1], np.ones(len(x), bool))


class _Tags(HTMLParser):
    """Collects attributes and tags that only data can have."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.script = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.script = tag == "script"
        if tag == "img" and any(name == "onerror" for name, _ in attrs):
            self.found.append("img onerror")

    def handle_data(self, data: str) -> None:
        if self.script and data.strip().startswith("alert("):
            self.found.append("script")


def check_page(text: str) -> None:
    """Raise `Failure` if a page has markup from data or control characters."""
    tags = _Tags()
    tags.feed(text)
    if tags.found:
        raise Failure("output", f"a page has markup from data: {tags.found}")
    if control := re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        raise Failure("output", f"a page has the control character {control[0]!r}")


def _suggest(prepared: Prepared, case: TableCase, written: Written, plain: Written, workspace: Workspace) -> str:
    """Distinct rows of the pool, as many as were requested."""
    model, k = prepared.models[case.target], 1 + case.option % 8
    arguments = ["suggest", str(prepared.folders[case.target]), str(written.path), "-k", str(k), "--num-samples", "4"]
    as_json = case.option % 2 == 0
    arguments += ["--keep", "town"] if case.option % 3 == 0 else []
    with workspace.guard():
        console = run_command(*arguments, *(["--json"] if as_json else []))
    if console.code:
        return ERROR
    x, notes, _ = _read_all(model, written.path)
    kind = judge_inputs(model, case, written, x, notes, _read_all(model, plain.path)[1], np.ones(len(x), bool))
    if as_json:
        found = json.loads(console.out)
        rows = [row["row"] for row in found["rows"]]
        if found["read"] != len(x) or len({*rows}) != min(k, len(x)) or not {*rows} <= {*range(1, len(x) + 1)}:
            raise Failure("wrong answer", f"rows {rows} of {found['read']} were suggested")
    return kind


def _permute(prepared: Prepared, case: TableCase, written: Written, plain: Written, workspace: Workspace) -> str:
    """Predictions of rows in another order are in that order, whatever the order of the columns."""
    model = prepared.models[case.target]
    with plain.path.open(encoding="utf-8", newline="") as file:
        header, *body = csv.reader(file)
    rng = np.random.default_rng(case.option)
    order, columns = rng.permutation(len(body)), rng.permutation(len(header))
    with (workspace.inputs / "shuffled.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([row[k] for k in columns] for row in [header, *(body[i] for i in order)])
    with workspace.guard():
        first = model.predict(_join(model, plain.path), num_samples=4).columns
        second = model.predict(_join(model, workspace.inputs / "shuffled.csv"), num_samples=4).columns
    for name, values in first.items():
        other, values = second[name], values[order]
        same = np.allclose(other, values, rtol=1e-4, atol=1e-5) if values.dtype.kind == "f" else (other == values).all()
        if not same:
            raise Failure("wrong answer", f"column {name!r} depends on the order of rows or columns")
    return CORRECT


def _fit(case: TableCase, workspace: Workspace) -> str:
    """The kinds of the columns are the true ones, and a saved model predicts as the fitted one."""
    case = replace(case, count=10 + case.count, edits=case.edits[:1])
    suffix = {"csv": ".csv", "jsonl": ".jsonl", "parquet": ".parquet"}[case.style.form]
    written = write_table(case, workspace.inputs / f"train{suffix}")
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"epochs": 1, "num_samples": 4, "progress": False, "ignore": ["extra 0"][: case.extra]}
    folder = workspace.outputs / "model"
    if case.option % 2:
        with workspace.guard(folder.name):
            arguments = ["fit", str(written.path), "--target", case.target, "--out", str(folder)]
            console = run_command(*arguments, "--epochs", "1", "--num-samples", "4")
        return ERROR if console.code else CORRECT
    with workspace.guard(folder.name):
        model = fit_table(
            written.path,
            case.target,
            on_start=lambda schema, notes: found.update(schema=schema, notes=notes),
            **options,
        )
        model.save(folder)
    again = load_model(folder)
    batch = next(iter(model.read(written.path)))
    first, second = model.predict(batch, num_samples=4).columns, again.predict(batch, num_samples=4).columns
    if any(not np.array_equal(first[name], second[name]) for name in first):
        raise Failure("wrong answer", "the saved model predicts something else than the fitted one")
    if not case.damage and not case.edits:
        kinds = {column.name: column.kind for column in model.schema.numbers}
        expected = {"size": "number", "count": "number", "member": "boolean", "since": "date"}
        wrong = {name: kinds.get(name) for name, kind in expected.items() if kinds.get(name) != kind}
        if wrong and not (wrong.keys() == {"count"} and case.count < 12):
            raise Failure("wrong answer", f"columns were read as {wrong}")
    return CORRECT


ACTION: dict[str, Any] = {
    "read": _read,
    "predict": _predict,
    "evaluate": _evaluate,
    "suggest": _suggest,
    "permute": _permute,
}
USUAL = [
    TableCase(action, target, 1, 12, Style(form), (), None, 1, 40)
    for action, target, form in (
        ("read", "kind", "jsonl"), ("predict", "price", "csv"), ("predict", "kind", "parquet"),
        ("evaluate", "kind", "csv"), ("suggest", "price", "csv"), ("permute", "kind", "csv"), ("fit", "price", "csv"),
    )
]  # fmt: skip
AREA = Area("tables", 0.3, prepare, lambda prepared: CASES, run, USUAL)
