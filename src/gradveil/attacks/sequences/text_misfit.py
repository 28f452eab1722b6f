"""How badly simulated gradients of texts, or of any word embeddings, explain an observed update.

Each tensor is compared by its angle, since clipping, signs and averages change lengths. If noise is Gaussian, and its
size and the gradient's are unknown, the likelihood of a tensor of n entries is (1 - cos^2)^(-n/2). The misfit is the
geometric mean of 1 - cos^2 over tensors, weighted by the square root of n, so that large layers do not decide alone.
Entries that were not sent are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradveil.attacks.sequences.token_span import is_pruned
from gradveil.client import Client
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.nn.stochastic import switched_off
from gradveil.nn.token_layout import TokenModel

_LARGE = 2
"""Tensors so many times as large as attention's are left out: perceptrons take most of the time, and add little."""
_ROUNDING = 1e-6
"""Squared sine of an angle that is rounding."""


@dataclass
class TextMisfit:
    """The misfit of texts to one target client's update; the word table's own gradient is left to `word_rows`."""

    client: Client
    params: Tensors
    update: Mapping[str, Tensor]
    names: list[str] = field(init=False)
    """The tensors that are compared."""

    def __post_init__(self) -> None:
        """Find what was sent, and how much each tensor counts."""
        model = self.client.model
        assert isinstance(model, TokenModel)
        own = model.get_parameter(f"{model.layout.words}.weight")
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        self._tables = [table for table in tables if table.weight is own]
        table = f"{model.layout.words}.weight"
        sent = {n: self.update[n].detach().nan_to_num(0, 0, 0) for n in self.client.trained() if n in self.update}
        paths = [path.format(layer) for layer in range(model.layout.layers) for path in model.layout.attention]
        attention = [sent[f"{path}.weight"].numel() for path in paths if f"{path}.weight" in sent]
        most = _LARGE * max(attention, default=torch.inf)
        self.names = [n for n, value in sent.items() if n != table and value.numel() <= most and bool(value.any())]
        self._sent = [sent[name] for name in self.names]
        self._kept = [value != 0 if is_pruned([value]) else None for value in self._sent]
        self._squares = self._sums([value.square() for value in self._sent])
        counts = [
            value.numel() if kept is None else int(kept.sum())
            for value, kept in zip(self._sent, self._kept, strict=True)
        ]
        self._weights = torch.tensor(counts, device=self._squares.device).double().sqrt()
        self._weights /= self._weights.sum().clamp_min(1)

    def __call__(self, ids: Tensor, labels: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Return the log misfit of texts [B, T]; given word embeddings [B, T, d], it can be differentiated by them."""
        gradient = self._gradient(ids, labels, embedded)
        along = self._sums([one * other for one, other in zip(self._sent, gradient, strict=True)])
        cosines = along / (self._squares * self._sums([one.square() for one in gradient])).clamp_min(1e-60).sqrt()
        # The square keeps its sign: an opposite gradient must be worse than one at a right angle.
        return (self._weights * (1 - cosines * cosines.abs() + _ROUNDING).log()).sum()

    def _gradient(self, ids: Tensor, labels: Tensor, embedded: Tensor | None) -> list[Tensor]:
        batch, objective = Batch(ids, labels), self.client.objective
        noise = switched_off(self.client.model, ids)
        leaves = {name: self.params[name].detach().clone().requires_grad_() for name in self.names}

        def instead(table: nn.Embedding, given: tuple[Tensor, ...], rows: Tensor) -> Tensor:
            """Return the embeddings as the table scales its rows; other numbers (a decoder's, shifted) keep theirs."""
            if embedded is None or not torch.equal(given[0], ids):
                return rows
            scale = rows.norm() / table.weight[ids].norm().clamp_min(1e-30)
            return embedded * scale.detach()

        handles = [] if embedded is None else [table.register_forward_hook(instead) for table in self._tables]
        try:
            with torch.enable_grad():
                value = objective.value({**self.params, **leaves}, batch, noise)
        finally:
            for handle in handles:
                handle.remove()
        found = torch.autograd.grad(
            value, list(leaves.values()), create_graph=embedded is not None, materialize_grads=True
        )
        return [one if kept is None else one * kept for one, kept in zip(found, self._kept, strict=True)]

    def _sums(self, values: list[Tensor]) -> Tensor:
        return torch.stack([value.sum() for value in values]).double() if values else torch.zeros(0).double()
