"""A client's inspection of a received model: patterns that honest training does not produce.

Rows that are copies of each other with graded biases (imprint), rows whose positive weights are the negative ones
scaled (trap), biases that hold most units of a layer shut (quantile), layers that are dead or far out of scale, a last
layer that lets one class or one feature through (fishing), and a jump that no client's update explains. Nothing here
proves a server honest, and weights can be made to look random. This is the second line: the first is the client's look
at its own update (`gradveil.federated.update_inspection`), which needs no pattern.

Layers are found by the names of what was received, so that a server's tensors are looked at whatever the client's model
calls its own. The model says which of them are embeddings, and which is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, Problem, refuse
from gradveil.core.settings import Choice
from gradveil.nn.module_paths import last_layer

Family = Literal["imprint", "trap", "quantile", "extreme", "fishing", "jump", "not finite", "leak", "malice"]
Policy = Literal["warn", "refuse", "ignore"]
POLICY = Choice(get_args(Policy))
"""What may be said: a policy that is misspelt must not pass for a milder one."""

_ROWS = 8
"""A layer with fewer rows is too small to tell a pattern from chance."""
_COLUMNS = 16
_MOST, _SOME = 0.5, 0.1
"""The share of a layer's rows that have to show a trace; of rows that are copies down to their size, a tenth does."""
_PARALLEL = 0.999
_JITTERED, _COPIED = 0.99, 0.02
"""How parallel copies are that jitter of a tenth of each weight was added to, and how far their sizes differ."""
_JITTER = 0.05
"""How far the cuts of parallel rows of any size lie apart, in units of the largest."""
_PAIRED = 2e-3
_BALANCED = 0.01
"""How far sums of positive over those of negative weights lie from each other in rows that were scaled alike."""
_OUT_OF_SCALE = 50.0
_NOTHING = 0.02
"""A row or column of a last layer this much smaller than the largest lets nothing through."""
_EMPTY = 0.9
"""The share of a layer's rows that pruning leaves at zero, and no more. A layer that is zero as a whole starts so."""
_SHUT, _UNITS, _CHANNELS = 0.7, 0.4, 1.25
"""The share of units with biases below zero, their median in units of the row's length, and how far biases of a norm
lie below zero in units of its weights. Honest medians lie above -0.15."""
_KINDS = 8
"""Sizes that the weights of a row have at least: those of quantised rows say nothing."""
_NATS = 20.0
"""A difference of last biases beyond which a class is as good as excluded; one in a million examples is 14."""
_JUMP, _LEAP, _FAR = 10.0, 0.3, 3.0
"""How often as far as one's own update, and how far in sizes of the tensor, nothing honest moves in one round. Both are
asked for: a server's momentum goes on where gradients have vanished, but not across the tensor. The last is the size
alone, where one's own update is not known."""
_BLOCK = 1024
"""Rows that are compared at once, so that wide layers take little memory."""
_REMEDY = "do not train on it: ask who runs the server, or leave this round out"
_REMEDIES: Mapping[str, str] = {
    "leak": "train on larger batches, clip and add noise, or leave this round out",
    "malice": "do not send it: ask who runs the server, or leave this round out",
}


