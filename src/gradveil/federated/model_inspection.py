"""A client's inspection of a received model for patterns that honest training does not produce.

The patterns are:

- imprint: rows that are copies of each other, with graded biases
- trap: rows whose positive weights are the negative ones, scaled
- quantile: biases that close most units of a layer
- extreme: layers that are dead or far out of scale
- fishing: a last layer that lets one class or one feature through
- jump: a change of the parameters that no client's update explains

No finding does not prove a server honest: weights can be made to look random. The first line of defence is the client's
inspection of its own update (`gradveil.federated.update_inspection`), which needs no pattern.

Layers are found by the names of the received tensors, so every tensor of the server is inspected, whatever the client's
model calls its parameters. The model shows which of them are embeddings, and which is the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.settings import Choice
from gradveil.core.tree import qualified
from gradveil.nn.module_paths import last_layer

Family = Literal["imprint", "trap", "quantile", "extreme", "fishing", "jump", "not finite", "leak", "malice"]
Policy = Literal["warn", "refuse", "ignore"]
POLICY = Choice(get_args(Policy))
"""Valid policies: a misspelt one must not pass for a milder one."""

_ROWS = 8
"""Smallest number of rows in which a pattern differs from chance."""
_COLUMNS = 16
"""Smallest number of weights per row in which a pattern differs from chance."""
_MOST, _SOME = 0.5, 0.1
"""Share of a layer's rows that have to show a pattern; a tenth is enough for copies of equal size."""
_PARALLEL = 0.999
"""Cosine above which rows are parallel."""
_JITTERED, _COPIED = 0.99, 0.02
"""Cosine and relative difference of sizes of copies with a jitter of a tenth of each weight."""
_JITTER = 0.05
"""Least spread of the cuts (bias / size) of parallel rows, in units of the largest."""
_PAIRED = 2e-3
"""Largest relative distance of a row's positive weights from its negative ones, scaled."""
_BALANCED = 0.01
"""Relative difference of the ratios of positive to negative weights in rows of one scale."""
_OUT_OF_SCALE = 50.0
"""Factor by which no honest layer scales a signal; its inverse square makes a layer dead."""
_NOTHING = 0.02
"""Relative size below which a row or column of the last layer lets nothing through."""
_EMPTY = 0.9
"""Largest share of zero rows that pruning explains. A layer that is zero as a whole may start so."""
_SHUT, _UNITS, _CHANNELS = 0.7, 0.4, 1.25
"""Share of units with biases below zero, their median in units of the row's length, and the bias of a norm below zero
in units of its weights. Honest medians are above -0.15."""
_KINDS = 8
"""Smallest number of different weights in a row: rows of quantised layers pair by chance."""
_NATS = 20.0
"""Difference of last biases beyond which a class is excluded; one in a million examples is 14."""
_JUMP, _LEAP, _FAR = 10.0, 0.3, 3.0
"""Distances that no honest round moves: in units of the client's own update, and in sizes of the tensor. A jump exceeds
both, since a server's momentum continues where gradients have vanished, but not across the whole tensor. The last is
the size alone, for an unknown update."""
_BLOCK = 1024
"""Number of rows compared at once, to bound the memory of wide layers."""
_REMEDY = "do not train on it: ask who runs the server, or leave this round out"
_REMEDIES: Mapping[str, str] = {
    "leak": "train on larger batches, clip and add noise, or leave this round out",
    "malice": "do not send it: ask who runs the server, or leave this round out",
}


