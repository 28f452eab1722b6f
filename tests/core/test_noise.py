import pytest
import torch
from torch import nn

from gradveil.core.distributions import Beta
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Bernoulli, Key, Laplace, Noise, NoiseSpec, Normal, Schedule, Uniform
from gradveil.nn.stochastic import model_noise, noise_names
from gradveil.nn.stochastic_layers import Dropout

SPEC = NoiseSpec({"a": Noise((2, 3), Normal(2.0)), "b": Noise((4,), Bernoulli(0.3), neutral=1.0, lower=0.0, upper=1.0)})


def test_key_and_path_determine_the_stream():
    draw = [torch.randn(4, generator=key.generator()) for key in (Key(1), Key(1), Key(2), Key(1).child("a"))]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert not torch.equal(draw[0], draw[3])
    assert Key(1).child("a", 2) == Key(1).child("a").child(2)
    assert Key(1).child("1") != Key(1).child(1), "a number and its text are different addresses"


def test_each_tensor_has_its_own_stream():
    """One tensor more does not change what the others draw."""
    more = SPEC | NoiseSpec({"c": Noise((7,), Uniform())})
    first, second = SPEC.sample(Key(0)), more.sample(Key(0))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sampling_keeps_the_global_generator():
    before = torch.random.get_rng_state()
    SPEC.sample(Key(0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_noise_check_reports_all_problems():
    with pytest.raises(GradveilError) as caught:
        SPEC.check({"a": torch.zeros(3, 2), "z": torch.zeros(1)})
    assert [(p.where, p.what) for p in caught.value.problems] == [
        ("noise.b", "is missing"),
        ("noise.a", "has shape (3, 2)"),
        ("noise.z", "is not an input of this client"),
    ]
    SPEC.check(SPEC.neutral())


def test_neutral_and_projection():
    assert torch.equal(SPEC.neutral()["b"], torch.ones(4))
    assert torch.equal(SPEC["b"].project(torch.tensor([-1.0, 0.5, 2.0])), torch.tensor([0.0, 0.5, 1.0]))
    assert torch.equal(SPEC["a"].project(torch.tensor([-9.0])), torch.tensor([-9.0]))


def test_schedule_uses_each_example_once_per_epoch():
    drawn = Schedule(6).sample((9, 2), torch.int64, Key(0).generator())
    assert drawn.shape == (9, 2)
    for epoch in drawn.view(3, 6):
        assert sorted(epoch.tolist()) == list(range(6))
    assert not torch.equal(drawn[:3], drawn[3:6])


@pytest.mark.parametrize(
    ("law", "penalty"),
    [
        (Normal(2.0), [0.5 * (1 / 4 + 4 / 4), 0.0]),
        (Laplace(2.0), [(1 + 2) / 2, 0.0]),
        (Bernoulli(0.5), [1.0, 0.5]),
        (Uniform(), [0.0, 0.0]),
    ],
)
def test_penalties_equal_hand_computed_values(law, penalty):
    torch.testing.assert_close(law.penalty(torch.tensor([[1.0, 2.0], [0.0, 0.0]])), torch.tensor(penalty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_beta_has_a_finite_penalty_at_both_ends(alpha: float, dtype: torch.dtype):
    value = torch.tensor([[0.0], [1.0]], dtype=dtype, requires_grad=True)
    penalty = Beta(alpha).penalty(value)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert value.grad is not None
    assert torch.isfinite(value.grad).all()


def test_times_and_under_and_to():
    spec = SPEC.times(5).under("model").to(torch.float64)
    assert {name: noise.shape for name, noise in spec.items()} == {"model.a": (5, 2, 3), "model.b": (5, 4)}
    assert spec.sample(Key(0))["model.a"].dtype == torch.float64


def test_model_noise_sees_shapes_and_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Dropout(0.5), nn.Sequential(Dropout(0.1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spec = model_noise(model, torch.randn(5, 3, generator=Key(0).generator()))
    assert {name: noise.shape for name, noise in spec.items()} == {"2.mask": (5, 4), "3.0.mask": (5, 4)}
    assert noise_names(model) == set(spec)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert "2.mask" not in model.state_dict(), "noise is never saved with a model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (15,), (17,), (2**16 + 3,), (2**17 - 1,), (3, 70_001)])
def test_normal_equals_torch_bitwise(shape: tuple[int, ...], dtype: torch.dtype):
    """They are drawn in blocks; records of earlier versions hold."""
    ours, theirs = Key(3).generator(), Key(3).generator()
    assert torch.equal(Normal().sample(shape, dtype, ours), torch.randn(shape, dtype=dtype, generator=theirs))
    assert torch.equal(Normal(0.3).sample(shape, dtype, ours), torch.randn(shape, dtype=dtype, generator=theirs) * 0.3)
    assert torch.equal(torch.rand(3, generator=ours), torch.rand(3, generator=theirs)), "both drew as many"
