"""Images: files of known pixels, damaged files and odd folders, through decoders, models and commands."""

import io
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from neuboots.app.images import ImageModel, fit_images
from neuboots.app.masks import MaskModel, fit_masks
from neuboots.data import CorruptFileError
from neuboots.data.image_folder import infer_label_map, load_image_folder, load_mask_folder
from neuboots.data.images import decode_image, decode_mask, read_image_size

from .driver import CORRECT, ERROR, FLAGGED, Area, Failure, Workspace, run_command

Array = np.ndarray[Any, Any]


# -- files of known pixels -----------------------------------------------------------------------------


def write_classes(folder: Path, count: int, *, seed: int) -> Path:
    """Images of two classes: bright above, or bright below."""
    rng = np.random.default_rng(seed)
    for name in ("above", "below"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 90, (10, 12, 3), dtype=np.uint8)
            pixels[slice(0, 5) if name == "above" else slice(5, 10)] += 120
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def write_pairs(folder: Path, count: int, *, seed: int) -> Path:
    """Images with masks: a bright rectangle of class 1."""
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        mask = np.zeros((16, 20), dtype=np.uint8)
        top, left = rng.integers(0, 8, 2)
        mask[top : top + 7, left : left + 9] = 1
        pixels = rng.integers(0, 90, (16, 20, 3), dtype=np.uint8) + 150 * mask[..., None]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    return folder


