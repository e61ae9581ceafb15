"""Vocabulary and SST-2."""

import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _hub import own_cache, tensors, write_split
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer

from neuboots._validation import ArgumentError
from neuboots.data._common import CorruptFileError
from neuboots.data.dataset import DatasetBundle, LoadOptions
from neuboots.data.text import PADDING, UNKNOWN, Vocabulary, load_sst2, tokenize

__all__ = ["own_cache"]

OPTIONS: dict[str, Any] = {"val_fraction": 0.2, "seed": 0, "streaming": False}
PARTS = ("train", "validation", "test")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n\t ", []),
        ("Don't STOP, o'clock's 9:30!", ["don't", "stop", ",", "o'clock's", "9", ":", "30", "!"]),
        ("wo n't 've 'tis -lrb-", ["wo", "n't", "'ve", "'tis", "-", "lrb", "-"]),
        ("naïve Ünder_score 中文 🙂", ["naïve", "ünder_score", "中文", "🙂"]),
        ("'", ["'"]),
        ("Cafe\u0301 ", ["caf\u00e9"]),  # as a Mac spells it
    ],
)
def test_tokenize(text: str, words: list[str]) -> None:
    assert tokenize(text) == words


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text(max_size=30), max_size=6), st.text(max_size=30), st.integers(1, 12))
def test_vocabulary_round_trip(texts: list[str], text: str, length: int) -> None:
    vocabulary = Vocabulary.from_texts(texts, min_count=1, length=length)
    known = {word for other in texts for word in tokenize(other)}
    x = vocabulary.encode(text)
    assert x.shape == (length,)
    assert x.dtype == torch.int64
    expected = [word if word in known else "<unknown>" for word in tokenize(text)[:length]] or ["<unknown>"]
    assert vocabulary.decode(x) == " ".join(expected)
    assert bool((x != PADDING).any())  # a net refuses a row of padding alone
    real = int((x != PADDING).sum())
    assert bool((x[:real] != PADDING).all())
    assert torch.equal(vocabulary.encode(text, length + 3)[:length][:real], x[:real])


def test_words_are_numbered_by_frequency_as_scikit_learn_counts_them() -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice([f"w{k}" for k in range(30)], 12, p=np.arange(1, 31) / 465)) for _ in range(40)]
    counter = CountVectorizer(token_pattern=r"\S+")
    counts = np.asarray(counter.fit_transform(texts).sum(0))[0]
    frequent = sorted(
        (-count, word) for word, count in zip(counter.get_feature_names_out(), counts, strict=True) if count >= 5
    )
    vocabulary = Vocabulary.from_texts(iter(texts), min_count=5)
    assert vocabulary.words == tuple(word for _, word in frequent)
    assert vocabulary.size == len(frequent) + 2
    assert vocabulary.encode(frequent[0][1]).tolist() == [2] + [0] * 63
    assert Vocabulary.from_texts([]).encode("anything").tolist()[:2] == [UNKNOWN, PADDING]


def test_vocabulary_goes_to_workers_and_says_what_is_wrong() -> None:
    vocabulary = Vocabulary(("a", "b"), 4)
    vocabulary.encode("a")
    assert pickle.loads(pickle.dumps(vocabulary)) == vocabulary
    wrong: list[Any] = [
        lambda: vocabulary.encode(None),  # type: ignore[arg-type]
        lambda: vocabulary.encode("a", 0),
        lambda: Vocabulary.from_texts("a text"),
        lambda: Vocabulary.from_texts(["a"], min_count=0),
        lambda: Vocabulary(("a",), -1),
        lambda: Vocabulary(("a", "a")),
        *(partial(vocabulary.decode, torch.tensor(ids)) for ids in ([4], [-1], [0.0], [[1]])),
    ]
    for call in wrong:
        with pytest.raises(ArgumentError):
            call()


WORDS = ["film", "plot", "dull", "bright", "funny", "slow", "cast", "scene", "warm", "thin"]


def sentences(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 6)) + f" only{seed}x{k}" for k in range(count)]


