"""The one table of methods: by name, with what each can do.

The command line, `load` and the tests read it. A method of your own joins with one line:

    register(Entry("mine", MyMethod, MyPredictor, "what it is, in a sentence"))

and `neuboots.contract.check_method("mine")` puts it through the same contract as the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from neuboots.prediction import Method, Predictor

Task = Literal["classification", "regression", "segmentation"]
TASKS: tuple[Task, ...] = get_args(Task)


@dataclass(frozen=True)
class Entry:
    """One method: how it is made, how it is restored, and what it can do.

    `train_cost` and `predict_cost` are orders in the cost L of one pass and the number K of members or replicates.
    """

    name: str
    make: Callable[..., Method]
    predictor: type[Predictor]
    summary: str
    tasks: tuple[Task, ...] = TASKS
    random: bool = True  # another seed gives other replicates, or the same in another order
    coherent: bool = True  # a replicate is one function of x, whatever the batch around x
    members: bool = False  # has num_members = K, and for K = 1 is a single net
    needs_net: bool = True  # False: make_net is not called, and may be None
    train_cost: str = "O(L)"
    predict_cost: str = "O(LK)"
    reference: str = ""

    def __post_init__(self) -> None:
        unknown = set(self.tasks) - set(TASKS)
        if unknown or not self.tasks:
            raise ValueError(f"got tasks={self.tasks!r}; expected some of {list(TASKS)}")
        if not (isinstance(self.predictor, type) and issubclass(self.predictor, Predictor)):
            raise ValueError(f"got predictor={self.predictor!r}; expected a class derived from Predictor")
        if not callable(self.make):
            raise ValueError(f"got make={self.make!r}; expected a class or function that makes the method")


METHODS: dict[str, Entry] = {}
WRAPPERS: dict[str, type[Predictor]] = {}  # predictors around another one, whose config has theirs under "inner"


def register(entry: Entry) -> Entry:
    """Add a method to the table, for `load`, the command line and `check_method`."""
    if METHODS.get(entry.name, entry) != entry or entry.name in WRAPPERS:
        raise ValueError(f"got the name {entry.name!r}, which another method has; expected a new one")
    METHODS[entry.name] = entry
    return entry


def find(name: str) -> Entry:
    """The method of this name, or a sentence that lists the names."""
    if name not in METHODS:
        raise ValueError(f"got the method {name!r}; expected one of {', '.join(METHODS)}")
    return METHODS[name]


def entry_of(config: dict[str, Any]) -> Entry:
    """The method that made the predictor with this config, inside any wrappers."""
    while config["method"] in WRAPPERS:
        config = config["inner"]
    return find(config["method"])


def predictor_of(config: dict[str, Any]) -> type[Predictor]:
    """The class whose `restore` reads this config."""
    return WRAPPERS[config["method"]] if config["method"] in WRAPPERS else find(config["method"]).predictor
