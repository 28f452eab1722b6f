"""One-run audit: a lower bound of epsilon from a single update with many canaries in it.

Each canary was part of the client's data with probability 1/2 (Steinke, Nasr, Jagielski 2023). From the update, some
are guessed to have been in it and some not; how many of these guesses are right bounds epsilon from below. It needs no
replay, so it also audits updates that were recorded from a running client. It is weaker than replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.assurance.canaries import SCALES, flat, noise_inputs, noiseless, unsupported
from gradveil.assurance.replay_audit import EpsilonAudit, promised
from gradveil.client import Client
from gradveil.core.errors import Problem, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.defences.guarantees import examine
from gradveil.nn.module_paths import count_classes
from gradveil.theory.accounting import POSITIVE, PROBABILITY
from gradveil.theory.epsilon_lower_bound import EpsilonBound, from_guesses

CONFIDENCE = 0.95
"""Of the bound."""
_AT_ONCE = 50
"""Canaries whose gradients are computed together."""
_FEWEST = 40
"""Guesses of the surest canaries at least."""


def one_run_audit(
    client: Client,
    update: Mapping[str, Tensor],
    canaries: Batch,
    included: Tensor,
    others: Batch | None = None,
    *,
    params: Tensors | None = None,
    guesses: int | None = None,
    delta: float = 1e-5,
    claimed: float | None = None,
) -> EpsilonAudit:
    """Bound the epsilon of one update that a client sent, per example, from which canaries were in it.

    The client sent the gradient of `others`, or trained on them with Poisson sampling, and on those `canaries` for
    which `included` [m] is true, each chosen by a fair coin. `params` are those that it received, by default its
    model's own. `guesses`, an even number to be chosen before the run, is how many canaries are guessed about: half of
    them in, half out. By default there are two tests,
    of the surest tenth and of all, each at half of the error: the first says most where noise is as claimed, the second
    where there is next to none.
    """
    count = len(canaries.targets)
    chosen = _usual_guesses(count) if guesses is None else (guesses,)
    problems = [*_problems(client, update, included, count, chosen, others)]
    problems += PROBABILITY.problems("delta", delta)
    problems += [] if claimed is None else POSITIVE.problems("claimed", claimed)
    refuse(problems)
    inside = included.bool()
    kept = [Batch(canaries.inputs[inside], canaries.targets[inside]), *([] if others is None else [others])]
    whole = Batch(*(torch.cat(parts) for parts in zip(*kept, strict=True)))
    promise = promised(client, whole, delta, claimed, "example")
    params = client.params() if params is None else params
    # Of local training, the first step's gradients stand for those of all: that costs sharpness, not validity.
    quiet = noiseless(replace(client, local=None), Batch(canaries.inputs[:1], canaries.targets[:1]))
    rows = _each(quiet, params, canaries)
    seen = _times(client, whole) * flat({name: update[name] for name in client.trained()})
    # What all canaries have in common says nothing about any; the others' gradient is known to this attacker.
    rest = seen - 0.5 * rows.sum(0)
    if others is not None:
        rest = rest - len(others.targets) * _clean(quiet, params, others)
    spread = _noise(client, whole)
    gram = rows @ rows.T
    scores = torch.linalg.solve(gram + 4 * max(spread**2, 1e-9) * torch.eye(count, dtype=gram.dtype), rows @ rest)
    order = scores.argsort(descending=True)
    level = 1 - (1 - CONFIDENCE) / len(chosen)
    bounds = list[EpsilonBound]()
    for number in chosen:
        right = int(inside[order[: number // 2]].sum()) + int((~inside[order[count - number // 2 :]]).sum())
        found, wrong = from_guesses(count, number, right, delta, level), 1 - right / number
        bounds.append(EpsilonBound(found, None, count, delta, CONFIDENCE, wrong, wrong))
    bound = max(bounds, key=lambda each: each.epsilon)
    return EpsilonAudit("example", promise.neighbours, promise.epsilon, bound, "canaries in one run")


def _usual_guesses(count: int) -> tuple[int, ...]:
    """Return even numbers of guesses: about a tenth of the canaries, and about all."""
    whole = count - count % 2
    return tuple(sorted({min(whole, max(_FEWEST, count // 20 * 2)), whole}))


def rehearsed_run(
    client: Client, others: Batch, count: int, *, delta: float = 1e-5, claimed: float | None = None, seed: int = 0
) -> EpsilonAudit:
    """Make one update of a client with `count` canaries, each in with probability 1/2, and audit it."""
    refuse([] if count >= 2 else [Problem("canaries", f"are {count}", "give at least 2")])
    key = Key(seed, (Stream.CANARY,))
    classes = count_classes(client.model, others.inputs[:1], int(others.targets.max()) + 1)
    images = noise_inputs(client, others, count, key)
    # Long gradients differ most: of small inputs all have much in common.
    images = images * SCALES[-1] if images.is_floating_point() else images
    canaries = Batch(images.to(others.inputs), torch.arange(count).to(others.targets) % classes)
    included = torch.rand(count, generator=key.child(Stream.SELECTED).generator()) < 0.5
    whole = Batch(
        torch.cat([others.inputs, canaries.inputs[included]]), torch.cat([others.targets, canaries.targets[included]])
    )
    params = client.params()
    noise = client.noise_spec(params, whole).sample(key.child(Stream.CLIENT))
    with torch.no_grad():
        update, _ = client.update(params, whole, noise, client.init(params))
    return one_run_audit(client, update, canaries, included, others, delta=delta, claimed=claimed)


def _clean(client: Client, params: Tensors, batch: Batch) -> Tensor:
    """Compute the clipped mean gradient of a batch without noise."""
    with torch.no_grad():
        return flat(client.update(params, batch, client.noise_spec(params, batch).neutral(), client.init(params))[0])


def _each(client: Client, params: Tensors, canaries: Batch) -> Tensor:
    """Compute the clipped gradients [m, parameters] of canaries without noise, one by one."""
    one = Batch(canaries.inputs[:1], canaries.targets[:1])
    neutral, state = client.noise_spec(params, one).neutral(), client.init(params)
    found = list[Tensor]()
    for start in range(0, len(canaries.targets), _AT_ONCE):
        data = Batch(*(value[start : start + _AT_ONCE, None] for value in canaries))
        count = len(data.targets)
        noise, kept = ({n: v.expand(count, *v.shape) for n, v in part.items()} for part in (neutral, state))
        with torch.no_grad():
            sent = client.updates(params, data, noise, kept)[0]
        found.append(torch.cat([value.flatten(1).double() for value in sent.values()], 1))
    return torch.cat(found)


def _times(client: Client, batch: Batch) -> float:
    """Return the factor from an update to the sum of the gradients of all examples."""
    count, local = len(batch.targets), client.local
    # A step draws batch of N examples, divides their sum by batch, and moves by lr: lr T / N times the sum in T steps.
    return count if local is None else count / (local.lr * local.count(count))


def _noise(client: Client, batch: Batch) -> float:
    """Return the standard deviation of the noise on the sum, as the client declares it."""
    sound = [each for each in examine(client, batch).sound if each.unit == "example"]
    if not sound:
        return 0.0
    count, local = len(batch.targets), client.local
    # The noise of T steps is sqrt(T) times one step's, and stands beside lr T / N times the sum.
    share = 1.0 if local is None else local.batch / count * sound[0].sums ** 0.5
    return sound[0].multiplier * sound[0].bound * (count if local is None else local.batch) / share


def _problems(
    client: Client,
    update: Mapping[str, Tensor],
    included: Tensor,
    count: int,
    chosen: Sequence[int],
    others: Batch | None,
) -> Iterator[Problem]:
    if reasons := unsupported(client, "example"):
        remedy = "audit the same defence with client.members=1 and one gradient, or local.sampling = poisson"
        yield Problem("client", " and ".join(reasons), remedy)
    examples = int(included.sum()) + (0 if others is None else len(others.targets))
    if client.local is not None and not client.local.count(examples):
        remedy = "give more examples, or fewer for local.batch"
        yield Problem("client.local", f"takes no step with {examples} examples", remedy)
    if missing := [name for name in client.trained() if name not in update]:
        yield Problem("update", f"lacks {', '.join(missing)}", "give every trained parameter")
    if included.shape != (count,):
        yield Problem("included", f"has shape {tuple(included.shape)}", f"give one flag for each of {count} canaries")
    if others is None and not bool(included.any()):
        yield Problem("included", "names no canary, and there are no others: nothing was sent", "give the others")
    for number in chosen:
        if number % 2 or not 0 < number <= count:
            yield Problem("guesses", f"are {number} of {count}", "give an even number, at most that of the canaries")
