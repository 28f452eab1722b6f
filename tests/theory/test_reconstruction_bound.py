"""The Bayesian Cramér-Rao bound: exact for linear-normal models, respected by the best possible estimate elsewhere."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.gradients.objective import mean_gradient
from gradveil.theory.input_jacobian import exact_squared_row_norms, jacobian
from gradveil.theory.reconstruction_bound import (
    error_bound,
    gaussian_information,
    information,
    information_trace,
    rate_bound,
    smoothed_information,
    trace_bound,
)

D, P = 5, 8


def normal(*shape: int, key: str) -> Tensor:
    return torch.randn(shape, generator=Key(0, (key,)).generator(), dtype=torch.float64)


A = normal(P, D, key="matrix")
VARIANCES = 0.1 + normal(P, key="variances").square()
ROOT = torch.eye(D).double() + 0.3 * normal(D, D, key="prior")
COVARIANCE = ROOT @ ROOT.T
PRIOR = torch.linalg.inv(COVARIANCE)


def seen(x: Tensor) -> Tensor:
    return x @ A.T + VARIANCES.sqrt() * normal(*x.shape[:-1], P, key="noise")


def test_linear_normal_model_reaches_the_bound():
    """The smallest error there is, the trace of the posterior covariance, in a form that inverts other matrices."""
    gain = COVARIANCE @ A.T @ torch.linalg.inv(A @ COVARIANCE @ A.T + VARIANCES.diag())
    smallest = torch.trace(COVARIANCE - gain @ A @ COVARIANCE) / D
    bound = error_bound(information(A, VARIANCES), PRIOR)
    torch.testing.assert_close(bound, smallest)
    looser = trace_bound(torch.trace(information(A, VARIANCES)), torch.trace(PRIOR), D)
    assert 0 < looser < 0.9 * smallest


def test_attacks_on_the_linear_normal_model_respect_it():
    x = normal(40_000, D, key="target_clients") @ ROOT.T
    g = seen(x)
    fisher = information(A, VARIANCES)
    bound = error_bound(fisher, PRIOR)
    scaled = (g / VARIANCES) @ A
    error = {
        "map": (torch.linalg.solve(fisher + PRIOR, scaled.T).T - x).square().mean(),
        "least squares": (torch.linalg.solve(fisher, scaled.T).T - x).square().mean(),
        "prior": x.square().mean(),
    }
    torch.testing.assert_close(error["map"], bound, rtol=0.02, atol=0)
    torch.testing.assert_close(error["least squares"], torch.linalg.inv(fisher).diagonal().mean(), rtol=0.02, atol=0)
    assert error["least squares"] > 1.1 * bound
    assert error["prior"] > 1.1 * bound
    assert min(error.values()) > trace_bound(torch.trace(fisher), torch.trace(PRIOR), D)


def test_mutual_information_bounds_the_linear_normal_model_too():
    """In the basis where the prior is diagonal; reached where all directions are alike."""
    variances = torch.linalg.eigvalsh(COVARIANCE)
    gained = torch.eye(D).double() + information(A, VARIANCES) @ COVARIANCE
    nats = torch.linalg.slogdet(gained).logabsdet / 2
    smallest = error_bound(information(A, VARIANCES), PRIOR)
    found = rate_bound(variances, nats)
    assert 0.5 * smallest < found <= smallest
    assert found < rate_bound(variances, nats / 2) < variances.mean()
    torch.testing.assert_close(rate_bound(variances, torch.zeros(()).double()), variances.mean())
    assert rate_bound(variances, torch.tensor(torch.inf).double()) == 0
    power, noise = 2.0, 0.5
    white = torch.full((4,), power).double()
    all_of_it = torch.tensor(4 / 2).double() * torch.log1p(torch.tensor(power / noise).double())
    torch.testing.assert_close(rate_bound(white, all_of_it), torch.tensor(1 / (1 / power + 1 / noise)).double())


def test_the_two_forms_meet_where_every_direction_is_alike():
    fisher, prior = 3.0 * torch.eye(D).double(), 2.0 * torch.eye(D).double()
    torch.testing.assert_close(error_bound(fisher, prior), torch.tensor(0.2).double())
    torch.testing.assert_close(trace_bound(fisher.trace(), prior.trace(), D), torch.tensor(0.2).double())


def test_the_gradient_of_a_network_is_bounded_too():
    """Two unknown entries, so that the posterior mean, the best estimate there is, can be had by weighing draws."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(normal(*parameter.shape, key=name))
    client = Client(net)
    params, target = client.params(), torch.tensor([1])

    def gradient(batch: Batch):
        return mean_gradient(client.objective, params, {}, batch, {})

    def flat(x: Tensor) -> Tensor:
        return torch.cat([value.flatten() for value in gradient(Batch(x[None], target)).values()])

    draws, target_clients = normal(20_000, 2, key="draws"), normal(400, 2, key="unknown")
    table = vmap(flat)(draws)
    some = Batch(draws[:500, None], target.expand(500, 1))
    jacobians = vmap(lambda x, y: jacobian(gradient, Batch(x, y)))(*some)
    for std in (0.1, 0.3, 1.0):
        variances = torch.full((table.shape[1],), std**2).double()
        g = vmap(flat)(target_clients) + std * normal(400, table.shape[1], key="sent")
        posterior = (-torch.cdist(g, table).square() / (2 * std**2)).softmax(-1) @ draws
        error = (posterior - target_clients).square().mean()
        bound = error_bound(information(jacobians, variances), torch.eye(2).double())
        assert 0.1 * error < bound < error, (std, float(bound), float(error))


