"""Files and folders that are replaced as a whole: kills, concurrent writers, full disks, links and modes."""

import errno
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from _kills import kill_at_every_step, run_in_fork
from torch import Tensor

from neuboots import serialization
from neuboots.serialization import atomic_file, read_artifact, write_artifact, write_text


def write(folder: Path, version: int, size: int = 3) -> None:
    write_artifact(folder, {"value": version}, {"value": torch.full((size,), version)}, kind="test")


def read(folder: Path) -> int:
    artifact = read_artifact(folder, kind="test")
    version: int = artifact.config["value"]
    values: Tensor = artifact.tensors["value"]
    assert (values == version).all(), "config and tensors are of different versions"
    return version


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("exchanged", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("exists", [True, False], ids=["old", "none"])
def test_killed_writer_leaves_a_complete_folder(
    exchanged: bool, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanged:
        monkeypatch.setattr(serialization, "_exchange", lambda first, second: False)
    folder = tmp_path / "model"
    write(tmp_path / "warm", 0)  # imports
    (tmp_path / "warm").rename(tmp_path / "warm-up")
    if exists:
        write(folder, 0)
    seen = set()
    for step in kill_at_every_step(lambda: write(folder, 1)):
        found = read(folder) if exists or folder.exists() else None
        assert names(tmp_path) == ["model", "warm-up"] or (found is None and not folder.exists()), "load leaves nothing"
        seen.add(found)
        write(folder, 2 + step)
        assert read(folder) == 2 + step
        assert names(tmp_path) == ["model", "warm-up"], "the next save leaves nothing"
        if exists:
            write(folder, 0)
        else:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    assert seen == {0 if exists else None, 1}


@pytest.mark.parametrize("exists", [True, False], ids=["old", "none"])
def test_killed_writer_leaves_a_complete_file(exists: bool, tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    seen = set()
    file.write_text("old") if exists else None
    for _ in kill_at_every_step(lambda: write_text(file, "new")):
        seen.add(file.read_text() if file.exists() else None)
        write_text(file, "old")
        assert names(tmp_path) == ["out.csv"]
        file.unlink() if not exists else None
    assert seen == {"old" if exists else None, "new"}


def test_concurrent_writers_and_readers_see_whole_versions(tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "out.csv"
    write(folder, 0)

    def work(writer: int) -> list[int]:
        for k in range(4):
            write(folder, 10 * writer + k, size=1 + writer)
            write_text(file, f"{writer}" * 1000)
        return [read(folder) for _ in range(10)]

    children = []
    for writer in (1, 2):
        if (child := os.fork()) == 0:
            os._exit(run_in_fork(lambda writer=writer: work(writer)))  # type: ignore[misc]
        children.append(child)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(3, 7)))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert {version // 10 for versions in found for version in versions} <= {*range(1, 7)}
    assert len({*file.read_text()}) == 1
    assert names(tmp_path) == ["model", "out.csv"]


def test_writer_waits_for_another_and_keeps_its_file(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    with ThreadPoolExecutor(1) as pool:
        with atomic_file(file) as temporary:
            second = pool.submit(write_text, file, "second")
            temporary.write_text("first")
            with pytest.raises(TimeoutError):
                second.result(timeout=0.1)
            assert temporary.read_text() == "first"
        second.result()
    assert file.read_text() == "second"
    assert names(tmp_path) == ["out.csv"]


def test_modes_follow_the_umask_or_the_replaced_file(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    folder, file = tmp_path / "model", tmp_path / "out.csv"
    before = os.umask(0o027)
    try:
        write(folder, 0)
        write_text(file, "old")
        assert {mode(path) for path in folder.iterdir()} == {mode(file)} == {0o640}
        assert mode(folder) == 0o750
        folder.chmod(0o700)
        file.chmod(0o600)
        write(folder, 1)
        write_text(file, "new")
        assert (mode(folder), mode(file)) == (0o700, 0o600)
    finally:
        os.umask(before)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)


def file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


@pytest.mark.parametrize("fill", [full_disk, file_limit])
def test_full_disk_keeps_the_old_and_leaves_nothing(
    fill: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "model", tmp_path / "out.csv"
    write(folder, 0)
    write_text(file, "old")

    def work() -> None:
        fill(monkeypatch)
        with pytest.raises(OSError, match=r"No space left|File too large"):
            write(folder, 1)
        with pytest.raises(OSError, match=r"No space left|File too large"):
            write_text(file, "new" * 100)
        with pytest.raises(OSError, match=r"No space left|File too large"):
            write(tmp_path / "first", 1)

    assert run_in_fork(work) == 0
    assert (read(folder), file.read_text(), names(tmp_path)) == (0, "old", ["model", "out.csv"])


def test_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    write(tmp_path / "model", 0)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError) as caught:
        write(tmp_path / "model", 1)
    assert caught.value.filename == str(tmp_path / "model")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "model", "text")
    assert names(tmp_path) == ["model"]


def test_links_stay_and_other_targets_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "real", 0)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    write(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real") == 1
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path / "real")
    for target in ("file", "loop", "link", "real", "."):
        with pytest.raises(FileExistsError):
            write(tmp_path / target, 2)
    assert (read(tmp_path / "real"), (tmp_path / "file").read_text()) == (1, "text")
    assert names(tmp_path) == ["file", "link", "loop", "real"]


def test_names_of_any_length(tmp_path: Path) -> None:
    write(tmp_path / ("m" * 255), 0)
    write_text(tmp_path / ("é" * 125 + ".csv"), "text")
    assert names(tmp_path) == ["m" * 255, "é" * 125 + ".csv"]
    assert read(tmp_path / ("m" * 255)) == 0


def test_file_system_that_creates_no_files_raises() -> None:
    with pytest.raises(OSError, match="page"), atomic_file(Path("/proc/page.html")):
        pass