@dataclass(frozen=True)
class Finding:
    """One trace of a manipulation: which layer, which family, and what was seen."""

    family: Family
    where: str
    what: str

    def problem(self, severity: Literal["error", "warning"]) -> Problem:
        """Say it as every other problem is said."""
        return Problem(self.where, f"{self.family}: {self.what}", _REMEDIES.get(self.family, _REMEDY), severity)


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, a row for each of its units, and their biases."""

    name: str
    rows: Tensor
    bias_name: str
    bias: Tensor | None

    @staticmethod
    def of(name: str, weight: Tensor, received: Mapping[str, Tensor]) -> _Layer:
        """Find the biases by their name, or where names say nothing behind the weights."""
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
    """Look for traces of manipulation in received parameters (and buffers), of this model if one is given.

    `previous` are the parameters of so many `rounds` before, `sent` the update that this client sent in answer to them
    (parameters in minus parameters out): with them a jump can be told. The more rounds have passed, the less is one.
    """
    found: list[Finding] = []
    for name, value in received.items():
        if not bool(torch.isfinite(value).all()):
            found.append(Finding("not finite", name, "holds NaN or infinite values"))
    broken = {finding.where for finding in found}
    layers = _layers(model, received)
    last = _last(model, layers)
    for name, weight in layers.items():
        layer = _Layer.of(name, weight, received)
        if name in broken or layer.bias_name in broken:
            continue
        looks = (_fishing,) if name == last else (_imprint, _trap, _quantile, _extreme)
        for look in looks:
            found += look(layer)
    found += _norms(received, broken)
    if previous is not None:
        found += _jump(received, previous, sent, broken, rounds)
    return found


def guarded(
    model: nn.Module | None,
    received: Mapping[str, Tensor],
    policy: Policy,
    tell: Callable[[Finding], None],
    previous: Mapping[str, Tensor] | None = None,
    sent: Mapping[str, Tensor] | None = None,
    rounds: int = 1,
) -> None:
    """Inspect a received model and act as the policy says: refuse by raising, tell every finding, or do nothing."""
    refuse(POLICY.problems("guard", policy))
    if policy == "ignore":
        return
    found = inspect(model, received, previous, sent, rounds)
    if policy == "refuse" and found:
        raise GradveilError(finding.problem("error") for finding in found)
    for finding in found:
        tell(finding)


def _layers(model: nn.Module | None, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pick the weights of layers: matrices called `weight`, or every matrix where names say nothing; no embeddings."""
    modules = dict(model.named_modules()) if model is not None else {}
    own = dict(model.named_parameters()) if model is not None else {}

    def embeds(name: str) -> bool:
        module = modules.get(_weight(name).rpartition(".")[0])
        return "emb" in name.lower() if module is None else isinstance(module, nn.Embedding)

    # Whole numbers in the place of a parameter are its values as soon as the model has taken them up.
    matrices = {n: v for n, v in received.items() if v.ndim >= 2 and own.get(n, v).is_floating_point()}
    called = {name: value for name, value in matrices.items() if "weight" in _kind(_weight(name))}
    return {name: value for name, value in (called or matrices).items() if value.numel() and not embeds(name)}


def _last(model: nn.Module | None, layers: Mapping[str, Tensor]) -> str | None:
    """Name the last layer's weight: where no model tells, the matrix of the fewest rows, in whatever order it came."""
    try:
        path = last_layer(model) if model is not None else ""
    except GradveilError:
        path = ""
    if (name := f"{path}.weight" if path else "weight") in layers and model is not None:
        return name
    matrices = [name for name, value in layers.items() if value.ndim == 2]
    return min(reversed(matrices), key=lambda name: len(layers[name]), default=None)


