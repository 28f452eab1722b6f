"""A function that torch cannot batch has the derivatives of one that it can, of any order."""

from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradveil.nn.repeated_call import repeated_call

INPUTS, WEIGHTS = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def decides(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    if bool(y.sum() > 0):
        y = 2 * y
    z = torch.zeros(3, dtype=y.dtype)
    z[:] = y.tanh()
    return z


def batched(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return torch.where(y.sum() > 0, 2 * y, y).tanh()


def repeated(x: Tensor, w: Tensor) -> Tensor:
    return repeated_call(decides, x, w)


def gradients(call, inputs: Tensor, weights: Tensor) -> Tensor:
    return vmap(grad(lambda w, x: call(x, w).pow(2).sum()), in_dims=(None, 0))(weights, inputs)


def test_gradients_of_a_batch_and_of_batches_of_batches():
    assert torch.allclose(gradients(repeated, INPUTS, WEIGHTS), gradients(batched, INPUTS, WEIGHTS))
    pairs = torch.stack([INPUTS, -INPUTS])
    found, expected = (vmap(partial(gradients, call, weights=WEIGHTS))(pairs) for call in (repeated, batched))
    assert torch.allclose(found, expected)


def test_derivatives_of_gradients_by_inputs_and_twice_by_weights():
    found = []
    for call in (repeated, batched):
        inputs, weights = INPUTS.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
        misfit = gradients(call, inputs, weights).pow(3).sum()
        by_inputs, by_weights = torch.autograd.grad(misfit, (inputs, weights), create_graph=True)
        found.append((by_inputs, by_weights, *torch.autograd.grad(by_weights.pow(2).sum(), weights)))
    assert all(torch.allclose(one, other) for one, other in zip(*found, strict=True))


def test_an_answer_that_ignores_an_input_has_a_gradient_of_zero():
    def call(w: Tensor, x: Tensor) -> Tensor:
        return repeated_call(lambda x, w: torch.ones(2).to(x), x, w).sum()

    assert not vmap(grad(call), in_dims=(None, 0))(WEIGHTS, INPUTS).any()
