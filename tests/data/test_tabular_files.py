"""Table files of many kinds: each is read completely, or rejected with one line that names the file or the column."""

import gzip
import io
import os
import sys
import threading
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from neuboots._validation import ArgumentError
from neuboots.data import DatasetNotFoundError, load_table, tabular
from neuboots.data._common import CorruptFileError
from neuboots.data.tabular import TableFile, encode_file


def rows(n: int = 60, *, y: str = "{k}.5", extra: Sequence[str] = ()) -> str:
    """n rows of y, a number a, a category b, and one more column if it has values."""
    lines = [f"{y.format(k=k, c='uv'[k % 2])},{k % 7 * 1.5},{'pqr'[k % 3]}" for k in range(n)]
    return "".join(f"{line},{extra[k % len(extra)]}\n" if extra else f"{line}\n" for k, line in enumerate(lines))


PLAIN = "y,a,b\n" + rows()
FEATURES = ("a", "b=p", "b=q", "b=r")

SAME_TABLE: dict[str, str] = {
    "byte order mark": "\ufeff" + PLAIN,
    "semicolons": PLAIN.replace(",", ";"),
    "decimal commas": PLAIN.replace(",", ";").replace(".", ","),
    "tabs": PLAIN.replace(",", "\t"),
    "bars": PLAIN.replace(",", "|"),
    "crlf": PLAIN.replace("\n", "\r\n"),
    "carriage returns": PLAIN.replace("\n", "\r"),
    "no last line end": PLAIN.rstrip("\n"),
    "blank lines": "\n" + PLAIN.replace("\n", "\n\n"),
    "spaces": "\n y , a , b \n" + rows().replace(",", " , "),
    "column without a name": ",y,a,b\n" + "".join(f"{k},{line}\n" for k, line in enumerate(rows().splitlines())),
    "trailing separators": PLAIN.replace("\n", ",\n"),
    "column without values": "y,a,b,c\n" + rows(extra=[""]),
}

OTHER_TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "quoted line breaks": (PLAIN.replace(",p\n", ',"p\np"\n'), ("a", "b=p\np", "b=q", "b=r")),
    "quoted separators": (PLAIN.replace(",p\n", ',"p, and ""p"""\n'), ("a", 'b=p, and "p"', "b=q", "b=r")),
    "quoted names": (PLAIN.replace("y,a,b", '"y","a, or\n""A""","b"'), ('a, or\n"A"', *FEATURES[1:])),
    "names with a quote": ('y,5" pipe\n' + "1,2.5\n2.5,3\n" * 30, ('5" pipe',)),
    "missing numbers": (PLAIN.replace(",1.5,", ",NaN,").replace(",3.0,", ",?,"), ("a", "a is missing", *FEATURES[1:])),
    "missing categories": (PLAIN.replace(",q\n", ",\n"), ("a", "b=p", "b=r", "b is missing")),
    "constant columns": ("y,a,b,c,d\n" + rows(extra=["7,same"]), ("a", "c", *FEATURES[1:], "d=same")),
    "very long text": (PLAIN + '3.5,1,"' + "long " * 60_000 + '"\n' * 1, ()),
    "dates": ("y,a,b,d\n" + rows(extra=[f"2024-02-{k:02d}" for k in range(1, 30)]), ("a", "d", *FEATURES[1:])),
    "times": ("y,a,b,d\n" + rows(extra=[f"2024-02-{k} 08:{k}:00" for k in range(10, 30)]), ("a", "d", *FEATURES[1:])),
    "mixed types": ("y,a,m\n" + "1.5,2,1\n2,1,x\n3,1,true\n4,1,\n" * 15, ("a", "m=1", "m=true", "m=x", "m is missing")),
    "unicode": (PLAIN.replace("a,b", "größe,名前").replace(",p\n", ",🐈\n"), ("größe", "名前=q", "名前=r", "名前=🐈")),
    "booleans": ("y,a,b,t\n" + rows(extra=["TRUE", "false"]), ("a", "t", *FEATURES[1:])),
    "large offsets": ("y,a\n" + "".join(f"{1e9 + k / 8},{1e12 + k % 5}\n" for k in range(60)), ("a",)),
    "tiny numbers": ("y,a\n" + "".join(f"{k * 1e-30},{k % 5 * 1e-200}\n" for k in range(60)), ("a",)),
}

