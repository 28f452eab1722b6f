"""Warnings about differential privacy that does not hold as it seems."""

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
"""Larger epsilons are no guarantee that anybody should rely on (Ponomareva et al. 2023, sec. 5.2.1)."""
_VOIDING: Mapping[Fault, tuple[str, str]] = {
    "trained beside": (
        "trains what it keeps to itself (a lock) without noise, and later steps depend on it",
        "leave keylock out; it has no epsilon",
    ),
    "mixed": (
        "mixes examples before the clip, and one of them reaches the gradients of others",
        "leave it out; it has no epsilon",
    ),
    "looks again": (
        "looks at the data again, beyond the noisy update",
        "leave it out, or let it depend on the update alone; it has no epsilon",
    ),
}
"""What is said of a flaw that voids a differential privacy, and what to do; shared noise is always warned of."""


def suspicions(client: Client, batch: Batch, training: Participation | None = None) -> Iterator[Problem]:
    """Warn of what makes a differential privacy void or worthless; each warning says where and what to do.

    Without a training, one update alone is accounted, as the client draws its examples: its epsilon is the least that
    any training has.
    """
    privacy = examine(client, batch)
    for slot in ("step", "send"):
        for name, stage in stages(getattr(client, slot)):
            if noise_is_shared(stage, client, batch):
                what = "adds the same noise to every client: noise from a shared seed is known to whoever knows it"
                yield _warning(f"{slot}.{name}", what, "declare the noise in noise(params), so that each draws its own")
    yield from _voided(privacy)
    if privacy.mechanisms and training:
        yield from _other_sampling(client, batch, training)
    for mechanism in privacy.mechanisms:
        yield from _disagreement(mechanism)
        if training and not mechanism.flaws:
            yield from _seen_alone(client, mechanism, training)
            yield from _too_few(mechanism, training)
        if not mechanism.flaws:
            yield from _meaningless(mechanism, training, training or _one_update(client, batch, mechanism))


def _voided(privacy: Privacy) -> Iterator[Problem]:
    """Say of each flaw whose differential privacy it voids."""
    flaws = dict.fromkeys(flaw for mechanism in privacy.mechanisms for flaw in mechanism.flaws)
    for flaw in flaws:
        if flaw.fault in _VOIDING:
            what, remedy = _VOIDING[flaw.fault]
            units = dict.fromkeys(each.unit for each in privacy.mechanisms if flaw in each.flaws)
            void = f"that voids the differential privacy of each {' and each '.join(units)}"
            yield _warning(flaw.where, f"{what}: {void}", remedy)


def _other_sampling(client: Client, batch: Batch, training: Participation) -> Iterator[Problem]:
    """Compare how a step's examples are drawn with what the accounting of noisy steps takes for granted."""
    local, noisy = client.local, any(isinstance(stage, Gaussian) for _, stage in stages(client.step))
    if local is None or not noisy or training.rate == 1:
        return
    rate = local.batch / (batch.inputs.shape[0] // client.members)
    if local.sampling != "poisson" and training.sampling == "poisson":
        what = "accounts for Poisson sampling, and local training takes batches of fixed size, which amplify less"
        yield _warning("privacy.sampling", what, "set local.sampling = poisson, or privacy.sampling = shuffled")
    elif local.sampling == "poisson" and training.sampling == "shuffled":
        what = "accounts for shuffled batches, and local training draws by Poisson: an example may be in more sums"
        yield _warning("privacy.sampling", what, "set local.sampling = batches, or privacy.sampling = poisson")
    elif training.sampling == "shuffled" and math.floor(1 / training.rate + 1e-9) > (times := int(1 / rate + 1e-9)):
        what = f"is {training.rate:g}, and each example is in one of every {plural(times, 'step')} of local training"
        yield _warning("privacy.rate", what, f"give {rate:g}, and count the steps of one client")
    elif training.sampling == "poisson" and training.rate < rate * (1 - 1e-9):
        what = f"is {training.rate:g}, and each example is in a step of local training with probability {rate:g}"
        yield _warning("privacy.rate", what, f"give {rate:g}, times the share of the clients in a round if it is drawn")


def _seen_alone(client: Client, mechanism: Mechanism, training: Participation) -> Iterator[Problem]:
    """Warn that choosing some of the clients hides nothing from who sees each of their updates by itself."""
    if mechanism.unit == "client" and client.members == 1 and training.sampling == "poisson" and training.rate < 1:
        what = f"is {training.rate:g}, as if nobody saw which clients were drawn, and the server sees each one's update"
        remedy = "count the rounds of one client at rate = 1, or sum clients before anybody sees them (client.members)"
        yield _warning("privacy.rate", what, remedy)


def _too_few(mechanism: Mechanism, training: Participation) -> Iterator[Problem]:
    """Warn of a training that is shorter than one of its updates."""
    if mechanism.sums > training.steps:
        what = f"are {training.steps:,}, and one update alone is made of {mechanism.sums:,} noisy sums"
        yield _warning("privacy.steps", what, "give those of the whole training: local steps times rounds")


def _disagreement(mechanism: Mechanism) -> Iterator[Problem]:
    told, bound = mechanism.scaled_to, mechanism.bound
    if told is not None and not math.isclose(told, bound, rel_tol=1e-9):
        what = f"the noise is scaled to a sensitivity of {told:g}, and one {mechanism.unit} can change the mean by "
        what += f"{bound:g}: the noise multiplier is {mechanism.multiplier:.4g}, {told / bound:.4g} times sigma"
        yield _warning("noise", what, f"scale the noise to the clip, or account for {mechanism.multiplier:.4g}")


def _one_update(client: Client, batch: Batch, mechanism: Mechanism) -> Participation:
    """Say how often a unit gets into the noisy sums of one update."""
    local, examples = client.local, batch.inputs.shape[0] // client.members
    if local is None or mechanism.unit == "client":
        return Participation(steps=mechanism.sums)
    if local.sampling == "poisson":
        return Participation(steps=mechanism.sums, rate=local.batch / examples)
    passes = math.ceil(mechanism.sums / (examples // local.batch))
    return Participation(steps=mechanism.sums, sampling="shuffled", at_most=passes)


def _meaningless(mechanism: Mechanism, training: Participation | None, planned: Participation) -> Iterator[Problem]:
    found = epsilon(mechanism.multiplier, planned)
    if found > MEANINGLESS:
        of = f"of a training of {planned.steps:,} sums" if training else "of one update alone"
        what = f"epsilon {of} is {found:,.4g} for each {mechanism.unit}, at delta {planned.delta:g}: "
        what += "no guarantee to rely on"
        yield _warning("noise", what, f"more noise: gradveil account --epsilon {MEANINGLESS:g} tells how much")


def _warning(where: str, what: str, remedy: str) -> Problem:
    return Problem(where, what, remedy, severity="warning")
