"""A map of single entries is read off simulated clients and undone; what is none is left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.undone_entries import is_map_of_entries, without_map
from gradveil.attacks.protocol import Observation
from gradveil.core import Bernoulli, Context, Key, Noise, NoiseSpec, Normal, Stage, Transform
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch, Domain
from gradveil.spaces import ImageSpace


@dataclass(frozen=True)
class Mapped(Transform):
    """Send a function of every parameter's gradient."""

    function: Callable[[Tensor], Tensor]
    stage: ClassVar[Stage] = Stage.QUANTISE

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        return {name: self.function(value) for name, value in update.items()}, state


def client(function: Callable[[Tensor], Tensor] | None = None, defence: str = "none") -> gv.Client:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 3))
    public = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    plain = gv.Client(net, nn.functional.cross_entropy, domain=Domain(ImageSpace((1, 8, 8)), 3, public))
    made = gv.parse(defence) if function is None else gv.Defence("mine", send=gv.chain(mapped=Mapped(function)))
    return made(plain, Key(0))


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda g: g.sign() * g.abs() ** 0.2,
    "cube": lambda g: g**3,
    "steps": lambda g: torch.floor(g / 1e-5) * 1e-5,
    "scale and shift": lambda g: -1e4 * g + 7,
    "squashed": lambda g: torch.tanh(30 * g),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_of_entries_is_undone(name: str) -> None:
    sender, plain = client(MAPS[name]), client()
    batch = Batch(torch.rand(2, 1, 1, 8, 8, generator=torch.Generator().manual_seed(5)), torch.tensor([[0], [2]]))
    sent, gradients = (each.updates(each.params(), batch, {}, {})[0] for each in (sender, plain))
    found = without_map([Observation(sender.params(), sent, 1, (0, 1))], sender, Key(1))
    assert found is not None
    (seen,), believed = found
    assert believed.send is None
    off = sum(float((seen.update[n] - gradients[n]).square().sum()) for n in gradients)
    assert off < 0.1 * sum(float(value.square().sum()) for value in gradients.values())


@dataclass(frozen=True)
class Cloak(Transform):
    """Hide a share of the entries behind loud noise, and leave the others alone."""

    share: float
    limit: float = torch.inf
    stage: ClassVar[Stage] = Stage.NOISE

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        laws = {"hidden": Bernoulli(self.share), "loud": Normal(100.0)}
        shapes = {name: tuple(value.shape) for name, value in params.items()}
        return NoiseSpec(
            {f"{kind}.{n}": Noise(shape, law, neutral=0) for n, shape in shapes.items() for kind, law in laws.items()}
        )

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        hidden = {n: noise[f"hidden.{n}"] * noise[f"loud.{n}"] for n in update}
        return {n: (g + hidden[n]).clamp(-self.limit, self.limit) for n, g in update.items()}, state


@pytest.mark.parametrize(("share", "limit"), [(0.05, torch.inf), (0.5, torch.inf), (0.8, torch.inf), (0.5, 1.0)])
def test_entries_between_loud_noise_are_read_off(share: float, limit: float) -> None:
    plain = client()
    sender = gv.Defence("mine", send=gv.chain(cloak=Cloak(share, limit)))(plain, Key(0))
    batch = Batch(torch.rand(1, 1, 1, 8, 8, generator=torch.Generator().manual_seed(5)), torch.tensor([[2]]))
    noise = {
        n: value[None]
        for n, value in sender.noise_spec(sender.params(), Batch(*(v[0] for v in batch))).sample(Key(3)).items()
    }
    (sent, _), (gradients, _) = (
        each.updates(each.params(), batch, given, {}) for each, given in ((sender, noise), (plain, {}))
    )
    found = without_map([Observation(sender.params(), sent, 1, (0,))], sender, Key(1))
    assert found is not None
    update, wide = found[0][0].update, "1.weight"  # the others have too few entries to read means off
    off = float((update[wide] - gradients[wide]).square().sum() / gradients[wide].square().sum())
    assert 1 - off > 0.6 * (1 - share)


@pytest.mark.parametrize("defence", ["none", "gaussian(0.1)", "prune(0.99)"])
def test_what_is_no_map_of_entries_or_hides_them_is_left_alone(defence: str) -> None:
    assert not is_map_of_entries(client(defence=defence), 1, Key(0))
    assert not is_map_of_entries(client(lambda g: g.flatten().flip(0).view_as(g)), 1, Key(0))


def test_an_attack_that_ignores_the_defence_does_not_undo_it() -> None:
    with pytest.raises(gv.GradveilError, match=r"undo_entries(?s:.*)simulated_client=full"):
        make_attack("portfolio(undo_entries=true, simulated_client=naive)")
