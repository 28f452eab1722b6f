"""What users' model modules look like, right and wrong."""

import torch
from torch import nn

NOT_A_FACTORY = 3


def plain(classes: int, hidden: int = 4) -> nn.Module:
    """Accepts some of the sizes, and an option."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, classes))


def varied(**options) -> nn.Module:
    """Accepts anything, and draws in many ways."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2), nn.Embedding(3, 2))
    for init in (nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.xavier_normal_, nn.init.kaiming_normal_):
        model.append(nn.Linear(2, 3))
        init(model[-1].weight)
    model.append(nn.Linear(2, 3))
    model[-1].weight.data = torch.randn(3, 2) + torch.rand(3, 2) + torch.empty(3, 2).normal_()
    model.append(nn.Linear(2, 3))
    model[-1].weight.data = torch.randn_like(model[-1].weight) + torch.rand_like(model[-1].weight)
    return model


a_model = nn.Linear(12, 10)


def needs(classes: int, depth: int, *, width: int) -> nn.Module:
    """Needs what only its user can say."""
    return nn.Sequential(nn.Flatten(), *(nn.Linear(12, width) for _ in range(depth)), nn.Linear(width, classes))


def raises(classes: int) -> nn.Module:
    """Fails."""
    raise ValueError(f"no weights for {classes} classes")


class OwnError(Exception):
    """Of no kind that anyone expects."""


def raises_its_own() -> nn.Module:
    """Fails in its own way."""
    raise OwnError("no licence")


def number() -> int:
    """Returns something else."""
    return 3
