"""What both forms of the influence bootstrap have in common: their name, and how `load_dataset` finds the right one."""

from abc import abstractmethod
from importlib import import_module
from typing import Any

from torch import nn

from neuboots.prediction import Predictor

MAX_KERNEL_ROWS = 3000  # rows × outputs of a kernel matrix: their square in memory, their cube in time
_FORMS = {"head": "HeadPredictor", "tangent": "TangentPredictor"}  # each in the file of its name


class InfluencePredictor(Predictor):
    """B replicates around a trained net, linear in the weights of the data."""

    ridge: float  # λ/n

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The net, and by how much the weights of the data move it."""

    @classmethod
    def from_config(cls, config: dict[str, Any], net: nn.Module) -> "InfluencePredictor":
        kind = _FORMS[config["form"]]
        form: type[InfluencePredictor] = getattr(import_module(f"neuboots.methods.influence.{config['form']}"), kind)
        return form.from_config(config, net)
