"""The other words of a token's sentence, solved for from what the first layer computes for that token.

An encoder's first layer averages the values of a token's companions: c = sum_j z_j e_j v_j / sum_j z_j e_j per head,
e_j = exp(q k_j), where z_j is 1 for the words of the token's sentence and 0 for all others of the batch. The hidden
units u(c) of the perceptron behind it enter a linear layer, so that they lie in the span that its gradient shows. Each
token therefore gives as many equations for z as its context has numbers. Gauss-Newton steps solve them with z >= 0 and
one word per position; from the mean over all candidates they converge to the sentence in about five steps. The method
is our own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.func import jacfwd

from gradveil.attacks.sequences.token_candidates import Candidates
from gradveil.attacks.sequences.token_span import TokenSpan
from gradveil.core.tree import Tensors
from gradveil.gradients.input_sensitivity import load_forward_mode
from gradveil.nn.token_layout import TokenLayout

_STEPS = 12
"""Most Gauss-Newton steps; those that converge need 3 to 7."""
_HOPELESS = (4, 0.05)
"""After so many steps, a rest above this belongs to a token that is in no sentence."""
_STALLED = 0.8
"""A step that leaves more than this share of the rest is the last one."""
_SOLVED = 3e-4
"""Largest rest of an equation that counts as solved; the other solutions of one token's equations end at 1e-3."""
_ANCHORS = (1, 4, 7, 10, 13)
"""Tokens whose equations are solved together, tried in this order."""
NEAR = 0.2
"""Largest rest of a sentence in a crowded span that is worth a subtraction, which shows whether it was right."""
_LIKELY = 0.7
"""Least share of a word whose equations are added."""
_ONE_WORD = 0.1
"""Weight of the equations that ask for one word per position."""
_ENTERING = 256
"""Candidates that enter the least squares at once."""
_ROUNDS = 4
"""Times that candidates enter in one step."""


@dataclass(frozen=True)
class SolvedSentence:
    """The candidates [T] of one sentence."""

    places: Tensor
    rest: float
    """The largest rest of the equations that were solved."""
    largest: float
    """The largest rest among all tokens of the sentence."""


