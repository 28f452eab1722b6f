"""Single examples in the rows of a gradient: rows and differences of rows compared with the examples' inputs.

Each row of a layer's gradient is a sum over the batch, dW_i = sum_e D_ei x_e, with the error D_ei of example e at unit
i. If one example has nearly all of a unit's error, the row is that example's input up to a factor. The same holds for
differences of two rows (imprints). The client knows D, so it can count isolated examples without a model of an attack,
in one pass over the batch and without weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.tree import Tensors, qualified, single
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
"""Cosine of two units' errors above which they count as equal up to a factor."""
_ROUNDING = 1e-10
"""Share of a unit's squared errors below which a difference is rounding."""
_EXPLAINED = 1e-4
"""Relative residual below which errors count as combinations of others."""
_PARTNERS, _PAIRED = 3, 256
"""Number of partners of a unit, and of units that get partners (or twice the examples, if more)."""
_SEVERAL = 4
"""Smallest number of examples (or groups of them) for a comparison of units: many units share two or three."""
_BLOCK = 1024
"""Number of units compared at once, to bound the memory of wide layers."""

Pairs = tuple[Tensor, Tensor, Tensor]
"""Indices of first and second rows, and the factors of the second ones."""


def unit_scales(errors: Tensor) -> Tensor:
    """Return each unit's largest error of [..., K], or 1 if it has none.

    The precision of a row is relative to its own numbers: a unit whose errors are 1e-25 times those of the others
    exposes its examples as well as they do. Each unit is therefore measured on its own scale.

    >>> unit_scales(torch.tensor([[1.0, 1e-25, 0.0], [-4.0, 0.0, 0.0]])).tolist() == [4.0, torch.tensor(1e-25), 1.0]
    True
    """
    largest = errors.abs().flatten(0, -2).amax(0) if len(errors) else errors.new_ones(errors.shape[-1])
    return torch.where(largest > 0, largest, 1.0)


def shared_support(support: Tensor) -> tuple[int, Tensor, int]:
    """Compare units by their support, the examples with a nonzero error [B, K].

    Returns the number of units with an error of four or more examples but not of all, the indices of those with the
    same examples as another such unit, and the number of groups of examples. Examples that no unit distinguishes form
    one group, because copies of an image would make units equal. Groups without any error do not count.

    >>> first_four = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0], [0.0]])
    >>> shared_support(torch.cat([torch.eye(6), first_four, 2 * first_four], 1) != 0)
    (2, tensor([6, 7]), 6)
    """
    support = support.unique(dim=0)
    support = support[support.any(1)]
    count = support.sum(0)
    index = ((count >= _SEVERAL) & (count < len(support))).nonzero().flatten()
    if not len(index):
        return 0, index, len(support)
    _, group, units = support[:, index].unique(dim=1, return_inverse=True, return_counts=True)
    return len(index), index[units[group] > 1], len(support)