@dataclass(frozen=True)
class Finding:
    """One indicator of a manipulation: its family, the layer, and the evidence."""

    family: Family
    where: str
    evidence: str

    def problem(self, severity: Literal["error", "warning"]) -> Problem:
        """Return the finding as a problem with a fix."""
        return Problem(self.where, f"{self.family}: {self.evidence}", _REMEDIES.get(self.family, _REMEDY), severity)


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, one row per unit, and their biases."""

    name: str
    rows: Tensor
    bias_name: str
    bias: Tensor | None

    @staticmethod
    def of(name: str, weight: Tensor, received: Mapping[str, Tensor]) -> _Layer:
        """Find the biases by name, or if names do not help, directly after the weights."""
        path, dot, kind = _weight(name).rpartition(".")
        if "weight" in kind:
            bias_name = path + dot + kind.replace("weight", "bias")
        else:
            names = list(received)
            bias_name = names[min(names.index(name) + 1, len(names) - 1)]
        bias = received.get(bias_name)
        units = (*weight.shape[:2],)
        if bias is None or bias.ndim != 1 or len(bias) not in units:
            return _Layer(name, weight.detach().flatten(1).double(), bias_name, None)
        if len(bias) != units[0]:  # a transposed convolution, or weights [in, out]
            weight = weight.transpose(0, 1)
        return _Layer(name, weight.detach().flatten(1).double(), bias_name, bias.detach().double())


def inspect(
    model: nn.Module | None,
    received: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None = None,
    sent: Mapping[str, Tensor] | None = None,
    rounds: int = 1,
) -> list[Finding]:
    """Look for indicators of manipulation in received parameters (and buffers), with the help of a model if given.

    A jump is found by comparison with the parameters `previous`, received `rounds` before, and with the update `sent`
    (parameters in minus parameters out) that this client then replied with. The bound grows with the rounds.
    """
    findings: list[Finding] = []
    for name, value in received.items():
        if not bool(torch.isfinite(value).all()):
            findings.append(Finding("not finite", name, "holds NaN or infinite values"))
    broken = {finding.where for finding in findings}
    layers = _layers(model, received)
    last = _last(model, layers)
    for name, weight in layers.items():
        layer = _Layer.of(name, weight, received)
        if name in broken or layer.bias_name in broken:
            continue
        for check in (_fishing,) if name == last else (_imprint, _trap, _quantile, _extreme):
            findings += check(layer)
    findings += _norms(received, broken)
    if previous is not None:
        findings += _jump(received, previous, sent, broken, rounds)
    return findings


def guarded(
    model: nn.Module | None,
    received: Mapping[str, Tensor],
    policy: Policy,
    report: Callable[[Finding], None],
    previous: Mapping[str, Tensor] | None = None,
    sent: Mapping[str, Tensor] | None = None,
    rounds: int = 1,
) -> None:
    """Inspect a received model and apply the policy: raise an error, report every finding, or do nothing."""
    refuse(POLICY.problems("guard", policy))
    if policy == "ignore":
        return
    findings = inspect(model, received, previous, sent, rounds)
    if policy == "refuse" and findings:
        raise GradveilError(finding.problem("error") for finding in findings)
    for finding in findings:
        report(finding)


def _layers(model: nn.Module | None, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of layers: matrices called `weight`, or else every matrix; no embeddings."""
    modules = dict(model.named_modules()) if model is not None else {}
    parameters = dict(model.named_parameters()) if model is not None else {}

    def embeds(name: str) -> bool:
        module = modules.get(_weight(name).rpartition(".")[0])
        return "emb" in name.lower() if module is None else isinstance(module, nn.Embedding)

    # Integers in place of a parameter become its values once the model has loaded them.
    matrices = {n: v for n, v in received.items() if v.ndim >= 2 and parameters.get(n, v).is_floating_point()}
    called = {name: value for name, value in matrices.items() if "weight" in _kind(_weight(name))}
    return {name: value for name, value in (called or matrices).items() if value.numel() and not embeds(name)}


def _last(model: nn.Module | None, layers: Mapping[str, Tensor]) -> str | None:
    """Return the name of the last layer's weight; without a model, the last matrix with the fewest rows."""
    try:
        path = last_layer(model) if model is not None else ""
    except GradveilError:
        path = ""
    if (name := qualified(path, "weight")) in layers and model is not None:
        return name
    matrices = [name for name, value in layers.items() if value.ndim == 2]
    return min(reversed(matrices), key=lambda name: len(layers[name]), default=None)


