"""Choose an inversion's settings on clients that the attacker simulates.

No setting wins against every defence: strong total variation finds images behind noise, and blurs them without it. The
attacker can simulate clients with public examples. It knows what these hold, so it attacks them with each variant of
its settings, and takes the variant that finds most. Where noise is added, a long search fits the noise and loses the
image, so the length of the search is tried too. The target clients' updates are not looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion_settings import InversionSettings, Variant
from gradveil.attacks.inversion.known_noise import stages
from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.attacks.protocol import Observation, Progress, Reconstruction, Remark
from gradveil.attacks.simulated_updates import Simulated
from gradveil.client import Client
from gradveil.core.formatting import plural
from gradveil.core.noise import Key
from gradveil.core.types import Batch

SIMULATED = 3
"""Simulated clients that every variant attacks, at most as many as there are target clients."""
_COST = 0.25
"""All rehearsals together take at most this share of the attack's own iterations, where that leaves them enough."""
_TIE = 30
"""Thousandths of a score that decide nothing: simulated clients are few, and rehearsals often shorter."""
_SHARE, _LEAST = 0.1, 150
"""Enough iterations of a rehearsal: this share of the attack's, and at least so many."""
_EARLY = 0.15
"""Share of the attack's iterations after which the search may stop, where the rehearsals have all of them."""

Report = Callable[[Progress], None]
"""Receives the progress of an attack."""
Run = Callable[[InversionSettings, Sequence[Observation], Knowledge, Report | None], Reconstruction]
"""Attacks these observations with these settings, and reports its progress."""


def effort(iterations: int, target_clients: int, variants: int) -> tuple[int, int]:
    """Return the simulated clients of a rehearsal, and its iterations, for an attack with so many of its own.

    The order of the variants depends on the iterations: on a ResNet-18 a total variation of 0.03 finds more than 0.01
    in 150, and less in 1,000. It also depends on the images, so one client is not enough.

    >>> effort(4000, 64, 4), effort(4000, 16, 4), effort(4000, 1, 4), effort(50, 1, 4)
    ((3, 4000), (3, 1333), (1, 400), (1, 50))
    """
    clients = min(SIMULATED, target_clients)
    least = max(round(_SHARE * iterations), min(_LEAST, iterations))
    return clients, max(round(min(1.0, _COST * target_clients / (variants * clients)) * iterations), least)


def other_length(iterations: int, target_clients: int, variants: int) -> tuple[int, int]:
    """Return the simulated clients for a search of another length than the rehearsals', and its iterations.

    It is as long as the attack where they are shorter; no client tries it where that takes too large a share of it.

    >>> other_length(4000, 64, 4), other_length(4000, 16, 4), other_length(1000, 4, 4), other_length(50, 1, 4)
    ((3, 600), (3, 4000), (1, 1000), (0, 50))
    """
    clients, rehearsed = effort(iterations, target_clients, variants)
    if rehearsed < iterations:
        return min(clients, int(_COST * target_clients)), iterations
    short = min(max(round(_EARLY * iterations), _LEAST), iterations)
    return clients if short < iterations else 0, short


def iterations_within(rows: float, target_clients: int, variants: int, noisy: bool = False) -> int:
    """Return the iterations of an attack that fit, with its rehearsals, into so many row-iterations.

    Behind noise that is added, rehearsals try another length too.

    >>> iterations_within(64_000, 32, 4), iterations_within(2000, 1, 4), iterations_within(300, 1, 4)
    (1599, 1400, 60)
    """

    def cost(iterations: int) -> int:
        clients, of_each = effort(iterations, target_clients, variants)
        tried = variants * clients * of_each
        tried += prod(other_length(iterations, target_clients, variants)) if noisy else 0
        return iterations * target_clients + tried

    # The cost grows with the iterations: the most whose cost is at most `rows`.
    return bisect_right(range(int(rows / target_clients) + 1), rows, key=cost) - 1


@dataclass(frozen=True)
class Rehearsal:
    """Updates of simulated clients, and the public examples behind them."""

    observations: Sequence[Observation]
    knowledge: Knowledge
    batch: Batch

    def scores(self, found: Reconstruction) -> Tensor:
        """Return the similarity of what was found and the public examples, for each simulated client."""
        space = self.knowledge.space
        truth = space.view(self.batch.inputs)
        scores = space.scores(space.match(space.view(found.inputs), truth)[1], truth)
        each = scores.get(space.headline, -scores["mse"])  # images too small for SSIM have none
        return each.cpu().double().flatten(1).mean(1)


def adds_noise(simulated_client: Client, seen: Observation, knowledge: Knowledge) -> bool:
    """Return whether normal or Laplace noise is added to gradients or finished updates, which a search may fit."""
    public, like = knowledge.public, next(iter(seen.params.values()))
    if public is None:
        return False
    batch = Batch(public.inputs[: seen.examples].to(like), public.targets[: seen.examples].to(like.device))
    return bool(stages(simulated_client.noise_spec(seen.params, batch), seen.params))