MANY_TEXTS = "".join(f"{k}.5,name {k}\n" for k in range(600))
REJECTED: dict[str, str | bytes] = {
    "empty": "",
    "blank": "\n \n",
    "names only": "y,a,b\n",
    "one row": "y,a,b\n1.5,2,p\n",
    "two rows": "y,a,b\nu,2,p\nv,3,q\n",
    "no target": "x,yy,a\n1,2,3\n",
    "constant target": "y,a,b\n" + rows(y="1.5"),
    "one class": "y,a,b\n" + rows(y="same"),
    "missing target": PLAIN + ",1,p\n",
    "target without values": "y,a,b\n" + rows(y=""),
    "distinct classes": "y,a,b\n" + rows(y="name {k}"),
    "classes beyond 2^53": "y,a\n" + "".join(f"{2**60 + k % 2 * 1024},{k % 5}\n" for k in range(60)),
    "date target": "y,a,b\n" + rows(9, y="2024-02-1{k}"),
    "repeated names": "y,a,a\n" + rows(),
    "target alone": "y\n1.5\n2.5\n",
    "features without values": "y,a\n" + "1.5,\n2.5,\n" * 9,
    "latin-1": PLAIN.replace(",p\n", ",é\n").encode("latin-1"),
    "latin-1 after many rows": b"y,a\n" + b"1,x\n" * 30_000 + b"1,M\xfcller\n",
    "utf-16": PLAIN.encode("utf-16"),
    "gzip": gzip.compress(PLAIN.encode(), mtime=0),
    "spreadsheet": b"PK\x03\x04spreadsheet",
    "binary": bytes(range(256)) * 40,
    "one long line": b"x" * 300_000,
    "truncated parquet": b"PAR1" + bytes(200),
    "infinite feature": PLAIN.replace(",1.5,", ",-inf,"),
    "infinite target": PLAIN.replace("\n7.5", "\ninf"),
    "overflowing squares": PLAIN.replace(",1.5,", ",1e300,"),
    "overflowing target": PLAIN.replace("\n7.5", "\n1e300"),
    "hundreds of digits": PLAIN.replace(",1.5,", f",{'9' * 400},"),
    "decimal or thousand": "y;a\n" + "".join(f"{k};1,{k:03d}\n" for k in range(60)),
    "decimal commas and points": PLAIN.replace(",", ";").replace(".", ",").replace(";p\n", ";1.050\n"),
    "repeated line of names": PLAIN + PLAIN,
    "nul after many rows": PLAIN + rows(900) + "1.5,2,p\0q\n",
    "quotes around six rows": PLAIN + '3.5,1,"p\n' + rows(6) + '3.5,1,"p"\n',
    "long row": PLAIN + "3.5,1,p,7\n",
    "long rows": "y,a,b\n" + rows(extra=["7"]),
    "open quote": PLAIN + '3.5,1,"p\n',
    "too many texts": "y,a\n" + MANY_TEXTS,
    "texts among numbers": "y,a\n" + MANY_TEXTS.replace("name ", "") + f"1.5,{'long' * 9999}\n",
    "decimal commas in quotes": "y,a\n" + "".join(f'{k}.5,"{k},{k % 10}5"\n' for k in range(600)),
    "json lists": '{"y": 1.5, "a": [1]}\n' * 60,
    "broken json": '{"y": 1.5, "a": 1}\n{"y": 2.5,\n',
    "json numbers": '{"y": 1.5, "a": 1}\n7\n',
}


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def all_inputs(path: Path, schema: Any) -> torch.Tensor:
    return torch.cat(list(encode_file(path, schema)))


