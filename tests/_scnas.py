"""Helpers of the SCNAS tests."""

import torch
from torch import Tensor

from neuboots_paper.scnas import SCNAS, Genotype
from neuboots_paper.scnas.net import SuperNet


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def copy_weights(net: SCNAS, supernet: SuperNet) -> None:
    """From the supernet to the fixed net, edge by edge: what the candidate of that name learned."""
    state, named = {}, dict(supernet.state_dict())
    for key in net.state_dict():
        if ".nodes." not in key:
            state[key] = named[key]
            continue
        part, cell, _, j, i, rest = key.split(".", 5)
        k = int(cell)
        normal = (
            f"{part}_normal" if k % 2 == (part == "decoder") else {"encoder": "reduction", "decoder": "expansion"}[part]
        )
        name = net.options["genotype"][normal][int(j)][int(i)]
        state[key] = named[f"{part}.{cell}.nodes.{j}.{i}.operations.{name}.{rest}"]
    net.load_state_dict(state)


def make_certain(supernet: SuperNet, genotype: Genotype) -> None:
    """Every draw is this genotype: e⁶⁰ to 1."""
    for kind, choices in supernet.pick(genotype).items():
        for a, choice in zip(supernet.logits[kind], choices, strict=True):
            a.data[choice.index] = 60.0
