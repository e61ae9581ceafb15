"""neuboots._io"""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_folder(folder: str | os.PathLike[str], names: Collection[str], what: str) -> Iterator[Path]:
    """Gives a folder to fill, which takes the place of `folder` as a whole at the end; if that fails, nothing changes.

    A folder that holds other files than these names is not `what` it should be, and is not replaced.
    """
    target = Path(folder).resolve()  # a link stays one
    check_replaceable(target, names, what)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        os.chmod(aside, 0o777 & ~get_umask())
        yield aside
        if target.exists():
            old = aside.with_name(aside.name + ".old")
            os.rename(target, old)
            try:
                os.rename(aside, target)
            except BaseException:  # Ctrl-C as well
                os.rename(old, target)
                raise
            shutil.rmtree(old)
        else:
            os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_replaceable(folder: str | os.PathLike[str], names: Collection[str], what: str) -> None:
    """Refuse a place that `atomic_folder` would refuse: to ask before long work."""
    target = Path(folder)
    if target.exists() and not (target.is_dir() and {path.name for path in target.iterdir()} <= {*names}):
        raise FileExistsError(f"{target} exists and is not {what}; expected a new folder: choose another name")
    if Path.cwd().is_relative_to(target.resolve()):
        raise FileExistsError(f"{target} holds the folder that you are in; expected another: choose another name")


def get_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """As `write_text`, a value as JSON."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Written aside, then renamed: nobody ever sees half a file, nor an empty one after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:  # a full disk, an interrupt
        aside.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None where there is nothing, or nothing that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
