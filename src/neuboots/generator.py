"""The bootstrap generator: one net, re-weighted at its last layer (paper, eq. 3.1 and Algorithm 2).

    g(x, α) = M(F(x) ⊙ h(α)) = (W diag h(α)) F(x) + b

h is the link: the identity in the paper. The features F(x) are computed once, and the B heads are one matrix product.
The output is linear in h(α), so that its mean and variance over α are known in closed form.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from neuboots._prng import derive_keys
from neuboots._validation import ArgumentError, check_choice, check_int
from neuboots.head import ForwardTrace, Head, cast_inputs, copy_net, extract_output, make_head, split_head
from neuboots.prediction import Moments
from neuboots.weights import Link, WeightDistribution, apply_link, link_moments

_PIXELS_AT_ONCE = 1 << 15  # whose squared features are held
_AFFINE_TOLERANCE = 1e-3  # relative to the outputs: rounding is far below, a softmax far above


class BootstrapGenerator(nn.Module):
    """g(x, α) around any net that ends in a Linear or 1×1 convolution, without parameters of its own.

    Outputs are (N, C, *). With S ≠ D blocks, feature d belongs to block d mod S.

    Args:
        net: The net.
        head: Name of its head; None: it is found.
        num_blocks: Number of blocks S; None: S = D.
        link: "identity" or "exp".
        example: Input, with which the head is found by running the net.

    Raises:
        ArgumentError: If the head cannot be found, or an option has another value.

    Example:
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
        check_choice("link", link, get_args(Link))
        self.split = split_head(net, head, example=example)
        self.net = self.split.net
        self.link = link
        self.num_blocks = self.split.width if num_blocks is None else check_int("num_blocks", num_blocks, minimum=1)
        blocks = torch.arange(self.split.width) % self.num_blocks  # (D,)
        self.register_buffer("feature_blocks", blocks, persistent=False)
        self.features_frozen = False
        self.output_axis: int | None = None  # of the outputs C if a Linear head keeps further axes; found by `at`

    def forward(self, x: Any, alpha: Tensor | None = None) -> Tensor:
        """Return g(x, α), (N, C, *).

        Args:
            x: Inputs.
            alpha: α, (S,), or (N, S) with a row per example; None: the net itself.
        """
        seen: list[Tensor] = []

        def scaled(head: Head, phi: Tensor) -> Tensor:
            seen.append(head(phi if alpha is None else phi * self._factor(alpha, phi)))
            return seen[0]

        output = extract_output(self.split.run(x, scaled), x)
        return self._channels_first(output, seen[0].shape)

    def _factor(self, alpha: Tensor, phi: Tensor) -> Tensor:
        """h(α) per feature, shaped to multiply φ."""
        rows = alpha.ndim == 2
        if alpha.shape[-1:] != (self.num_blocks,) or alpha.ndim > 2 or (rows and len(alpha) != len(phi)):
            expected = f"({self.num_blocks},), or ({len(phi)}, {self.num_blocks}) with a row per example"
            raise ArgumentError("alpha", tuple(alpha.shape), expected)
        factor = apply_link(alpha.to(phi), self.link)[..., self.feature_blocks]  # (D,) or (N, D)
        shape = [len(factor) if rows else 1] + [1] * (phi.ndim - 1)
        shape[self.split.axis] = factor.shape[-1]
        return factor.view(shape)

    def _channels_first(self, output: Tensor, head_output: torch.Size) -> Tensor:
        """Move the outputs of a Linear head on (N, T, D) to axis 1: (N, C, T)."""
        if self.split.axis != -1 or output.ndim < 3:
            return output
        if self.output_axis is not None and self.output_axis < output.ndim:
            return output.movedim(self.output_axis, 1)
        return output.movedim(-1, 1) if output.shape == head_output else output

    def at(self, x: Any) -> "GeneratorAtInput":
        """Compute the features of x and return ĝ(x, ·) (Algorithm 2, line 1)."""
        trace = self.split.trace(cast_inputs(self.net, x))
        if self.output_axis is None and self.split.axis == -1 and trace.phi.ndim > 2:
            self.output_axis = _find_output_axis(trace, self.split.head)
        return GeneratorAtInput(self, trace)

    def replicates(self, x: Any, alphas: Tensor) -> Tensor:
        """Return g(x, α_b) for every row of alphas (B, S), from one forward pass: (B, N, C, *)."""
        return self.at(x)(alphas)

    def moments(self, x: Any, weight_distribution: WeightDistribution) -> Moments:
        """Return the exact mean and standard deviation of g(x, α) over α (B = ∞), from one forward pass."""
        return self.at(x).moments(weight_distribution)

    def export(self, alpha: Tensor | None = None) -> nn.Module:
        """Return the replicate g(·, α) as a plain net: a copy whose head has the weights W diag h(α)."""
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
        """Train the head only: the other parameters and the BatchNorm statistics stay.

        Raises:
            ArgumentError: If the head shares its weights with another layer.
        """
        head = self.split.head
        trainable = set(head.parameters())
        others = (module for module in self.net.modules() if module not in set(head.modules()))
        if any(parameter in trainable for module in others for parameter in module.parameters(recurse=False)):
            hint = "train the whole net, or untie the weights"
            raise ArgumentError("head", self.split.name, "a layer that shares its weights with no other", hint=hint)
        self.features_frozen = True
        for parameter in self.parameters():
            parameter.requires_grad_(parameter in trainable)
        self.train(self.training)

    def train(self, mode: bool = True) -> "BootstrapGenerator":
        """Set training mode; frozen features stay in evaluation mode."""
        super().train(mode)
        if self.features_frozen:
            self.net.eval()
            self.split.head.train(mode)
        return self


