"""The Gauss–Newton matrix of a head, Σᵢ wᵢ Jᵢᵀ Λᵢ Jᵢ with Jᵢ = I ⊗ φ̃ᵢᵀ: whole, or as a Kronecker product.

Each form gives its eigenvalues and, for a function f of them, what f(H) does to vectors and at points. Weights of the
head are ordered output by output: K = C·D̃.
"""

import torch
from torch import Tensor


class Whole:
    """H = U diag(h) Uᵀ, held whole: K² numbers, and K² products for each point."""

    def __init__(self, outputs: int, width: int, device: torch.device) -> None:
        self.outputs, self.width = outputs, width
        self._sum = torch.zeros(outputs * width, outputs * width, dtype=torch.float64, device=device)
        self.values = self._sum[0]
        self._vectors = self._sum

    def add(self, phi: Tensor, root: Tensor, w: Tensor) -> None:
        """More points: features φ̃ (M, D̃), roots L of Λ (M, C, C), weights (M,)."""
        curvature = w[:, None, None] * (root @ root.mT)
        places = self._sum.view(self.outputs, self.width, self.outputs, self.width)
        for c in range(self.outputs):  # the lower triangle, which is all that `eigh` reads
            some = (curvature[:, c, : c + 1, None] * phi[:, None]).flatten(1)  # (M, (c + 1)·D̃)
            places[c, :, : c + 1] += (phi.T @ some).view(self.width, c + 1, self.width)

    @property
    def matrix(self) -> Tensor:
        """The sum so far, of which the lower triangle counts: (K, K)."""
        return self._sum

    def settle(self) -> None:
        """Nothing more to add: the sum becomes its eigenvalues and eigenvectors."""
        values, self._vectors = torch.linalg.eigh(self._sum)
        self.values = values.clamp_min(0.0)

    def coordinates(self, vectors: Tensor) -> Tensor:
        """Uᵀ v of each row v: (·, K) → (·, K)."""
        return vectors @ self._vectors

    def apply(self, f: Tensor, vectors: Tensor) -> Tensor:
        """f(H) v of each row v: (·, K) → (·, K)."""
        return (self.coordinates(vectors) * f) @ self._vectors.T

    def at(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ at each point: (M, C, C)."""
        along = (phi @ self._vectors.view(self.outputs, self.width, -1)).movedim(0, 1)  # J U: (M, C, K)
        return (along * f) @ along.mT


class Product:
    """H ≈ G ⊗ A, the Kronecker product with the same partial traces: C² + D̃² numbers.

        A = Σᵢ wᵢ tr(Λᵢ) φ̃ᵢφ̃ᵢᵀ,   G = Σᵢ wᵢ |φ̃ᵢ|² Λᵢ / tr A

    It is exact where all Λᵢ are the same, as for the squared error. Ritter, Botev and Barber, A scalable Laplace
    approximation for neural networks, ICLR 2018.
    """

    def __init__(self, outputs: int, width: int, device: torch.device) -> None:
        self.outputs, self.width = outputs, width
        self._inner = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._outer = torch.zeros(outputs, outputs, dtype=torch.float64, device=device)
        self.values = self._inner[0]

    def add(self, phi: Tensor, root: Tensor, w: Tensor) -> None:
        """More points: features φ̃ (M, D̃), roots L of Λ (M, C, C), weights (M,)."""
        self._inner += phi.T @ ((w * root.square().sum((1, 2)))[:, None] * phi)
        scaled = ((w * phi.square().sum(1)).sqrt()[:, None, None] * root).movedim(1, 0).flatten(1)  # (C, M·C)
        self._outer += scaled @ scaled.T

    def settle(self) -> None:
        """Nothing more to add: the factors become their eigenvalues and eigenvectors."""
        total = self._inner.trace().clamp_min(torch.finfo(torch.float64).tiny)
        inner, self._inner = torch.linalg.eigh(self._inner)
        outer, self._outer = torch.linalg.eigh(self._outer)
        self.values = ((outer / total).clamp_min(0.0)[:, None] * inner.clamp_min(0.0)).flatten()

    def coordinates(self, vectors: Tensor) -> Tensor:
        """Uᵀ v of each row v: (·, K) → (·, K)."""
        return (self._outer.T @ vectors.view(-1, self.outputs, self.width) @ self._inner).flatten(1)

    def apply(self, f: Tensor, vectors: Tensor) -> Tensor:
        """f(H) v of each row v: (·, K) → (·, K)."""
        scaled = (self.coordinates(vectors) * f).view(-1, self.outputs, self.width)
        return (self._outer @ scaled @ self._inner.T).flatten(1)

    def at(self, phi: Tensor, f: Tensor) -> Tensor:
        """J f(H) Jᵀ at each point: (M, C, C)."""
        along = (phi @ self._inner).square() @ f.view(self.outputs, self.width).T  # (M, C)
        return (self._outer * along[:, None]) @ self._outer.T


Curvature = Whole | Product
