"""Batched optimisers: the next step of every row, without reads by the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.settings import Checked, Positive
from gradveil.core.tree import Tensors

Sign = Annotated[Literal["plain", "signed", "soft"], "Gradient for Adam: unchanged, its sign, or a smooth sign."]
Rate = Annotated[Positive, "Step size."]
Project = Callable[[str, Tensor], Tensor]
"""(name of a variable, its values [n, ...]) -> the nearest allowed values."""


@dataclass(frozen=True)
class Adam(Checked):
    """Element-wise Adam on all rows at once.

    `sign="signed"` steps with the sign of the gradient, `"soft"` with g / (|g| + mean |g| of the row).
    """

    lr: Rate = 0.1
    sign: Sign = "plain"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    label: ClassVar[str] = "attack"

    def init(self, variables: Tensors) -> Tensors:
        """Return the moments (leading N)."""
        return {f"{moment}.{name}": torch.zeros_like(v) for name, v in variables.items() for moment in "mv"}

    def step(
        self,
        variables: Tensors,
        grads: Tensors,
        loss: Tensor,
        state: Tensors,
        scale: Tensor,
        count: int,
        project: Project,
        plain: frozenset[str] = frozenset(),
    ) -> tuple[Tensors, Tensors]:
        """Step every row: `scale` [N] multiplies the step size; the gradient of `plain` variables is never signed."""
        b1, b2 = self.betas
        c1, c2 = 1 - b1 ** (count + 1), 1 - b2 ** (count + 1)
        out: Tensors = {}
        after: Tensors = {}
        for name, value in variables.items():
            g = grads[name] if name in plain else self._signed(grads[name])
            m = torch.lerp(state[f"m.{name}"], g, 1 - b1)
            v = state[f"v.{name}"].mul(b2).addcmul_(g, g, value=1 - b2)
            size = (scale * (self.lr / c1)).view(-1, *[1] * (value.ndim - 1))
            out[name] = project(name, value - size * m / (v.div(c2).sqrt_().add_(self.eps)))
            after[f"m.{name}"], after[f"v.{name}"] = m, v
        return out, after

    def _signed(self, g: Tensor) -> Tensor:
        if self.sign == "signed":
            return g.sign()
        if self.sign == "soft":
            size = g.abs()
            mean = size.flatten(1).mean(1).view(-1, *[1] * (g.ndim - 1))
            return g / (size + mean + torch.finfo(g.dtype).tiny)
        return g


@dataclass(frozen=True)
class RMSprop(Checked):
    """Element-wise RMSprop with momentum on all rows at once: m <- momentum m + g / (sqrt(v) + eps), x <- x - lr m."""

    lr: Rate = 1e-2
    decay: float = 0.99
    momentum: float = 0.0
    eps: float = 1e-8
    label: ClassVar[str] = "attack"

    def init(self, variables: Tensors) -> Tensors:
        """Return the moments (leading N)."""
        return {f"{moment}.{name}": torch.zeros_like(v) for name, v in variables.items() for moment in "mv"}

    def step(
        self,
        variables: Tensors,
        grads: Tensors,
        loss: Tensor,
        state: Tensors,
        scale: Tensor,
        count: int,
        project: Project,
        plain: frozenset[str] = frozenset(),
    ) -> tuple[Tensors, Tensors]:
        """Step every row: `scale` [N] multiplies the step size."""
        out: Tensors = {}
        after: Tensors = {}
        for name, value in variables.items():
            g = grads[name]
            v = state[f"v.{name}"].mul(self.decay).addcmul_(g, g, value=1 - self.decay)
            m = state[f"m.{name}"].mul(self.momentum).addcdiv_(g, v.sqrt().add_(self.eps))
            size = (scale * self.lr).view(-1, *[1] * (value.ndim - 1))
            out[name] = project(name, value - size * m)
            after[f"m.{name}"], after[f"v.{name}"] = m, v
        return out, after


@dataclass(frozen=True)
class LBFGS(Checked):
    """Limited-memory BFGS with one history per row; an iteration is one evaluation of every row.

    `line_search="armijo"` halves a row's step until its objective falls by `decrease` of the predicted amount;
    `"none"` always takes the full step (Zhu et al.'s program). The direction comes from the compact form of the inverse
    Hessian (Byrd, Nocedal, Schnabel 1994), so that a long history costs four matrix products instead of a loop.
    """

    lr: Rate = 1.0
    history: int = 100
    line_search: Literal["armijo", "none"] = "armijo"
    decrease: float = 1e-4
    label: ClassVar[str] = "attack"
    smallest: float = 1e-8
    """A step shorter than this restarts the row from steepest descent."""

    def init(self, variables: Tensors) -> Tensors:
        """Return the state (leading N): the accepted point, its gradient, the direction, and the history.

        `pairs` holds the s, then the y. `sy[i, j]` is s_i . y_j where j is the newer pair, `yy` holds the products of
        the y. `live` marks the filled places, `at` is the next place.
        """
        x = flat(variables)
        rows, size = x.shape
        m = self.history
        return {
            "x": x.clone(),
            "f": torch.full_like(x[:, 0], torch.inf),
            "g": torch.zeros_like(x),
            "d": torch.zeros_like(x),
            "t": torch.zeros_like(x[:, 0]),
            "pairs": x.new_zeros(rows, 2 * m, size),
            "sy": x.new_zeros(rows, m, m, dtype=torch.float64),
            "yy": x.new_zeros(rows, m, m, dtype=torch.float64),
            "live": torch.zeros(rows, m, dtype=torch.bool, device=x.device),
            "at": torch.zeros(rows, dtype=torch.long, device=x.device),
        }

    def step(
        self,
        variables: Tensors,
        grads: Tensors,
        loss: Tensor,
        state: Tensors,
        scale: Tensor,
        count: int,
        project: Project,
        plain: frozenset[str] = frozenset(),
    ) -> tuple[Tensors, Tensors]:
        """Judge the trial point `variables`, accept or shorten each row's step, and return the next trial point."""
        x, g = flat(variables), torch.nan_to_num(flat(grads))
        first = torch.isinf(state["f"])
        # Armijo's condition f(x + t d) <= f(x) + decrease t g'd.
        predicted = self.decrease * state["t"] * (state["g"] * state["d"]).sum(1)
        good = torch.isfinite(loss) & (first | (self.line_search == "none") | (loss <= state["f"] + predicted))
        keep = good.unsqueeze(1)
        after = torch.where(keep, g, state["g"])
        new, along = self._remember(state, x - state["x"], g - state["g"], after, good & ~first)
        new["x"] = torch.where(keep, x, state["x"])
        new["g"] = after
        new["f"] = torch.where(good, loss, state["f"])
        # No step along this direction helps: forget the history, so that the next direction is -g.
        lost = ~good & (state["t"] * 0.5 < self.smallest)
        new["live"] = new["live"] & ~lost.unsqueeze(1)
        d = self._direction(new, along, min(count, self.history))
        downhill = (d * new["g"]).sum(1) < 0
        d = torch.where(downhill.unsqueeze(1), d, -new["g"])
        steepest = ~downhill | ~new["live"].any(1)
        # A gradient has no natural step size: the first step moves by at most lr in the 1-norm.
        start = self.lr * torch.where(steepest, (1 / new["g"].abs().sum(1).clamp_min(1e-30)).clamp_max(1.0), 1.0)
        new_line = good | lost
        new["d"] = torch.where(new_line.unsqueeze(1), d, state["d"])
        new["t"] = torch.where(new_line, start * scale, state["t"] * 0.5)
        trial = new["x"] + new["t"].unsqueeze(1) * new["d"]
        return unflat(trial, variables, project), new

    def _remember(self, state: Tensors, s: Tensor, y: Tensor, g: Tensor, accepted: Tensor) -> tuple[Tensors, Tensor]:
        """Store the step of the rows that accepted one with positive curvature.

        Returns the state and the products of all pairs with g, [n, 2 m], from one sweep over the history.
        """
        curvature = (s * y).sum(1)
        use = accepted & (curvature > 1e-10 * y.square().sum(1).clamp_min(1e-30))
        rows, at, wide = torch.arange(len(s), device=s.device), state["at"], use.unsqueeze(1)
        new = dict(state)
        # In place: the history is by far the largest part of the state.
        pairs = state["pairs"]
        for value, place in ((s, at), (y, at + self.history)):
            pairs[rows, place] = torch.where(wide, value, pairs[rows, place])
        # The long vectors are on the left: a product with two narrow columns on the right is three times slower.
        with_y, with_g = torch.bmm(torch.stack([y, g], 1), pairs.mT).unbind(1)
        for name, column in zip(("sy", "yy"), with_y.double().split(self.history, 1), strict=True):
            # Column `at` of S'Y holds s_i . y of the new y. Its row would hold products with older y, which R never
            # reads; Y'Y is symmetric, and needs both.
            column = torch.where(wide, column, state[name][rows, :, at])
            state[name][rows, :, at] = column
            if name == "yy":
                state[name][rows, at] = column
        new["live"] = state["live"].clone()
        new["live"][rows, at] = use | state["live"][rows, at]
        new["at"] = torch.where(use, (at + 1) % self.history, at)
        return new, with_g.double()

    def _direction(self, state: Tensors, along: Tensor, used: int) -> Tensor:
        """Return -H g with H = c I + [S, c Y] [[R^-T (D + c Y'Y) R^-1, -R^-T], [-R^-1, 0]] [S, c Y]', c = s'y / y'y.

        R is the upper triangle of S'Y from the oldest pair to the newest, D its diagonal. Empty places have R = 1 and
        vectors of weight zero.
        """
        g = state["g"]
        if used == 0:
            return -g
        # `at` is the oldest place of the ring: from there the order is from old to new, and the last `used` places are
        # taken.
        steps = torch.arange(self.history - used, self.history, device=g.device)
        order = (state["at"].unsqueeze(1) + steps) % self.history
        live = state["live"].gather(1, order).double()
        both = live.unsqueeze(1) * live.unsqueeze(2)
        sy, yy = (_reorder(state[name], order) * both for name in ("sy", "yy"))
        curvature = torch.diagonal(sy, dim1=1, dim2=2)
        r = torch.triu(sy) + torch.diag_embed(1 - live)
        newest, size = curvature[:, -1], torch.diagonal(yy, dim1=1, dim2=2)[:, -1]
        c = torch.where(live[:, -1] > 0, newest / size.clamp_min(1e-300), torch.ones_like(newest)).unsqueeze(1)
        # p = S'g, q = Y'g, w = R^-1 p, u = R^-T (D w + c (Y'Y w - q)): -H g = -S u + c Y w - c g. The small systems are
        # ill-conditioned, and solved in double precision.
        p, q = (part.gather(1, order) * live for part in along.split(self.history, 1))
        w = torch.linalg.solve_triangular(r, p.unsqueeze(2), upper=True)
        inner = curvature.unsqueeze(2) * w + c.unsqueeze(2) * (torch.bmm(yy, w) - q.unsqueeze(2))
        u = torch.linalg.solve_triangular(r.mT, inner, upper=False).squeeze(2) * live
        weights = g.new_zeros(len(g), 2, self.history)
        weights[:, 0].scatter_(1, order, -u.to(g.dtype))
        weights[:, 1].scatter_(1, order, (c * w.squeeze(2) * live).to(g.dtype))
        return torch.bmm(weights.flatten(1).unsqueeze(1), state["pairs"]).squeeze(1) - c.to(g.dtype) * g


def _reorder(matrix: Tensor, order: Tensor) -> Tensor:
    """Select rows and columns of each [m, m] matrix in an order [n, k]."""
    index = order.unsqueeze(2).expand(-1, -1, matrix.shape[2])
    taken = matrix.gather(1, index)
    return taken.gather(2, order.unsqueeze(1).expand(-1, taken.shape[1], -1))


def flat(tensors: Tensors) -> Tensor:
    """Concatenate each row's variables in one vector."""
    return torch.cat([value.flatten(1) for value in tensors.values()], 1)


def unflat(vectors: Tensor, like: Tensors, project: Project) -> Tensors:
    """Split each row's vector into variables again, and project them."""
    parts = vectors.split([value[0].numel() for value in like.values()], 1)
    return {name: project(name, part.view_as(like[name])) for (name, part) in zip(like, parts, strict=True)}
