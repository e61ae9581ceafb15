"""docs/your-data.md from a real run: `make your-data` (two minutes).

    data of scikit-learn → CSV files → the commands of the page → docs/your-data.json and docs/figures → the page

No number of the page is typed: your-data.md.in has the words, your-data.json what the commands said and what was
counted in their files. `your_data_page.page` puts the two together, and a test does so again.
"""

import contextlib
import io
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from your_data_files import (
    FACTOR,
    FEW,
    HOLED,
    KNOWN,
    MIXED_UP,
    MORE,
    write_diabetes,
    write_digits,
    write_labelled,
    write_patients,
)
from your_data_page import WIDTH, page, percent, short

HERE = Path(__file__).resolve().parent
SHUFFLES = range(8)
SHOWN = 0  # the shuffle of the page

COMMANDS = {
    "fit": "neuboots fit patients.csv --target diagnosis --max-error 0.1 --out patients-model",
    "predict": "neuboots predict patients-model new.csv --out answers.csv",
    "mixed_up": "neuboots predict patients-model mixed-up.csv --out mixed-up-answers.csv",
    "evaluate": "neuboots evaluate patients-model followed-up.csv --out patients.html",
    "few": "neuboots fit few.csv --target diagnosis --test 0 --out few-model",
    "next": f"neuboots next few-model pool.csv -k {MORE} --out to-label.csv",
    "more": "neuboots fit more.csv --target diagnosis --test 0 --out more-model",
    "fit_numbers": "neuboots fit diabetes.csv --target progression --out diabetes-model",
    "predict_numbers": "neuboots predict diabetes-model new-diabetes.csv --out numbers.csv",
    "evaluate_numbers": "neuboots evaluate diabetes-model later-diabetes.csv --out diabetes.html",
    "fit_images": "neuboots fit digits --channels 1 --out digits-model",
    "predict_images": "neuboots predict digits-model new-digits --out digits.csv",
}
"""The commands of the page, by the names that its template calls them."""


# -- commands ------------------------------------------------------------------------------------------


def said(folder: Path, command: str, *, aside: io.StringIO | None = None) -> str:
    """What a command prints when it is run in this folder; its standard error goes aside, if there is an aside."""
    from neuboots.cli import main

    print(command, file=sys.__stderr__)
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(aside or out):
        code = main(shlex.split(command)[1:])
    if code:
        raise SystemExit(f"{command} gave the exit code {code}: {out.getvalue()}")
    return out.getvalue()


def asked(folder: Path, command: str) -> dict[str, Any]:
    """The JSON object of a command."""
    found: dict[str, Any] = json.loads(said(folder, f"{command} --json", aside=io.StringIO()))
    return found


# -- what is counted -----------------------------------------------------------------------------------


