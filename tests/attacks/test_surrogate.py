"""Surrogate models: one gradient on the line of local training explains the update, at the cost of one gradient."""

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.inversion.problem import InversionProblem
from gradveil.attacks.inversion.surrogate_model import PLACE, place
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, Local
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data import load
from gradveil.metrics import match_batch, ssim
from gradveil.nn.models import build

DIGITS = load("digits", size=32)
SPACE = DIGITS.private.space


def observed(examples, local, dtype=torch.float32):
    """Return a client, its batch, the server's view of an update, and the attacker's knowledge."""
    net = build("scheliga-cnn", channels=1, size=32, classes=10, generator=Key(0).generator()).to(dtype)
    batch = Batch(DIGITS.private.inputs[:examples].to(dtype), DIGITS.private.targets[:examples])
    client = Client(net, local=local)
    params = client.params()
    update, _ = client.update(params, batch, client.noise_spec(params, batch).sample(Key(1)), client.init(params))
    seen = Observation(params, {name: value[None] for name, value in update.items()}, examples, (0,))
    return client, batch, seen, Knowledge(SPACE, 10, targets=batch.targets[None])


def objective(client, seen, known, batch, share, text="sme(tv=0)"):
    """Return an attack's objective at the true images, at a share of the line."""
    problem = InversionProblem(make_attack(text), [seen], client, known, Key(0))
    variables, constants = problem.start([0])
    variables |= {"inputs": batch.inputs[None], PLACE: torch.tensor([place(share)]).to(batch.inputs)}
    return problem.loss(variables, constants, torch.tensor([0]), {})


def test_truth_fits_best_inside_the_line():
    client, batch, seen, known = observed(8, Local(batch=2, lr=0.01, epochs=5))
    before, middle, after = (float(objective(client, seen, known, batch, share)) for share in (0, 0.5, 1))
    assert middle < before / 2
    assert middle < after
    attack = make_attack("sme(tv=0)")
    at_truth = attack.evaluate([seen], client, known, Key(0), batch.inputs[None], {})
    assert float(at_truth) <= middle


def test_one_step_is_the_gradient_at_the_sent_parameters():
    client, batch, seen, known = observed(4, Local(batch=4, lr=0.05, steps=1))
    assert float(objective(client, seen, known, batch, 0)) == pytest.approx(0, abs=1e-5)
    assert float(objective(client, seen, known, batch, 1)) > 1e-4


def test_place_has_an_exact_derivative():
    client, _, seen, known = observed(4, Local(batch=2, lr=0.01, epochs=3), torch.float64)
    problem = InversionProblem(make_attack("sme"), [seen], client, known, Key(0))
    variables, constants = problem.start([0])
    where = variables[PLACE].requires_grad_()

    def loss(value):
        return problem.loss({**variables, PLACE: value}, constants, torch.tensor([0]), {}).sum()

    (slope,) = torch.autograd.grad(loss(where), where)
    apart = (loss(where.detach() + 0.01) - loss(where.detach() - 0.01)) / 0.02
    assert float(slope) == pytest.approx(float(apart), rel=1e-4)


@pytest.mark.parametrize("epochs", [1, 8])
def test_an_iteration_runs_the_model_once_whatever_the_steps(epochs):
    client, _, seen, known = observed(4, Local(batch=2, lr=0.05, epochs=epochs))
    problem = InversionProblem(make_attack("sme"), [seen], client, known, Key(0))
    variables, constants = problem.start([0])
    problem.loss(variables, constants, torch.tensor([0]), {})  # the first call of a shape also runs the reference
    runs: list[int] = []
    hook = client.model.get_submodule("head").register_forward_hook(lambda *_: runs.append(1))
    problem.loss(variables, constants, torch.tensor([0]), {})
    hook.remove()
    assert len(runs) == 1


def test_rows_have_places_of_their_own():
    client, _, seen, known = observed(4, Local(batch=2, lr=0.05, epochs=2))
    problem = InversionProblem(make_attack("sme(restarts=2)"), [seen], client, known, Key(0))
    variables, constants = problem.start([0, 1])
    variables[PLACE] = torch.tensor([place(0.1), place(0.9)])
    both = problem.loss(variables, constants, torch.tensor([0, 1]), {})
    for row in (0, 1):
        one, own = problem.start([row])
        one[PLACE] = variables[PLACE][row : row + 1]
        torch.testing.assert_close(problem.loss(one, own, torch.tensor([row]), {}), both[row : row + 1])


def test_images_return_from_ten_steps_without_step_size_and_number():
    client, batch, seen, known = observed(2, Local(batch=1, lr=0.02, epochs=5))
    unknowing = Client(client.model, local=Local(batch=2, lr=1.0, steps=1))
    found = make_attack("sme(iterations=200, tv=0.003)")([seen], unknowing, known, Key(0))
    images, truth = SPACE.view(found.inputs[0]), SPACE.view(batch.inputs)
    order = match_batch(images[None], truth[None])[0][0]
    assert float(ssim(images[order], truth).mean()) > 0.5


def test_surrogate_with_whitening_is_refused():
    with pytest.raises(GradveilError) as caught:
        make_attack("cdia(surrogate=line, whiten=true)")
    (problem,) = caught.value.problems
    assert "whiten" in problem.what
    assert "surrogate" in problem.remedy
