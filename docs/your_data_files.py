"""The files of docs/your-data.md, from data that scikit-learn ships."""

from pathlib import Path

import numpy as np
import pandas as pd

HOLED = ("mean texture", "mean smoothness", "worst symmetry")  # columns that lose cells
HOLES = 0.04  # of their cells
KNOWN = 369  # rows with a diagnosis; the other 200 are new
FEW, MORE = 60, 20  # rows with a diagnosis before, and labels that are added
MIXED_UP, FACTOR = "mean radius", 10  # as if it were in other units


def patients(seed: int) -> pd.DataFrame:
    """Breast cancer Wisconsin, 569 rows in an order drawn by the seed, with some cells emptied."""
    from sklearn.datasets import load_breast_cancer

    held = load_breast_cancer(as_frame=True)
    frame = held.data.assign(diagnosis=held.target_names[held.target])
    rng = np.random.default_rng(seed)
    frame = frame.iloc[rng.permutation(len(frame))].reset_index(drop=True)
    for name in HOLED:
        frame.loc[rng.random(len(frame)) < HOLES, name] = np.nan
    return frame


def write_patients(folder: Path, seed: int) -> pd.DataFrame:
    """Rows with a diagnosis, new ones without it, and the new ones again when it is known."""
    frame = patients(seed)
    known, new = frame[:KNOWN], frame[KNOWN:]
    unlabelled = new.drop(columns="diagnosis")
    mixed_up = unlabelled.assign(**{MIXED_UP: FACTOR * unlabelled[MIXED_UP]})
    files = {
        "patients": known,
        "new": unlabelled,
        "followed-up": new,
        "mixed-up": mixed_up,
        "few": known[:FEW],
        "pool": known[FEW:].drop(columns="diagnosis"),
    }
    for name, rows in files.items():
        rows.to_csv(folder / f"{name}.csv", index=False)
    return frame


def write_labelled(folder: Path, frame: pd.DataFrame, chosen: str) -> None:
    """more.csv: the few rows, and the chosen ones of the pool with the diagnosis that a doctor would write there."""
    rows = pd.read_csv(folder / chosen)["row"].to_numpy() - 1
    pd.concat([frame[:FEW], frame[FEW:KNOWN].iloc[rows]]).to_csv(folder / "more.csv", index=False)


def write_diabetes(folder: Path, seed: int) -> None:
    """The progression of diabetes after a year, from ten measurements in their units."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": "progression"})
    frame = frame.sample(frac=1, random_state=seed)
    frame[:-100].to_csv(folder / "diabetes.csv", index=False)
    frame[-100:].to_csv(folder / "later-diabetes.csv", index=False)
    frame[-100:].drop(columns="progression").to_csv(folder / "new-diabetes.csv", index=False)


def write_digits(folder: Path) -> None:
    """A folder of images for each digit, and one of new images."""
    from PIL import Image
    from sklearn.datasets import load_digits

    held = load_digits()
    for k, (pixels, digit) in enumerate(zip(held.images[:1300], held.target[:1300], strict=True)):
        place = folder / "digits" / str(digit) if k < 1000 else folder / "new-digits"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((15 * pixels).astype(np.uint8)).save(place / f"{k:04}.png")