def _weight(name: str) -> str:
    """Return the weight that a tensor parametrises, or the name itself.

    >>> _weight("head.parametrizations.weight.original1"), _weight("head.weight")
    ('head.weight', 'head.weight')
    """
    path, parametrised, rest = name.rpartition("parametrizations.")
    return path + rest.rpartition(".")[0] if parametrised else name


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _most(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0


def _imprint(layer: _Layer) -> Iterator[Finding]:
    """Report rows that are copies of one measurement, with biases that cut its range into bins."""
    rows, bias = layer.rows, layer.bias
    if len(rows) < _ROWS or rows.shape[1] < _COLUMNS:
        return
    sizes = rows.norm(dim=1)
    unit = (rows / sizes[:, None].clamp(min=1e-30)).float()
    same = _shared(unit, _PARALLEL)
    number = int(same.sum())
    # Copies also differ in bias, while units that have learned the same do not. Jittered copies agree in size.
    near = _shared(unit, _JITTERED)
    graded = bias is not None and len(bias[near].unique()) > 0.5 * int(near.sum())
    copies = int(((sizes[near] / sizes[near].median() - 1).abs() < _COPIED).sum()) if graded else 0
    if bias is not None and number >= _ROWS:
        cuts = bias[same] / sizes[same].clamp(min=1e-30)
        spread = float(cuts.std()) > _JITTER * float(cuts.abs().max())
        copies = max(copies, number if spread and len(cuts.unique()) > 0.5 * number else 0)
    many = number >= max(_ROWS, _MOST * len(rows))
    if many or copies >= max(_ROWS, _SOME * len(rows)):
        number = max(number if many else 0, copies)
        more = " and their biases differ" if graded else ""
        yield Finding("imprint", layer.name, f"{number} of {len(rows)} rows point the same way{more}")


def _shared(unit: Tensor, least: float) -> Tensor:
    """Return which rows have the direction that most rows share."""
    alike = torch.cat([((block @ unit.T).abs() > least).sum(1) for block in unit.split(_BLOCK)])
    return (unit @ unit[int(alike.argmax())]).abs() > least


def _trap(layer: _Layer) -> Iterator[Finding]:
    """Report rows in which half of the weights are the other half, negative and scaled by one number."""
    name, rows = layer.name, layer.rows
    half = rows.shape[1] // 2
    if len(rows) < _ROWS or half < _COLUMNS:
        return
    exact: list[Tensor] = []
    halved: list[Tensor] = []
    for block in rows.split(_BLOCK):
        # Sorting is slow, and few rows of an honest layer have as many positive as negative weights.
        in_half = ((block <= 0).sum(1) >= half) & ((block >= 0).sum(1) >= half)
        ordered = block[in_half].sort(1).values
        # Sizes of the smaller half's and of the larger half's weights, each from the largest on: a trap's are
        # proportional.
        below, above = -ordered[:, :half], ordered.flip(1)[:, :half]
        various = (below.diff(dim=1) != 0).sum(1) >= _KINDS
        split = (below[:, -1] >= 0) & (above[:, -1] >= 0) & (below[:, 0] > 0) & (above[:, 0] > 0) & various
        scale = above.sum(1) / below.sum(1).clamp(min=1e-30)
        apart = (above - scale[:, None] * below).norm(dim=1) / above.norm(dim=1).clamp(min=1e-30)
        exact.append(scale[split & (apart < _PAIRED)])
        halved.append(scale[(below[:, -1] > 0) & (above[:, -1] > 0) & various])
    paired, alike = torch.cat(exact), _densest(torch.cat(halved))
    if len(paired) >= max(_ROWS, _MOST * len(rows)):
        evidence = f"in {len(paired)} of {len(rows)} rows the positive weights are the negative ones times"
        yield Finding("trap", name, f"{evidence} {float(paired.median()):.3f}")
    elif len(alike) >= max(_ROWS, _SOME * len(rows)):
        # Of n random weights just half are positive once in sqrt(pi n / 2) rows, and then the sums differ.
        evidence = f"in {len(alike)} of {len(rows)} rows just half of the weights are positive, and their sum is"
        yield Finding("trap", name, f"{evidence} {float(alike.median()):.3f} times that of the others")


def _densest(scales: Tensor) -> Tensor:
    """Return the most numbers within one window of twice the tolerance."""
    ordered = scales.sort().values
    ends = torch.searchsorted(ordered, ordered * (1 + 2 * _BALANCED), right=True)
    counts = ends - torch.arange(len(ordered), device=ordered.device)
    first = int(counts.argmax()) if len(ordered) else 0
    return ordered[first : int(ends[first])] if len(ordered) else ordered


def _quantile(layer: _Layer) -> Iterator[Finding]:
    """Report biases that close most units for most inputs (Nowak et al. 2024), with honest weights."""
    sizes = layer.rows.norm(dim=1)
    live = sizes > 0
    if layer.bias is None or int(live.sum()) < 2 * _ROWS or layer.rows.shape[1] < _COLUMNS:
        return
    cuts = layer.bias[live] / sizes[live]
    shut, median = int((cuts < 0).sum()), -float(cuts.median())
    # Biases beyond the reach of inputs of size 1 make units dead, which `_extreme` reports.
    if shut >= _SHUT * len(cuts) and _UNITS < median <= layer.rows.shape[1] ** 0.5:
        evidence = (
            f"is below zero in {shut} of {len(cuts)} units, by {median:.2f} times the length of a row in the median"
        )
        yield Finding("quantile", layer.bias_name, evidence)


def _norms(received: Mapping[str, Tensor], broken: set[str]) -> Iterator[Finding]:
    """Report norms that are far out of scale, or whose biases close most channels."""
    for name, scale in received.items():
        if scale.ndim != 1 or _kind(name) != "weight" or name in broken:
            continue
        if _most(scale) > _OUT_OF_SCALE:
            yield Finding("extreme", name, f"reaches {_most(scale):.3g}, where a norm's scale is about 1")
        bias_name = name.removesuffix("weight") + "bias"
        bias = received.get(bias_name)
        if bias is None or bias_name in broken or bias.shape != scale.shape or len(bias) < 2 * _ROWS:
            continue
        shut = int((bias.double() < -_CHANNELS * scale.double().abs())[scale != 0].sum())
        if shut > _SHUT * len(bias):
            evidence = f"lies {_CHANNELS} deviations or more below zero in {shut} of {len(bias)} channels"
            yield Finding("quantile", bias_name, evidence)


def _extreme(layer: _Layer) -> Iterator[Finding]:
    """Report layers that are dead, or so far out of scale that no features pass them."""
    name, rows, bias = layer.name, layer.rows, layer.bias
    fan_in = rows.shape[1]
    # A layer that keeps the variance of its input has weights of root mean square 1 / sqrt(fan in).
    sizes = rows.norm(dim=1)
    if not bool(sizes.any()):  # a residual branch or an adapter that starts at zero
        return
    dead = sizes < 1 / _OUT_OF_SCALE**2
    # Pruning leaves zeros, and nothing that is nearly zero.
    if int((dead & (sizes > 0)).sum()) > _MOST * len(rows) or int(dead.sum()) > _EMPTY * len(rows):
        yield Finding("extreme", name, f"{int(dead.sum())} of {len(rows)} rows are zero, or as good as that")
        return
    gain = float(rows[sizes > 0].square().mean().sqrt()) * fan_in**0.5
    if gain > _OUT_OF_SCALE:
        yield Finding("extreme", name, f"its weights are {gain:.0f} times as large as those that keep a signal's size")
    elif gain < 1 / _OUT_OF_SCALE**2:
        yield Finding("extreme", name, f"its weights are {1 / gain:.0f} times too small to keep a signal's size")
    if bias is None:
        return
    # |w x| <= |w| |x|, and inputs of size 1 have |x| = sqrt(fan in): behind such biases units are off, or always on.
    beyond = int((bias.abs() > sizes * fan_in**0.5)[sizes > 0].sum()) if fan_in >= _COLUMNS else 0
    if float(bias.abs().max()) > _OUT_OF_SCALE:
        yield Finding("extreme", layer.bias_name, f"reaches {float(bias.abs().max()):.3g}")
    elif beyond > _MOST * int((sizes > 0).sum()):
        evidence = f"lies beyond what inputs of size 1 reach in {beyond} of {len(rows)} units"
        yield Finding("extreme", layer.bias_name, evidence)


def _fishing(layer: _Layer) -> Iterator[Finding]:
    """Report a last layer in which only the examples of one class, or of one feature, count."""
    name, rows, bias = layer.name, layer.rows, layer.bias
    sizes = rows.norm(dim=1)
    empty = sizes <= _NOTHING * sizes.max()
    # Pruning may remove a class or two. To fish for a class, a server empties most of the others.
    if len(rows) <= 2 * int(empty.sum()) < 2 * len(rows):
        yield Finding("fishing", name, f"{int(empty.sum())} of {len(rows)} classes have no weights to speak of")
    if rows.shape[1] >= _COLUMNS and bool((~empty).any()):
        columns = rows[~empty].norm(dim=0)
        used = columns > _NOTHING * columns.max()
        if int(used.sum()) <= max(1, 0.05 * len(used)):
            yield Finding("fishing", name, f"only {int(used.sum())} of {len(used)} features count")
    if bias is not None and float(bias.max() - bias.min()) > _NATS:
        spread = float(bias.max() - bias.min())
        yield Finding("fishing", layer.bias_name, f"biases {spread:.0f} nats apart exclude classes")


def _jump(
    received: Mapping[str, Tensor],
    previous: Mapping[str, Tensor],
    sent: Mapping[str, Tensor] | None,
    broken: set[str],
    rounds: int,
) -> Iterator[Finding]:
    """Report parameters that moved farther than a mean of updates like the client's own moves them."""
    for name, before in previous.items():
        after = received.get(name)
        if name in broken:
            continue
        if after is None or after.shape != before.shape:
            yield Finding("jump", name, "was there in the round before, with another shape or not at all now")
            continue
        moved = float((after.double() - before.double()).norm())
        # Parameters near zero are measured by those that keep a signal's size: rows of length 1, biases of 1.
        whole = len(before) ** 0.5 if before.ndim else 1.0
        size = max(float(before.double().norm()), 0.5 * whole if before.ndim > 1 else whole)
        update_size = None if sent is None or name not in sent else float(sent[name].double().norm())
        if update_size is None:
            if moved > _FAR * rounds**0.5 * size:
                yield Finding("jump", name, f"moved by {moved / size:.3g} times its size")
        elif moved > _JUMP * rounds * update_size and moved > _LEAP * rounds**0.5 * size:
            often = f"{moved / update_size:.3g} times as far as" if update_size else "without"
            yield Finding("jump", name, f"moved by {moved / size:.3g} times its size, {often} one's own update")
