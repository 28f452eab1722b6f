"""Choose an inversion's settings on clients that the attacker simulates.

No setting wins against every defence: strong total variation finds images behind noise, and blurs them without it. The
attacker can simulate clients with public examples. It knows what these hold, so it attacks them with each variant of
its settings, and takes the variant that finds most. Where noise is added, a long search fits the noise and loses the
image, so the length of the search is tried too. The target clients' updates are not looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
_FAR = 4
"""Ratio of two lengths from which on the best may well lie between them: on a ResNet-18 behind noise it does."""

Report = Callable[[Progress], None]
"""Receives the progress of an attack."""
Run = Callable[[InversionSettings, Sequence[Observation], Knowledge, Report | None], Reconstruction]
"""Attacks these observations with these settings, and reports its progress."""


def effort(iterations: int, target_clients: int, variants: int) -> tuple[int, int]:
    """Return the simulated clients of a rehearsal, and its iterations, for an attack with so many of its own.

    The order of the variants depends on the iterations: on a ResNet-18 a total variation of 0.03 finds more than 0.01
    in 150, and less in 1,000. It also depends on the images, so one client is not enough: a short attack of few targets
    has fewer all the same, or it would be over before it began.

    >>> effort(4000, 64, 4), effort(4000, 16, 4), effort(4000, 1, 4), effort(300, 4, 4), effort(50, 1, 4)
    ((3, 4000), (3, 1333), (1, 400), (2, 150), (1, 50))
    """
    least = max(round(_SHARE * iterations), min(_LEAST, iterations))
    afforded = int(iterations * target_clients / max(1, variants * least))
    clients = min(SIMULATED, target_clients, max(1, afforded))
    return clients, max(round(min(1.0, _COST * target_clients / (variants * clients)) * iterations), least)


def further(
    iterations: int, target_clients: int, variants: int, noisy: bool = False
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the simulated clients of further rehearsals: of how many of the best variants, for how many iterations.

    Where rehearsals are much shorter than the attack, the two best variants are tried for longer, by few clients.
    Behind noise that is added (`noisy`) the best one is tried at other lengths, of which one is the attack's.

    >>> further(1000, 4, 4), further(1000, 4, 4, noisy=True)
    ((1, ((2, 387),)), (1, ((2, 387), (1, 1000))))
    >>> further(4000, 64, 4), further(4000, 64, 4, noisy=True)
    ((0, ()), (3, ((1, 1549), (1, 600))))
    """
    clients, rehearsed = effort(iterations, target_clients, variants)
    if rehearsed < iterations:
        clients, other, finalists = min(clients, int(_COST * target_clients)), iterations, 2
    else:
        other, finalists = min(max(round(_EARLY * iterations), _LEAST), iterations), 1
    between = round((rehearsed * other) ** 0.5)
    tried: list[tuple[int, int]] = []
    if max(rehearsed, other) >= _FAR * min(rehearsed, other) and (noisy or finalists > 1):
        tried.append((min(finalists, variants), between))
    if noisy and other != rehearsed:
        tried.append((1, other))
    return (clients, tuple(tried)) if clients and tried else (0, ())


