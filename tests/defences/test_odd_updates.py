"""Scalars, single entries, no entries at all, ties and zeros: every stage sends numbers, batched as looped."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from gradveil.core.noise import Key
from gradveil.core.tree import stack
from gradveil.core.types import Batch, Context
from gradveil.defences import (
    Aligned,
    Clip,
    Dgc,
    Dual,
    Feedback,
    Gaussian,
    Laplacian,
    LowRank,
    Magnitude,
    MinMax,
    Outpost,
    Quantise,
    Sign,
    StandIn,
)

SHAPES = {"w": (6, 5), "one": (1,), "alone": (1, 1), "scalar": (), "none": (0, 4), "nothing": (0,), "large": (2500, 2)}
FILLED = {name: shape for name, shape in SHAPES.items() if 0 not in shape}
STAGES = {
    "clip": Clip(1.0),
    "clip by layer": Clip(0.1, scope="layer"),
    "gaussian": Gaussian(0.1),
    "laplace": Laplacian(0.1),
    "dual": Dual(0.3, 0.3),
    "magnitude": Magnitude(0.7),
    "magnitude of all": Magnitude(0.999, "global"),
    "aligned": Aligned(),
    "vote": Aligned(selection="vote"),
    "sign": Sign(),
    "l2": Quantise(127, "l2"),
    "max": Quantise(1, "max"),
    "max, clipped": Quantise(1, "max", 2.5),
    "minmax": MinMax(0.5),
    "dgc": Dgc(0.1),
    "low rank": LowRank(0.5),
    "adam": StandIn(),
    "adagrad": StandIn("adagrad"),
    "yogi": StandIn("yogi", variant="published_code"),
    "outpost": Outpost(),
    "feedback": Feedback(Dual()),
}


def filled(kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
    generator = Key(0, (kind, name)).generator()
    if kind == "drawn":
        return torch.randn(shape, generator=generator)
    if kind == "ties":
        return torch.randint(-1, 2, shape, generator=generator).float()
    return torch.full(shape, {"zeros": 0.0, "equal": -0.5}[kind])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["drawn", "zeros", "ties", "equal"])
def test_every_stage_accepts_every_shape(stage: str, kind: str):
    transform = STAGES[stage]
    shapes = FILLED if isinstance(transform, Outpost) else SHAPES  # it needs the variance of a layer's weights
    params = {name: filled("drawn", name, shape) for name, shape in shapes.items()}
    updates = [{name: filled(kind, f"{name} {n}", shape) for name, shape in shapes.items()} for n in range(2)]
    context = Context(params, Batch(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)))
    state, draws = transform.init(params), [transform.noise(params).sample(Key(n)) for n in range(2)]
    looped = [transform.apply(u, dict(state), z, context)[0] for u, z in zip(updates, draws, strict=True)]
    both = stack(updates) | {f"z.{name}": value for name, value in stack(draws).items()}

    def one(row: dict[str, Tensor]) -> dict[str, Tensor]:
        noise = {name.removeprefix("z."): value for name, value in row.items() if name.startswith("z.")}
        return transform.apply({name: row[name] for name in shapes}, state, noise, context)[0]

    torch.testing.assert_close(vmap(one)(both), stack(looped))
    assert all(bool(value.isfinite().all()) for sent in looped for value in sent.values())
    assert {name: tuple(value.shape) for name, value in looped[0].items()} == shapes
    shown = transform.evidence(looped[0])
    again = transform.apply(updates[0], dict(state), {**draws[0], **shown}, context)[0]
    assert all(not bool(value.isnan().any()) for value in again.values())
