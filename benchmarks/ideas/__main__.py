"""Measure the ideas and write the tables of the decision.

    python -m benchmarks.ideas [--scale full|all|smoke] [--only NAME …] [--rows FILE]

Every idea in every setting of the scale; a row for each is appended to the file (rows that are there are not measured
again). All but smoke go into docs/decisions/0010-generators-that-follow-the-data.md.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.ideas.judge import PAGE, Idea, Row, judged, page_with
from benchmarks.ideas.tried import IDEAS, worlds
from benchmarks.ideas.world import World

ROWS = Path(__file__).parents[1] / "ideas.jsonl"


def read_rows(path: Path = ROWS) -> list[Row]:
    """In the order of the ideas, whatever the order they were measured in."""
    order = [(idea.group, idea.name) for idea in IDEAS]
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return sorted(found, key=lambda row: order.index((row["group"], row["idea"])))


def place_of(world: World, idea: Idea) -> Row:
    """What names a row."""
    s = world.setting
    where = {"function": s.function, "noise": s.noise, "n": s.n, "width": s.width}
    return {**where, "group": idea.group, "idea": idea.name}


def measure(world: World, idea: Idea, scale: str) -> Row:
    s = world.setting
    how = {"sets": s.sets, "steps": s.steps, "replicates": world.replicates, "seed": s.seed, "scale": scale}
    how["command"] = f"python -m benchmarks.ideas --scale {scale}"
    how["trainings"] = world.replicates + 1 if idea.trainings is None else idea.trainings
    return {**place_of(world, idea), **how, **judged(world, idea.run(world))}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scale", choices=["full", "all", "smoke"], default="full")
    parser.add_argument("--only", nargs="*", help="names of ideas or groups; all if not given")
    parser.add_argument("--rows", type=Path, default=ROWS)
    args = parser.parse_args(argv)
    done = read_rows(args.rows)
    for world in worlds(args.scale):
        main_setting = args.scale == "smoke" or (world.setting.n, world.setting.width) == (300, 64)
        for idea in IDEAS:
            if args.only is not None and not {idea.name, idea.group} & set(args.only):
                continue
            place = place_of(world, idea)
            if not (idea.further or main_setting) or any(place.items() <= row.items() for row in done):
                continue
            row = measure(world, idea, args.scale)
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print({name: value for name, value in row.items() if name != "command"}, flush=True)
    if args.scale != "smoke" and args.rows == ROWS:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), read_rows()), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