def _weight(name: str) -> str:
    """Name the weight that a tensor is a part of, where torch parametrises it.

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
    """Tell rows that are copies of one measurement, with biases that cut its range into bins."""
    rows, bias = layer.rows, layer.bias
    if len(rows) < _ROWS or rows.shape[1] < _COLUMNS:
        return
    sizes = rows.norm(dim=1)
    unit = (rows / sizes[:, None].clamp(min=1e-30)).float()
    same = _shared(unit, _PARALLEL)
    number = int(same.sum())
    # A tenth of the rows has to differ in bias too: units that learn the same do not. Jittered ones agree in size.
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
    """Tell which rows have the direction that most rows share, if they share one: that of most of them."""
    alike = torch.cat([((block @ unit.T).abs() > least).sum(1) for block in unit.split(_BLOCK)])
    return (unit @ unit[int(alike.argmax())]).abs() > least


def _trap(layer: _Layer) -> Iterator[Finding]:
    """Tell rows of which half of the weights are the other half, negative and scaled by one number."""
    name, rows = layer.name, layer.rows
    half = rows.shape[1] // 2
    if len(rows) < _ROWS or half < _COLUMNS:
        return
    exact: list[Tensor] = []
    halved: list[Tensor] = []
    for block in rows.split(_BLOCK):
        # Few rows of an honest layer are split in half, and sorting takes its time.
        in_half = ((block <= 0).sum(1) >= half) & ((block >= 0).sum(1) >= half)
        ordered = block[in_half].sort(1).values
        below, above = -ordered[:, :half], ordered.flip(1)[:, :half]
        various = (below.diff(dim=1) != 0).sum(1) >= _KINDS
        split = (below[:, -1] >= 0) & (above[:, -1] >= 0) & (below[:, 0] > 0) & (above[:, 0] > 0) & various
        scale = above.sum(1) / below.sum(1).clamp(min=1e-30)
        apart = (above - scale[:, None] * below).norm(dim=1) / above.norm(dim=1).clamp(min=1e-30)
        exact.append(scale[split & (apart < _PAIRED)])
        halved.append(scale[(below[:, -1] > 0) & (above[:, -1] > 0) & various])
    paired, alike = torch.cat(exact), _densest(torch.cat(halved))
    if len(paired) >= max(_ROWS, _MOST * len(rows)):
        what = f"in {len(paired)} of {len(rows)} rows the positive weights are the negative ones times"
        yield Finding("trap", name, f"{what} {float(paired.median()):.3f}")
    elif len(alike) >= max(_ROWS, _SOME * len(rows)):
        # Of n random weights just half are positive once in sqrt(pi n / 2) rows, and then the sums differ.
        what = f"in {len(alike)} of {len(rows)} rows just half of the weights are positive, and their sum is"
        yield Finding("trap", name, f"{what} {float(alike.median()):.3f} times that of the others")


def _densest(scales: Tensor) -> Tensor:
    """Pick as many numbers as lie within one window, twice the tolerance wide."""
    ordered = scales.sort().values
    ends = torch.searchsorted(ordered, ordered * (1 + 2 * _BALANCED), right=True)
    counts = ends - torch.arange(len(ordered), device=ordered.device)
    first = int(counts.argmax()) if len(ordered) else 0
    return ordered[first : int(ends[first])] if len(ordered) else ordered


def _quantile(layer: _Layer) -> Iterator[Finding]:
    """Report biases that hold most units shut for most inputs (Nowak et al. 2024), where the weights are honest."""
    sizes = layer.rows.norm(dim=1)
    live = sizes > 0
    if layer.bias is None or int(live.sum()) < 2 * _ROWS or layer.rows.shape[1] < _COLUMNS:
        return
    cuts = layer.bias[live] / sizes[live]
    shut, median = int((cuts < 0).sum()), -float(cuts.median())
    # Beyond what inputs of size 1 reach units are dead, which is another trace.
    if shut >= _SHUT * len(cuts) and _UNITS < median <= layer.rows.shape[1] ** 0.5:
        what = f"is below zero in {shut} of {len(cuts)} units, by {median:.2f} times the length of a row in the median"
        yield Finding("quantile", layer.bias_name, what)


def _norms(received: Mapping[str, Tensor], broken: set[str]) -> Iterator[Finding]:
    """Report norms that are far out of scale, or whose biases hold most channels shut."""
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
            what = f"lies {_CHANNELS} deviations or more below zero in {shut} of {len(bias)} channels"
            yield Finding("quantile", bias_name, what)


def _extreme(layer: _Layer) -> Iterator[Finding]:
    """Tell layers that are dead, or so far out of scale that what passes them is no feature any more."""
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
        what = f"lies beyond what inputs of size 1 reach in {beyond} of {len(rows)} units"
        yield Finding("extreme", layer.bias_name, what)


def _fishing(layer: _Layer) -> Iterator[Finding]:
    """Tell a last layer that lets the examples of one class, or of one feature, be the only ones that count."""
    name, rows, bias = layer.name, layer.rows, layer.bias
    sizes = rows.norm(dim=1)
    empty = sizes <= _NOTHING * sizes.max()
    # A class or two may have been pruned away; to fish for some, a server empties the others.
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
    """Tell parameters that moved farther than the mean of updates like one's own moves them."""
    for name, before in previous.items():
        now = received.get(name)
        if name in broken:
            continue
        if now is None or now.shape != before.shape:
            yield Finding("jump", name, "was there in the round before, with another shape or not at all now")
            continue
        moved = float((now.double() - before.double()).norm())
        # What starts at zero is measured by what keeps a signal's size: rows of length 1, biases of 1.
        whole = len(before) ** 0.5 if before.ndim else 1.0
        size = max(float(before.double().norm()), 0.5 * whole if before.ndim > 1 else whole)
        own = None if sent is None or name not in sent else float(sent[name].double().norm())
        if own is None:
            if moved > _FAR * rounds**0.5 * size:
                yield Finding("jump", name, f"moved by {moved / size:.3g} times its size")
        elif moved > _JUMP * rounds * own and moved > _LEAP * rounds**0.5 * size:
            often = f"{moved / own:.3g} times as far as" if own else "without"
            yield Finding("jump", name, f"moved by {moved / size:.3g} times its size, {often} one's own update")