@dataclass
class TokenCompanions:
    """The equations of one batch: candidates of all positions as [n], and the span of the hidden units."""

    model: nn.Module
    layout: TokenLayout
    params: Tensors
    candidates: Candidates
    hidden: TokenSpan
    end: int | None = None
    perceptron: bool = True
    """The span is that of the hidden units; False: of what the heads give, where the perceptron is frozen."""
    crowded: bool = False
    """More tokens than directions: units lie near the span only, and those of wrong words farther away."""
    places: Tensor = field(init=False)
    """The position of each candidate [n]."""
    words: Tensor = field(init=False)
    """The token number of each candidate [n]."""

    def __post_init__(self) -> None:
        """Compute queries, keys and values of every candidate."""
        load_forward_mode()
        usable = torch.isfinite(self.candidates.residuals)
        self.places, self.words = usable.nonzero()[:, 0], self.candidates.words[usable]
        layout, params = self.layout, self.params
        inputs, carried = [], []
        for position in range(len(self.candidates.words)):
            words = self.words[self.places == position]
            inputs.append(layout.first_inputs(self.model, params, position, words))
            carried.append(layout.first_carried(self.model, params, position, words))
        self._carried = torch.cat(carried)
        self._query, self._key, self._value = layout.projections(params, torch.cat(inputs), 0)
        self._query = self._query * self._query.shape[-1] ** -0.5
        count = len(self.candidates.words)
        rows = self._value.new_zeros(count, len(self.words))
        rows[self.places, torch.arange(len(self.words))] = 1
        if self.end is not None:  # a sentence that has ended has no word at later positions
            for place in (self.words == self.end).nonzero().flatten().tolist():
                rows[int(self.places[place]) + 1 :, place] = 1
        self._occupied = rows

    @torch.no_grad()
    def solve(self, anchor: int) -> SolvedSentence:
        """Return the sentence that holds a candidate.

        Where one token's equations leave several solutions, those of the words that fit best are added.
        """
        shares = 1 / self._occupied.sum(1)[self.places].clamp_min(1)
        shares[self.places == self.places[anchor]] = 0
        shares[anchor] = 1
        best = None
        for count in _ANCHORS:
            anchors = [anchor, *self._fitting(anchor, shares)[: count - 1]] if count > 1 else [anchor]
            shares, rest = self._descended(anchors, shares)
            words = self._likeliest(shares)
            found = SolvedSentence(words, rest, self._largest(words))
            # In a crowded span no rest is small: more equations are added as long as the words fit better.
            if self.crowded and best is not None and found.largest >= best.largest:
                break
            best = found
            if rest < _SOLVED or rest > self._hopeless:
                break
        assert best is not None
        return best

    @property
    def _hopeless(self) -> float:
        return 2 * _HOPELESS[1] if self.crowded else _HOPELESS[1]

    def _descended(self, anchors: list[int], shares: Tensor) -> tuple[Tensor, float]:
        """Take Gauss-Newton steps for the equations of some tokens; return the shares and the largest rest."""
        free = self.places != self.places[anchors[0]]
        wanted = _ONE_WORD * (1 - self._occupied[:, anchors[0]])
        pool = shares[free] > _LIKELY
        before = torch.inf
        for step in range(_STEPS):
            parts = [self._equations(anchor, shares) for anchor in anchors]
            largest = max(float(rest.norm()) for _, rest in parts)
            if largest > _STALLED * before or (step >= _HOPELESS[0] and largest > self._hopeless):
                break
            before = largest
            matrix, rest = torch.cat([one for one, _ in parts])[:, free], torch.cat([rest for _, rest in parts])
            rows = torch.cat([matrix, _ONE_WORD * self._occupied[:, free]])
            # Gauss-Newton: matrix (z - shares) + rest = 0, for the words of all positions but the anchor's.
            solution, pool = _nonnegative(rows, torch.cat([matrix @ shares[free] - rest, wanted]), pool)
            shares = shares.clone()
            shares[free] = solution
        return shares, max(self._rest(anchor, shares) for anchor in anchors)

    def _fitting(self, anchor: int, shares: Tensor) -> list[int]:
        """Return the likeliest other words, those first whose own equations are solved best."""
        likely = [int(one) for one in (shares > _LIKELY).nonzero().flatten() if int(one) != anchor]
        return sorted(likely, key=lambda one: self._rest(one, shares))

    def _likeliest(self, shares: Tensor) -> Tensor:
        """Return the candidate [T] with the largest share of each position, up to the end."""
        found: list[int] = []
        for position in range(len(self.candidates.words)):
            here = (self.places == position).nonzero().flatten()
            # More than half of the sentence's weight here is on ends at earlier positions.
            if not len(here) or float(self._occupied[position] @ shares - shares[here].sum()) > 0.5:
                break
            if self.end is None and float(shares[here].sum()) < 0.5:
                break
            found.append(int(here[shares[here].argmax()]))
        return torch.tensor(found, dtype=torch.long, device=shares.device)

    def _largest(self, words: Tensor) -> float:
        """Return the largest rest of a sentence's tokens."""
        shares = self._value.new_zeros(len(self.words))
        shares[words] = 1
        return max((self._rest(int(one), shares) for one in words), default=torch.inf)

    def _rest(self, anchor: int, shares: Tensor) -> float:
        """Return what the span leaves of a token's hidden units."""
        units = self._units(self._context(anchor, shares)[0], self._carried[anchor])
        return float(self.hidden.residuals(units))

    def _context(self, anchor: int, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention gives a candidate [d], and its derivatives by the shares [d, n]."""
        scores = torch.einsum("hc,nhc->nh", self._query[anchor], self._key)
        weights = (scores - scores.amax(0)).exp()
        weights = weights / (shares.unsqueeze(1) * weights).sum(0).clamp_min(1e-30)
        context = torch.einsum("nh,nhc->hc", shares.unsqueeze(1) * weights, self._value)
        # dc / dz_j = w_j (v_j - c), with w_j = e_j / sum_i z_i e_i.
        slopes = weights.unsqueeze(2) * (self._value - context)
        return context.flatten(), slopes.flatten(1).T

    def _units(self, context: Tensor, carried: Tensor) -> Tensor:
        if not self.perceptron:
            return context
        return self.layout.hidden_units(self.model, self.params, context, carried, 0)

    def _equations(self, anchor: int, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives [m, n] of what the span leaves of the hidden units, and that rest [m]."""
        context, slopes = self._context(anchor, shares)
        carried = self._carried[anchor]
        units = self._units(context, carried)
        table = torch.cat([jacfwd(self._units)(context, carried), units.unsqueeze(1)], 1) / units.norm()
        basis = self.hidden.basis
        table = table - basis.T @ (basis @ table)
        # Q only turns the equations: R keeps their lengths and products, with as many rows as there are columns.
        small = torch.linalg.qr(table, mode="r").R
        return small[:, :-1] @ slopes, small[:, -1]


def _nonnegative(rows: Tensor, sides: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise |rows z - sides| over z >= 0; `pool` [n] are the candidates that may enter, and is returned larger."""
    solution = rows.new_zeros(rows.shape[1])
    rest = sides
    for _ in range(_ROUNDS):
        # Minus the slope of half the squared rest: only candidates that lower it may enter.
        gains = rows.T @ rest
        gains[pool] = -torch.inf
        entering = gains.topk(min(_ENTERING, len(gains))).indices
        entering = entering[gains[entering] > 1e-6]
        if not len(entering) and bool(pool.any()):
            break
        pool = pool.clone()
        pool[entering] = True
        chosen = rows[:, pool]
        if not chosen.shape[1]:
            break
        solved, _ = nnls(chosen.double().cpu().numpy(), sides.double().cpu().numpy(), maxiter=20 * chosen.shape[1])
        solution = rows.new_zeros(rows.shape[1])
        solution[pool] = torch.from_numpy(solved).to(solution)
        rest = sides - rows @ solution
    return solution, solution > 0