@pytest.mark.parametrize("kind", SAME_TABLE)
def test_csv_dialects_give_same_table(kind: str, tmp_path: Path) -> None:
    data = load_table(write(tmp_path, SAME_TABLE[kind]), target="y")
    plain = load_table(write(tmp_path, PLAIN, "plain.csv"), target="y")
    assert data.schema.features == FEATURES
    for split in ("train", "validation", "test"):
        for tensor, expected in zip(getattr(data, split).tensors, getattr(plain, split).tensors, strict=True):
            assert torch.equal(tensor, expected)
    assert torch.equal(all_inputs(tmp_path / "t.csv", plain.schema), all_inputs(tmp_path / "plain.csv", plain.schema))


@pytest.mark.parametrize("kind", OTHER_TABLES)
def test_csv_contents_are_encoded(kind: str, tmp_path: Path) -> None:
    text, features = OTHER_TABLES[kind]
    data = load_table(write(tmp_path, text), target="y", val_fraction=0, test_fraction=0)
    assert not features or data.schema.features == features
    assert torch.equal(all_inputs(tmp_path / "t.csv", data.schema), data.train.tensors[0])  # type: ignore[attr-defined]
    assert bool(data.train.tensors[0].isfinite().all())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", REJECTED)
def test_invalid_tables_are_rejected_in_one_line(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, REJECTED[kind])
    with pytest.raises(ValueError, match=r"t\.csv|target|test_fraction|Column") as caught:
        load_table(path, target="y")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


ROW = "1.5,2,p\n"
WITH_NOTES: dict[str, tuple[str, str]] = {
    "short rows": (PLAIN + "3.5,1\n4.5\n" * 9, "18 rows have fewer fields than the first line (first: line 62)"),
    "blank lines of one column": ("y\n" + "1.5\n\n  \n" * 60, "120 blank lines are skipped (first: line 3)"),
    "quotes around six rows": (PLAIN + '3.5,1,"p\n' + rows(6) + '3.5,1,p"\n', "a quoted text has 8 lines"),
    "quotes around two rows": (PLAIN + 2 * (ROW + '"3.5,1,p\n3".5,1,p\n').replace('3".5', '3.5"'), "has 4 lines"),
    "quotes in quotes": (
        PLAIN + '3.5,1,"5" pipe"\n',
        "1 quoted texts have a quote that is not written twice (first: line 62)",
    ),
    "points in a list of semicolons": ("y;a\n" + "".join(f"{k};1.{k:03d}\n" for k in range(60)), "'1.000' in line 2"),
    "late keys": ('{"y": 1}\n' * 20_000 + '{"y": 1, "z": 2}\n' * 3, "3 lines have keys that do not occur before"),
}


