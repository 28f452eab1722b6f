"""Recurrent layers step by step: torch's own cannot be batched over target clients, nor differentiated twice there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError, Problem

PACKED = Problem(
    "model",
    "packs sequences, whose lengths depend on the data",
    "give recurrent layers the padded tensor without pack_padded_sequence, read their output at the last word of each "
    "text, and set prepare=True",
)
"""The problem of a model that gives packed sequences to its recurrent layers."""


class Recurrence(nn.Module):
    """What an `nn.RNN`, `nn.LSTM` or `nn.GRU` computes, with its parameters under their names.

    Inputs are tensors, not packed sequences; layers follow each other without dropout, and outputs are not projected.
    """

    def __init__(self, old: nn.RNNBase) -> None:
        """Take the settings and the parameters of a layer."""
        super().__init__()
        self.mode, self.num_layers, self.hidden_size = old.mode, old.num_layers, old.hidden_size
        self.batch_first, self.bidirectional, self.input_size = old.batch_first, old.bidirectional, old.input_size
        for name, value in old.named_parameters():
            self.register_parameter(name, value)  # tied ones stay tied

    def extra_repr(self) -> str:
        """Say what is computed."""
        return f"{self.mode}, layers={self.num_layers}, width={self.hidden_size}"

    def flatten_parameters(self) -> None:
        """Do nothing: users' models call it, and torch's own moves parameters there."""

    def forward(self, x: Any, state: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of the last layer, and the last states of all: h, of an LSTM (h, c)."""
        if not isinstance(x, Tensor):
            raise GradveilError([PACKED])
        steps = x.transpose(0, 1) if self.batch_first and x.dim() == 3 else x
        given = (state,) if isinstance(state, Tensor) else state
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            outputs = []
            for way in ("", "_reverse") if self.bidirectional else ("",):
                here = None if given is None else tuple(part[len(ends)] for part in given)
                found, end = self._run(steps.flip(0) if way else steps, f"_l{layer}{way}", here)
                outputs.append(found.flip(0) if way else found)
                ends.append(end)
            steps = torch.cat(outputs, -1)
        last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        outputs = steps.transpose(0, 1) if self.batch_first and x.dim() == 3 else steps
        return outputs, last if self.mode == "LSTM" else last[0]

    def _run(self, steps: Tensor, suffix: str, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one direction of a layer over the steps [T, ..., d]; return all outputs and the last state."""
        weight_in, weight = getattr(self, f"weight_ih{suffix}"), getattr(self, f"weight_hh{suffix}")
        bias_in, bias = getattr(self, f"bias_ih{suffix}", None), getattr(self, f"bias_hh{suffix}", None)
        if state is None:
            zeros = torch.zeros_like(steps[0, ..., :1]).expand(*steps.shape[1:-1], self.hidden_size)
            state = (zeros, zeros) if self.mode == "LSTM" else (zeros,)
        outputs = []
        for seen in F.linear(steps, weight_in, bias_in).unbind():
            state = _next_state(self.mode, seen, F.linear(state[0], weight, bias), state)
            outputs.append(state[0])
        return torch.stack(outputs), state


class RecurrentCell(nn.Module):
    """What an `nn.RNNCell`, `nn.LSTMCell` or `nn.GRUCell` computes, with its parameters under their names."""

    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(self, old: nn.RNNCellBase) -> None:
        """Take the settings and the parameters of a cell."""
        super().__init__()
        self.input_size, self.hidden_size, self.bias = old.input_size, old.hidden_size, old.bias
        plain = f"RNN_{str(getattr(old, 'nonlinearity', '')).upper()}"
        self.mode = "LSTM" if isinstance(old, nn.LSTMCell) else "GRU" if isinstance(old, nn.GRUCell) else plain
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            self.register_parameter(name, getattr(old, name))

    def extra_repr(self) -> str:
        """Say what is computed."""
        return f"{self.mode}, width={self.hidden_size}"

    def forward(self, x: Tensor, state: Any = None) -> Any:
        """Return the next state: h, of an LSTM (h, c)."""
        if state is None:
            zeros = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], self.hidden_size)
            state = (zeros, zeros)
        given = (state,) if isinstance(state, Tensor) else tuple(state)
        seen, kept = F.linear(x, self.weight_ih, self.bias_ih), F.linear(given[0], self.weight_hh, self.bias_hh)
        found = _next_state(self.mode, seen, kept, given)
        return found if self.mode == "LSTM" else found[0]


def _next_state(mode: str, seen: Tensor, kept: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the next state, from the products with the step's input and with the last output."""
    if mode == "LSTM":
        enter, forget, new, leave = (seen + kept).chunk(4, -1)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * cell.tanh(), cell
    if mode == "GRU":
        (reset, update, new), (reset_kept, update_kept, new_kept) = seen.chunk(3, -1), kept.chunk(3, -1)
        share = (update + update_kept).sigmoid()
        candidate = (new + (reset + reset_kept).sigmoid() * new_kept).tanh()
        return ((1 - share) * candidate + share * state[0],)
    total = seen + kept
    return (total.tanh() if mode == "RNN_TANH" else total.relu(),)
