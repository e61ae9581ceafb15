"""The bootstrap generator: one net, re-weighted at its last layer (paper, eq. 3.1 and Algorithm 2).

    g(x, α) = M(F(x) ⊙ h(α)) = (W diag h(α)) F(x) + b

h is the link: the identity in the paper. The features F(x) are computed once; the B heads are folded into
one product. The output is linear in h(α), so its mean and variance over α are known in closed form.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys
from neuboots.head import ForwardTrace, Head, cast_inputs, copy_net, extract_output, make_head, split_head
from neuboots.prediction import Moments
from neuboots.weights import Link, WeightDistribution, apply_link, check_blocks, check_link, link_moments

_PIXELS = 1 << 15  # whose squared features are made at once
_AFFINE_TOLERANCE = 1e-3  # of the outputs' size: rounding is far below, a softmax far above


class BootstrapGenerator(nn.Module):
    """g(x, α) around any net that ends in a Linear or 1×1 convolution. It has no parameters of its own.

    Outputs are (N, C, *). With S ≠ D blocks the D features are dealt to the S blocks in turn.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> g, x = BootstrapGenerator(net), torch.zeros(2, 4)
    >>> bool((g(x, torch.ones(8)) == net(x)).all())
    True
    """

    feature_blocks: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        head: str | None = None,
        num_blocks: int | None = None,
        link: Link = "identity",
        example: Any = None,
    ) -> None:
        super().__init__()
        self.split = split_head(net, head, example=example)
        self.net = self.split.net
        self.link = link
        self.num_blocks = self.split.width if num_blocks is None else num_blocks
        check_blocks(self.num_blocks)
        check_link(link)
        blocks = torch.arange(self.split.width) % self.num_blocks  # (D,)
        self.register_buffer("feature_blocks", blocks, persistent=False)
        self.features_frozen = False
        self.output_axis: int | None = None  # of the outputs C where a Linear head keeps further axes; found by `at`

    def forward(self, x: Any, alpha: Tensor | None = None) -> Tensor:
        """g(x, α): (N, C, *). α is (S,), or (N, S) with a row for each input; None is the plain net."""
        seen: list[Tensor] = []

        def scaled(head: Head, phi: Tensor) -> Tensor:
            seen.append(head(phi if alpha is None else phi * self._factor(alpha, phi)))
            return seen[0]

        output = extract_output(self.split.run(x, scaled), x)
        return self._channels_first(output, seen[0].shape)

    def _factor(self, alpha: Tensor, phi: Tensor) -> Tensor:
        """h(α) dealt to the features and shaped to multiply φ."""
        if alpha.shape[-1:] != (self.num_blocks,) or alpha.ndim > 2:
            raise ValueError(
                f"got α of shape {tuple(alpha.shape)}; expected ({self.num_blocks},), or "
                f"(N, {self.num_blocks}) with a row for each input"
            )
        if alpha.ndim == 2 and len(alpha) != len(phi):
            raise ValueError(f"got {len(alpha)} rows of α for features of {len(phi)} inputs; expected one row for each")
        factor = apply_link(alpha.to(phi), self.link)[..., self.feature_blocks]  # (D,) or (N, D)
        if alpha.ndim == 1:
            return factor if self.split.axis == -1 else factor.view(-1, *[1] * (phi.ndim - 2))
        shape = [len(factor)] + [1] * (phi.ndim - 1)
        shape[self.split.axis] = factor.shape[1]
        return factor.view(shape)

    def _channels_first(self, output: Tensor, head_output: torch.Size) -> Tensor:
        """A Linear head applied to (N, T, D) gives (N, T, C): as everywhere, outputs go to axis 1."""
        if self.split.axis != -1 or output.ndim < 3:
            return output
        if self.output_axis is not None and self.output_axis < output.ndim:
            return output.movedim(self.output_axis, 1)
        return output.movedim(-1, 1) if output.shape == head_output else output

    def at(self, x: Any) -> "GeneratorAtInput":
        """ĝ(x, ·), features computed a priori (Algorithm 2, line 1)."""
        passed = self.split.trace(cast_inputs(self.net, x))
        if self.output_axis is None and self.split.axis == -1 and passed.phi.ndim > 2:
            self.output_axis = _find_output_axis(passed, self.split.head)
        return GeneratorAtInput(self, passed)

    def replicates(self, x: Any, alphas: Tensor) -> Tensor:
        """g(x, α_b) for every row of alphas (B, S), from one pass through F: (B, N, C, *)."""
        return self.at(x)(alphas)

    def moments(self, x: Any, weight_distribution: WeightDistribution) -> Moments:
        """Exact mean and standard deviation of g(x, α) over α: B = ∞ for the price of one pass."""
        return self.at(x).moments(weight_distribution)

    def export(self, alpha: Tensor | None = None) -> nn.Module:
        """The replicate g(·, α) as a plain net: a copy whose head has the weights W diag h(α)."""
        net = copy_net(self.net)
        if alpha is None:
            return net
        with torch.no_grad():
            weight = self.split.head.weight
            factor = apply_link(alpha.to(weight), self.link)[self.feature_blocks]
            weight = weight * factor.view(-1, *[1] * (weight.ndim - 2))
        parent, _, key = self.split.name.rpartition(".")
        net.get_submodule(parent)._modules[key] = make_head(weight, self.split.head.bias)
        return net

    def freeze_features(self) -> None:
        """Train the head only: F keeps its parameters and its BatchNorm statistics."""
        head = self.split.head
        kept = set(head.parameters())
        others = (module for module in self.net.modules() if module not in set(head.modules()))
        if any(parameter in kept for module in others for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"the head {self.split.name!r} shares its weights with a layer below, which would change with it; "
                "expected weights of its own: train the whole net, or untie them"
            )
        self.features_frozen = True
        for parameter in self.parameters():
            parameter.requires_grad_(parameter in kept)
        self.train(self.training)

    def train(self, mode: bool = True) -> "BootstrapGenerator":
        super().train(mode)
        if self.features_frozen:
            self.net.eval()
            self.split.head.train(mode)
        return self


def _find_output_axis(passed: ForwardTrace, head: Head) -> int | None:
    """The axis along which a change of the head's first output stays at one place; None if that does not tell."""
    with torch.no_grad():
        z = head(passed.phi)
        bumped = z.clone()
        bumped[..., 0] += 1.0
        change = (passed.finish(bumped) - passed.finish(z)).abs()
    axes = range(1, change.ndim)
    single = [a for a in axes if int((change.movedim(a, 0).flatten(1).amax(1) > 0).sum()) == 1]
    return single[0] if len(single) == 1 else None


