"""Warnings about differential privacy that is void, weak or accounted for wrongly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.formatting import plural
from gradveil.core.types import Batch
from gradveil.defences.additive_noise import Gaussian
from gradveil.defences.guarantees import Fault, Mechanism, Privacy, examine, stages
from gradveil.defences.stage_probes import noise_is_shared
from gradveil.theory.accounting import Participation, epsilon

MEANINGLESS = 10.0
"""Larger epsilons are not a useful guarantee (Ponomareva et al. 2023, sec. 5.2.1)."""


def reservation(value: float) -> str:
    """Say of an epsilon that it is too large to rely on; empty for others.

    >>> reservation(48.8), reservation(6.9)
    ('above 10: no guarantee to rely on', '')
    """
    return f"above {MEANINGLESS:g}: no guarantee to rely on" if value > MEANINGLESS else ""


_VOIDING: Mapping[Fault, tuple[str, str]] = {
    "trained beside": (
        "trains private layers (a lock) without noise, and later steps depend on them",
        "leave keylock out; it has no epsilon",
    ),
    "mixed": (
        "mixes examples before the clip, so one example reaches the gradients of others",
        "leave it out; it has no epsilon",
    ),
    "looks again": (
        "uses the data again, beyond the noisy update",
        "leave it out, or let it depend on the update alone; it has no epsilon",
    ),
}
"""Problem and fix for each flaw that voids differential privacy; shared noise has its own warning."""


def suspicions(client: Client, batch: Batch, training: Participation | None = None) -> Iterator[Problem]:
    """Warn about differential privacy that is void or worthless, with place and fix.

    Without a training, one update alone is accounted for, sampled like the client's: no training has a smaller epsilon.
    """
    privacy = examine(client, batch)
    for slot in ("step", "send"):
        for name, stage in stages(getattr(client, slot)):
            if noise_is_shared(stage, client, batch):
                problem = "adds the same noise to every client: anyone who knows the seed knows the noise"
                yield _warning(
                    f"{slot}.{name}", problem, "declare the noise in noise(params): each client draws its own"
                )
    yield from _voided(privacy)
    if privacy.mechanisms and training:
        yield from _other_sampling(client, batch, training)
    for mechanism in privacy.mechanisms:
        yield from _disagreement(mechanism)
        if training and not mechanism.flaws:
            yield from _seen_alone(client, mechanism, training)
            yield from _too_few(mechanism, training)
        if not mechanism.flaws:
            yield from _meaningless(mechanism, training, training or one_update(client, batch, mechanism))


def _voided(privacy: Privacy) -> Iterator[Problem]:
    """Report each flaw with the units whose differential privacy it voids."""
    flaws = dict.fromkeys(flaw for mechanism in privacy.mechanisms for flaw in mechanism.flaws)
    for flaw in flaws:
        if flaw.fault in _VOIDING:
            problem, remedy = _VOIDING[flaw.fault]
            units = dict.fromkeys(each.unit for each in privacy.mechanisms if flaw in each.flaws)
            void = f"that voids the differential privacy of each {' and each '.join(units)}"
            yield _warning(flaw.where, f"{problem}: {void}", remedy)


def _other_sampling(client: Client, batch: Batch, training: Participation) -> Iterator[Problem]:
    """Compare how a step draws its examples with the sampling that the accounting assumes."""
    local, noisy = client.local, any(isinstance(stage, Gaussian) for _, stage in stages(client.step))
    if local is None or not noisy or training.rate == 1:
        return
    rate = local.batch / (batch.inputs.shape[0] // client.members)
    if local.sampling != "poisson" and training.sampling == "poisson":
        problem = "accounts for Poisson sampling, but local training takes batches of fixed size, which amplify less"
        yield _warning("privacy.sampling", problem, "set local.sampling = poisson, or privacy.sampling = shuffled")
    elif local.sampling == "poisson" and training.sampling == "shuffled":
        problem = "accounts for shuffled batches, but local training samples by Poisson: an example may be in more sums"
        yield _warning("privacy.sampling", problem, "set local.sampling = batches, or privacy.sampling = poisson")
    elif training.sampling == "shuffled" and math.floor(1 / training.rate + 1e-9) > (times := int(1 / rate + 1e-9)):
        problem = f"is {training.rate:g}, but each example is in one of every {plural(times, 'step')} of local training"
        yield _warning("privacy.rate", problem, f"give {rate:g}, and count the steps of one client")
    elif training.sampling == "poisson" and training.rate < rate * (1 - 1e-9):
        problem = f"is {training.rate:g}, but each example is in a step of local training with probability {rate:g}"
        yield _warning(
            "privacy.rate", problem, f"give {rate:g}, times the share of the clients in a round if it is drawn"
        )


def _seen_alone(client: Client, mechanism: Mechanism, training: Participation) -> Iterator[Problem]:
    """Warn that sampling clients does not amplify privacy if the server sees each update alone."""
    if mechanism.unit == "client" and client.members == 1 and training.sampling == "poisson" and training.rate < 1:
        problem = f"is {training.rate:g}, as if the drawn clients were secret, but the server sees each client's update"
        remedy = (
            "count the rounds of one client at rate = 1, or sum clients before the server sees them (client.members)"
        )
        yield _warning("privacy.rate", problem, remedy)


def _too_few(mechanism: Mechanism, training: Participation) -> Iterator[Problem]:
    """Warn about a training that is shorter than one of its updates."""
    if mechanism.sums > training.steps:
        problem = f"are {training.steps:,}, but one update alone has {mechanism.sums:,} noisy sums"
        yield _warning("privacy.steps", problem, "count the whole training: local steps times rounds")


def _disagreement(mechanism: Mechanism) -> Iterator[Problem]:
    assumed, bound = mechanism.scaled_to, mechanism.bound
    if assumed is not None and not math.isclose(assumed, bound, rel_tol=1e-9):
        problem = (
            f"the noise is scaled to a sensitivity of {assumed:g}, but one {mechanism.unit} can change the mean by "
        )
        problem += f"{bound:g}: the noise multiplier is {mechanism.multiplier:.4g}, {assumed / bound:.4g} times sigma"
        yield _warning("noise", problem, f"scale the noise to the clip, or account for {mechanism.multiplier:.4g}")


def one_update(client: Client, batch: Batch, mechanism: Mechanism) -> Participation:
    """Return the participation of a unit in the noisy sums of one update."""
    local, examples = client.local, batch.inputs.shape[0] // client.members
    if local is None or mechanism.unit == "client":
        return Participation(steps=mechanism.sums)
    if local.sampling == "poisson":
        return Participation(steps=mechanism.sums, rate=local.batch / examples)
    passes = math.ceil(mechanism.sums / (examples // local.batch))
    return Participation(steps=mechanism.sums, sampling="shuffled", at_most=passes)


def _meaningless(mechanism: Mechanism, training: Participation | None, planned: Participation) -> Iterator[Problem]:
    value = epsilon(mechanism.multiplier, planned)
    if value > MEANINGLESS:
        of = f"of a training of {planned.steps:,} sums" if training else "of one update alone"
        problem = f"epsilon {of} is {value:,.4g} for each {mechanism.unit}, at delta {planned.delta:g}: "
        problem += "not a useful guarantee"
        yield _warning("noise", problem, f"add noise: gradveil account --epsilon {MEANINGLESS:g} computes how much")


def _warning(where: str, problem: str, remedy: str) -> Problem:
    return Problem(where, problem, remedy, severity="warning")
