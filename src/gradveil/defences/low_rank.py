"""Low rank: send each layer's strongest directions, as many as an energy threshold asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from gradveil.core.errors import Problem
from gradveil.core.noise import Noise, NoiseSpec, Normal
from gradveil.core.settings import Checked, Kept
from gradveil.core.tree import Tensors, peak, select, tmap, under
from gradveil.core.types import Context, Stage, Transform
from gradveil.defences.entry import DefenceEntry

DIRECTIONS, LOADS = "directions", "loads"
"""Names of the orthonormal rows that span a sent layer, and of its coordinates along them."""


class Decomposed(NamedTuple):
    """Right singular vectors of a matrix [O, R], with K = min(O, R), and the shares of energy they carry."""

    directions: Tensor
    """[K, R] orthonormal rows."""
    shares: Tensor
    """[K] squares of the singular values over their sum, the largest first; zeros for a matrix of zeros."""


@dataclass(frozen=True)
class LowRank(Checked, Transform):
    """Send the projection of every layer's update on its strongest right singular vectors (Luo et al. 2025, SVDefense).

    A layer's update is a matrix G [O, R], one row per output channel. With the squared singular values' shares p_i
    (of weighted rows, see below), the k directions of most energy are sent, k the least number with
    p_1 + ... + p_k >= t. The threshold t adapts to the client: t = least + (energy - least) H, where H is the mean over
    the layers of the entropy -sum p_i log p_i over log K. A client of few classes has few strong directions, so a low
    H, and sends fewer of them.

    With `channels="norm"`, each row is weighted by its norm before the decomposition, so that strong channels choose
    the directions. A low-rank approximation of diag(w) G, unweighted after it, is G projected on the same directions.

    The paper's summaries name the truncation, a threshold that follows the entropy of the singular values, and
    channel weights, but print no formula: those here are ours. Its weights for layers when a server aggregates are no
    part of a client's defence. Parameters of one dimension (biases, norms) have no rank, and are sent as they are.

    What was sent, X [O, R], gives away its directions V [K, R] and loads L = X V^T [O, K]: intermediates
    `directions.<parameter>` and `loads.<parameter>` [K, O], zeros where not kept. For a true update G, X equals
    G V^T V, and what was cut, E = G - G V^T V, has no part along the loads: L^T W^2 E = 0 with the weights W of the
    rows. With both pinned, an update shows as G V^T V plus what E has along each load, which is as many equations as
    X has unknowns. Where they are computed instead, the derivative takes the directions as constants.
    """

    energy: Annotated[Kept, "Threshold of a client whose singular values are all equal: share of energy sent."] = 0.9
    least: Annotated[Kept, "Threshold of a client that has a single direction; as high as energy: not adaptive."] = 0.5
    channels: Annotated[
        Literal["norm", "equal"], "Weights of the rows that choose the directions: their norms, or none."
    ] = "norm"
    label: ClassVar[str] = "svdefense"
    stage: ClassVar[Stage] = Stage.PRUNE
    identity_settings: ClassVar = {"energy": 1.0, "least": 1.0}

    def conflicts(self, sound: bool) -> Iterator[Problem]:
        """Refuse a lowest threshold above the highest."""
        if sound and self.least > self.energy:
            what = f"is {self.least:g}, more than energy, {self.energy:g}"
            yield Problem("svdefense.least", what, "give at most energy")

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Declare the directions and loads of the layers, which may be pinned."""
        spec = NoiseSpec()
        for name, p in params.items():
            if _is_layer(p):
                outputs, inputs = _shape(p)
                rank = min(outputs, inputs)
                of_layer = {f"{DIRECTIONS}.{name}": (rank, inputs), f"{LOADS}.{name}": (rank, outputs)}
                spec = spec | NoiseSpec({n: Noise(shape, Normal(), dtype=p.dtype) for n, shape in of_layer.items()})
        return spec

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return the directions and loads of each layer; nothing where a later transform changed them."""
        layers = {name: _matrix(value) for name, value in sent.items() if _is_layer(value)} if exact else {}
        directions = tmap(_spanned, layers)
        loads = {name: rows @ layers[name].mT for name, rows in directions.items()}
        return {**under(DIRECTIONS, directions), **under(LOADS, loads)}

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Project each layer on its directions; those that are not pinned are computed from the update itself."""
        if self.least == 1:
            return update, state
        layers = {name: _matrix(value) for name, value in update.items() if _is_layer(value)}
        directions, loads = select(noise, DIRECTIONS), select(noise, LOADS)
        if layers.keys() - directions.keys():
            directions = {**self._kept(tmap(torch.detach, layers)), **directions}
        sent = {name: value @ directions[name].mT @ directions[name] for name, value in layers.items()}
        for name in layers.keys() & loads.keys():
            sent[name] = sent[name] + self._along(layers[name] - sent[name], loads[name], self._squares(layers[name]))
        return {n: sent[n].reshape(v.shape) if n in sent else v for n, v in update.items()}, state

    def _along(self, cut: Tensor, loads: Tensor, squares: Tensor) -> Tensor:
        """Return what was cut [O, R] along each of the loads [K, O], by the squared weights of the rows [O]."""
        weighted = loads * squares
        lengths = (weighted * loads).sum(1, keepdim=True)
        return loads.mT @ (weighted @ cut / _positive(lengths))

    def _kept(self, layers: Mapping[str, Tensor]) -> Tensors:
        """Return the directions of each layer, zeros where they are not kept."""
        found = {name: decomposed(value * self._squares(value).sqrt()[:, None]) for name, value in layers.items()}
        if not found:
            return {}
        entropies = torch.stack([entropy(each.shares) for each in found.values()])
        threshold = self.least + (self.energy - self.least) * entropies.mean()
        return {name: each.directions * _needed(each.shares, threshold) for name, each in found.items()}

    def _squares(self, matrix: Tensor) -> Tensor:
        """Return the squared weights of the rows, relative to the largest entry: squares of squares would overflow."""
        if self.channels == "equal":
            return matrix.new_ones(len(matrix))
        return (matrix / _positive(peak(matrix.detach().abs()))).square().sum(1)


