"""A client's look at the model it was sent, before it trains on it: what a server does that wants to read data.

Each family of manipulation leaves a trace in the parameters that honest training does not: rows that are copies of each
other with graded biases (imprint), rows whose positive weights are the negative ones scaled (trap), layers that are
dead or far out of scale, a last layer that lets one class or one feature through (fishing), and a jump that no client's
update explains. Nothing here proves a server honest: weights can be manipulated in ways that nobody has published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, Problem
from gradveil.nn.paths import last_layer

Family = Literal["imprint", "trap", "extreme", "fishing", "jump", "not finite"]
Policy = Literal["warn", "refuse", "ignore"]

_ROWS = 8
"""A layer with fewer rows is too small to tell a pattern from chance."""
_COLUMNS = 16
_MOST = 0.5
"""The share of a layer's rows that have to show a trace."""
_PARALLEL = 0.999
_PAIRED = 2e-3
_OUT_OF_SCALE = 50.0
_NATS = 30.0
"""A difference of last biases beyond which a class is as good as excluded."""
_JUMP = 10.0
_REMEDY = "do not train on it: ask who runs the server, or leave this round out"


@dataclass(frozen=True)
class Finding:
    """One trace of a manipulation: which layer, which family, and what was seen."""

    family: Family
    where: str
    what: str

    def problem(self, severity: Literal["error", "warning"]) -> Problem:
        """Say it as every other problem is said."""
        return Problem(self.where, f"{self.family}: {self.what}", _REMEDY, severity)


def inspect(
    model: nn.Module,
    received: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None = None,
    sent: Mapping[str, Tensor] | None = None,
) -> list[Finding]:
    """Look for traces of manipulation in received parameters of this model.

    `previous` are the parameters of the round before, `sent` the update that this client sent in it (parameters in
    minus parameters out): with them a jump can be told.
    """
    found: list[Finding] = []
    for name, value in received.items():
        if not bool(torch.isfinite(value).all()):
            found.append(Finding("not finite", name, "holds NaN or infinite values"))
    broken = {finding.where for finding in found}
    last = _last(model)
    for path, module in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        weight = received.get(name)
        if weight is None or weight.ndim < 2 or name in broken or isinstance(module, nn.Embedding):
            continue
        rows = weight.detach().flatten(1).double()
        bias = received.get(name.removesuffix("weight") + "bias")
        looks = (_fishing,) if path == last else (_imprint, _trap, _extreme)
        for look in looks:
            found += look(name, rows, None if bias is None else bias.detach().double())
    if previous is not None:
        found += _jump(received, previous, sent, broken)
    return found


def guarded(
    model: nn.Module,
    received: Mapping[str, Tensor],
    policy: Policy,
    tell: Callable[[Finding], None],
    previous: Mapping[str, Tensor] | None = None,
    sent: Mapping[str, Tensor] | None = None,
) -> None:
    """Inspect a received model and act as the policy says: refuse by raising, tell every finding, or do nothing."""
    if policy == "ignore":
        return
    found = inspect(model, received, previous, sent)
    if policy == "refuse" and found:
        raise GradveilError(finding.problem("error") for finding in found)
    for finding in found:
        tell(finding)


def _last(model: nn.Module) -> str | None:
    try:
        return last_layer(model)
    except GradveilError:
        return None


def _imprint(name: str, rows: Tensor, bias: Tensor | None) -> Iterator[Finding]:
    """Tell rows that are copies of one measurement, with biases that cut its range into bins."""
    if len(rows) < _ROWS or rows.shape[1] < _COLUMNS:
        return
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    # The direction that most rows share, if they share one, is that of most of them.
    alike = (unit @ unit.T).abs() > _PARALLEL
    most = alike[int(alike.sum(1).argmax())]
    if int(most.sum()) >= max(_ROWS, _MOST * len(rows)) and bool((rows[most].abs().sum(1) > 0).all()):
        graded = bias is not None and len(bias[most].unique()) > 0.5 * int(most.sum())
        more = " and their biases differ" if graded else ""
        yield Finding("imprint", name, f"{int(most.sum())} of {len(rows)} rows point the same way{more}")