def make_file(mode: str, form: str, seed: int, side: int) -> tuple[bytes, Array | None]:
    """A file in a mode of PIL and a lossless format, and its pixels in RGB; None if it must be an error."""
    rng = np.random.default_rng(seed)
    height, width = side, side + 3
    grey = rng.integers(0, 256, (height, width), dtype=np.uint8)
    color = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    truth: Array | None = np.repeat(grey[..., None], 3, 2)
    if mode == "L":
        image = Image.fromarray(grey)
    elif mode == "LA":
        image = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(grey[::-1].copy())])
    elif mode == "1":
        image = Image.fromarray(grey > 127)
        truth = np.repeat(((grey > 127) * np.uint8(255))[..., None], 3, 2)
    elif mode in ("RGB", "RGBA"):
        image, truth = Image.fromarray(color), color
        if mode == "RGBA":
            image.putalpha(Image.fromarray(grey))
    elif mode in ("P", "P transparent"):
        index = (grey // 64).astype(np.uint8)
        palette = rng.integers(0, 256, (4, 3), dtype=np.uint8)
        image = Image.fromarray(index)
        image.putpalette(palette.tobytes())
        truth = palette[index]
        if mode == "P transparent":
            image.info["transparency"] = 0
    elif mode == "I;16":
        wide = rng.integers(0, 65536, (height, width)).astype(np.uint16)
        image = Image.fromarray(wide)
        truth = np.repeat(((wide.astype(np.int64) + 128) // 257)[..., None], 3, 2)
    elif mode == "I":
        image, truth = Image.fromarray(rng.integers(-5, 70000, (height, width)).astype(np.int32)), None
    elif mode == "F":
        image, truth = Image.fromarray(rng.random((height, width)).astype(np.float32)), None
    else:
        raise ValueError(mode)
    file = io.BytesIO()
    image.save(file, form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))
    return file.getvalue(), truth


FORMATS = {
    "PNG": ("L", "LA", "1", "RGB", "RGBA", "P", "P transparent", "I;16"),
    "TIFF": ("L", "LA", "1", "RGB", "RGBA", "P", "I;16", "I", "F"),
    "BMP": ("L", "1", "RGB", "P"),
    "GIF": ("L", "P", "1"),
    "PPM": ("L", "1", "RGB"),
    "WEBP": ("RGB", "RGBA"),
}
SUFFIX = {"PNG": ".png", "TIFF": ".tif", "BMP": ".bmp", "GIF": ".gif", "PPM": ".ppm", "WEBP": ".webp"}


def make_bomb(kind: int) -> bytes:
    """A small file that claims, or is, a very large image."""
    if kind % 4 == 0:  # a header of 60,000 × 60,000 pixels
        header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + _chunk(b"IHDR", header)
            + _chunk(b"IDAT", zlib.compress(b"\0" * 1000))
            + _chunk(b"IEND", b"")
        )
    if kind % 4 == 1:  # 12,000 × 12,000 black pixels that compress well
        data = zlib.compressobj(9)
        row = b"\0" + b"\0" * 12_000
        body = b"".join(data.compress(row * 100) for _ in range(120)) + data.flush()
        header = struct.pack(">IIBBBBB", 12_000, 12_000, 8, 0, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")
    if kind % 4 == 2:  # a text chunk that expands
        file = io.BytesIO()
        Image.new("L", (12, 10)).save(file, "PNG")
        png = file.getvalue()
        text = _chunk(b"zTXt", b"k\0\0" + zlib.compress(b"x" * 100_000_000))
        return png[:33] + text + png[33:]
    return b"P6\n2147483647 2147483647\n255\n" + b"\0" * 100


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


# -- cases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageCase:
    """Files, and what is done with them."""

    action: str
    form: str
    mode: int
    seed: int
    side: int
    damage: str
    at: int
    value: int


ODD = ("none", "flip", "flip", "truncate", "empty", "text", "bomb", "one pixel", "tall", "link loop", "dangling link",
       "link out", "fifo", "folder.png", "control name", "markup name", "bytes name", "long name", "empty class",
       "other class", "other suffix", "exif", "animated", "upper case")  # fmt: skip
ACTIONS = (
    "decode",
    "decode",
    "decode mask",
    "predict",
    "predict",
    "predict masks",
    "evaluate",
    "evaluate masks",
    "fit",
    "fit masks",
    "load",
    "command",
)
CASES = st.builds(
    ImageCase,
    action=st.sampled_from(ACTIONS),
    form=st.sampled_from(sorted(FORMATS)),
    mode=st.integers(0, 8),
    seed=st.integers(0, 1 << 30),
    side=st.integers(8, 20),
    damage=st.sampled_from(ODD),
    at=st.integers(0, 1 << 20),
    value=st.integers(0, 255),
)


class Prepared(NamedTuple):
    """Models and their folders."""

    images: ImageModel
    masks: MaskModel
    image_folder: Path
    mask_folder: Path


_MADE: list[Prepared] = []  # of this process


def prepare(folder: Path) -> Prepared:
    """Train a model of images and one of masks, once in a process."""
    if _MADE and _MADE[0].image_folder.exists():
        return _MADE[0]
    images, pairs = write_classes(folder / "classes", 8, seed=0), write_pairs(folder / "pairs", 6, seed=0)
    model = fit_images(images, epochs=1, size=8, num_samples=4, progress=False)
    masks = fit_masks(pairs, epochs=1, num_samples=2, progress=False)
    model.save(folder / "images")
    masks.save(folder / "masks")
    _MADE[:] = [Prepared(model, masks, folder / "images", folder / "masks")]
    return _MADE[0]


def run(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """Write the files and do with them what the case says."""
    action = case.action.split()[0]
    steps = {
        "decode": _decode,
        "predict": _predict,
        "evaluate": _evaluate,
        "fit": _fit,
        "load": _load,
        "command": _command,
    }
    return steps[action](prepared, case, workspace)


def _file(case: ImageCase) -> tuple[bytes, Array | None]:
    modes = FORMATS[case.form]
    return make_file(modes[case.mode % len(modes)], case.form, case.seed, case.side)


def _damage(data: bytes, case: ImageCase) -> bytes | None:
    """Damaged bytes of a file; None if this damage is not one of bytes."""
    at = case.at % len(data)
    if case.damage == "exif":
        image, file = Image.open(io.BytesIO(data)).convert("RGB"), io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = case.value % 12
        image.save(file, "JPEG", exif=exif)
        return file.getvalue()
    if case.damage == "animated":
        frames, file = [Image.new("RGB", (12, 10), (k, 0, 0)) for k in range(3)], io.BytesIO()
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
        return file.getvalue()
    if case.damage in ("one pixel", "tall"):
        file = io.BytesIO()
        Image.new("L", (1, 1) if case.damage == "one pixel" else (1, 20_000)).save(file, "PNG")
        return file.getvalue()
    return {
        "flip": data[:at] + bytes([data[at] ^ (1 << case.value % 8)]) + data[at + 1 :],
        "truncate": data[:at],
        "empty": b"",
        "text": b"<svg onload=alert(1)>",
        "bomb": make_bomb(case.value) if case.damage == "bomb" else b"",
    }.get(case.damage)


def _decode(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """A whole file has the pixels that were written; a damaged one is an error, or an image of any pixels."""
    if case.action == "decode mask":
        return _decode_mask(case, workspace)
    data, truth = _file(case)
    damaged = _damage(data, case)
    path = workspace.inputs / f"image{SUFFIX[case.form]}"
    path.write_bytes(data if damaged is None else damaged)
    channels = 3 if case.at % 3 else 1
    with workspace.guard():
        size = read_image_size(path, path)
        pixels = decode_image(path, channels, path).numpy()
        small = decode_image(path, channels, path, size=(8, 8), stretch=bool(case.value % 2))
    if pixels.shape != (channels, *size) or small.shape != (channels, 8, 8):
        raise Failure("wrong answer", f"an image of size {size} has shape {pixels.shape}, or {tuple(small.shape)}")
    if damaged is not None:
        return CORRECT
    if truth is None:
        raise Failure(
            "wrong answer", f"a file of mode {FORMATS[case.form][case.mode % len(FORMATS[case.form])]} was decoded"
        )
    if channels == 1:
        truth = np.asarray(Image.fromarray(truth.astype(np.uint8)).convert("L"))[..., None]
    if not np.array_equal(pixels, truth.transpose(2, 0, 1)):
        raise Failure("wrong answer", f"{case.form} {case.mode}: pixels differ from those that were written")
    return CORRECT


def _decode_mask(case: ImageCase, workspace: Workspace) -> str:
    """A mask has the values that were written, or is an error."""
    rng = np.random.default_rng(case.seed)
    high = (2, 5, 256, 256, 70_000)[case.mode % 5]
    values = rng.integers(0, high, (case.side, case.side + 2))
    kinds = (np.uint8, np.uint8, np.uint8, np.uint8, np.int32)
    image = Image.fromarray(values.astype(kinds[case.mode % 5]))
    form = "TIFF" if high > 256 else ("PNG", "TIFF", "BMP", "GIF")[case.value % 4]
    if case.mode % 5 == 3 and form != "GIF":
        image = Image.merge("RGB", [image] * 3)
    file = io.BytesIO()
    image.save(file, form)
    damaged = _damage(file.getvalue(), case)
    path = workspace.inputs / f"mask{SUFFIX[form]}"
    path.write_bytes(file.getvalue() if damaged is None else damaged)
    with workspace.guard():
        mask = decode_mask(path, path).numpy()
        names, label_map = infer_label_map(np.unique(mask).tolist(), None, None)
        classes = label_map(__import__("torch").from_numpy(mask), path).numpy()
    if damaged is not None:
        return CORRECT
    if not np.array_equal(mask, values):
        raise Failure("wrong answer", "values of a mask differ from those that were written")
    back = np.array(
        [label_map.values[c] if c != 255 or len(names) > 255 else label_map.ignore_index for c in classes.flat]
    )
    if not np.array_equal(back, values.ravel()):
        raise Failure("wrong answer", "classes of a mask differ from its values")
    return CORRECT


def _add_odd(folder: Path, case: ImageCase, workspace: Workspace, *, name: str = "odd") -> bool:
    """Add an odd file to a folder of images; return whether it is a readable image."""
    data, truth = _file(case)
    damaged = _damage(data, case)
    path = folder / f"{name}{SUFFIX[case.form]}"
    if damaged is not None:
        path.write_bytes(damaged)
        return False
    names = {"control name": "\x1b[31mred\x07\n", "markup name": "<img src=x onerror=alert(1)>=1",
             "bytes name": os.fsdecode(b"\xff\xfe"), "long name": "x" * 240}  # fmt: skip
    if case.damage in names:
        (folder / f"{names[case.damage]}{path.suffix}").write_bytes(data)
        return truth is not None
    if case.damage == "link loop":
        (folder / "loop").symlink_to(folder)
    elif case.damage == "dangling link":
        path.symlink_to(folder / "nothing.png")
    elif case.damage == "link out":
        path.symlink_to("/etc/passwd")
    elif case.damage == "fifo":
        os.mkfifo(path)
    elif case.damage == "folder.png":
        path.mkdir()
    elif case.damage == "empty class":
        (folder.parent / "nothing").mkdir()
    elif case.damage == "other class":
        (folder.parent / "\x1b[31mother").mkdir()
        (folder.parent / "\x1b[31mother" / path.name).write_bytes(data)
    elif case.damage == "other suffix":
        (folder / "notes\x1b[31m.txt").write_text("=1", encoding="utf-8")
    elif case.damage == "upper case":
        (folder / f"ODD{path.suffix.upper()}").write_bytes(data)
        return truth is not None
    else:
        path.write_bytes(data)
        return truth is not None
    return False


def _predict(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """Every image is predicted as it is alone, or skipped with a note."""
    if case.action == "predict masks":
        model: Any = prepared.masks
        folder = write_pairs(workspace.inputs / "pairs", 3, seed=case.seed) / "images"
    else:
        model = prepared.images
        folder = write_classes(workspace.inputs / "classes", 2, seed=case.seed)
    place = folder if case.action == "predict masks" else folder / "above"
    whole = sorted(folder.rglob("*.png"))
    readable = _add_odd(place, case, workspace)
    with workspace.guard():
        batches = [*model.read(folder)]
        found: dict[str, Any] = {}
        for batch in batches:
            columns = model.predict(batch, num_samples=4).columns
            found |= {str(name): {c: v[i] for c, v in columns.items()} for i, name in enumerate(batch.keys["file"])}
    notes = [note for batch in batches for note in batch.notes]
    for path in whole[:3]:
        alone = model.predict(next(iter(model.read(path))), num_samples=4).columns
        row = found.get(path.relative_to(folder).as_posix())
        if row is None:
            raise Failure("wrong answer", f"{path.name} was not predicted")
        for name, values in alone.items():
            same = (
                np.isclose(row[name], values[0], rtol=1e-3, atol=1e-4)
                if values.dtype.kind == "f"
                else row[name] == values[0]
            )
            if not same:
                raise Failure("wrong answer", f"{name} of {path.name} is {row[name]}, alone {values[0]}")
    more = len(found) - len(whole)
    if more < 0 or (readable and not more and not notes):
        raise Failure("wrong answer", f"{len(found)} predictions of {len(whole)} images")
    expects_note = case.damage in ("truncate", "empty", "text", "fifo", "dangling link", "link out", "other suffix")
    if expects_note and not more and not notes:
        raise Failure("wrong answer", f"a file was left out without a note ({case.damage})")
    return FLAGGED if notes else CORRECT


def _evaluate(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """Labeled images are counted; odd ones are noted or an error."""
    if case.action == "evaluate masks":
        pairs = write_pairs(workspace.inputs / "pairs", 3, seed=case.seed)
        readable = _add_odd(pairs / "images", case, workspace)
        if case.at % 2:  # its mask, of another size or with unknown values
            values = np.full((case.side, case.side + (3 if case.at % 4 else 4)), case.value % 4, dtype=np.uint8)
            Image.fromarray(values).save(pairs / "masks" / "odd.png")
        folder, count, model = pairs, 3, prepared.mask_folder
    else:
        folder = write_classes(workspace.inputs / "classes", 3, seed=case.seed)
        readable = _add_odd(folder / "above", case, workspace)
        count, model = 6, prepared.image_folder
    with workspace.guard():
        console = run_command("evaluate", str(model), str(folder), "--num-samples", "4", "--json")
    if console.code:
        return ERROR
    found = json.loads(console.out)
    read = found["rows"]["read"]
    if read < count or (readable and read == count and not found["notes"]):
        raise Failure("wrong answer", f"{read} images of {count} and {case.damage} were evaluated, without a note")
    return FLAGGED if found["notes"] else CORRECT


def _fit(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """Training reads every image, or notes those that it skips."""
    notes: list[str] = []

    def on_start(chosen: Any, found: Any) -> None:
        notes.extend(found)

    options: Any = {"epochs": 1, "num_samples": 2, "progress": False, "test_fraction": 0.0, "on_start": on_start}
    if case.action == "fit masks":
        pairs = write_pairs(workspace.inputs / "pairs", 5, seed=case.seed)
        readable = _add_odd(pairs / "images", case, workspace)
        if case.at % 2:
            values = np.full((case.side, case.side + (3 if case.at % 4 else 4)), case.value % 4, dtype=np.uint8)
            Image.fromarray(values).save(pairs / "masks" / "odd.png")
        with workspace.guard():
            model: Any = fit_masks(pairs, **options)
        count = 5
    else:
        folder = write_classes(workspace.inputs / "classes", 5, seed=case.seed)
        readable = _add_odd(folder / "above", case, workspace)
        with workspace.guard():
            model = fit_images(folder, size=8, **options)
        count = 10
    read = sum(model.card.rows.values())
    if read < count or (readable and read == count and not notes):
        raise Failure("wrong answer", f"{read} images of {count} and {case.damage} were read, without a note")
    return FLAGGED if len(notes) > (case.action == "fit masks") else CORRECT


def _load(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """Data sets of folders give the pixels of the files."""
    masks = case.at % 2
    if masks:
        folder = write_pairs(workspace.inputs / "pairs", 4, seed=case.seed)
        _add_odd(folder / "images", case, workspace)
    else:
        folder = write_classes(workspace.inputs / "classes", 4, seed=case.seed)
        _add_odd(folder / "above", case, workspace)
    skipped = 0
    with workspace.guard():
        data = (load_mask_folder if masks else load_image_folder)(folder, val_fraction=0.0, test_fraction=0.0)
        train: Any = data.train
        for i in range(len(train)):
            try:
                x, _ = train[i]
            except CorruptFileError:
                skipped += 1
                continue
            file = train.source.inputs[i] if hasattr(train.source, "inputs") else train.source.files[i]
            pixels = np.asarray(Image.open(file).convert("RGB"), dtype=np.float32) / 255
            if case.damage == "none" and os.path.basename(file) != f"odd{SUFFIX[case.form]}":
                mean, std = (np.array(v, dtype=np.float32) for v in (data.standardizer.mean, data.standardizer.std))
                if not np.allclose(x.numpy(), ((pixels - mean) / std).transpose(2, 0, 1), atol=1e-5):
                    raise Failure("wrong answer", f"pixels of {file} differ")
    return FLAGGED if skipped else CORRECT


def _command(prepared: Prepared, case: ImageCase, workspace: Workspace) -> str:
    """The commands print no control characters, whatever the names of files are."""
    from .tables import check_cells

    folder = write_classes(workspace.inputs / "classes", 2, seed=case.seed)
    _add_odd(folder / "above", case, workspace)
    out = workspace.outputs / "found.csv"
    command = ("predict", "suggest", "masks")[case.at % 3]
    if command == "masks":
        folder = write_pairs(workspace.inputs / "pairs", 2, seed=case.seed)
        _add_odd(folder / "images", case, workspace)
        out = workspace.outputs / "found"
        with workspace.guard(out.name):
            console = run_command(
                "predict", str(prepared.mask_folder), str(folder), "--out", str(out), "--num-samples", "2"
            )
        if not console.code:
            check_cells((out / "summary.csv").read_text(encoding="utf-8"))
        return ERROR if console.code else CORRECT
    arguments = [command, str(prepared.image_folder), str(folder), "--num-samples", "2"]
    with workspace.guard(out.name):
        console = run_command(
            *arguments, *(["--out", str(out)] if case.value % 2 else []), data_on_stdout=command == "predict"
        )
    if not console.code and out.exists():
        check_cells(out.read_text(encoding="utf-8"))
    if console.code and out.exists():
        raise Failure("leftovers", out.name)
    return ERROR if console.code else CORRECT


USUAL = [ImageCase(action, "PNG", 3, 1, 12, "none", 2, 1) for action in dict.fromkeys(ACTIONS)]
AREA = Area("image folders", 0.18, prepare, lambda prepared: CASES, run, USUAL)