def write(
    root: Path,
    *,
    column: str = "text",
    train: list[Any] | None = None,
    labels: list[int] | None = None,
    test_label: int | None = None,
) -> dict[str, list[Any]]:
    """Three splits, their labels 0 and 1 in turn; `test_label` stands for labels that are not public."""
    written = {"train": train or sentences(50, 0), "validation": sentences(10, 1), "test": sentences(20, 2)}
    for split, texts in written.items():
        rows = [k % 2 for k in range(len(texts))]
        if split == "test" and test_label is not None:
            rows = [test_label] * len(texts)
        if split == "train" and labels is not None:
            rows = labels
        write_split(root / "sst2" / "data", split, {column: texts, "label": rows}, features=False)
    return written


def decoded(data: DatasetBundle, part: str) -> list[str]:
    return [data.vocabulary.decode(x) for x in tensors(getattr(data, part))[0]]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_data_root(streaming: bool, tmp_path: Path) -> None:
    written = write(tmp_path)
    data = load_sst2(tmp_path, LoadOptions(**{**OPTIONS, "streaming": streaming}))
    assert (data.task, data.classes) == ("classification", ("negative", "positive"))
    assert sorted(data.vocabulary.words) == sorted(WORDS)  # what comes once is not known
    assert data.channels == data.vocabulary.size == 12
    for part, texts in written.items():
        x, y = tensors(getattr(data, part))
        assert x.shape == (len(texts), 64)
        assert x.dtype == y.dtype == torch.int64
        assert y.tolist() == [k % 2 for k in range(len(texts))]
        assert decoded(data, part) == [" ".join([*text.split()[:6], "<unknown>"]) for text in texts]


@pytest.mark.parametrize("streaming", [False, True])
def test_labels_that_are_not_public(streaming: bool, tmp_path: Path) -> None:
    """As on the hub: the test split is its validation rows, and a fraction of the training rows is for validation."""
    written = write(tmp_path, column="sentence", test_label=-1)
    data = load_sst2(tmp_path, LoadOptions(**{**OPTIONS, "streaming": streaming}))
    assert tensors(data.test)[1].tolist() == [k % 2 for k in range(10)]
    assert [text.removesuffix(" <unknown>") for text in decoded(data, "test")] == [
        " ".join(text.split()[:6]) for text in written["validation"]
    ]
    train, validation = (tensors(part)[0] for part in (data.train, data.validation))
    assert (len(train), len(validation)) == (40, 10)
    both = Counter(text.removesuffix(" <unknown>") for part in PARTS[:2] for text in decoded(data, part))
    assert both == Counter(" ".join(text.split()[:6]) for text in written["train"])
    assert load_sst2(tmp_path, LoadOptions(**{**OPTIONS, "streaming": streaming, "val_fraction": 0})).validation is None


@pytest.mark.parametrize("streaming", [False, True])
def test_vocabulary_is_that_of_training_rows_alone(streaming: bool, tmp_path: Path) -> None:
    """A word in four rows is known if at least two of them are for training; over seeds, both happen."""
    texts = sentences(50, 0)
    texts[:4] = [f"{text} rareword" for text in texts[:4]]
    write(tmp_path, test_label=-1, train=texts)
    seen = set()
    for seed in range(12):
        data = load_sst2(tmp_path, LoadOptions(val_fraction=0.6, seed=seed, streaming=streaming))
        counts = Counter(word for text in _texts_of(data, texts) for word in tokenize(text))
        assert {*data.vocabulary.words} == {word for word, count in counts.items() if count >= 2}
        seen.add("rareword" in data.vocabulary.words)
    assert seen == {True, False}


def _texts_of(data: DatasetBundle, texts: list[str]) -> list[str]:
    """The sentences of the training part, found by their first six words."""
    rows = Counter(" ".join(words.split()[:6]) for words in decoded(data, "train"))
    return [text for text in texts if " ".join(text.split()[:6]) in rows]


@pytest.mark.parametrize("streaming", [False, True])
def test_sentences_without_word_and_sentences_that_are_none(streaming: bool, tmp_path: Path) -> None:
    texts: list[Any] = sentences(50, 0)
    texts[7] = "   "
    write(tmp_path / "empty", train=texts)
    data = load_sst2(tmp_path / "empty", LoadOptions(**{**OPTIONS, "streaming": streaming}))
    assert tensors(data.train)[0][7].tolist() == [UNKNOWN] + [PADDING] * 63
    texts[8] = None
    write(tmp_path / "none", train=texts, column="sentence")
    with pytest.raises(CorruptFileError):
        load_sst2(tmp_path / "none", LoadOptions(**{**OPTIONS, "streaming": streaming}))