def prepare(
    observations: Sequence[Observation], simulated_client: Client, knowledge: Knowledge, key: Key, count: int
) -> Rehearsal | None:
    """Simulate so many clients with public examples; None without enough, or where an attack knows secrets."""
    seen, public = observations[-1], knowledge.public
    told = any(isinstance(how, Known) for name, how in knowledge.tensors.items() if name != "public")
    if told or public is None or len(public.inputs) < seen.examples:
        return None
    draw = key.generator()
    places = torch.stack([torch.randperm(len(public.inputs), generator=draw)[: seen.examples] for _ in range(count)])
    like = next(iter(seen.params.values()))
    batch = Batch(public.inputs[places].to(like), public.targets[places].to(like.device))
    numbers = tuple(range(count))
    keys = [key.child(number) for number in numbers]
    sent = Simulated(simulated_client, observations, every=True).send_in_rounds(batch, keys)
    rounds = [replace(seen, update=each, target_clients=numbers) for seen, each in zip(observations, sent, strict=True)]
    targets = None if knowledge.targets is None else batch.targets
    return Rehearsal(rounds, replace(knowledge, targets=targets), batch)


def rehearse(
    attack: InversionSettings,
    rehearsal: Rehearsal | None,
    iterations: int,
    run: Run,
    other: tuple[Rehearsal, int] | None = None,
    progress: Report | None = None,
) -> tuple[int, ...]:
    """Return the thousandths that each variant scores on simulated clients; nothing without a rehearsal.

    `other` are the first of these clients and another number of iterations. The best variant is then tried with that
    too, and five numbers follow: how many clients, the fewer iterations, their score on these clients, the more
    iterations, and theirs.
    """
    if rehearsal is None:
        return ()
    rows = len(rehearsal.batch.inputs) * attack.restarts * iterations
    more = 0 if other is None else len(other[0].batch.inputs) * attack.restarts * other[1]
    whole, before = rows * len(attack.variants) + more, 0

    def tried(variant: Variant, length: int, on: Rehearsal) -> Tensor:
        nonlocal before
        version = attack.with_variant(variant)
        version = replace(version, descent=replace(version.descent, iterations=length))
        size = len(on.batch.inputs) * attack.restarts * length
        report = progress and shifted(progress, before, after=whole - before - size)
        before += size
        return on.scores(run(version, on.observations, on.knowledge, report))

    each = [tried(variant, iterations, rehearsal) for variant in attack.variants]
    scores = tuple(round(1000 * float(found.mean())) for found in each)
    if other is None:
        return scores
    first, length = other
    best = _best(attack.variants, scores)
    known = each[attack.variants.index(best)][: len(first.batch.inputs)]
    pair = sorted([(iterations, known), (length, tried(best, length, first))], key=lambda one: one[0])
    lengths = (number for size, found in pair for number in (size, round(1000 * float(found.mean()))))
    return (*scores, len(known), *lengths)


def shifted(progress: Report, before: int, after: int = 0) -> Report:
    """Report the progress of a part, with the row-iterations before and after it."""

    def report(part: Progress) -> None:
        budget = before + part.row_budget + after
        progress(replace(part, row_iterations=before + part.row_iterations, row_budget=budget))

    return report


def choose(attack: InversionSettings, scores: Sequence[int]) -> tuple[InversionSettings, Remark]:
    """Return the attack with the variant of the best score (its first without scores), and a remark.

    Of variants that score about the same, the one that ends with the weakest total variation is taken. On a ResNet-18
    and behind bottlenecks it gains with the length of the search; behind pruning and signs it loses a little. Of two
    lengths the longer is taken unless the other scores clearly better.
    """
    if not scores:
        best = attack.variants[0]
        words = (
            f"it searched with {_words(best)}, untried on simulated clients: that takes public examples and no secrets"
        )
        return attack.with_variant(best), Remark(words, (0,))
    of_variants, of_lengths = scores[: len(attack.variants)], scores[len(attack.variants) :]
    best = _best(attack.variants, of_variants)
    tried = "; ".join(
        f"{_words(each)}: {score / 1000:.2f}" for each, score in zip(attack.variants, of_variants, strict=True)
    )
    words = f"it searched with {_words(best)}, the best on simulated clients ({tried})"
    chosen = attack.with_variant(best)
    if of_lengths:
        clients, few, early, many, late = of_lengths
        stops = early > late + _TIE
        words += f", for {few if stops else many} iterations ({few}: {early / 1000:.2f}; {many}: {late / 1000:.2f}, "
        words += f"on {plural(clients, 'simulated client')})"
        chosen = replace(chosen, descent=replace(chosen.descent, iterations=few)) if stops else chosen
    return chosen, Remark(words, (0,))


def _best(variants: Sequence[Variant], scores: Sequence[int]) -> Variant:
    tied = [(v.last_tv, -score, v) for v, score in zip(variants, scores, strict=True)]
    return min((each for each in tied if each[1] <= _TIE - max(scores)), key=lambda each: each[:2])[2]


def _words(variant: Variant) -> str:
    end = "" if variant.tv_end is None else f", tv_end={variant.tv_end:g}"
    return f"tv={variant.tv:g}{end}, lr={variant.stepper.lr:g}, sign={variant.stepper.sign}"