@pytest.mark.parametrize("kind", WITH_NOTES)
def test_lines_that_may_be_read_wrongly_are_counted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a file that is read in many chunks."""
    text, expected = WITH_NOTES[kind]
    table = TableFile.open(write(tmp_path, text, "t.jsonl" if text[0] == "{" else "t.csv"))
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", 600)
    for _ in range(2):
        assert sum(map(len, table.frames())) >= 60
    (note,) = table.notes
    assert expected in note


WITHOUT_NOTES = {
    **SAME_TABLE,
    "text of many lines": PLAIN + '3.5,1,"Dear Sir,\n\nhere is, as you asked, the list: a, b, c, d\nBest\nX"\n' * 3,
    "blank lines": PLAIN + "\n \n" + PLAIN.split("\n", 1)[1],
    "addresses": "y,a\n" + '1.5,"Main Street 5, Bonn\nGermany"\n' * 60,
    "quotes, spaces and doubled quotes": PLAIN + '3.5, "1" ,"a ""b"", c"\n"4.5","2",""\n',
    "inches": PLAIN + '3.5,1,5" pipe and 6" pipe\n',
    "quotes around all": PLAIN.replace(",", '","').replace("\n", '"\n"')[:-1].replace("y", '"y', 1),
}


@pytest.mark.parametrize("kind", WITHOUT_NOTES)
def test_usual_files_have_no_notes(kind: str, tmp_path: Path) -> None:
    table = TableFile.open(write(tmp_path, WITHOUT_NOTES[kind]))
    assert sum(map(len, table.frames())) >= 60
    assert table.notes == []


def test_notes_are_warnings(tmp_path: Path) -> None:
    path = write(tmp_path, WITH_NOTES["short rows"][0])
    with pytest.warns(UserWarning, match="18 rows have fewer fields"):
        data = load_table(path, target="y", val_fraction=0, test_fraction=0)
    assert data.schema.features == ("a", "a is missing", *FEATURES[1:], "b is missing")
    write(tmp_path, "y,i\n" + "".join(f"{k}.5,{2**53 + k}\n" for k in range(60)))
    with pytest.warns(UserWarning, match="'i' has 58 integers"):
        assert load_table(path, target="y", val_fraction=0, test_fraction=0).schema.features == ("i",)


@pytest.mark.parametrize(
    ("separator", "values", "given", "sign"),
    [
        (";", ["1,5", "1,050"], None, ","),  # other numbers decide
        (";", ["0,123", "1,050"], ".", ","),
        (";", ["1.5", "1,050"], None, "."),
        (";", ["1,050,000", "1,050"], None, "."),
        (";", ["1,050.5", "1,050"], None, "."),
        (";", ["1.050,5", "12"], None, ","),
        (";", ["1234,567", "1,050"], None, ","),
        (";", ["1,050", "2"], ",", ","),  # an answer decides
        (";", ["1,050", "2"], ".", "."),
        ("\t", ["1,050", "2"], ",", ","),
        (";", ["7", "8"], ",", ","),
        (",", ["1.050", "7"], ",", "."),
        (",", ['"1,050"', "7"], None, "."),
        (",", ['"1,5"', "7"], ",", ","),
    ],
)
def test_decimal_sign(separator: str, values: list[str], given: Any, sign: str, tmp_path: Path) -> None:
    lines = [separator.join(["a", "b"]), *(separator.join([str(k), value]) for k, value in enumerate(values))]
    assert TableFile.open(write(tmp_path, "\n".join(lines)), decimal=given).decimal == sign


@pytest.mark.parametrize("text", ["a;b\n1,5;1.050\n", "a;b\n1.050;7\n", "a;b\n1,5;2.5\n"])
def test_points_among_decimal_commas_are_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="line 2"):
        TableFile.open(write(tmp_path, text), decimal=",")


def test_repeated_keys_and_broken_characters(tmp_path: Path) -> None:
    for line in ('{"y": 1, "a": 2, "a": 3}', '{"y": 1, "a": "\\ud800"}'):
        with pytest.raises(CorruptFileError, match=r"t\.jsonl"):
            list(TableFile.open(write(tmp_path, f'{{"y": 1, "a": 2}}\n{line}\n', "t.jsonl")).frames())


def test_class_with_the_name_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is a class among texts, also in a later chunk, and a missing value among numbers and of other columns."""
    monkeypatch.setattr(tabular, "MAX_CHUNK_CELLS", 60)
    names = ["minor", "None", "major"]
    path = write(tmp_path, "y,a\n" + "".join(f"{names[k % 3]},{'None' if k % 5 == 0 else k}\n" for k in range(90)))
    for streaming in (False, True):
        data = load_table(path, target="y", val_fraction=0, test_fraction=0, streaming=streaming)
        assert data.classes == ("None", "major", "minor")
        assert data.schema.features == ("a", "a is missing")
        assert [int(y) for _, y in list(data.train)[:3]] == [2, 0, 1]
    write(tmp_path, "y,a\n" + "".join(f"{'None' if k == 80 else k % 3},{k}\n" for k in range(90)))
    with pytest.raises(ArgumentError, match="row 81"):
        load_table(path, target="y")