class Story:
    """What the page is made from: what commands said, facts in words, tables; and what the figures are drawn from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, dict[str, str]] = {}
        self.facts: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.drawn: dict[str, Any] = {}

    def run(self, *names: str) -> None:
        for name in names:
            self.runs[name] = {"command": COMMANDS[name], "output": said(self.folder, COMMANDS[name])}

    def read(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self.folder / name)

    def tell(self) -> None:
        """The whole page, section by section."""
        self.frame = write_patients(self.folder, SHOWN)
        write_diabetes(self.folder, SHOWN)
        write_digits(self.folder)
        self.file()
        self.run("fit", "predict", "mixed_up", "evaluate")
        self.rule()
        self.three_rows()
        self.unlike()
        self.decision()
        self.run("few", "next")
        write_labelled(self.folder, self.frame, "to-label.csv")
        self.run("more")
        self.shuffles()
        self.few_rows()
        self.run("fit_numbers", "predict_numbers", "evaluate_numbers", "fit_images", "predict_images")
        self.numbers()

    def file(self) -> None:
        known = self.frame[:KNOWN]
        names = [*known.columns[:4], "diagnosis"]
        first = int(known.index[known[HOLED[0]].isna()][0])  # a row with an empty cell, and those around it
        lines = known.loc[first - 1 : first + 1, names].to_csv(index=False).splitlines()
        self.tables["file"] = [line.split(",") for line in lines]
        self.facts |= {
            "known": str(KNOWN),
            "new": str(len(self.frame) - KNOWN),
            "columns": str(known.shape[1] - 1),
            "holed": ", ".join(HOLED),
            "holes": str(int(self.frame.isna().sum().sum())),
            "few": str(FEW),
            "more": str(MORE),
        }

    def rule(self) -> None:
        from neuboots.app import load_model

        model: Any = load_model(self.folder / "patients-model")
        usual = COMMANDS["fit"].replace(" --max-error 0.1", "").replace("patients-model", "usual-model")
        notes = asked(self.folder, usual)["figures"]["notes"]
        rows = model.card.rows
        self.facts |= {
            "train": str(rows["train"]),
            "held_out": str(rows["held out"]),
            "test": str(rows["test"]),
            "least": percent(model.abstain.confidence),
            "usual_promise": notes[0],
        }
        self.least = model.abstain.confidence

    def three_rows(self) -> None:
        """The surest, the least sure, and the most unlike."""
        answers = self.read("answers.csv")
        usual = answers[answers["ood_score"] <= 1]
        places = [usual["entropy"].idxmin(), usual["entropy"].idxmax(), answers["ood_score"].idxmax()]
        truth = self.frame["diagnosis"][KNOWN:].to_numpy()
        names = ["row", "prediction", "probability", "std", "entropy", "mutual_information", "ood_score", "abstain"]
        self.tables["three"] = [["", *names, "turned out"]]
        for title, k in zip(("sure", "unsure", "unlike"), places, strict=True):
            row = answers.loc[k]
            cells = [short(row[name]) for name in names]
            self.tables["three"].append([title, *cells, truth[k]])
        unsure = answers.loc[places[1]]
        self.facts["unsure_share"] = percent(unsure["mutual_information"] / unsure["entropy"])

    def unlike(self) -> None:
        """Each column × 10 in turn: how many rows are found to be unlike the training rows?"""
        from neuboots.app import load_model

        model: Any = load_model(self.folder / "patients-model")
        new, changed = self.read("new.csv"), self.folder / "changed.csv"
        shares = {}
        for name in new.columns:
            new.assign(**{name: FACTOR * new[name]}).to_csv(changed, index=False)
            scores = [model.predict(chunk, num_samples=1).columns["ood_score"] for chunk in model.read(changed)]
            shares[name] = float((np.concatenate(scores) > 1).mean())
        answers, mixed_up = self.read("answers.csv"), self.read("mixed-up-answers.csv")
        wrong = mixed_up["prediction"].to_numpy() != self.frame["diagnosis"][KNOWN:].to_numpy()
        hardest = min(shares, key=shares.__getitem__)
        self.facts |= {
            "mixed_up_column": MIXED_UP,
            "factor": str(FACTOR),
            "mixed_up_found": percent((mixed_up["ood_score"] > 1).mean()),
            "mixed_up_wrong": percent(wrong.mean()),
            "mixed_up_confidence": percent(mixed_up["probability"].mean()),
            "usual_found": percent((answers["ood_score"] > 1).mean()),
            "columns_found": str(sum(share > 0.5 for share in shares.values())),
            "hardest": hardest,
            "hardest_found": percent(shares[hardest]),
        }
        self.drawn["unlike"] = (answers["ood_score"].to_numpy(), mixed_up["ood_score"].to_numpy())

    def decision(self) -> None:
        """Rows that are answered, and errors among them, by the model's rule and by others."""
        answers = self.read("answers.csv")
        truth = self.frame["diagnosis"][KNOWN:].to_numpy()
        wrong = answers["prediction"].to_numpy() != truth
        missed = wrong & (truth == "malignant")
        sure = answers["probability"].to_numpy()
        rules = {
            "answer every row": np.full(len(sure), True),
            "the model's rule: `abstain` is false": ~answers["abstain"].to_numpy(),
            "`probability` at least 0.9": sure >= 0.9,
            "`probability` at least 0.99": sure >= 0.99,
        }
        head = ["rule", "answered", "handed to a person", "wrong among the answered", "malignant called benign"]
        self.tables["decision"] = [head]
        for name, acted in rules.items():
            share = f" ({percent(wrong[acted].mean())})" if acted.any() else ""
            counts = [acted.sum(), (~acted).sum(), f"{wrong[acted].sum()}{share}", missed[acted].sum()]
            self.tables["decision"].append([name, *map(str, counts)])
        mine = rules["the model's rule: `abstain` is false"]
        unusual = answers["ood_score"].to_numpy() > 1
        self.facts |= {
            "answered": str(mine.sum()),
            "handed": str((~mine).sum()),
            "handed_unusual": str(unusual.sum()),
            "wrong_answered": str(wrong[mine].sum()),
            "error_answered": percent(wrong[mine].mean()),
            "wrong_handed": str(wrong[~mine].sum()),
            "error_new": percent(wrong.mean()),
            "one_row": percent(1 / len(wrong)),
        }
        self.drawn["decision"] = (sure, wrong, mine)

    def shuffles(self) -> None:
        """The same commands on other shuffles of the rows: is the promise kept, and do the chosen labels help?"""
        rows, only_unusual = [], 0
        for seed in SHUFFLES:
            folder = self.folder / f"shuffle-{seed}"
            folder.mkdir()
            frame = write_patients(folder, seed)

            def figures(name: str, folder: Path = folder) -> dict[str, Any]:
                asked(folder, COMMANDS[name])
                model = shlex.split(COMMANDS[name])[-1]
                found: dict[str, Any] = asked(folder, f"neuboots evaluate {model} followed-up.csv")["figures"]
                return found

            whole, few, labelled = figures("fit"), figures("few"), {}
            for way in ("default", "random"):
                asked(folder, f"{COMMANDS['next']} --strategy {way}")
                write_labelled(folder, frame, "to-label.csv")
                labelled[way] = figures("more")["error"]
            names = ("error", "answered", "error_answered")
            rows.append([*(whole[name] for name in names), few["error"], labelled["default"], labelled["random"]])
            only_unusual += whole["answered"] >= 1 - whole["unusual"]
        table = np.array(rows, dtype=float)
        self.drawn["shuffles"] = table
        self.facts |= {"shown": str(SHOWN), "only_unusual": str(only_unusual)}
        self.promise(table)
        self.labels(table)

    def promise(self, table: np.ndarray) -> None:
        kept = int((~(table[:, 2] > 0.1)).sum())  # where nothing is answered, nothing is wrong
        answering = table[table[:, 1] > 0]
        self.facts |= {
            "silent": str(len(table) - len(answering)),
            "shuffles": str(len(table)),
            "kept": "all" if kept == len(table) else str(kept),
            "mean_error": percent(table[:, 0].mean()),
            "mean_answered": percent(table[:, 1].mean()),
            "mean_error_answered": percent(np.average(answering[:, 2], weights=answering[:, 1])),
            "best": percent(answering[:, 2].min()),
            "worst": percent(answering[:, 2].max()),
        }

    def labels(self, table: np.ndarray) -> None:
        import torch

        from neuboots.evaluation._parallel import student_t_interval

        before, chosen, drawn = table[:, 3:].T
        better, worse = int((chosen < drawn).sum()), int((chosen > drawn).sum())
        low, high = (float(end) for end in student_t_interval(torch.from_numpy(chosen - drawn)[:, None]))
        if high < 0:
            verdict = "the chosen labels helped more than those of chance"
        elif low > 0:
            verdict = "the chosen labels helped less than those of chance"
        else:
            verdict = "these shuffles are too few to tell the choice from chance"
        self.facts |= {
            **{f"{name}_error": percent(rate[SHOWN]) for name, rate in (("before", before), ("chosen", chosen))},
            "random_error": percent(drawn[SHOWN]),
            "mean_before": percent(before.mean()),
            "mean_chosen": percent(chosen.mean()),
            "mean_random": percent(drawn.mean()),
            "better": str(better),
            "worse": str(worse),
            "same": str(len(table) - better - worse),
            "difference": f"{100 * (chosen - drawn).mean():+.1f}".replace("-", "−"),
            "difference_low": f"{100 * low:+.1f}".replace("-", "−"),
            "difference_high": f"{100 * high:+.1f}".replace("-", "−"),
            "labels_verdict": verdict,
        }
        first = self.read("to-label.csv")[:5]
        self.tables["next"] = [
            list(first.columns),
            *([short(cell) for cell in row] for row in first.itertuples(index=False)),
        ]

    def few_rows(self) -> None:
        """How many held-out rows promises take, and how many rows of a file that is; see `fit`'s defaults."""
        from neuboots.app.rejection import DELTA
        from neuboots.cli.fit import Fit
        from neuboots.estimators import NeuBootsRegressor

        share = (1 - Fit.test) * NeuBootsRegressor().validation_fraction / 2
        for name, rows in (("interval", 0.95 / 0.05), ("risk", math.log(DELTA) / math.log1p(-Fit.max_error))):
            held_out = math.ceil(rows - 1e-9)
            self.facts |= {f"rows_of_{name}": str(held_out), f"file_of_{name}": str(math.ceil(held_out / share))}

    def numbers(self) -> None:
        answers = self.read("numbers.csv")
        truth = self.read("later-diabetes.csv")["progression"].to_numpy()
        names = ["prediction", "low", "high", "confidence_low", "confidence_high", "std"]
        low, high, sure_low, sure_high = (answers[name].to_numpy() for name in names[1:5])
        order = np.argsort(high - low)  # the narrowest first
        self.tables["numbers"] = [["row", *names, "abstain", "turned out"]]
        for k in (int(order[0]), int(order[-1])):
            row = answers.loc[k]
            cells = [
                str(row["row"]),
                *(f"{row[name]:.0f}" for name in names),
                short(row["abstain"]),
                f"{truth[k]:.0f}",
            ]
            self.tables["numbers"].append(cells)
        error = answers["prediction"].to_numpy() - truth
        narrow, wide = (np.sqrt(np.square(error[half]).mean()) for half in np.array_split(order, 2))
        self.facts |= {
            "new_numbers": str(len(answers)),
            "covered": str(int(((low <= truth) & (truth <= high)).sum())),
            "covered_by_confidence": str(int(((sure_low <= truth) & (truth <= sure_high)).sum())),
            "rmse_narrow": f"{narrow:.0f}",
            "rmse_wide": f"{wide:.0f}",
        }
        columns = (answers["prediction"].to_numpy(), low, high, sure_low, sure_high)
        self.drawn["numbers"] = (truth, *columns)


def main() -> None:
    os.environ["COLUMNS"] = str(WIDTH)
    from your_data_figures import FIGURES

    with tempfile.TemporaryDirectory() as scratch:
        story = Story(Path(scratch))
        story.tell()
    held = {"runs": story.runs, "facts": story.facts, "tables": story.tables}
    text = json.dumps(held, indent=1, ensure_ascii=False)
    (HERE / "your-data.json").write_text(text + "\n", encoding="utf-8")
    (HERE / "figures").mkdir(exist_ok=True)
    draw: Callable[..., Any]
    for name, draw in FIGURES.items():
        draw(HERE / "figures" / f"your-data-{name}.png", story.drawn)
    template = (HERE / "your-data.md.in").read_text(encoding="utf-8")
    (HERE / "your-data.md").write_text(page(template, held), encoding="utf-8")


if __name__ == "__main__":
    main()
