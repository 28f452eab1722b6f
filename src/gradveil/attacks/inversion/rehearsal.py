"""Choose an inversion's settings on clients that the attacker simulates.

No setting wins against every defence: strong total variation finds images behind noise, and blurs them without it. The
attacker can simulate clients with public examples. It knows what these hold, so it attacks them with each variant of
its settings for a short time, and takes the variant that finds most. The target clients' updates are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gradveil.attacks.inversion.inversion_settings import InversionSettings, Variant
from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.attacks.protocol import Observation, Reconstruction, Remark
from gradveil.attacks.simulated_updates import Simulated
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch

SIMULATED = 3
"""Simulated clients that every variant attacks."""
SHARE, _LEAST = 0.1, 150
"""Iterations of a rehearsal: this share of the attack's, and at least so many."""

Run = Callable[[InversionSettings, Sequence[Observation], Knowledge], Reconstruction]
"""Attacks these observations with these settings."""


def rehearsal_iterations(iterations: int) -> int:
    """Return the iterations of each rehearsal of an attack with so many.

    >>> rehearsal_iterations(4000), rehearsal_iterations(500), rehearsal_iterations(50)
    (400, 150, 50)
    """
    return max(round(SHARE * iterations), min(_LEAST, iterations))


@dataclass(frozen=True)
class Rehearsal:
    """Updates of simulated clients, and the public examples behind them."""

    observations: Sequence[Observation]
    knowledge: Knowledge
    batch: Batch

    def score(self, found: Reconstruction) -> float:
        """Return the mean similarity of what was found and the public examples."""
        space = self.knowledge.space
        truth = space.view(self.batch.inputs)
        scores = space.scores(space.match(space.view(found.inputs), truth)[1], truth)
        return float(scores.get(space.headline, -scores["mse"]).mean())  # images too small for SSIM have none


def prepare(
    observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key
) -> Rehearsal | None:
    """Simulate clients with public examples; None without enough examples, or where an attack is told secrets."""
    seen, public = observations[-1], knowledge.public
    told = any(isinstance(how, Known) for name, how in knowledge.tensors.items() if name != "public")
    if told or public is None or len(public.inputs) < seen.examples:
        return None
    draw = key.generator()
    places = torch.stack(
        [torch.randperm(len(public.inputs), generator=draw)[: seen.examples] for _ in range(SIMULATED)]
    )
    like = next(iter(seen.params.values()))
    batch = Batch(public.inputs[places].to(like), public.targets[places].to(like.device))
    keys = [key.child(number) for number in range(SIMULATED)]
    sent = Simulated(simulated_client, observations, every=True).send_in_rounds(batch, keys)
    numbers = tuple(range(SIMULATED))
    rounds = [replace(seen, update=each, target_clients=numbers) for seen, each in zip(observations, sent, strict=True)]
    targets = None if knowledge.targets is None else batch.targets
    return Rehearsal(rounds, replace(knowledge, targets=targets), batch)


def rehearse(attack: InversionSettings, rehearsal: Rehearsal | None, run: Run) -> tuple[InversionSettings, Remark]:
    """Return the attack with its best variant on simulated clients (its first without a rehearsal), and a remark."""
    versions = [attack.with_variant(variant) for variant in attack.variants]
    if rehearsal is None:
        words = f"it searched with {_words(attack.variants[0])}, untried: that takes public examples"
        return versions[0], Remark(words, (0,))
    scores = []
    for version in versions:
        iterations = rehearsal_iterations(version.descent.iterations)
        short = replace(version, descent=replace(version.descent, iterations=iterations))
        scores.append(rehearsal.score(run(short, rehearsal.observations, rehearsal.knowledge)))
    best = max(range(len(scores)), key=scores.__getitem__)
    tried = "; ".join(f"{_words(variant)}: {score:.2f}" for variant, score in zip(attack.variants, scores, strict=True))
    chosen = _words(attack.variants[best])
    return versions[best], Remark(
        f"it searched with {chosen}, the best of its settings on simulated clients ({tried})", (0,)
    )


def _words(variant: Variant) -> str:
    return f"tv={variant.tv:g}, lr={variant.stepper.lr:g}, sign={variant.stepper.sign}"