@dataclass(frozen=True)
class GeneratorAtInput:
    """ĝ(x, ·) at a fixed x: a function of α alone."""

    generator: BootstrapGenerator
    passed: ForwardTrace

    @property
    def output(self) -> Tensor:
        """The plain net's output: (N, C, *)."""
        return self._finished(self.passed.output)

    def _finished(self, output: Tensor) -> Tensor:
        phi, split = self.passed.phi, self.generator.split
        shape = (*phi.shape[:-1], split.head.weight.shape[0])
        return self.generator._channels_first(output, torch.Size(shape))

    def __call__(self, alphas: Tensor) -> Tensor:
        """(B, S) → (B, N, C, *)."""
        generator, phi = self.generator, self.passed.phi
        if alphas.ndim != 2 or alphas.shape[1] != generator.num_blocks or len(alphas) < 1:
            raise ValueError(f"got alphas of shape {tuple(alphas.shape)}; expected (B, {generator.num_blocks}), B ≥ 1")
        factors = apply_link(alphas.to(phi), generator.link)[:, generator.feature_blocks]  # (B, D)
        weight, bias = self._weight_and_bias()
        return self.heads(factors[:, None] * weight, bias)

    def heads(self, weights: Tensor, biases: Tensor | None) -> Tensor:
        """The net's outputs with other heads: weights (B, C, D) and biases (C,) or (B, C) → (B, N, C, *)."""
        generator = self.generator
        z = self._product(weights, biases)  # (B, N, …)
        if self.passed.ends_at_head:
            return z.movedim(-1, 2) if generator.split.axis == -1 and z.ndim > 3 else z
        first = self._finished(self.passed.finish(z[0]))
        if len(z) == 1:
            return first[None]
        finished = first.new_empty(len(z), *first.shape)  # filled one by one: a stack would need twice the memory
        finished[0] = first
        for b in range(1, len(z)):
            finished[b] = self._finished(self.passed.finish(z[b]))
        return finished

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        head = self.generator.split.head
        return head.weight.flatten(1), head.bias  # (C, D), (C,)

    def _product(self, weights: Tensor, bias: Tensor | None) -> Tensor:
        """All heads in one product: weights (B, C, D) on φ, in the head's own layout with B in front."""
        phi = self.passed.phi
        num, outputs, width = weights.shape
        wide = weights.reshape(num * outputs, width)
        if bias is not None:
            bias = bias.expand(num, outputs).reshape(-1)  # (B·C,)
        if self.generator.split.axis == -1:
            rows = phi.reshape(-1, width)  # (M, D)
            z = rows @ wide.T if bias is None else torch.addmm(bias, rows, wide.T)  # (M, B·C)
            return z.view(*phi.shape[:-1], num, outputs).movedim(-2, 0)
        z = wide @ phi.flatten(2)  # (N, B·C, P)
        if bias is not None:
            z += bias[:, None]
        return z.view(len(phi), num, outputs, *phi.shape[2:]).movedim(1, 0)

    def moments(self, weight_distribution: WeightDistribution) -> Moments:
        """Mean m Wφ + b; variance (v − c) Σ_s A_s² + c (Σ_s A_s)², where A_s is what block s adds to Wφ.

        (m, v, c) are the moments of h(α). An affine finish (upsampling) is carried through block by block;
        after any other one the moments are not known in closed form, and a sentence says so.
        """
        generator = self.generator
        mean, v, c = link_moments(weight_distribution, generator.link, generator.num_blocks)
        weight, _ = self._weight_and_bias()
        if self.passed.ends_at_head and generator.num_blocks >= generator.split.width:
            whole = self._product(weight[None], None)[0]  # Wφ
            squares = self._square_sums(weight)
            whole, squares = self._finished(whole), self._finished(squares)
            offset = self._offset(whole)
        else:
            offset, whole, squares = self._block_sums(weight_distribution)
        variance = (v - c) * squares + c * whole.square()
        return Moments(offset + mean * whole, variance.clamp_min(0.0).sqrt())

    def _square_sums(self, weight: Tensor) -> Tensor:
        """Σ_d W_cd² φ_d², in the head's own layout; of pixels some at a time, lest φ² need as much memory as φ."""
        phi = self.passed.phi
        if self.generator.split.axis == -1:
            return phi.square() @ weight.square().T
        pieces = [weight.square() @ some.square() for some in torch.split(phi.flatten(2), _PIXELS, 2)]  # (N, C, pixels)
        return torch.cat(pieces, 2).view(len(phi), len(weight), *phi.shape[2:])

    def _offset(self, like: Tensor) -> Tensor:
        """b, shaped for outputs (N, C, *)."""
        bias = self.generator.split.head.bias
        return torch.zeros_like(like) if bias is None else bias.view(-1, *[1] * (like.ndim - 2))

    def _block_sums(self, weight_distribution: WeightDistribution) -> tuple[Tensor, Tensor, Tensor]:
        """(finish(b), Σ_s A_s, Σ_s A_s²) after a finish that must be affine, which three weightings test."""
        generator = self.generator
        weight, bias = self._weight_and_bias()
        drawn = apply_link(
            weight_distribution.sample(derive_keys(torch.arange(2), "affine"), generator.num_blocks), generator.link
        )
        tests = torch.cat([torch.ones_like(drawn[:1]), drawn[:1], 3 * drawn[1:]]).to(weight)  # (3, S)
        offset = self._finish_one(torch.zeros_like(weight), bias)
        whole, squares = torch.zeros_like(offset), torch.zeros_like(offset)
        sums = torch.zeros(len(tests), *offset.shape, dtype=offset.dtype, device=offset.device)
        for block in range(min(generator.num_blocks, generator.split.width)):
            part = self._finish_one(weight * (generator.feature_blocks == block), bias) - offset  # A_s, finished
            whole += part
            squares += part.square()
            sums += tests[:, block].view(-1, *[1] * part.ndim) * part
        for factor, total in zip(tests, sums, strict=True) if offset.numel() else ():  # no rows, nothing to test
            direct = self._finish_one(weight * factor[generator.feature_blocks], bias)
            others = [axis for axis in range(direct.ndim) if axis != 1]  # each output against its own size
            size = torch.maximum(direct.abs(), offset.abs()).amax(others, keepdim=True)
            gap = (offset + total - direct).abs()
            if bool((gap > _AFFINE_TOLERANCE * size + torch.finfo(gap.dtype).tiny).any()):
                raise ValueError(
                    "exact moments need what follows the head to be affine (upsampling, scaling), and here it is "
                    "not: use the moments of samples instead (predict or summarize)"
                )
        return offset, whole, squares

    def _finish_one(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The net's output with this head: (N, C, *)."""
        return self._finished(self.passed.finish(self._product(weight[None], bias)[0]))
