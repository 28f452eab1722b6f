"""Deep gradient compression against a plain loop over rounds and entries."""

import pytest
import torch

from gradveil.core.noise import Key
from gradveil.core.types import Batch, Context
from gradveil.defences import Dgc, parse

CONTEXT = Context({}, Batch(torch.zeros(1), torch.zeros(1)))
ROUNDS = 7
SHAPES = {"conv": (4, 2, 3, 3), "head": (5, 20), "bias": (6,)}


def gradients():
    return [
        {n: torch.randn(s, generator=Key(0, (n, t)).generator(), dtype=torch.float64) for n, s in SHAPES.items()}
        for t in range(ROUNDS)
    ]


def compressed(dgc: Dgc):
    """Everything that happens: (gradient, what is sent, state before, state after) for each round."""
    rounds = []
    state = dgc.init(gradients()[0])
    for g in gradients():
        sent, after = dgc.apply(g, state, {}, CONTEXT)
        rounds.append((g, sent, state, after))
        state = after
    return rounds


def plain(keep: float, momentum: float, warmup: int, name: str):
    """The paper's algorithm for one layer, entry by entry."""
    size = gradients()[0][name].numel()
    u, v, out = [0.0] * size, [0.0] * size, []
    for t, g in enumerate(gradients()):
        for i, value in enumerate(g[name].flatten().tolist()):
            u[i] = momentum * u[i] + value
            v[i] += u[i]
        ratio = max(keep ** ((t + 1) / (warmup + 1)), keep)
        many = size - int((1 - ratio) * size + 1e-9)
        chosen = sorted(range(size), key=lambda i: -abs(v[i]))[:many]
        out.append([v[i] if i in chosen else 0.0 for i in range(size)])
        for i in chosen:
            u[i] = v[i] = 0.0
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(
    ("keep", "momentum", "warmup"), [(0.1, 0.9, 3), (0.25, 0.5, 0), (0.001, 0.9, 5), (1.0, 0.9, 2)]
)
def test_layers_are_a_loop(keep: float, momentum: float, warmup: int):
    rounds = compressed(Dgc(keep, momentum, warmup))
    for name in ("conv", "head"):
        found = torch.stack([sent[name].flatten() for _, sent, _, _ in rounds])
        torch.testing.assert_close(found, plain(keep, momentum, warmup, name))


def test_the_warm_up_sends_less_every_round_until_it_ends():
    counts = [int((sent["head"] != 0).sum()) for _, sent, _, _ in compressed(Dgc(0.01, 0.9, 3))]
    assert counts == [32, 10, 4, 1, 1, 1, 1]


def test_vectors_send_their_momentum():
    """Momentum-corrected and dense: what torch's SGD with momentum would step by."""
    weight = torch.zeros(6, dtype=torch.float64)
    optimiser = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    for g, sent, _, _ in compressed(Dgc(0.1, 0.9, 0)):
        before = weight.clone()
        weight.grad = g["bias"]
        optimiser.step()
        torch.testing.assert_close(sent["bias"], before - weight)


def test_what_is_not_sent_stays():
    for g, sent, before, after in compressed(Dgc(0.2, 0.9, 2)):
        for name in ("conv", "head"):
            momentum = 0.9 * before[f"momentum.{name}"] + g[name]
            total = before[f"left.{name}"] + momentum
            torch.testing.assert_close(sent[name] + after[f"left.{name}"], total, rtol=0, atol=0)
            out = sent[name] != 0
            assert not after[f"momentum.{name}"][out].any()
            assert torch.equal(after[f"momentum.{name}"][~out], momentum[~out])
    assert "left.bias" not in after


def test_victims_in_different_rounds_send_different_shares():
    """The round is state, so a batch may hold clients that joined at different times."""
    dgc = parse("dgc(keep=0.01, warmup=3)").send
    g = gradients()[0]
    states = [dgc.init(g), {n: v + 2 if n.endswith("rounds") else v for n, v in dgc.init(g).items()}]
    rows = {n: torch.stack([v, v]) for n, v in g.items()}
    state = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    sent, _ = torch.func.vmap(lambda one, own: dgc.apply(one, own, {}, CONTEXT))(rows, state)
    assert [int((row != 0).sum()) for row in sent["head"]] == [32, 4]
    for row, own in enumerate(states):
        torch.testing.assert_close(sent["conv"][row], dgc.apply(g, own, {}, CONTEXT)[0]["conv"])


def test_a_client_sends_what_an_attacker_simulates():
    """Two rounds of a layer that is large enough for blocks, plainly, differentiated, and as one victim of several."""
    layer = torch.randn(3, 300, 300, generator=Key(5).generator())
    dgc = Dgc(0.2, 0.9, 2)
    state = dgc.init({"layer": layer[0]})
    _, state = dgc.apply({"layer": layer[0]}, state, {}, CONTEXT)

    def second(g: torch.Tensor) -> dict[str, torch.Tensor]:
        sent, after = dgc.apply({"layer": g}, state, {}, CONTEXT)
        return {"sent": sent["layer"], **after}

    plain = second(layer[1])
    simulated = second(layer[1].clone().requires_grad_())
    batched = torch.vmap(second)(layer[1:])
    for name, value in plain.items():
        assert torch.equal(value, simulated[name]), name
        assert torch.equal(value, batched[name][0]), name