def test_traces_from_row_norms_are_those_of_the_matrix():
    client = Client(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double())
    params = client.params()
    batch = Batch(normal(2, 3, key="inputs"), torch.tensor([0, 1]))

    def gradient(own: Batch):
        return mean_gradient(client.objective, params, {}, own, {})

    variances = {name: 0.1 + normal(*p.shape, key=name).square() for name, p in params.items()}
    matrix = information(jacobian(gradient, batch), torch.cat([v.flatten() for v in variances.values()]))
    torch.testing.assert_close(
        information_trace(exact_squared_row_norms(gradient, batch), variances), torch.trace(matrix)
    )


def test_coordinates_without_noise_or_dependence():
    silent = torch.cat([A, torch.zeros(1, D).double()])
    with_zero = torch.cat([VARIANCES, torch.zeros(1).double()])
    torch.testing.assert_close(information(silent, with_zero), information(A, VARIANCES))
    pruned = VARIANCES.clone()
    pruned[3:] = torch.inf
    torch.testing.assert_close(information(A, pruned), information(A[:3], VARIANCES[:3]))
    squares, told = {"g": A.square().sum(1)}, VARIANCES.clone()
    torch.testing.assert_close(information_trace(squares, {"g": pruned}), information(A, pruned).trace())
    told[0] = 0.0
    assert trace_bound(information_trace(squares, {"g": told}), torch.ones(()), D) == 0
    with pytest.raises(GradveilError, match="error_bound"):
        error_bound(information(A, told), PRIOR)


def test_prior_information_is_estimated_from_examples():
    public = normal(50_000, D, key="public") @ ROOT.T + 7.0
    torch.testing.assert_close(gaussian_information(public), PRIOR, rtol=0.05, atol=0.05)
    few = public[:D]
    with pytest.raises(GradveilError, match="5 examples do not determine the covariance of 5 entries"):
        gaussian_information(few)
    assert bool(torch.linalg.eigvalsh(gaussian_information(few, ridge=0.1)).max() <= 10 + 1e-9)


def test_smoothed_examples_have_the_information_of_their_mixture():
    generator = Key(0, ("smoothed",)).generator()
    alone = smoothed_information(torch.zeros(1, 2).double(), 0.5, generator, draws=100_000)
    torch.testing.assert_close(alone, 4 * torch.eye(2).double(), rtol=0.03, atol=0.03)
    # A mixture that fills out a normal law has that law's information, not that of its parts.
    many = smoothed_information(0.6 * normal(4000, 1, key="many"), 0.8, generator, draws=4000)
    torch.testing.assert_close(many, torch.ones(1, 1).double(), rtol=0.05, atol=0)
    # No law of that variance has less information than the normal one (information times variance is at least 1).
    pair = torch.tensor([[-1.0], [1.0]]).double()
    assert float(smoothed_information(pair, 0.5, generator)) * (1 + 0.25) > 2
