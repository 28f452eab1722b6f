import torch

from gradveil.core.noise import Key
from gradveil.core.tree import norm, select, squared_norm, stack, straight_through, take, under


def test_norm_equals_that_of_the_concatenation_with_zero_slope_at_zero():
    generator = Key(0).generator()
    tensors = {"a": torch.randn(3, 2, generator=generator), "b": torch.randn(5, generator=generator)}
    whole = torch.cat([value.flatten() for value in tensors.values()])
    torch.testing.assert_close(norm(tensors), whole.norm())
    torch.testing.assert_close(squared_norm(tensors), whole @ whole)
    zero = torch.zeros(3, requires_grad=True)
    (slope,) = torch.autograd.grad(norm({"a": zero}), zero)
    assert torch.equal(slope, torch.zeros(3))


def test_under_and_select_are_inverse():
    tensors = {"w": torch.ones(1), "v.w": torch.zeros(1)}
    assert select(under("send", tensors), "send").keys() == tensors.keys()
    assert select({"sender.w": torch.ones(1)}, "send") == {}, "a prefix ends at a dot"


def test_stack_and_take_are_inverse():
    rows = [{"w": torch.full((2,), float(i))} for i in range(3)]
    assert torch.equal(take(stack(rows), [2, 0])["w"][:, 0], torch.tensor([2.0, 0.0]))
    assert stack([]) == {}


def test_straight_through_has_exact_value_and_surrogate_slope():
    x = torch.tensor([0.3, -2.0], requires_grad=True)
    y = straight_through(x.sign(), torch.tanh(x))
    assert torch.equal(y, x.sign())
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, 1 - torch.tanh(x.detach()) ** 2)


def test_straight_through_is_exact_for_distant_surrogates():
    """Three levels must stay three: a compressed update is counted by its distinct values."""
    x = torch.randn(1000, generator=Key(1).generator())
    y = straight_through(0.1 * x.sign(), 37.0 * x)
    assert torch.equal(y, 0.1 * x.sign())
