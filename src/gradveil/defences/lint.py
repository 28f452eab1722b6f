"""Warnings about differential privacy that is not what it seems to be."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.types import Batch
from gradveil.defences.noise import Gaussian
from gradveil.defences.privacy import Mechanism, data_dependent, examine, mixes, noise_is_shared, stages, trains_beside
from gradveil.theory.accounting import Training, epsilon

MEANINGLESS = 10.0
"""Larger epsilons are no guarantee that anybody should rely on (Ponomareva et al. 2023, sec. 5.2.1)."""


def suspicions(client: Client, batch: Batch, training: Training | None = None) -> Iterator[Problem]:
    """Warn of what makes a differential privacy void or worthless; each warning says where and what to do.

    Without a training, one update alone is accounted: its epsilon is the least that any training has.
    """
    privacy = examine(client, batch)
    slots = [(f"{slot}.{name}", stage) for slot in ("step", "send") for name, stage in stages(getattr(client, slot))]
    for where, stage in slots:
        if noise_is_shared(stage, client, batch):
            what = "adds the same noise to every client: noise from a shared seed is known to whoever knows the seed"
            yield _warning(where, what, "declare the noise in noise(params), so that each client draws its own")
        if privacy.mechanisms and data_dependent(stage, client, batch):
            what = "looks at the data again, beyond the noisy update: that voids the differential privacy before it"
            yield _warning(where, what, "leave it out, or let it depend on the update alone; it has no epsilon")
    if trains_beside(client, privacy.mechanisms):
        what = "trains what it keeps to itself (a lock) without noise, and later steps depend on it: that voids the "
        yield _warning("model", what + "differential privacy of each example", "leave keylock out; it has no epsilon")
    if privacy.mechanisms and any(mixes(transform, client, batch) for transform in client.batch):
        what = "mixes examples before the clip: one of them reaches the gradients of others, which voids the guarantee"
        yield _warning("batch", what, "leave it out; it has no epsilon")
    if privacy.mechanisms and training:
        yield from _other_sampling(client, batch, training)
    for mechanism in privacy.mechanisms:
        yield from _disagreement(mechanism)
        if not privacy.void:
            yield from _meaningless(mechanism, training)


def _other_sampling(client: Client, batch: Batch, training: Training) -> Iterator[Problem]:
    """Compare how a step's examples are drawn with what the accounting of noisy steps takes for granted."""
    local, noisy = client.local, any(isinstance(stage, Gaussian) for _, stage in stages(client.step))
    if local is None or not noisy or training.sampling != "poisson" or training.rate == 1:
        return
    rate = local.batch / (batch.inputs.shape[0] // client.members)
    if local.sampling != "poisson":
        what = "accounts for Poisson sampling, and local training takes batches of fixed size, which amplify less"
        yield _warning("privacy.sampling", what, "set local.sampling = poisson, or privacy.sampling = shuffled")
    elif training.rate < rate * (1 - 1e-9):
        what = f"is {training.rate:g}, and each example is in a step of local training with probability {rate:g}"
        yield _warning("privacy.rate", what, f"give {rate:g}, times the share of the clients in a round if it is drawn")


def _disagreement(mechanism: Mechanism) -> Iterator[Problem]:
    told, bound = mechanism.scaled_to, mechanism.bound
    if told is not None and not math.isclose(told, bound, rel_tol=1e-9):
        what = f"the noise is scaled to a sensitivity of {told:g}, and one {mechanism.unit} can change the mean by "
        what += f"{bound:g}: the noise multiplier is {mechanism.multiplier:.4g}, {told / bound:.4g} times sigma"
        yield _warning("noise", what, f"scale the noise to the clip, or account for {mechanism.multiplier:.4g}")


def _meaningless(mechanism: Mechanism, training: Training | None) -> Iterator[Problem]:
    planned = training or Training(steps=mechanism.sums)
    found = epsilon(mechanism.multiplier, planned)
    if found > MEANINGLESS:
        of = f"of a training of {planned.steps:,} sums" if training else "of one update alone"
        what = f"epsilon {of} is {found:,.4g} for each {mechanism.unit}, at delta {planned.delta:g}: "
        what += "no guarantee to rely on"
        yield _warning("noise", what, f"more noise: gradveil account --epsilon {MEANINGLESS:g} tells how much")


def _warning(where: str, what: str, remedy: str) -> Problem:
    return Problem(where, what, remedy, severity="warning")
