"""Row norms of the Jacobian dg/dx: how strongly each coordinate of a gradient depends on the inputs.

Optimal defences distribute their noise by these norms (Chen, Gürsoy and Lei 2024, "Optimal Defenses Against Gradient
Reconstruction Attacks"), and reconstruction bounds sum them. Of texts, x are the word embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import jacfwd, jvp, vjp, vmap

from gradveil.core.noise import Noise, NoiseSpec, Normal
from gradveil.core.tree import Tensors, norm, root, tmap
from gradveil.core.types import Batch, InputPerturbation
from gradveil.gradients.input_sensitivity import load_forward_mode

Gradient = Callable[[Batch], Tensors]
"""A client's differentiable mean gradient: `Context.gradient`."""
AT_ONCE = 16
"""Probes per batch: each needs memory for one gradient."""
_STEP, _JUMP = 3e-3, 0.2
"""A finite step, and the largest relative error of its difference quotient for a function without jumps."""


def probe_noise(batch: Batch, probes: int) -> NoiseSpec:
    """Declare `probe` [probes, B, C, H, W]: standard normal directions in the space of the whole batch.

    With the neutral value zero, all row norms are zero.
    """
    inputs = batch.inputs
    return NoiseSpec({"probe": Noise((probes, *inputs.shape), Normal(), neutral=0.0, dtype=inputs.dtype)})


def squared_row_norms(
    gradient: Gradient,
    batch: Batch,
    probe: Tensor,
    at_once: int = AT_ONCE,
    perturbation: InputPerturbation | None = None,
) -> Tensors:
    """Estimate ||dg_i/dx||^2 of every coordinate i by mean_k (J v_k)_i^2 over K probes v_k ~ N(0, I).

    x is the whole batch, or what `perturbation` adds to it. The estimate is unbiased with relative variance 2 / K, and
    exactly zero for zero rows. It costs K forward-mode products, `at_once` in one batch, is differentiable, and runs
    under `vmap`.
    """
    load_forward_mode()
    chosen = perturbation or InputPerturbation()
    start = chosen.zeros(batch.inputs).to(probe.dtype)

    def perturbed(added: Tensor) -> Tensors:
        with chosen.added(batch, added) as moved:
            return gradient(moved)

    def product(direction: Tensor) -> Tensors:
        return jvp(perturbed, (start,), (direction,))[1]

    total: Tensors = {}
    for some in probe.split(at_once):
        sums = {name: rows.square().sum(0) for name, rows in vmap(product)(some).items()}
        total = {name: total[name] + value for name, value in sums.items()} if total else sums
    return {name: value / len(probe) for name, value in total.items()}


def squared_products(
    function: Callable[[Tensor], Tensors], inputs: Tensor, directions: Tensor, at_once: int = 4
) -> Tensor | None:
    """Compute ||J v||^2 [N] over all coordinates of a function of tensors, for directions v [N, *inputs.shape].

    None if a small step along the last direction finds a jump, as in gradients of networks with ReLU: J would
    underestimate the dependence.
    """
    load_forward_mode()

    def product(direction: Tensor) -> Tensors:
        return jvp(function, (inputs,), (direction,))[1]

    # A jump between the two points enters the difference quotient, and not J.
    step = _STEP * directions[-1]
    taken = tmap(lambda ahead, behind: (ahead - behind) / (2 * _STEP), function(inputs + step), function(inputs - step))
    if bool(norm(tmap(torch.sub, product(directions[-1]), taken)) > _JUMP * norm(taken)):
        return None
    sums: list[Tensor] = []
    for some in directions.split(at_once):
        rows = vmap(product)(some).values()
        sums.append(torch.stack([value.reshape(len(some), -1).square().sum(1) for value in rows]).sum(0))
    return torch.cat(sums)


def spectral_norms(
    function: Callable[[Tensor], Tensors], inputs: Tensor, start: Tensor, iterations: int = 50, tolerance: float = 1e-3
) -> Tensor:
    """Estimate the largest singular value [V] of each row's Jacobian by power iteration on J^T J.

    Row v of the function's tensors [V, ...] depends on row v of the inputs [V, ...] alone. `start` holds the first
    directions. An iteration takes one product with J and one with J^T, and never makes J. It ends when no estimate
    grows by more than the tolerance; estimates grow towards the values from below.
    """
    load_forward_mode()

    def unit(direction: Tensor) -> Tensor:
        length = direction.flatten(1).norm(dim=1).reshape(-1, *[1] * (direction.dim() - 1))
        return direction / torch.where(length > 0, length, torch.ones_like(length))

    direction, found = unit(start), inputs.new_zeros(len(inputs))
    back = vjp(function, inputs)[1]
    for _ in range(iterations):
        ahead: Tensors = jvp(function, (inputs,), (direction,))[1]
        before, found = found, torch.stack([v.flatten(1).square().sum(1) for v in ahead.values()]).sum(0).sqrt()
        if bool((found - before <= tolerance * found).all()):
            break
        direction = unit(back(ahead)[0])
    return found


def exact_squared_row_norms(gradient: Gradient, batch: Batch) -> Tensors:
    """Compute ||dg_i/dx||^2 from the whole Jacobian, for small models and tests."""
    dimensions = batch.inputs.dim()
    return {name: rows.flatten(-dimensions).square().sum(-1) for name, rows in _jacobians(gradient, batch).items()}


def jacobian(gradient: Gradient, batch: Batch) -> Tensor:
    """Compute the Jacobian as a matrix [coordinates of the update, entries of the batch], for small models."""
    entries = batch.inputs.numel()
    return torch.cat([rows.reshape(-1, entries) for rows in _jacobians(gradient, batch).values()])


def norms(squares: Mapping[str, Tensor]) -> Tensors:
    """Take roots of squared row norms; the derivative at a row of zeros is zero, not infinite."""
    return {name: root(value) for name, value in squares.items()}


def _jacobians(gradient: Gradient, batch: Batch) -> Tensors:
    load_forward_mode()
    found: Tensors = jacfwd(lambda x: gradient(Batch(x, batch.targets)))(batch.inputs)  # pyright: ignore
    return found