@pytest.mark.parametrize("value", [pd.Timestamp("2024-02-29"), pd.Timestamp("2024-02-29", tz="UTC"), date(2024, 2, 29)])
@pytest.mark.parametrize("kind", ["boolean", "number"])
def test_dates_are_neither_booleans_nor_numbers(value: Any, kind: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"y": np.arange(60) / 7, "a": np.arange(60) % 2 == 0 if kind == "boolean" else np.arange(60)})
    frame.to_parquet(path := tmp_path / "t.parquet")
    schema = load_table(path, target="y").schema
    for column in ([value] * 60, [True] * 60 if kind == "number" else [2.5] * 60):
        frame.assign(a=column).to_parquet(path)
        with pytest.raises(ValueError, match="'a' has .* in row 1"):
            all_inputs(path, schema)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t"])
def test_parquet_is_recognized_by_its_content(name: str, tmp_path: Path) -> None:
    frame = pd.read_csv(plain := write(tmp_path, PLAIN, "plain.csv"))
    frame.to_parquet(tmp_path / name)
    schema = load_table(tmp_path / name, target="y").schema
    assert schema == load_table(plain, target="y").schema


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for name, state in ((tmp_path / "none.csv", "does not exist"), (tmp_path, "folder"), (os.devnull, "not a regular")):
        with pytest.raises(DatasetNotFoundError, match=state):
            TableFile.open(name)
    if os.geteuid() != 0:  # root may read everything
        (path := write(tmp_path, PLAIN)).chmod(0)
        with pytest.raises(DatasetNotFoundError):
            TableFile.open(path)


def test_open_quote_in_header_does_not_read_whole_file(tmp_path: Path) -> None:
    lines = "".join(f"{k % 5},{k}.25\n" for k in range(300_000))
    assert TableFile.open(write(tmp_path, f'5" pipe,y\n{lines}')).names == ('5" pipe', "y")


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
def test_standard_input_is_read(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.read_csv(write(tmp_path, PLAIN))
    content = {
        "csv": PLAIN.encode(),
        "parquet": frame.to_parquet(),
        "json": frame.to_json(orient="records", lines=True).encode(),
    }[form]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    table = TableFile.open("-")
    for _ in range(2):
        pd.testing.assert_frame_equal(pd.concat(table.frames()), frame, check_index_type=False)


def test_named_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = "a,b\n" + "".join(f"{k},{k % 3}\n" for k in range(200_000))
    writer = threading.Thread(target=path.write_text, args=(content,))
    writer.start()
    found = pd.concat(TableFile.open(path).frames())
    writer.join()
    assert np.array_equal(found.a, np.arange(200_000))


def test_raw_columns_keep_all_digits(tmp_path: Path) -> None:
    big = 2**53 + 1
    write(tmp_path, f"id,tag\n{big},NA\n,x\n", "t.csv")
    write(tmp_path, f'{{"id": {big}, "tag": ["x"]}}\n{{"id": null}}\n', "t.jsonl")
    pd.DataFrame({"id": pd.array([big, None], "Int64"), "tag": [["x"], None]}).to_parquet(tmp_path / "t.parquet")
    for name, expected in {
        "t.csv": [str(big), "NA", "nan", "x"],
        "t.jsonl": [str(big), '["x"]', "None", "None"],
        "t.parquet": [str(big), '["x"]', "None", "nan"],
    }.items():
        (frame,) = TableFile.open(tmp_path / name).frames(raw=["id", "tag"])
        assert [str(value) for row in frame.to_numpy(dtype=object) for value in row] == expected