def solved(errors: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Find examples that a combination of several rows isolates, from relative errors [B, K].

    The units of a group are open for the same examples (`support`). Let a second group be open for one example more. If
    its errors of all other examples are combinations of the first group's, the same combinations of rows cancel those
    examples and leave the input of the additional one. This needs more examples than units: with fewer, any errors
    would be combinations. Returns the combinations [n, K] and the examples [n]. Single rows and pairs of rows are left
    to `partners`.

    >>> number = torch.arange(6.0)[:, None]
    >>> group = torch.cat([1 + number, number.square() + 1], 1)
    >>> errors = torch.cat([(number < 4) * group, (number < 5) * group], 1)
    >>> solved(errors, errors != 0)[1]
    tensor([4, 4])
    """
    errors, support, device = errors.cpu().double(), support.cpu(), errors.device
    sure = errors.any(1)
    index = ((support & sure[:, None]).sum(0) >= _SEVERAL).nonzero().flatten()
    combinations, owner = [errors.new_zeros(0, errors.shape[1])], list[int]()
    if len(index):
        kinds = support[:, index] & sure[:, None]
        kinds, group, units = kinds.unique(dim=1, return_inverse=True, return_counts=True)
        for less, more in _nested(kinds, units):
            rest = kinds[:, less] == kinds[:, more]
            base, others = index[group == less], index[group == more]
            known, target = errors[rest][:, base], errors[rest][:, others]
            factors = torch.linalg.pinv(known) @ target
            explained = (target - known @ factors).norm(dim=0) < _EXPLAINED * target.norm(dim=0)
            # Each combination is one row of the second group less its fit by rows of the first one.
            rows = errors.new_zeros(int(explained.sum()), errors.shape[1])
            rows[torch.arange(len(rows)), others[explained]] = 1.0
            rows[:, base] = -factors[:, explained].T
            combinations.append(rows)
            owner += [int((~rest).nonzero())] * len(rows)
    return torch.cat(combinations).to(device), torch.tensor(owner, dtype=torch.long, device=device)


def _nested(kinds: Tensor, units: Tensor) -> list[list[int]]:
    """Pair groups of several units whose examples differ by one; the smaller group has fewer units than examples.

    `kinds` [B, G] marks the examples of each group, `units` [G] counts its units.
    """
    several = (units > 1).nonzero().flatten()
    members = kinds[:, several].double()
    count = members.sum(0)
    # members.T @ members counts common examples: i lies within j where that is the size of i.
    within = (members.T @ members == count[:, None]) & (count == count[:, None] + 1)
    within &= (units[several] < count)[:, None]
    return several[within.nonzero()[:_PAIRED]].tolist()


def partners(errors: Tensor, scaled: Tensor) -> Pairs:
    """Pair each unit with those whose errors [B, K] are most nearly equal up to a factor.

    Bins of an imprint differ by one example each, whatever their rows, sizes and order. Of units that are equal up to a
    factor, one is taken. Pairs are chosen by `scaled` errors, in which all examples weigh the same.
    """
    unit = scaled / scaled.norm(dim=0).clamp(min=1e-30)
    distinct = _distinct(unit)
    unit = unit[:, distinct]
    index = torch.arange(len(distinct), device=distinct.device)
    # Neighbours in an imprint are the most similar of all units: in a wide layer only the most similar get partners.
    most = max(_PAIRED, 2 * len(errors))
    if len(distinct) > most:
        alike = torch.cat([_alike(unit, some).amax(1) for some in index.split(_BLOCK)])
        index = alike.topk(most).indices
    count = max(0, min(_PARTNERS, len(distinct) - 1))
    near = _alike(unit, index).topk(count, dim=1).indices
    first, second = distinct[index].repeat_interleave(count), distinct[near.flatten()]
    errors_first, errors_second = errors[:, first], errors[:, second]
    # The factor is the median quotient over common examples; elsewhere the quotient is zero, infinite or NaN.
    ratio = errors_first / errors_second
    ratio = torch.where((errors_first != 0) & ratio.isfinite(), ratio, torch.nan)
    factor = ratio.nanmedian(0).values.nan_to_num(1.0) if len(first) else ratio.new_zeros(0)
    # Pairs whose difference is rounding isolate nothing.
    proper = (errors_first - factor * errors_second).square().sum(0) > _ROUNDING * errors_first.square().sum(0)
    return first[proper], second[proper], factor[proper]


def _alike(unit: Tensor, some: Tensor) -> Tensor:
    """Return |cos| of some units with all, and -1 with themselves."""
    alike = (unit[:, some].T @ unit).abs()
    return alike.scatter_(1, some[:, None], -1.0)


def _distinct(unit: Tensor) -> Tensor:
    """Return the indices of distinct columns: of unit columns that are equal up to a sign one, of zero columns none."""
    # Equal columns get equal projections on a fixed vector, so they are neighbours once sorted by projection.
    mark = torch.linspace(1, 2, len(unit), dtype=unit.dtype, device=unit.device).cos()
    order = (mark @ unit).abs().argsort()
    ordered = unit[:, order]
    same = (ordered[:, 1:] * ordered[:, :-1]).sum(0).abs() > _SAME
    new = torch.cat([same.new_ones(1), ~same]) if len(order) else same
    return order[new & (ordered.square().sum(0) > 0.5)].sort().values


def difference(rows: Tensor, pairs: Pairs | None) -> Tensor:
    """Return first - factor * second for each pair of rows; without pairs, the rows."""
    if pairs is None:
        return rows
    first, second, factor = pairs
    factor = factor.view(-1, *[1] * (rows.ndim - 1))
    return rows[first].to(factor) - factor * rows[second].to(factor)


def unscaled(pairs: Pairs | None, scales: Tensor) -> Pairs | None:
    """Convert factors between scaled units into factors between the units themselves, in double precision."""
    if pairs is None:
        return None
    first, second, factor = pairs
    return first, second, factor.double() * scales[first].double() / scales[second].double()


def chosen(pairs: Pairs | None, rows: Tensor) -> Pairs:
    """Return the pairs at these indices; without pairs, the rows with a second row of factor 0."""
    if pairs is None:
        return rows, rows, torch.zeros(len(rows), dtype=torch.double, device=rows.device)
    first, second, factor = pairs
    return first[rows], second[rows], factor[rows]


def divided(rows: Tensor, by: Tensor) -> Tensor:
    """Divide rows [K, n] by numbers [K], and keep the finite quotients."""
    quotients = rows.double() / by.double()[:, None]
    return quotients[quotients.isfinite().all(1)]


@dataclass(frozen=True)
class Inputs:
    """A layer's inputs [B, n]."""

    x: Tensor

    @property
    def variance(self) -> Tensor:
        """Squared distance to the median, of the median example; a single example is compared with its mean.

        With a mean instead of medians, one example out of scale would make every other one look close to anything.
        """
        centre = self.x.median(0).values if len(self.x) > 2 else self.x.mean(0) if len(self.x) > 1 else self.x.mean()
        return (self.x - centre).square().mean(1).median().clamp(min=1e-30)

    def pooled(self, rows: Tensor, owner: Tensor, errors: Tensor, most: float) -> set[int]:
        """Return the owners whose input is read from the sum of their rows, weighted by errors to average noise out."""
        examples, group = owner.unique(return_inverse=True)
        weighted = errors.double()[:, None] * rows.double()
        sums = weighted.new_zeros(len(examples), rows.shape[1]).index_add_(0, group, weighted)
        return self.near(sums, examples, most)

    def near(self, rows: Tensor, owner: Tensor, most: float) -> set[int]:
        """Return the owners whose row is their input, up to a factor and an error of this share of the variance."""
        truth, rows = self.x[owner].double(), rows.double()
        factor = (rows * truth).sum(1) / rows.square().sum(1).clamp(min=1e-300)
        error = (truth - factor[:, None] * rows).square().mean(1)
        return set(owner[error < most * self.variance].tolist())

    def solved(self, candidates: Tensor, most: float) -> set[int]:
        """Return the examples whose input is one of the candidates [n, ...]."""
        if not len(candidates):
            return set()
        x = self.x.to(candidates)
        # Squared distances |c - x|^2 = |c|^2 - 2 c x + |x|^2, without the difference of every pair in memory.
        apart = candidates.square().sum(1)[:, None] - 2 * candidates @ x.T + x.square().sum(1)
        return set((apart.amin(0) / self.x.shape[1] < most * self.variance).nonzero().flatten().tolist())

    def snr(self, errors: Tensor) -> float:
        """Return max_e |g_e| / |sum of the others| of the gradients g_e = D_e x_e^T, from their inner products.

        <g_e, g_f> = (D_e D_f) (x_e x_f), so no gradient is computed.
        """
        products = (errors @ errors.T) * (self.x @ self.x.T)
        squares = products.diagonal()
        # |sum - g_e|^2 = |sum|^2 - 2 <g_e, sum> + |g_e|^2.
        rest = products.sum() - 2 * products.sum(1) + squares
        return float((squares.clamp(min=0) / rest.clamp(min=1e-60)).sqrt().max())


SILENT = 0.2
"""Share of learning examples below which a layer's update is compared with its whole gradient."""
_READ, _VISIBLE = 0.02, 0.1
"""Mean squared errors of an input that is read, and of one that is visible, as shares of the inputs' variance.

With ReLU the input that is read is exact. Leaky activations mix in a little of all other examples.
"""
_UNCHANGED = 0.5
"""Largest change of a row by a defence, as 1 - cos^2, with which it still counts as the row of the batch."""
_OFTEN = 0.25
"""Share of units with the same examples as another one above which their rows are compared with the sent ones."""
_ALONE, _SINGLED = 0.99, 0.98
"""Share of a unit's absolute errors, or of their squares, with which one example owns it."""
_SURE = 1e-6
"""Share of the largest output error below which an example has none: its gradient is rounding."""
_FEWEST = 8
"""Smallest number of examples for the share that a layer learns from."""
_COST = 2**33
"""Number of multiplications up to which each token of a layer is compared, instead of each example."""
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Isolated:
    """Examples that one layer's gradient isolates, by their index in the batch."""

    layer: str
    live: int = 0
    """Number of units with an error."""
    alone: int = 0
    """Number of units of which one example has more than 99% of the absolute errors."""
    owners: frozenset[int] = _NONE
    """Examples with such a unit, or with such a difference of two units."""
    singled: frozenset[int] = _NONE
    """Examples with nearly all squared error of a unit (or a difference), relative to each example's error at the
    model's output: the parameters single them out, and not their loss."""
    effective: float = 0.0
    """(sum |D|)^2 / sum D^2 of a unit's errors, the median over live units: the number of examples that a row mixes."""
    learning_share: float = 1.0
    """(sum g)^2 / (n sum g^2) over these relative errors: the share of the examples that the layer learns from."""
    snr: float | None = None
    """D-SNR, max_e |g_e| / |sum of the others|, of linear layers of one input per example."""
    read: frozenset[int] = _NONE
    """Examples whose input to this layer can be computed from the sent update."""
    visible: frozenset[int] = _NONE
    """Singled out examples that the sent update still shows, if not exactly."""
    agreement: float = 0.0
    """cos^2 of the layer's update with its gradient, if it learns from few examples."""
    partial: int = 0
    """Number of units with an error of some examples, and none of others (`shared_support`)."""
    shared: int = 0
    """Number of those with the same examples as another unit and, in a sent update, with the row of the whole batch.

    Combinations of such rows can isolate an example that no two rows do (`solved`)."""
    groups: int = 0
    """Number of groups of examples that the layer's open units distinguish."""
    columns: Isolated | None = None
    """The same for the columns of a linear layer's weight: inputs that only one example activates, whatever its error.

    A column reveals an example's error and, once enough errors are known, its input."""

    @property
    def sides(self) -> tuple[Isolated, ...]:
        """The rows, and the columns if they were inspected."""
        return (self,) if self.columns is None else (self, self.columns)


@dataclass(frozen=True)
class _Rows:
    """Rows of layers with the same inputs: errors and their support [tokens, K], and the sent rows [K, n]."""

    errors: Tensor
    sent: Tensor | None
    support: Tensor

    @staticmethod
    def joined(layers: list[_Rows]) -> _Rows:
        """Join the last layer's rows with those of layers whose sent rows are known or unknown like its own."""
        alike = [rows for rows in layers if (rows.sent is None) is (layers[-1].sent is None)]
        errors = torch.cat([rows.errors for rows in alike], 1)
        sent = [rows.sent for rows in alike if rows.sent is not None]
        if not _affordable(errors):
            return layers[-1]
        return _Rows(errors, torch.cat(sent) if sent else None, torch.cat([rows.support for rows in alike], 1))


@dataclass
class Pass:
    """One pass of a client's model over a batch, with hooks on its layers."""

    client: Client
    params: Tensors
    """Parameters, and buffers that replace the client's."""
    batch: Batch
    noise: Mapping[str, Tensor]
    sent: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The update to be sent; without it only errors are counted."""
    centred: bool = False
    """Whether running means are replaced by those of the batch."""
    even: bool = False
    """Whether every example's error at the model's output is scaled to size 1, however sure the model is."""
    only: frozenset[str] | None = None
    """The layers to inspect; None for all."""
    layers: dict[str, Isolated] = field(default_factory=dict[str, Isolated])

    def __post_init__(self) -> None:
        """Prepare the values that the hooks collect."""
        self._calls: dict[str, int] = {}
        self._parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._made: dict[int, tuple[str, Tensor]] = {}
        self._errors = torch.ones(len(self.batch.inputs), device=self.batch.inputs.device)
        self._passed: dict[str, Tensor] = {}
        self._normed: dict[str, tuple[Owned, bool]] = {}
        self._inputs: dict[str, tuple[object, ...]] = {}
        self._same_inputs: dict[tuple[object, ...], list[_Rows]] = {}
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
        hooks = [m.register_forward_hook(self._forward(p, m, start)) for p, m in model.named_modules() if _inspected(m)]
        if self.centred:
            hooks += [m.register_forward_pre_hook(_centre) for m in model.modules()]
        try:
            with torch.enable_grad(), collect_penalties() as penalties:
                outputs = call_on(model, {**lent, **fixed, **self.noise}, inputs)
                if not outputs.requires_grad:
                    return []
                outputs = outputs.view_as(outputs)  # a new node of the graph: its hook runs before those of the layers
                outputs.register_hook(self._outputs)
                torch.autograd.grad(self.client.objective.total(outputs, self.batch.targets, penalties), start)
        finally:
            for hook in hooks:
                hook.remove()
            self._made.clear()
        return [self.layers[path] for path in self._calls if path in self.layers]

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of sent matrices (and larger tensors) that belong to no inspected layer."""
        inspected = {self._names.get(qualified(path, "weight")) for path in self.layers}
        within = tuple(f"{path}." for path in self.layers if path)
        matrices = [name for name, value in self.sent.items() if value.ndim > 1 and bool(value.any())]
        return tuple(name for name in matrices if name not in inspected and not name.startswith(within))

    def _outputs(self, errors: Tensor) -> Tensor | None:
        size = _wide(errors).flatten(1).norm(dim=1)
        # Relative to an infinite size, an example whose errors are rounding has none.
        size = torch.where(size > _SURE * size.max(), size, torch.inf)
        self._errors = torch.where(size.isfinite(), 1.0, size) if self.even else size / size.amin()
        # The batch as the last dimension, over which the sizes broadcast.
        return (errors.transpose(0, -1) / size.to(errors)).transpose(0, -1) if self.even else None

    def _by_example(self, value: object) -> bool:
        """Return whether a value is a tensor whose first dimension is the batch; others are not inspected."""
        return isinstance(value, Tensor) and value.ndim > 1 and len(value) == len(self.batch.inputs)

    def _forward(self, path: str, module: nn.Module, start: Tensor) -> Callable[..., Any]:
        """Return the forward hook of a layer, which keeps its input until the backward pass has its errors."""

        def hook(_module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            x: Any = arguments[0] if arguments else None
            if self._apart or not self._by_example(x) or not self._by_example(output):
                return output
            # A zero that requires a gradient: errors reach this layer, though parameters and inputs are constants.
            output = output if output.requires_grad else output + start
            self._calls[path] = self._calls.get(path, 0) + 1
            before, _ = self._made.get(id(x), ("", x))
            self._made[id(output)] = path, output
            self._passed[path] = output.detach() > 0
            self._inputs[path] = x.data_ptr(), x.shape, x.stride()

            def back(errors: Tensor) -> None:
                parts = self._parts.setdefault(path, [])
                parts.append((_wide(x), _wide(errors)))
                if len(parts) == self._calls[path]:
                    self._layer(path, module, self._parts.pop(path), before)

            output.register_hook(back)
            return output

        return hook

    def _layer(self, path: str, module: nn.Module, parts: list[tuple[Tensor, Tensor]], before: str) -> None:
        """Count the examples that a layer isolates, once the errors of all its calls are known."""
        gradients = WeightGradients(module, parts)
        sent, rows = None, as_linear(module, parts)
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            sent = self._sent(path, gradients)
        if rows is not None and _affordable(rows[1]):
            self._remember(path, rows, sent)
        if self.only is not None and self.only.isdisjoint((path, before)):
            return
        # A norm has its units in the dimension of the layer before it: 1 of [B, C, L], the last of [B, H, W, C].
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
        isolated = Isolated(path, int(live.sum()), len(raw.rows), raw.examples, relative.examples)
        mixed = (total.square() / sizes.square().sum(0))[live].median() if bool(live.any()) else 0.0
        share = self._learning_share([errors for _, errors in parts])
        isolated = replace(isolated, effective=float(mixed), learning_share=share)
        if rows is not None and _affordable(rows[1]):
            isolated = self._tokens(isolated, *rows, sent)
        elif sent is not None:
            read, visible = gradients.shown(raw, sent, _READ), gradients.shown(relative, sent, _VISIBLE)
            isolated = replace(isolated, read=read, visible=visible)
        partial, alike, groups = shared_support(self._support(path, sizes))
        shared = len(alike) if sent is not None or not self.sent else 0
        if sent is not None and shared > _OFTEN * partial:
            shared = len(gradients.unchanged(Owned(alike, alike), sent, _UNCHANGED))
        isolated = replace(isolated, partial=partial, shared=shared, groups=groups)
        if path in self._normed:
            isolated = _behind_norm(isolated, gradients, sent, *self._normed[path])
        if sent is not None and isolated.learning_share < SILENT:
            isolated = replace(isolated, agreement=gradients.agrees(sent))
        self.layers[path] = isolated

    def _sent(self, path: str, gradients: WeightGradients) -> Tensor | None:
        """Return the sent update of a layer's weight, as rows; None if it is unknown.

        If torch computes the weight from other tensors (weight norm), only updates of those are sent. Where they agree
        with the gradients of those tensors, the weight's own gradient is as good as sent.
        """
        if qualified(path, "weight") in self._names:
            return self._sent_parameter(path, "weight")
        sources = {
            name: f"{path}.{name}" for name, _ in gradients.module.named_parameters() if f"{path}.{name}" in self.sent
        }
        if sources.keys() <= {"bias"}:
            return None
        self._apart = True
        gradient = source_gradients(
            gradients.module, {n: self.params[full] for n, full in sources.items()}, gradients.parts
        )
        self._apart = False
        sent = torch.cat([_wide(self.sent[full]).flatten() for full in sources.values()])[None]
        return gradients.total(slice(None)) if float(1 - agreement(gradient, sent)) < _UNCHANGED else None

    def _sent_parameter(self, path: str, kind: str) -> Tensor | None:
        """Return the sent update of a layer's parameter, under whatever name the model has it."""
        return _maybe_wide(self.sent.get(self._names.get(f"{path}.{kind}", "")))

    def _remember(self, path: str, rows: Part, sent: Tensor | None) -> None:
        """Keep a layer's rows for other layers with the same inputs."""
        errors = rows[1].flatten(0, -2)
        kept_rows = _Rows(errors, None if sent is None else sent.flatten(1), self._support(path, errors))
        self._same_inputs.setdefault(self._inputs[path], []).append(kept_rows)

    def _learning_share(self, errors: list[Tensor]) -> float:
        """Return the share of the examples that a layer learns from; 1 with too few errors to tell."""
        largest = max(float(part.abs().amax()) for part in errors) or 1.0
        # Divided by the largest error before squaring: squares of tiny errors would underflow.
        energy = torch.stack([(part / largest).flatten(1).square().sum(1) for part in errors]).sum(0)
        gains = energy.sqrt() / self._errors
        sure = int(self._errors.isfinite().sum())
        squares = float(gains.square().sum())
        return float(gains.sum().square()) / squares / sure if squares and sure >= _FEWEST else 1.0

    def _support(self, path: str, sizes: Tensor) -> Tensor:
        """Return the units open for each example [B, K]: by errors, or by outputs if no error is zero (leaky ReLU)."""
        support, passed = sizes != 0, self._passed[path].flatten(1)
        leaky = bool(support[support.any(1)].all()) and passed.shape == support.shape
        return support & passed if leaky else support

    def _tokens(self, isolated: Isolated, x: Tensor, errors: Tensor, sent: Tensor | None) -> Isolated:
        """Count a linear layer's isolated tokens by rows, differences of rows and columns, and solve for its inputs.

        Earlier layers with the same inputs count as more rows of this one.
        """
        per_example = len(x.flatten(0, -2)) // len(x)
        x, errors = x.flatten(0, -2), errors.flatten(0, -2)
        size = self._errors.repeat_interleave(per_example)
        sent = None if sent is None else sent.flatten(1)
        rows = _Rows.joined(self._same_inputs[self._inputs[isolated.layer]])
        sets = _sets(Inputs(x), rows.errors, size, rows.sent, rows.support)
        if sent is not None and (shift := self._sent_parameter(isolated.layer, "bias")) is not None:
            sets["read"] |= Inputs(x).solved(divided(sent, shift), _READ)
        columns = self._columns(isolated.layer, x, errors, sent)
        if sent is not None:
            sets["read"] |= _unmixed(x, errors, columns["read"], sent)
        side = replace(Isolated(f"{isolated.layer}, columns"), **_examples(columns, per_example))
        snr = Inputs(x).snr(errors) if per_example == 1 else None
        return replace(isolated, snr=snr, columns=side, **_examples(sets, per_example))

    def _columns(self, path: str, x: Tensor, errors: Tensor, sent: Tensor | None) -> dict[str, set[int]]:
        """Find the tokens that columns isolate: the transposed gradient has inputs D_e and errors x_e.

        A column isolates a token if only that token activates its input. Visible are those whose input passes no error
        back; the others show in the rows of the layer before.
        """
        length = errors.double().norm(dim=1)
        length = torch.where(length > _SURE * length.amax(), length, torch.inf).to(x)
        # dW^T = sum_e (|D_e| x_e) (D_e / |D_e|)^T: inputs of length 1, as a column shows D_e up to a factor only.
        turned = torch.where(length.isfinite()[:, None], x * length[:, None], 0.0)
        inputs, update = Inputs(errors / length[:, None]), None if sent is None else sent.T
        sets = _sets(inputs, turned, length, update, turned != 0)
        weight = _maybe_wide(self.params.get(self._names.get(qualified(path, "weight"), "")))
        if update is not None and weight is not None:
            silent = ((errors @ weight.flatten(1) == 0) | (turned == 0)).all(0) & (turned != 0).any(0)
            quiet = turned[:, silent]
            sets["visible"] = _sets(inputs, quiet, length, update[silent], quiet != 0)["visible"]
        return sets


def _sets(inputs: Inputs, errors: Tensor, size: Tensor, sent: Tensor | None, support: Tensor) -> dict[str, set[int]]:
    """Find the tokens that rows, differences of two rows and solved groups isolate, and those that the update shows.

    `size` has the tokens' errors at the model's output.
    """
    scales, size = unit_scales(errors), size[:, None]
    scaled = errors / scales
    owners, singled, read, visible = set[int](), set[int](), set[int](), set[int]()
    for pairs in (None, partners(scaled, scaled / size)):
        sizes, as_sent = difference(scaled.T, pairs).T, unscaled(pairs, scales)
        raw, relative = Owned.of(sizes.abs(), _ALONE), Owned.of((sizes / size).square(), _SINGLED)
        owners |= raw.examples
        singled |= relative.examples
        if sent is not None:
            rows, weights = difference(sent, chosen(as_sent, raw.rows)), sizes[raw.owner, raw.rows].double()
            # Errors in their own scale again, that of the first unit of a pair.
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


def _examples(sets: Mapping[str, set[int]], per_example: int) -> dict[str, Any]:
    """Convert sets of tokens into sets of examples with this number of tokens."""
    return {name: frozenset(token // per_example for token in tokens) for name, tokens in sets.items()}


def _unmixed(x: Tensor, errors: Tensor, known: set[int], sent: Tensor) -> set[int]:
    """Return tokens whose input solves dW = sum_e D_e x_e^T by least squares, with errors [B, K] known from columns.

    Errors are normalised: columns show them only up to a factor.
    """
    tokens = torch.tensor(sorted(known), dtype=torch.long, device=sent.device)
    directions = errors[tokens].double()
    directions = directions / directions.norm(dim=1, keepdim=True)
    # X = (D D^T)^+ D dW, from dW = D^T X.
    rows = torch.linalg.pinv(directions @ directions.T, hermitian=True) @ (directions @ sent.double())
    return Inputs(x).near(rows, tokens, _READ)


def read_from(weight: Tensor, bias: Tensor, x: Tensor) -> int:
    """Count the inputs [B, n] that are quotients of an update's rows and biases, x = dW_i / db_i."""
    return len(Inputs(_wide(x)).solved(divided(_wide(weight), _wide(bias)), _READ))


def _behind_norm(
    isolated: Isolated, gradients: WeightGradients, sent: Tensor | None, behind: Owned, mixing: bool
) -> Isolated:
    """Add the examples that the norm behind a layer isolates, since errors are mixed again on their way to the layer.

    A norm of single examples leaves their input visible in the row. One over the batch subtracts the batch's mean and
    trend, which a server with auxiliary data can add again.
    """
    singled, (x, _) = isolated.singled | behind.examples, gradients.parts[0]
    if sent is None:
        return replace(isolated, singled=singled)
    visible = gradients.unchanged(behind, sent, _VISIBLE)
    read = visible if mixing else _NONE
    if x.ndim == 2 and not mixing:
        read = frozenset(Inputs(x).near(sent[behind.rows], behind.owner, _VISIBLE))
    return replace(isolated, singled=singled, visible=isolated.visible | visible, read=isolated.read | read)


def _inspected(module: nn.Module) -> bool:
    """Return whether a module is inspected: layers with weights, and norms."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, BatchStatistics)) or "Norm" in type(module).__name__


def _mixes(module: nn.Module) -> bool:
    """Return whether a norm uses statistics of the batch."""
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