def _find_output_axis(trace: ForwardTrace, head: Head) -> int | None:
    """Find the axis along which a change of the head's first output stays at one index; None if ambiguous."""
    with torch.no_grad():
        z = head(trace.phi)
        changed = z.clone()
        changed[..., 0] += 1.0
        change = (trace.finish(changed) - trace.finish(z)).abs()
    axes = range(1, change.ndim)
    single = [a for a in axes if int((change.movedim(a, 0).flatten(1).amax(1) > 0).sum()) == 1]
    return single[0] if len(single) == 1 else None


@dataclass(frozen=True)
class GeneratorAtInput:
    """ĝ(x, ·), the generator at fixed inputs: a function of α.

    Attributes:
        generator: The generator.
        trace: The forward pass at x.
    """

    generator: BootstrapGenerator
    trace: ForwardTrace

    @property
    def output(self) -> Tensor:
        """Output of the net itself, (N, C, *)."""
        return self.arrange(self.trace.output)

    def arrange(self, output: Tensor) -> Tensor:
        """Return an output of the net with its channels on axis 1, (N, C, *)."""
        shape = (*self.trace.phi.shape[:-1], self.generator.split.head.weight.shape[0])
        return self.generator._channels_first(output, torch.Size(shape))

    def __call__(self, alphas: Tensor) -> Tensor:
        """Return g(x, α_b) for every row of alphas: (B, S) → (B, N, C, *)."""
        generator = self.generator
        if alphas.ndim != 2 or alphas.shape[1] != generator.num_blocks or len(alphas) < 1:
            raise ArgumentError("alphas", tuple(alphas.shape), f"(B, {generator.num_blocks}) with B ≥ 1")
        factors = apply_link(alphas.to(self.trace.phi), generator.link)[:, generator.feature_blocks]  # (B, D)
        weight, bias = self._weight_and_bias()
        return self.apply_heads(factors[:, None] * weight, bias)

    def apply_heads(self, weights: Tensor, biases: Tensor | None) -> Tensor:
        """Return the net's outputs with other heads, (B, N, C, *).

        Args:
            weights: Weights of the heads, (B, C, D).
            biases: Biases, (C,) or (B, C); None: zero.
        """
        z = self._multiply(weights, biases)  # (B, N, …)
        if self.trace.ends_at_head:
            return z.movedim(-1, 2) if self.generator.split.axis == -1 and z.ndim > 3 else z
        first = self.arrange(self.trace.finish(z[0]))
        finished = first.new_empty(len(z), *first.shape)  # filled one by one: a stack would need twice the memory
        finished[0] = first
        for b in range(1, len(z)):
            finished[b] = self.arrange(self.trace.finish(z[b]))
        return finished

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        head = self.generator.split.head
        return head.weight.flatten(1), head.bias  # (C, D), (C,)

    def _multiply(self, weights: Tensor, bias: Tensor | None) -> Tensor:
        """All heads in one product: weights (B, C, D) on φ, in the head's layout with B first."""
        phi = self.trace.phi
        num, outputs, width = weights.shape
        stacked = weights.reshape(num * outputs, width)
        if bias is not None:
            bias = bias.expand(num, outputs).reshape(-1)  # (B·C,)
        if self.generator.split.axis == -1:
            rows = phi.reshape(-1, width)  # (M, D)
            z = rows @ stacked.T if bias is None else torch.addmm(bias, rows, stacked.T)  # (M, B·C)
            return z.view(*phi.shape[:-1], num, outputs).movedim(-2, 0)
        z = stacked @ phi.flatten(2)  # (N, B·C, P)
        if bias is not None:
            z += bias[:, None]
        return z.view(len(phi), num, outputs, *phi.shape[2:]).movedim(1, 0)

    def moments(self, weight_distribution: WeightDistribution) -> Moments:
        """Return the exact moments: mean m Wφ + b, variance (v − c) Σ_s A_s² + c (Σ_s A_s)².

        A_s is the contribution of block s to Wφ, and (m, v, c) are the moments of h(α). An affine function after the
        head (upsampling) is applied block by block.

        Raises:
            ArgumentError: If what follows the head is not affine.
        """
        generator = self.generator
        mean, v, c = link_moments(weight_distribution, generator.link, generator.num_blocks)
        weight, bias = self._weight_and_bias()
        if self.trace.ends_at_head and generator.num_blocks >= generator.split.width:
            total = self.arrange(self._multiply(weight[None], None)[0])  # Wφ
            squares = self.arrange(self._sum_squares(weight))
            offset = torch.zeros_like(total) if bias is None else bias.view(-1, *[1] * (total.ndim - 2))
        else:
            offset, total, squares = self._sum_blocks(weight_distribution)
        variance = (v - c) * squares + c * total.square()
        return Moments(offset + mean * total, variance.clamp_min(0.0).sqrt())

    def _sum_squares(self, weight: Tensor) -> Tensor:
        """Σ_d W_cd² φ_d², in the head's layout; pixels in pieces, so that φ² needs less memory than φ."""
        phi = self.trace.phi
        if self.generator.split.axis == -1:
            return phi.square() @ weight.square().T
        pieces = torch.split(phi.flatten(2), _PIXELS_AT_ONCE, 2)
        sums = torch.cat([weight.square() @ piece.square() for piece in pieces], 2)  # (N, C, P)
        return sums.view(len(phi), len(weight), *phi.shape[2:])

    def _sum_blocks(self, weight_distribution: WeightDistribution) -> tuple[Tensor, Tensor, Tensor]:
        """(finish(b), Σ_s A_s, Σ_s A_s²); three weightings test that finish is affine."""
        generator = self.generator
        weight, bias = self._weight_and_bias()
        alphas = weight_distribution.sample(derive_keys(torch.arange(2), "affine"), generator.num_blocks)
        draws = apply_link(alphas, generator.link)
        tests = torch.cat([torch.ones_like(draws[:1]), draws[:1], 3 * draws[1:]]).to(weight)  # (3, S)
        offset = self._finish_one(torch.zeros_like(weight), bias)
        total, squares = torch.zeros_like(offset), torch.zeros_like(offset)
        sums = torch.zeros(len(tests), *offset.shape, dtype=offset.dtype, device=offset.device)
        for block in range(min(generator.num_blocks, generator.split.width)):
            part = self._finish_one(weight * (generator.feature_blocks == block), bias) - offset  # A_s, finished
            total += part
            squares += part.square()
            sums += tests[:, block].view(-1, *[1] * part.ndim) * part
        for factor, linear in zip(tests, sums, strict=True) if offset.numel() else ():
            direct = self._finish_one(weight * factor[generator.feature_blocks], bias)
            others = [axis for axis in range(direct.ndim) if axis != 1]  # each output relative to its own size
            size = torch.maximum(direct.abs(), offset.abs()).amax(others, keepdim=True)
            gap = (offset + linear - direct).abs()
            if bool((gap > _AFFINE_TOLERANCE * size + torch.finfo(gap.dtype).tiny).any()):
                hint = "use the moments of samples (predict or summarize)"
                raise ArgumentError("model", "a nonlinear function after its head", "an affine one", hint=hint)
        return offset, total, squares

    def _finish_one(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Output of the net with this head, (N, C, *)."""
        return self.arrange(self.trace.finish(self._multiply(weight[None], bias)[0]))
