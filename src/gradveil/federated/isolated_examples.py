"""Single examples in the rows of a gradient: rows and differences of rows compared with examples' inputs.

Each row of a layer's gradient is a sum over the batch, dW_i = sum_e D_ei x_e, with the error D_ei of example e at unit
i. If one example has nearly all of a unit's error, the row is that example's input up to a factor. The same holds for
differences of two rows (imprints). The client knows D. It therefore needs no model of an attack to count isolated
examples. One pass over the batch is enough, without weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.tree import Tensors, single
from gradveil.core.types import Batch
from gradveil.federated.weight_gradients import (
    CONVOLUTIONS,
    Owned,
    Part,
    WeightGradients,
    agreement,
    as_linear,
    source_gradients,
)
from gradveil.nn.module_paths import call_on
from gradveil.nn.normalisation import BatchStatistics
from gradveil.nn.stochastic import collect_penalties
from gradveil.nn.surgery import BatchNorm

_SAME = 1 - 1e-6
"""The cosine of two units' errors that are one and the same up to a factor."""
_ROUNDING = 1e-10
_MADE = 1e-4
"""What is left of errors that are made of others, as a share of them."""
_PARTNERS, _LOOKED = 3, 256
"""How many partners a unit has, and the units that have any: at least so many, or twice the examples."""
_SEVERAL = 4
"""The fewest examples (or groups of them) that units are compared by: many units have the same two or three."""
_BLOCK = 1024
"""Units that are compared at once, so that wide layers take little memory."""

Pairs = tuple[Tensor, Tensor, Tensor]
"""Places of first and second rows, and the factors that the second ones are multiplied by."""


def unit_scales(errors: Tensor) -> Tensor:
    """Return each unit's largest error of [..., K], or 1 where it has none.

    Each row of a gradient is as exact as its own numbers: a unit whose errors are 1e-25 times those of the others shows
    its examples as well as they do. Units are therefore judged each on its own scale.

    >>> unit_scales(torch.tensor([[1.0, 1e-25, 0.0], [-4.0, 0.0, 0.0]])).tolist() == [4.0, torch.tensor(1e-25), 1.0]
    True
    """
    largest = errors.abs().flatten(0, -2).amax(0) if len(errors) else errors.new_ones(errors.shape[-1])
    return torch.where(largest > 0, largest, 1.0)


def shared_support(support: Tensor) -> tuple[int, Tensor, int]:
    """Compare units by the examples that have an error there at all [B, K].

    Returns the number of units with an error of four or more examples but not of all, the places of those that have
    just the examples of another such unit, and the number of groups of examples. Examples that no unit tells apart
    are one group: copies of an image would make units alike. Groups without any error do not count.

    >>> first_four = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0], [0.0]])
    >>> shared_support(torch.cat([torch.eye(6), first_four, 2 * first_four], 1) != 0)
    (2, tensor([6, 7]), 6)
    """
    support = support.unique(dim=0)
    support = support[support.any(1)]
    count = support.sum(0)
    places = ((count >= _SEVERAL) & (count < len(support))).nonzero().flatten()
    if not len(places):
        return 0, places, len(support)
    _, group, units = support[:, places].unique(dim=1, return_inverse=True, return_counts=True)
    return len(places), places[units[group] > 1], len(support)


