"""A function that torch cannot batch has the derivatives of one that it can, of any order."""

from functools import partial

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from gradveil.gradients.input_sensitivity import load_forward_mode
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


def along(call, inputs: Tensor, weights: Tensor) -> Tensor:
    """Return the derivative of each answer along an input of ones."""
    return vmap(lambda x: jvp(lambda x: call(x, weights), (x,), (torch.ones_like(x),))[1])(inputs)


def test_derivatives_along_tangents_and_of_gradients_along_them():
    load_forward_mode()
    found = []
    for call in (repeated, batched):
        weights = WEIGHTS.clone().requires_grad_()
        answers = along(call, INPUTS, weights)
        by_weights = torch.autograd.grad(answers.pow(2).sum(), weights)
        of_gradients = jvp(partial(gradients, call, weights=WEIGHTS), (INPUTS,), (torch.ones_like(INPUTS),))
        found.append((answers, *by_weights, *of_gradients))
    assert all(torch.allclose(one, other) for one, other in zip(*found, strict=True))


def test_an_answer_that_ignores_an_input_has_a_gradient_of_zero():
    def call(w: Tensor, x: Tensor) -> Tensor:
        return repeated_call(lambda x, w: torch.ones(2).to(x), x, w).sum()

    assert not vmap(grad(call), in_dims=(None, 0))(WEIGHTS, INPUTS).any()