def decomposed(matrix: Tensor) -> Decomposed:
    """Decompose a matrix; entries that are not finite count as zeros.

    >>> decomposed(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).shares
    tensor([0.6400, 0.3600])
    """
    finite = torch.where(matrix.isfinite(), matrix, 0.0)
    finite = finite / _positive(peak(finite.abs()))
    linalg: Any = torch.linalg
    _, values, rows = cast("tuple[Tensor, Tensor, Tensor]", linalg.svd(finite, full_matrices=False))
    energies = values.square()
    return Decomposed(rows, energies / _positive(energies.sum()))


def entropy(shares: Tensor) -> Tensor:
    """Return the entropy of shares [K] over log K, from 0 for a single one to 1 for equal ones.

    >>> entropy(torch.tensor([0.9, 0.1])), entropy(torch.tensor([0.25, 0.25, 0.25, 0.25])), entropy(torch.ones(1))
    (tensor(0.4690), tensor(1.), tensor(0.))
    """
    if len(shares) < 2:
        return shares.new_zeros(())
    return -torch.xlogy(shares, shares).sum() / torch.tensor(float(len(shares))).log().to(shares)


def _needed(shares: Tensor, threshold: Tensor) -> Tensor:
    """Mark [K, 1] the fewest directions whose shares reach a threshold: at least one, none without energy."""
    before = shares.cumsum(0) - shares
    return ((before < threshold) & (shares > 0)).to(shares.dtype).unsqueeze(1)


def _spanned(sent: Tensor) -> Tensor:
    """Return the directions that the rows of a matrix span, zeros below rounding."""
    rows, shares = decomposed(sent)
    rounded = (torch.finfo(sent.dtype).eps * max(sent.shape)) ** 2
    return rows * (shares > rounded * peak(shares)).to(sent.dtype).unsqueeze(1)


def _is_layer(value: Tensor) -> bool:
    return value.dim() > 1 and value.numel() > 0


def _shape(value: Tensor) -> tuple[int, int]:
    return value.shape[0], prod(value.shape[1:])


def _matrix(value: Tensor) -> Tensor:
    return value.reshape(_shape(value))


def _positive(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, torch.ones_like(value))


LOW_RANK = (
    DefenceEntry(
        name="svdefense",
        factory=LowRank,
        stage="svd",
        description="SVDefense: send each layer's strongest singular directions, fewer where few are strong",
        changes=("send",),
        cost="a singular value decomposition per layer; all bytes",
        citation="Luo, Yau, Song 2025, SVDefense: Effective Defense against Gradient Inversion Attacks via Singular "
        "Value Decomposition (arXiv 2510.03319)",
        identity={"energy": 1.0, "least": 1.0},
    ),
)