def iterations_within(
    allowed: float, target_clients: int, variants: int, noisy: bool = False, timed: bool = False
) -> int:
    """Return the iterations that are left of the `allowed` ones of an attack when it has rehearsed.

    Behind noise that is added, rehearsals try other lengths too. Of a time (`timed`) they take more than their rows
    say: an iteration of few rows costs as much as a row beside these.

    >>> iterations_within(2000, 32, 4), iterations_within(2000, 1, 4), iterations_within(300, 1, 4)
    (1599, 1400, 60)
    >>> [iterations_within(*each, 4, timed=timed) for each in ((2000, 32), (315, 4)) for timed in (False, True)]
    [1599, 1511, 165, 121]
    """
    beside = 1 if timed else 0

    def cost(iterations: int) -> int:
        clients, of_each = effort(iterations, target_clients, variants)
        tried = variants * (clients + beside) * of_each
        few, finals = further(iterations, target_clients, variants, noisy)
        tried += (few + beside) * sum(count * length for count, length in finals)
        return iterations * (target_clients + beside) + tried

    # The cost grows with the iterations: the most whose cost is at most what is allowed.
    return bisect_right(range(int(allowed) + 1), allowed * (target_clients + beside), key=cost) - 1


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
    more: tuple[Rehearsal, tuple[tuple[int, int], ...]] | None = None,
    progress: Report | None = None,
) -> tuple[int, ...]:
    """Return the thousandths that each variant scores on simulated clients; nothing without a rehearsal.

    `more` are the first of these clients and what `further` returns. More numbers follow then: how many clients, and
    for each search of theirs the place of its variant, its iterations, and its score.
    """
    if rehearsal is None:
        return ()
    rows = len(rehearsal.batch.inputs) * attack.restarts * iterations
    first, finals = (rehearsal, ()) if more is None else more
    size = len(first.batch.inputs) * attack.restarts
    whole, before = rows * len(attack.variants) + size * sum(count * length for count, length in finals), 0

    def tried(variant: Variant, length: int, on: Rehearsal) -> Tensor:
        nonlocal before
        version = attack.with_variant(variant)
        version = replace(version, descent=replace(version.descent, iterations=length))
        part = len(on.batch.inputs) * attack.restarts * length
        report = progress and shifted(progress, before, after=whole - before - part)
        before += part
        return on.scores(run(version, on.observations, on.knowledge, report))

    each = [tried(variant, iterations, rehearsal) for variant in attack.variants]
    scores = tuple(map(_thousandths, each))
    if not finals:
        return scores
    ranking = _ranked(dict(enumerate(scores)), attack.variants)
    numbers = [
        len(first.batch.inputs),
        ranking[0],
        iterations,
        _thousandths(each[ranking[0]][: len(first.batch.inputs)]),
    ]
    for count, length in finals:
        found = {place: _thousandths(tried(attack.variants[place], length, first)) for place in ranking[:count]}
        numbers += [number for place, score in found.items() for number in (place, length, score)]
        ranking = _ranked(found, attack.variants)
    return (*scores, *numbers)


def shifted(progress: Report, before: int, after: int = 0) -> Report:
    """Report the progress of a part, with the row-iterations before and after it."""

    def report(part: Progress) -> None:
        budget = before + part.row_budget + after
        progress(replace(part, row_iterations=before + part.row_iterations, row_budget=budget))

    return report


def choose(attack: InversionSettings, scores: Sequence[int]) -> tuple[InversionSettings, Remark]:
    """Return the attack with the variant of the best score (its first without scores), and a remark.

    Of variants that score about the same, the one that ends with the weakest total variation is taken. On a ResNet-18
    and behind bottlenecks it gains with the length of the search; behind pruning and signs it loses a little. Of the
    lengths that score about the same the longest is taken.
    """
    if not scores:
        best = attack.variants[0]
        words = (
            f"it searched with {_words(best)}, untried on simulated clients: that takes public examples and no secrets"
        )
        return attack.with_variant(best), Remark(words, (0,))
    of_variants, finals = scores[: len(attack.variants)], scores[len(attack.variants) :]
    place, length = _ranked(dict(enumerate(of_variants)), attack.variants)[0], attack.descent.iterations
    tried = "; ".join(
        f"{_words(each)}: {score / 1000:.2f}" for each, score in zip(attack.variants, of_variants, strict=True)
    )
    searches = ""
    if finals:
        clients, *numbers = finals
        found = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        decides = max(iterations for _, iterations, _ in found)
        if decides == length:  # the attack's own length was tried, behind noise: all lengths compete
            top = max(score for _, _, score in found)
            decides = length = max(iterations for _, iterations, score in found if score + _TIE >= top)
        place = _ranked({p: score for p, i, score in found if i == decides}, attack.variants)[0]
        each = (f"tv={_weight(attack.variants[p])}, {i} iterations: {s / 1000:.2f}" for p, i, s in found)
        searches = f"; on {plural(clients, 'simulated client')} {'; '.join(each)}"
    chosen = attack.with_variant(attack.variants[place])
    chosen = replace(chosen, descent=replace(chosen.descent, iterations=length))
    words = f"it searched with {_words(attack.variants[place])} for {length} iterations, the best on simulated clients"
    return chosen, Remark(f"{words} ({tried}{searches})", (0,))


def _thousandths(found: Tensor) -> int:
    return round(1000 * float(found.mean()))


def _ranked(scores: Mapping[int, int], variants: Sequence[Variant]) -> list[int]:
    """Rank places of variants by their scores; of those about as good as the best, the weakest last variation first."""
    top = max(scores.values())
    return sorted(
        scores, key=lambda p: (0, variants[p].last_tv, -scores[p]) if scores[p] + _TIE >= top else (1, -scores[p], 0)
    )


def _words(variant: Variant) -> str:
    return f"tv={_weight(variant)}, lr={variant.stepper.lr:g}, sign={variant.stepper.sign}"


def _weight(variant: Variant) -> str:
    return f"{variant.tv:g}" if variant.tv_end is None else f"{variant.tv:g}, tv_end={variant.tv_end:g}"
