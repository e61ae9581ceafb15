"""Files in folders: which there are, in which split, and which belong together.

    path/<class>/…,               path/<split>/<class>/…
    path/{images, masks}/<name>,  path/<split>/{images, masks}/<name>,  path/{images, masks}/<split>/<name>

Files come sorted by name, folders are walked to the bottom, and what is hidden is passed over: .DS_Store,
.ipynb_checkpoints, and the ._ files that archives of a Mac leave beside every other.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from neuboots.data.parts import Part
from neuboots.data.sources import Missing, split_off
from neuboots.keys import whole

SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
"""What the folders of a split may be called."""


class Found(NamedTuple):
    files: list[Path]
    others: list[Path]  # of other kinds, passed over


def folder_at(path: str | Path, what: str) -> Path:
    """The folder that was given, or a sentence."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "is not there"
        raise Missing(f"got {str(path)!r}, which {kind}; expected {what}")
    return folder


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, by name, without hidden ones."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def files_in(folder: Path, endings: Collection[str]) -> Found:
    """All files below a folder whose names end so, and all others; links are followed, but in no circle."""
    found = Found([], [])
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else sorted(name for name in folders if not _is_hidden(name))
        if real in seen:
            continue
        seen.add(real)
        for name in names:
            if not _is_hidden(name):
                (found.files if name.lower().endswith(tuple(endings)) else found.others).append(Path(place, name))
    found.files.sort()
    found.others.sort()
    return found


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))


# -- splits --------------------------------------------------------------------------------------------


def split_folders(folder: Path) -> dict[str, Path]:
    """Split → its folder, for those that there are; none of them, unless train is one."""
    found: dict[str, Path] = {}
    for entry in folders_in(folder):
        for split, names in SPLITS.items():
            if entry.name.lower() in names:
                if split in found:
                    raise ValueError(f"got {found[split]} and {entry}; expected one folder for {split}: join the two")
                found[split] = entry
    return found if "train" in found else {}


def three_parts(
    parts: Mapping[str, Part], *, validation: Any, test: Any, seed: int, stratified: bool = False
) -> tuple[Part, Part | None, Part | None]:
    """(train, validation, test): those that have folders of their own, the others as shares of all rows of train,
    of each class the same share if `stratified`."""
    seed = whole("seed", seed)
    shares = {"validation": validation, "test": test}
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= float(share) < 1:  # NaN fails too
            raise ValueError(f"got {name}={share!r}; expected a share of the rows from 0 to below 1")
    drawn = {name: float(share) for name, share in shares.items() if name not in parts}
    if sum(drawn.values()) >= 1:
        raise ValueError(
            f"got validation={validation:g} and test={test:g}; expected shares that leave rows to train on"
        )
    train, n = parts["train"], len(parts["train"])
    needed = 1 + sum(share > 0 for share in drawn.values())
    if n < needed:
        names = " and ".join(f"{name}=0" for name, share in drawn.items() if share > 0)
        raise ValueError(f"got {n} rows to share out; expected at least {needed}: add some, or take {names}")
    found: dict[str, Part | None] = dict(parts)
    left = 1.0
    for name in ("test", "validation"):
        if name not in drawn:
            continue
        strata = train.targets if stratified else None
        train, found[name] = split_off(train, drawn[name] / left, seed=seed, strata=strata)
        left -= drawn[name]
    return train, found["validation"], found["test"]


# -- pairs ---------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    inputs: list[str]
    targets: list[str]
    passed_over: list[str]


def paired_folders(folder: Path, inputs: Sequence[str], targets: Sequence[str]) -> dict[str, tuple[Path, Path]]:
    """Split → (folder of inputs, folder of targets), in any of the three layouts; all is train where none is named."""
    here = _pair_in(folder, inputs, targets)
    if here is not None:
        first, second = split_folders(here[0]), split_folders(here[1])
        if not first:
            return {"train": here}
        for split, entry in first.items():
            if split not in second:
                raise Missing(f"got {entry}, but no folder for {split} in {here[1]}; expected one in both")
        return {split: (entry, second[split]) for split, entry in first.items()}
    splits = split_folders(folder)
    found = {split: _pair_in(entry, inputs, targets) for split, entry in splits.items()}
    for split, pair in found.items():
        if pair is None:
            raise Missing(
                f"got {splits[split]} without {' or '.join(inputs)}, or without {' or '.join(targets)}; expected both "
                "folders in it"
            )
    if not found:
        raise Missing(
            f"got {folder} with {_listed(folders_in(folder))}; expected the folders {' or '.join(inputs)} and "
            f"{' or '.join(targets)}, or train with both in it"
        )
    return {split: pair for split, pair in found.items() if pair is not None}


def _pair_in(folder: Path, inputs: Sequence[str], targets: Sequence[str]) -> tuple[Path, Path] | None:
    names = {entry.name: entry for entry in folders_in(folder)}
    first = next((names[name] for name in inputs if name in names), None)
    second = next((names[name] for name in targets if name in names), None)
    return None if first is None or second is None else (first, second)


def pairs_in(folders: tuple[Path, Path], endings: Sequence[str], target_endings: Sequence[str]) -> Pairs:
    """Inputs and targets of one name, whatever their endings; one without the other is named."""
    found = [files_in(folder, ends) for folder, ends in zip(folders, (endings, target_endings), strict=True)]
    inputs, targets = (
        _by_stem(listed.files, folder, ends)
        for listed, folder, ends in zip(found, folders, (endings, target_endings), strict=True)
    )
    for stem, file in inputs.items():
        if stem not in targets:
            expected = folders[1] / (stem + target_endings[0])
            raise Missing(
                f"got {file} without its {folders[1].name}; expected a file such as {expected} "
                f"({_or(target_endings)}), or neither"
            )
    for stem, file in targets.items():
        if stem not in inputs:
            raise Missing(f"got {file} without its file in {folders[0]}; expected one of the same name, or neither")
    if not inputs:
        others = _kinds(found[0].others)
        raise Missing(f"got {folders[0]} without any file{others}; expected names that end in {_or(endings)}")
    passed_over = [str(file) for listed in found for file in listed.others]
    return Pairs([str(file) for file in inputs.values()], [str(targets[stem]) for stem in inputs], passed_over)


def _by_stem(files: list[Path], folder: Path, endings: Collection[str]) -> dict[str, Path]:
    by_stem: dict[str, Path] = {}
    for file in files:
        name = file.relative_to(folder).as_posix()
        ending = max((end for end in endings if name.lower().endswith(end)), key=len)
        stem = name[: -len(ending)]
        if stem in by_stem:
            raise ValueError(f"got {by_stem[stem]} and {file}; expected one file of a name: remove one of them")
        by_stem[stem] = file
    return by_stem


def _kinds(others: list[Path]) -> str:
    """Of what was passed over, for a sentence."""
    if not others:
        return ""
    kinds = sorted({other.suffix or other.name for other in others})[:5]
    return f" that can be taken ({len(others)} of other kinds were passed over: {', '.join(kinds)})"


def _listed(folders: list[Path]) -> str:
    names = [folder.name for folder in folders]
    if not names:
        return "no folders"
    return f"the folders {', '.join(names[:8])}" + (" …" if len(names) > 8 else "")


def _or(endings: Collection[str]) -> str:
    return ", ".join(sorted(endings))