def solved(errors: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Find what is left of one example where a group of units is made of another one, by relative errors [B, K].

    The units of a group are open for the same examples (`support`). Where another group is open for one example more,
    and its errors of all others are combinations of the first one's, the same combinations of rows leave that example's
    input alone. Errors of more examples than units are not made of others by chance. Returns the combinations [n, K]
    and the examples [n]. Of single rows and pairs of them (`partners`) it says nothing.

    >>> own = torch.arange(6.0)[:, None]
    >>> group = torch.cat([1 + own, own.square() + 1], 1)
    >>> errors = torch.cat([(own < 4) * group, (own < 5) * group], 1)
    >>> solved(errors, errors != 0)[1]
    tensor([4, 4])
    """
    errors, support, device = errors.cpu().double(), support.cpu(), errors.device
    sure = errors.any(1)
    place = ((support & sure[:, None]).sum(0) >= _SEVERAL).nonzero().flatten()
    found, owner = [errors.new_zeros(0, errors.shape[1])], list[int]()
    if len(place):
        kinds = support[:, place] & sure[:, None]
        kinds, group, units = kinds.unique(dim=1, return_inverse=True, return_counts=True)
        for less, more in _nested(kinds, units):
            rest = kinds[:, less] == kinds[:, more]
            base, others = place[group == less], place[group == more]
            own, wanted = errors[rest][:, base], errors[rest][:, others]
            factors = torch.linalg.pinv(own) @ wanted
            made = (wanted - own @ factors).norm(dim=0) < _MADE * wanted.norm(dim=0)
            rows = errors.new_zeros(int(made.sum()), errors.shape[1])
            rows[torch.arange(len(rows)), others[made]] = 1.0
            rows[:, base] = -factors[:, made].T
            found.append(rows)
            owner += [int((~rest).nonzero())] * len(rows)
    return torch.cat(found).to(device), torch.tensor(owner, dtype=torch.long, device=device)


def _nested(kinds: Tensor, units: Tensor) -> list[list[int]]:
    """Pair the groups of several units with those that have one example more, if fewer units than examples are shared.

    `kinds` [B, G] tells the examples of each group.
    """
    several = (units > 1).nonzero().flatten()
    own = kinds[:, several].double()
    count = own.sum(0)
    within = (own.T @ own == count[:, None]) & (count == count[:, None] + 1) & (units[several] < count)[:, None]
    return several[within.nonzero()[:_LOOKED]].tolist()


def partners(errors: Tensor, scaled: Tensor) -> Pairs:
    """Pair each unit with those whose errors [B, K] are most nearly the same up to a factor.

    Bins of an imprint differ by one example each, whatever their rows, sizes and order are. Of units that are the same
    up to a factor one is taken. Pairs are chosen by scaled errors, in which no example is larger than others.
    """
    unit = scaled / scaled.norm(dim=0).clamp(min=1e-30)
    kept = _distinct(unit)
    unit = unit[:, kept]
    place = torch.arange(len(kept), device=kept.device)
    # Neighbours in an imprint are the most alike of all units: of a wide layer those are looked at.
    most = max(_LOOKED, 2 * len(errors))
    if len(kept) > most:
        alike = torch.cat([_alike(unit, some).amax(1) for some in place.split(_BLOCK)])
        place = alike.topk(most).indices
    count = max(0, min(_PARTNERS, len(kept) - 1))
    near = _alike(unit, place).topk(count, dim=1).indices
    first, second = kept[place].repeat_interleave(count), kept[near.flatten()]
    own, other = errors[:, first], errors[:, second]
    # Off the examples that both have, a quotient is zero or infinite: neither counts.
    ratio = own / other
    ratio = torch.where((own != 0) & ratio.isfinite(), ratio, torch.nan)
    factor = ratio.nanmedian(0).values.nan_to_num(1.0) if len(first) else ratio.new_zeros(0)
    # Where hardly anything is left, the two were the same but for rounding.
    left = (own - factor * other).square().sum(0) > _ROUNDING * own.square().sum(0)
    return first[left], second[left], factor[left]


def _alike(unit: Tensor, some: Tensor) -> Tensor:
    """Return |cos| of some units with all, and -1 with themselves."""
    alike = (unit[:, some].T @ unit).abs()
    return alike.scatter_(1, some[:, None], -1.0)


def _distinct(unit: Tensor) -> Tensor:
    """Return the places of columns of length 1, one of those that are the same up to a sign; none of zeros."""
    mark = torch.linspace(1, 2, len(unit), dtype=unit.dtype, device=unit.device).cos()
    order = (mark @ unit).abs().argsort()
    ordered = unit[:, order]
    same = (ordered[:, 1:] * ordered[:, :-1]).sum(0).abs() > _SAME
    new = torch.cat([same.new_ones(1), ~same]) if len(order) else same
    return order[new & (ordered.square().sum(0) > 0.5)].sort().values


def difference(rows: Tensor, pairs: Pairs | None) -> Tensor:
    """Return rows as they are, or each first less its second times the factor."""
    if pairs is None:
        return rows
    first, second, factor = pairs
    factor = factor.view(-1, *[1] * (rows.ndim - 1))
    return rows[first].to(factor) - factor * rows[second].to(factor)


def unscaled(pairs: Pairs | None, scales: Tensor) -> Pairs | None:
    """Return pairs that were found in units on a scale of their own as they are without it, in double precision."""
    if pairs is None:
        return None
    first, second, factor = pairs
    return first, second, factor.double() * scales[first].double() / scales[second].double()


def chosen(pairs: Pairs | None, rows: Tensor) -> Pairs:
    """Return the pairs at some places, or single rows as pairs without a second."""
    if pairs is None:
        return rows, rows, torch.zeros(len(rows), dtype=torch.double, device=rows.device)
    first, second, factor = pairs
    return first[rows], second[rows], factor[rows]


def divided(rows: Tensor, by: Tensor) -> Tensor:
    """Divide rows [K, n] by numbers [K] that are not zero, each as exact as it is by itself."""
    quotients = rows.double() / by.double()[:, None]
    return quotients[quotients.isfinite().all(1)]


@dataclass(frozen=True)
class Inputs:
    """A layer's inputs [B, n]."""

    x: Tensor

    @property
    def variance(self) -> Tensor:
        """Their variance over the examples, that of the median example; over the entries where there is one example.

        One example out of scale would make every other one look close to anything.
        """
        centre = self.x.median(0).values if len(self.x) > 2 else self.x.mean(0) if len(self.x) > 1 else self.x.mean()
        return (self.x - centre).square().mean(1).median().clamp(min=1e-30)

    def pooled(self, rows: Tensor, owner: Tensor, errors: Tensor, most: float) -> set[int]:
        """Return the owners that are read from all of their rows at once, weighted by their errors: noise averages."""
        examples, place = owner.unique(return_inverse=True)
        weighted = errors.double()[:, None] * rows.double()
        sums = weighted.new_zeros(len(examples), rows.shape[1]).index_add_(0, place, weighted)
        return self.near(sums, examples, most)

    def near(self, rows: Tensor, owner: Tensor, most: float) -> set[int]:
        """Return the owners of rows that are their input, up to a factor and this share of the variance."""
        truth, rows = self.x[owner].double(), rows.double()
        factor = (rows * truth).sum(1) / rows.square().sum(1).clamp(min=1e-300)
        error = (truth - factor[:, None] * rows).square().mean(1)
        return set(owner[error < most * self.variance].tolist())

    def solved(self, candidates: Tensor, most: float) -> set[int]:
        """Return the examples that lie at one of the candidates [n, ...]."""
        if not len(candidates):
            return set()
        x = self.x.to(candidates)
        apart = candidates.square().sum(1)[:, None] - 2 * candidates @ x.T + x.square().sum(1)
        return set((apart.amin(0) / self.x.shape[1] < most * self.variance).nonzero().flatten().tolist())

    def snr(self, errors: Tensor) -> float:
        """Return max_e |g_e| / |sum of the others| of the gradients g_e = D_e x_e^T, from their inner products."""
        products = (errors @ errors.T) * (self.x @ self.x.T)
        own = products.diagonal()
        others = products.sum() - 2 * products.sum(1) + own
        return float((own.clamp(min=0) / others.clamp(min=1e-60)).sqrt().max())


SILENT = 0.2
"""A layer that learns from a smaller share of the examples is compared with its gradient as a whole."""
_READ, _VISIBLE = 0.02, 0.1
"""Mean squared errors, as shares of the variance of a layer's inputs, of what was read and of what is still visible.

Behind ReLU what is read is exact. Leaky activations mix a little of all other examples in.
"""
_KEPT = 0.5
"""Most of a row that a defence may have changed, as 1 - cos^2, so that it still counts as the row of the batch."""
_OFTEN = 0.25
"""The share of units with the same examples as another one above which their rows are compared with what is sent."""
_ALONE, _SINGLED = 0.99, 0.98
"""The share of a unit's absolute errors, or of their squares, that makes it one example's own."""
_SURE = 1e-6
"""An example with a smaller share of the largest error at the output has none: its gradient is rounding."""
_FEWEST = 8
_COST = 2**33
"""Multiplications up to which each token of a layer is compared by itself, and not only each example."""
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Isolated:
    """What one layer's gradient isolates, by the positions of examples in the batch."""

    layer: str
    live: int = 0
    """Units with an error at all."""
    alone: int = 0
    """Units of which one example has more than 99% of the absolute errors."""
    owners: frozenset[int] = _NONE
    """Examples with such a unit, or with such a difference of two units."""
    singled: frozenset[int] = _NONE
    """Examples with nearly all squared error of a unit (or a difference) where each example's errors are divided by its
    own at the model's output: the parameters single them out, and not their loss."""
    effective: float = 0.0
    """(sum |D|)^2 / sum D^2 of a unit's errors, the median over live units: how many examples a row mixes."""
    heard: float = 1.0
    """(sum g)^2 / (n sum g^2) over these relative errors: the share of the examples that the layer learns from."""
    snr: float | None = None
    """D-SNR, max_e |g_e| / |sum of the others|, of linear layers of one input per example."""
    read: frozenset[int] = _NONE
    """Examples whose input to this layer can be computed from the update that is sent."""
    visible: frozenset[int] = _NONE
    """Singled out examples that the update which is sent still shows, if not exactly."""
    agreement: float = 0.0
    """cos^2 of the layer's update with its gradient, where it learns from few examples."""
    partial: int = 0
    """Units with an error of some examples, and none of others (`shared_support`)."""
    shared: int = 0
    """Those that have just the examples of another unit; of what is sent, those whose row is still that of the batch.

    Their rows span what one example adds: differences of solved groups of rows show it where no two rows do."""
    told_apart: int = 0
    """Groups of examples that the layer's open units tell apart."""
    columns: Isolated | None = None
    """The same of the columns of a linear layer's weight: which inputs are those of one example, whatever errors are.

    Of the columns an example's error is what is read, and with it, where enough are known, its input."""

    @property
    def sides(self) -> tuple[Isolated, ...]:
        """Rows, and columns where they were looked at."""
        return (self,) if self.columns is None else (self, self.columns)


@dataclass(frozen=True)
class _Rows:
    """Rows of layers that take the same inputs: errors and their support [tokens, K], and what is sent [K, n]."""

    errors: Tensor
    sent: Tensor | None
    support: Tensor

    @staticmethod
    def joined(layers: list[_Rows]) -> _Rows:
        """Return the last layer's rows with those of the others, if what is sent of them is known as well."""
        alike = [own for own in layers if (own.sent is None) is (layers[-1].sent is None)]
        errors, sent = torch.cat([own.errors for own in alike], 1), [own.sent for own in alike if own.sent is not None]
        if not _affordable(errors):
            return layers[-1]
        return _Rows(errors, torch.cat(sent) if sent else None, torch.cat([own.support for own in alike], 1))


@dataclass
class Pass:
    """One pass of a client's model over a batch, with hooks on its layers."""

    client: Client
    params: Tensors
    """Parameters, and buffers that replace the client's."""
    batch: Batch
    noise: Mapping[str, Tensor]
    sent: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The update that is about to leave; without it only errors are counted."""
    centred: bool = False
    """Whether running means are replaced by those of the batch."""
    even: bool = False
    """Whether each example starts back with an error of size 1 at the model's output, as sure as the model is of it."""
    only: frozenset[str] | None = None
    """The layers that are looked at; all if None."""
    found: dict[str, Isolated] = field(default_factory=dict[str, Isolated])

    def __post_init__(self) -> None:
        """Prepare what is collected on the way."""
        self._calls: dict[str, int] = {}
        self._parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._made: dict[int, tuple[str, Tensor]] = {}
        self._errors = torch.ones(len(self.batch.inputs), device=self.batch.inputs.device)
        self._passed: dict[str, Tensor] = {}
        self._normed: dict[str, tuple[Owned, bool]] = {}
        self._inputs: dict[str, tuple[object, ...]] = {}
        self._beside: dict[tuple[object, ...], list[_Rows]] = {}
        self._apart = False
        names, modules = {id(p): name for name, p in self.client.model.named_parameters()}, self.client.model
        self._names = {
            f"{path}.{kind}": names[id(p)]
            for path, module in modules.named_modules()
            for kind, p in module.named_parameters(recurse=False)
        }

    def run(self) -> list[Isolated]:
        """Run the model forward and backward, and return its layers in the order of the forward pass."""
        model, inputs = self.client.model, self.batch.inputs
        lent = {name: value.clone() for name, value in self.client.objective.buffers().items()}
        fixed = {
            name: value.detach().clone() if name in lent else value.detach() for name, value in self.params.items()
        }
        start = torch.zeros((), device=inputs.device, requires_grad=True)
        hooks = [m.register_forward_hook(self._forward(p, m, start)) for p, m in model.named_modules() if _looked(m)]
        if self.centred:
            hooks += [m.register_forward_pre_hook(_centre) for m in model.modules()]
        try:
            with torch.enable_grad(), collect_penalties() as penalties:
                outputs = call_on(model, {**lent, **fixed, **self.noise}, inputs)
                if not outputs.requires_grad:
                    return []
                outputs = outputs.view_as(outputs)  # a node of its own: its hook runs before those of the layers
                outputs.register_hook(self._outputs)
                torch.autograd.grad(self.client.objective.total(outputs, self.batch.targets, penalties), start)
        finally:
            for hook in hooks:
                hook.remove()
            self._made.clear()
        return [self.found[path] for path in self._calls if path in self.found]

    @property
    def unseen(self) -> tuple[str, ...]:
        """Name what is sent of matrices (and larger tensors) that belong to no layer which was looked at."""
        looked = {self._names.get(f"{path}.weight") for path in self.found}
        within = tuple(f"{path}." for path in self.found if path)
        matrices = [name for name, value in self.sent.items() if value.ndim > 1 and bool(value.any())]
        return tuple(name for name in matrices if name not in looked and not name.startswith(within))

    def _outputs(self, errors: Tensor) -> Tensor | None:
        size = _wide(errors).flatten(1).norm(dim=1)
        size = torch.where(size > _SURE * size.max(), size, torch.inf)
        self._errors = torch.where(size.isfinite(), 1.0, size) if self.even else size / size.amin()
        return (errors.transpose(0, -1) / size.to(errors)).transpose(0, -1) if self.even else None

    def _by_example(self, value: object) -> bool:
        """Whether a value is a tensor whose first dimension is the batch: of others nothing is said here."""
        return isinstance(value, Tensor) and value.ndim > 1 and len(value) == len(self.batch.inputs)

    def _forward(self, path: str, module: nn.Module, start: Tensor) -> Callable[..., Any]:
        """Return the hook that keeps a layer's input until its errors come back."""

        def hook(_module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            given: Any = arguments[0] if arguments else None
            if self._apart or not self._by_example(given) or not self._by_example(output):
                return output
            output = output if output.requires_grad else output + start
            self._calls[path] = self._calls.get(path, 0) + 1
            before, _ = self._made.get(id(given), ("", given))
            self._made[id(output)] = path, output
            self._passed[path] = output.detach() > 0
            self._inputs[path] = given.data_ptr(), given.shape, given.stride()

            def back(errors: Tensor) -> None:
                parts = self._parts.setdefault(path, [])
                parts.append((_wide(given), _wide(errors)))
                if len(parts) == self._calls[path]:
                    self._layer(path, module, self._parts.pop(path), before)

            output.register_hook(back)
            return output

        return hook

    def _layer(self, path: str, module: nn.Module, parts: list[tuple[Tensor, Tensor]], before: str) -> None:
        """Count what a layer isolates, once all of its errors have come."""
        gradients = WeightGradients(module, parts)
        sent, rows = None, as_linear(module, parts)
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            sent = self._sent(path, gradients)
        if rows is not None and _affordable(rows[1]):
            self._remember(path, rows, sent)
        if self.only is not None and self.only.isdisjoint((path, before)):
            return
        # A norm has its units where the layer before it has them: 1 of [B, C, L], the last of [B, H, W, C].
        layer = module if isinstance(module, (nn.Linear, *CONVOLUTIONS)) else self.client.model.get_submodule(before)
        by_unit = [_by_unit(errors, isinstance(layer, nn.Linear)) for _, errors in parts]
        sizes = torch.stack(by_unit).sum(0)
        sizes = sizes / unit_scales(sizes)
        raw, relative = Owned.of(sizes, _ALONE), Owned.of((sizes / self._errors[:, None]).square(), _SINGLED)
        if not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            self._normed[before] = relative, _mixes(module)
            return
        total = sizes.sum(0)
        live = total > 0
        found = Isolated(path, int(live.sum()), len(raw.rows), raw.examples, relative.examples)
        mixed = (total.square() / sizes.square().sum(0))[live].median() if bool(live.any()) else 0.0
        found = replace(found, effective=float(mixed), heard=self._heard([errors for _, errors in parts]))
        if rows is not None and _affordable(rows[1]):
            found = self._tokens(found, *rows, sent)
        elif sent is not None:
            read, visible = gradients.shown(raw, sent, _READ), gradients.shown(relative, sent, _VISIBLE)
            found = replace(found, read=read, visible=visible)
        partial, alike, groups = shared_support(self._support(path, sizes))
        shared = len(alike) if sent is not None or not self.sent else 0
        if sent is not None and shared > _OFTEN * partial:
            shared = len(gradients.kept(Owned(alike, alike), sent, _KEPT))
        found = replace(found, partial=partial, shared=shared, told_apart=groups)
        if path in self._normed:
            found = _behind_norm(found, gradients, sent, *self._normed[path])
        if sent is not None and found.heard < SILENT:
            found = replace(found, agreement=gradients.agrees(sent))
        self.found[path] = found

    def _sent(self, path: str, gradients: WeightGradients) -> Tensor | None:
        """Return what is sent of a layer's weight; its own gradient where what it is computed from shows that."""
        if f"{path}.weight" in self._names:
            return self._told(path, "weight")
        sources = {
            name: f"{path}.{name}" for name, _ in gradients.module.named_parameters() if f"{path}.{name}" in self.sent
        }
        if sources.keys() <= {"bias"}:
            return None
        self._apart = True
        own = source_gradients(gradients.module, {n: self.params[full] for n, full in sources.items()}, gradients.parts)
        self._apart = False
        told = torch.cat([_wide(self.sent[full]).flatten() for full in sources.values()])[None]
        return gradients.of(slice(None)) if float(1 - agreement(own, told)) < _KEPT else None

    def _told(self, path: str, kind: str) -> Tensor | None:
        """Return what is sent of a layer's parameter, whatever it is called."""
        return _maybe_wide(self.sent.get(self._names.get(f"{path}.{kind}", "")))

    def _remember(self, path: str, rows: Part, sent: Tensor | None) -> None:
        """Keep a layer's rows for the layers that take the same inputs."""
        errors = rows[1].flatten(0, -2)
        own = _Rows(errors, None if sent is None else sent.flatten(1), self._support(path, errors))
        self._beside.setdefault(self._inputs[path], []).append(own)

    def _heard(self, errors: list[Tensor]) -> float:
        """Return the share of the examples that a layer learns from; 1 if hardly an example has an error."""
        largest = max(float(part.abs().amax()) for part in errors) or 1.0
        energy = torch.stack([(part / largest).flatten(1).square().sum(1) for part in errors]).sum(0)
        gains = energy.sqrt() / self._errors
        sure = int(self._errors.isfinite().sum())
        squares = float(gains.square().sum())
        return float(gains.sum().square()) / squares / sure if squares and sure >= _FEWEST else 1.0

    def _support(self, path: str, sizes: Tensor) -> Tensor:
        """Tell which units each example opens [B, K]: by errors, or if none is zero (leaky activations) by outputs."""
        support, passed = sizes != 0, self._passed[path].flatten(1)
        leaky = bool(support[support.any(1)].all()) and passed.shape == support.shape
        return support & passed if leaky else support

    def _tokens(self, found: Isolated, x: Tensor, errors: Tensor, sent: Tensor | None) -> Isolated:
        """Count a linear layer's units and differences of two, token by token, and solve for its inputs.

        Layers that have been looked at and take the same inputs count as more rows of this one.
        """
        each = len(x.flatten(0, -2)) // len(x)
        x, errors = x.flatten(0, -2), errors.flatten(0, -2)
        size = self._errors.repeat_interleave(each)
        sent = None if sent is None else sent.flatten(1)
        rows = _Rows.joined(self._beside[self._inputs[found.layer]])
        sets = _sets(Inputs(x), rows.errors, size, rows.sent, rows.support)
        if sent is not None and (shift := self._told(found.layer, "bias")) is not None:
            sets["read"] |= Inputs(x).solved(divided(sent, shift), _READ)
        columns = self._columns(found.layer, x, errors, sent)
        if sent is not None:
            sets["read"] |= _unmixed(x, errors, columns["read"], sent)
        side = replace(Isolated(f"{found.layer}, columns"), **_examples(columns, each))
        snr = Inputs(x).snr(errors) if each == 1 else None
        return replace(found, snr=snr, columns=side, **_examples(sets, each))

    def _columns(self, path: str, x: Tensor, errors: Tensor, sent: Tensor | None) -> dict[str, set[int]]:
        """Find the tokens that columns isolate: the weight's gradient turned round is one of inputs D_e and errors x_e.

        An input that is active for one example counts. As visible count those that no error reaches: the rows of the
        layer before show the others.
        """
        length = errors.double().norm(dim=1)
        length = torch.where(length > _SURE * length.amax(), length, torch.inf).to(x)
        turned = torch.where(length.isfinite()[:, None], x * length[:, None], 0.0)
        inputs, update = Inputs(errors / length[:, None]), None if sent is None else sent.T
        found = _sets(inputs, turned, length, update, turned != 0)
        weight = _maybe_wide(self.params.get(self._names.get(f"{path}.weight", "")))
        if update is not None and weight is not None:
            silent = ((errors @ weight.flatten(1) == 0) | (turned == 0)).all(0) & (turned != 0).any(0)
            quiet = turned[:, silent]
            found["visible"] = _sets(inputs, quiet, length, update[silent], quiet != 0)["visible"]
        return found


def _sets(inputs: Inputs, errors: Tensor, size: Tensor, sent: Tensor | None, support: Tensor) -> dict[str, set[int]]:
    """Find the tokens that rows, differences of two rows and solved groups of rows isolate, and show in what is sent.

    `size` are the tokens' errors at the model's output.
    """
    scales, size = unit_scales(errors), size[:, None]
    scaled = errors / scales
    owners, singled, read, visible = set[int](), set[int](), set[int](), set[int]()
    for pairs in (None, partners(scaled, scaled / size)):
        own, as_sent = difference(scaled.T, pairs).T, unscaled(pairs, scales)
        raw, relative = Owned.of(own.abs(), _ALONE), Owned.of((own / size).square(), _SINGLED)
        owners |= raw.examples
        singled |= relative.examples
        if sent is not None:
            rows, weights = difference(sent, chosen(as_sent, raw.rows)), own[raw.owner, raw.rows].double()
            weights *= (scales if pairs is None else scales[pairs[0]])[raw.rows].double()
            read |= inputs.pooled(rows, raw.owner, weights, _READ)
            rows = difference(sent, chosen(as_sent, relative.rows))
            visible |= inputs.near(rows, relative.owner, _VISIBLE)
    combined, owner = solved(scaled / size, support)
    owners |= set(owner.tolist())
    singled |= set(owner.tolist())
    if sent is not None and len(owner):
        rows = (combined / scales.double()) @ sent.double()
        read |= inputs.near(rows, owner, _READ)
        visible |= inputs.near(rows, owner, _VISIBLE)
    return {"owners": owners, "singled": singled, "read": read, "visible": visible}


def _examples(sets: Mapping[str, set[int]], each: int) -> dict[str, Any]:
    """Return the examples of tokens, of which each has so many."""
    return {name: frozenset(token // each for token in own) for name, own in sets.items()}


def _unmixed(x: Tensor, errors: Tensor, known: set[int], sent: Tensor) -> set[int]:
    """Return those whose input is solved for by the errors [B, K] that columns show of some: dW = sum_e D_e x_e^T."""
    tokens = torch.tensor(sorted(known), dtype=torch.long, device=sent.device)
    own = errors[tokens].double()
    own = own / own.norm(dim=1, keepdim=True)
    rows = torch.linalg.pinv(own @ own.T, hermitian=True) @ (own @ sent.double())
    return Inputs(x).near(rows, tokens, _READ)


def read_from(weight: Tensor, bias: Tensor, x: Tensor) -> int:
    """Count the inputs [B, n] that are quotients of an update's rows and biases."""
    return len(Inputs(_wide(x)).solved(divided(_wide(weight), _wide(bias)), _READ))


def _behind_norm(
    found: Isolated, gradients: WeightGradients, sent: Tensor | None, behind: Owned, mixing: bool
) -> Isolated:
    """Add what the norm behind a layer isolates: its errors are mixed again on their way to the layer.

    A norm of single examples leaves their input visible in the row. One over the batch takes off the batch's mean and
    trend, which a server with public images puts back.
    """
    singled, (x, _) = found.singled | behind.examples, gradients.parts[0]
    if sent is None:
        return replace(found, singled=singled)
    visible = gradients.kept(behind, sent, _VISIBLE)
    read = visible if mixing else _NONE
    if x.ndim == 2 and not mixing:
        read = frozenset(Inputs(x).near(sent[behind.rows], behind.owner, _VISIBLE))
    return replace(found, singled=singled, visible=found.visible | visible, read=found.read | read)


def _looked(module: nn.Module) -> bool:
    """Whether a module's errors are looked at: those of layers with weights, and of norms."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, BatchStatistics)) or "Norm" in type(module).__name__


def _mixes(module: nn.Module) -> bool:
    """Whether a norm takes its statistics from the batch."""
    return isinstance(module, BatchStatistics) or (isinstance(module, BatchNorm) and module.training)


def _affordable(errors: Tensor) -> bool:
    return errors[..., 0].numel() * errors.shape[-1] ** 2 <= _COST or errors.ndim == 2


def _centre(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    mean = getattr(module, "running_mean", None)
    if isinstance(mean, Tensor):
        x = arguments[0].detach()
        mean.copy_(x.mean((0, *range(2, x.ndim))))


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(single(value.dtype))


def _maybe_wide(value: Tensor | None) -> Tensor | None:
    return None if value is None else _wide(value)


def _by_unit(errors: Tensor, last: bool) -> Tensor:
    """Sum absolute errors over positions: [B, ..., K] or [B, K, ...] -> [B, K]."""
    if errors.ndim == 2:
        return errors.abs()
    return errors.abs().flatten(1, -2).sum(1) if last else errors.abs().flatten(2).sum(2)