def _trap(name: str, rows: Tensor, _bias: Tensor | None) -> Iterator[Finding]:
    """Tell rows of which half of the weights are the other half, negative and scaled by one number."""
    half = rows.shape[1] // 2
    if len(rows) < _ROWS or half < _COLUMNS:
        return
    ordered = rows.sort(1).values
    below, above = -ordered[:, :half], ordered.flip(1)[:, :half]
    split = (below[:, -1] >= 0) & (above[:, -1] >= 0) & (below[:, 0] > 0) & (above[:, 0] > 0)
    scale = above.sum(1, keepdim=True) / below.sum(1, keepdim=True).clamp(min=1e-30)
    apart = (above - scale * below).norm(dim=1) / above.norm(dim=1).clamp(min=1e-30)
    paired = split & (apart < _PAIRED)
    if int(paired.sum()) >= max(_ROWS, _MOST * len(rows)):
        what = f"in {int(paired.sum())} of {len(rows)} rows the positive weights are the negative ones times {{:.3f}}"
        yield Finding("trap", name, what.format(float(scale[paired].median())))


def _extreme(name: str, rows: Tensor, bias: Tensor | None) -> Iterator[Finding]:
    """Tell layers that are dead, or so far out of scale that what passes them is no feature any more."""
    fan_in = rows.shape[1]
    dead = rows.abs().sum(1) == 0
    if int(dead.sum()) > _MOST * len(rows):
        yield Finding("extreme", name, f"{int(dead.sum())} of {len(rows)} rows are zero")
        return
    # A layer that keeps the variance of its input has weights of root mean square 1 / sqrt(fan in).
    gain = float(rows.square().mean().sqrt()) * fan_in**0.5
    if gain > _OUT_OF_SCALE:
        yield Finding("extreme", name, f"its weights are {gain:.0f} times as large as those that keep a signal's size")
    elif gain < 1 / _OUT_OF_SCALE**2:
        yield Finding("extreme", name, f"its weights are {1 / gain:.0f} times too small to keep a signal's size")
    if bias is not None and float(bias.abs().max()) > _OUT_OF_SCALE:
        yield Finding("extreme", name.removesuffix("weight") + "bias", f"reaches {float(bias.abs().max()):.3g}")


def _fishing(name: str, rows: Tensor, bias: Tensor | None) -> Iterator[Finding]:
    """Tell a last layer that lets the examples of one class, or of one feature, be the only ones that count."""
    empty = rows.abs().sum(1) == 0
    if 0 < int(empty.sum()) < len(rows):
        yield Finding("fishing", name, f"{int(empty.sum())} of {len(rows)} classes have no weights, the others have")
    if rows.shape[1] >= _COLUMNS and bool((~empty).any()):
        used = (rows[~empty] != 0).any(0)
        if int(used.sum()) <= max(1, 0.05 * len(used)):
            yield Finding("fishing", name, f"only {int(used.sum())} of {len(used)} features count")
    if bias is not None and float(bias.max() - bias.min()) > _NATS:
        spread = float(bias.max() - bias.min())
        yield Finding(
            "fishing", name.removesuffix("weight") + "bias", f"biases {spread:.0f} nats apart exclude classes"
        )


def _jump(
    received: Mapping[str, Tensor], previous: Mapping[str, Tensor], sent: Mapping[str, Tensor] | None, broken: set[str]
) -> Iterator[Finding]:
    """Tell parameters that moved farther than the mean of updates like one's own moves them."""
    for name, before in previous.items():
        now = received.get(name)
        if name in broken:
            continue
        if now is None or now.shape != before.shape:
            yield Finding("jump", name, "was there in the round before, with another shape or not at all now")
            continue
        moved = float((now.double() - before.double()).norm())
        own = None if sent is None or name not in sent else float(sent[name].double().norm())
        size = float(before.double().norm())
        if own is not None and moved > _JUMP * own + 1e-3 * size:
            yield Finding("jump", name, f"moved {moved / max(own, 1e-30):.3g} times as far as one's own update")
        elif own is None and moved > _JUMP * size + 1.0:
            yield Finding("jump", name, f"moved by {moved / max(size, 1e-30):.3g} times its size")
