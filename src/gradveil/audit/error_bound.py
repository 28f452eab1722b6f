"""The error that no attacker can stay below, for the targets of a run.

Images are taken to be normal with the public images' spectrum (`gradveil.theory.reconstruction_bound`), labels and
the model's noise to be known. Bounds are mean squared errors of pixels in [0, 1], as the scores are. Where a formal
guarantee holds, the probability of recovery is bounded too (`gradveil.theory.reconstruction_robustness`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from gradveil.attacks.protocol import Observation
from gradveil.audit.attack_selection import TrialAddress
from gradveil.audit.baselines import LEVEL
from gradveil.audit.experiment import Experiment
from gradveil.audit.observe import Truth, in_round, undefended
from gradveil.client import Client
from gradveil.core.formatting import number as rounded
from gradveil.core.formatting import percent, plural, rounded_up
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, take
from gradveil.core.types import Batch
from gradveil.defences.fisher_information import UpdateInformation, information, obstacle, settled, sight
from gradveil.theory.accounting import Participation, Unit
from gradveil.theory.epsilon_lower_bound import upper_end
from gradveil.theory.gradient_pruning import taylor_bound
from gradveil.theory.input_jacobian import spectral_norms
from gradveil.theory.reconstruction_bound import block_bound, from_cosine, rate_bound, spectrum
from gradveil.theory.reconstruction_robustness import GUESSES, recovery_bound, total_shift, unbiased_error

_AT_ONCE = 2**22
"""How many numbers of gradients are computed at once for their Jacobian."""
PROBES = 2
"""Random directions in each group of cosine coefficients, for each target client."""


def leaked(
    experiment: Experiment, seed: int, client: Client, seen: Sequence[Observation], truth: Truth
) -> tuple[Tensors, str | None]:
    """Estimate what all rounds tell of every target client, or give the reason why no bound is known.

    `information` [V, G] are the traces tr F_g over groups of cosine coefficients: the mean of v^T F v for v with random
    signs in a group (Hutchinson 1989), not a number where the update jumps. `nats` [V] bound the mutual information.
    """
    first = Batch(truth.raw.inputs[0], truth.raw.targets[0])
    why = (
        obstacle(client, first)
        if experiment.space.pictured
        else f"no prior of {experiment.space.words.plural} is known"
    )
    if why is None and (experiment.public is None or len(experiment.public) < 2):
        why = "there are no public images to learn a prior from"
    if why is not None or experiment.public is None:
        return {"information": torch.zeros(0, 0), "nats": torch.zeros(0)}, why
    groups, mean = spectrum(experiment.public.views).groups(), experiment.public.inputs.mean(0).to(first.inputs)
    cuts = [sight(watched.believed(client), first.inputs.shape[0]) for watched in seen]
    cuts = [settled(cut, watched.params, first) for cut, watched in zip(cuts, seen, strict=True)]
    rows: list[UpdateInformation] = []
    for v, number in enumerate(seen[0].target_clients):
        batch = Batch(truth.raw.inputs[v], truth.raw.targets[v])
        probes = _probes(experiment, groups, batch, Key(seed, (Stream.BOUND, number)))
        parts = []
        for r, watched in enumerate(seen):
            names = client.noise_spec(watched.params, batch)
            noise = {name: truth.noise[in_round(r, name)][v] for name in names}
            parts.append(information(cuts[r], watched.params, batch, noise, probes, mean))
        rows.append(reduce(add, parts))
    along = torch.stack([row.along for row in rows]).reshape(len(rows), len(groups), PROBES)
    return {"information": along.mean(2), "nats": torch.stack([row.nats for row in rows])}, None


def mse_bound(experiment: Experiment, told: Mapping[str, Tensor], examples: int) -> dict[str, Any]:
    """Bound the mean squared error by what the target clients' updates tell; `prior` is the error without any update.

    Expectations are averages over the target clients, who stand for draws from the prior. Of both bounds the higher one
    counts; where the update jumps there is only that of mutual information.
    """
    assert experiment.public is not None
    prior = spectrum(experiment.public.views)
    sizes = examples * prior.groups().flatten(1).sum(1).double()
    found = {"mutual information": float(rate_bound(prior.variances, told["nats"].mean() / examples))}
    fisher = told["information"].mean(0)
    if not bool(fisher.isnan().any()):
        found["Cramér-Rao"] = float(block_bound(fisher, examples * prior.information(), sizes))
    best = max(found, key=lambda name: found[name])
    return {"mse": found[best], "by": best, "prior": prior.variance}


def taylor_errors(
    experiment: Experiment, seed: int, client: Client, base: Client, seen: Observation, truth: Truth, left_out: Tensor
) -> Tensor:
    """Return the mean squared error [V] that Proposition 1 of Xue et al. 2024 gives for pruned gradients.

    `left_out` [V] is the distance of what was sent from the gradient. The result is of first order, and for attackers
    whose images have what was sent as their whole gradient: one who reads the mask off the zeros need not obey it. NaN
    where the gradient does not depend on the image, and of texts, whose tokens are numbers without distances.
    """
    if not truth.raw.inputs.is_floating_point():
        return torch.full_like(left_out, torch.nan)
    plain, noise, state = undefended(client, base, seen.params, truth)
    lower, upper = experiment.space.bounds(truth.raw.inputs)
    pixels = (truth.raw.inputs - lower) / (upper - lower)
    size, found = max(1, _AT_ONCE // sum(value.numel() for value in seen.params.values())), list[Tensor]()
    for begin in range(0, len(left_out), size):
        rows = slice(begin, begin + size)
        targets, drawn, kept = truth.raw.targets[rows], take(noise, rows), take(state, rows)

        def gradients(some: Tensor, fixed: tuple[Tensor, Tensors, Tensors] = (targets, drawn, kept)) -> Tensors:
            batch = Batch(lower + some * (upper - lower), fixed[0])
            return plain.updates(seen.params, batch, fixed[1], fixed[2])[0]

        keys = [Key(seed, (Stream.BOUND, number, Stream.PROBE)) for number in seen.target_clients[rows]]
        start = torch.stack([torch.randn(pixels.shape[1:], generator=key.generator()) for key in keys])
        found.append(spectral_norms(gradients, pixels[rows], start.to(pixels)))
    norms = torch.cat(found)
    squares = taylor_bound(left_out, norms).double().square() / pixels[0].numel()
    return torch.where(norms > 0, squares, torch.nan)


def _probes(experiment: Experiment, groups: Tensor, batch: Batch, key: Key) -> Tensor:
    """Draw directions [G K, B, C, H, W] of the model's inputs, which are (pixel - mean) / std."""
    shape = (len(groups), PROBES, *batch.inputs.shape)
    signs = 2.0 * torch.randint(2, shape, generator=key.generator(), dtype=torch.float64) - 1
    pixels = from_cosine(signs * groups[:, None, None].double())
    lower, upper = experiment.space.bounds(torch.zeros(()))
    return (pixels * (upper - lower).double()).flatten(0, 1).to(batch.inputs)


@dataclass(frozen=True)
class _Watched:
    """Noisy sums of a unit that an attacker sees: those that the audit made, or those of the planned training."""

    of: Literal["watched", "planned"]
    unit: Unit
    noise: float
    training: Participation

    def bound(self, guess: float) -> float:
        return recovery_bound(guess, [(self.noise, self.training)])


def recovery_bounds(
    experiment: Experiment,
    trial: TrialAddress,
    mechanisms: Sequence[tuple[Unit, float, Mapping[str, Any]]],
    records: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Bound the probability that any attacker recovers and identifies an image, for each sound mechanism of a client.

    `guess` is the chance of the best guess without the update, from the baselines of these targets; where it is
    unknown, `quoted` has the bound for usual values. Rounds of a training before the attack count, because the attacker
    has the parameters that they led to.
    """
    config = experiment.config
    rounds = config.rounds + (trial.trained or 0)
    found: list[dict[str, Any]] = []
    for unit, noise, settings in mechanisms:
        once = Participation(**settings)
        watched = replace(once, steps=once.steps * rounds, at_most=once.at_most and once.at_most * rounds)
        plans = [_Watched("watched", unit, noise, watched)]
        plans += [_Watched("planned", unit, noise, config.privacy.build())] if config.privacy else []
        guesses = best_chances(records, unit)
        found += [_stated(plan, guesses, config.client[trial.client].examples) for plan in plans]
    return found


def _stated(plan: _Watched, guesses: Mapping[str, float], examples: int) -> dict[str, Any]:
    training = plan.training
    # A guess may hit any example of a client; of an update some example is hit at most as often as all together.
    some = {name: min(1.0, guess * (examples if plan.unit == "client" else 1)) for name, guess in guesses.items()}
    guess, recovered = min(some.values(), default=None), some.get("recovered")
    bound = None if guess is None else plan.bound(guess)
    return {
        "of": plan.of,
        "unit": plan.unit,
        "noise": plan.noise,
        "releases": training.epochs if training.sampling == "shuffled" else training.steps,
        "rate": training.rate if training.sampling == "poisson" else 1.0,
        "guess": guess,
        "bound": bound,
        "bound_any": None if bound is None else min(1.0, bound * (examples if plan.unit == "example" else 1)),
        "guess_recovered": recovered,
        "bound_recovered": None if recovered is None else plan.bound(recovered),
        "quoted": {f"{each:g}": plan.bound(each) for each in GUESSES},
        "mse_unbiased": unbiased_error(total_shift([(plan.noise, training)])),
    }


def best_chances(records: Sequence[Mapping[str, Any]], unit: Unit = "example") -> dict[str, float]:
    """Bound the chance from above that a guess recovers, or identifies, one of these images; known criteria only.

    The chance of identification is that of one image among the gallery's of its class, all equally likely. The chance
    of recovery is a share of public images: it takes the upper Clopper-Pearson end at 5%, divided by the number of
    guesses that were compared (every public image, the mean of the class, and the mean image). A batch has as many
    guesses as images. An attacker who knows all examples but one aims all of them at this one: the chance of an
    `example` is that of the easiest image. A `client` has as many chances as images: that of the easiest client counts.
    """
    of = max if unit == "example" else fmean
    found: dict[str, float] = {}
    clients = [[image.get("expected") or {} for image in record["per_image"]] for record in records]
    clients = [images for images in clients if images]
    if clients and all("identified" in expected for images in clients for expected in images):
        aimed = "aimed" if unit == "example" else "identified"
        found["identified"] = max(of(each.get(aimed, each["identified"]) for each in images) for images in clients)
    if clients and all("recovered" in expected for images in clients for expected in images):
        found["recovered"] = max(
            of(min(1.0, _upper(expected, len(images), unit)) for expected in images) for images in clients
        )
    return found


def _upper(expected: Mapping[str, Any], guesses: int, unit: Unit) -> float:
    aimed = unit == "example" and "single" in expected
    share, images = (expected[name] for name in (("single", "public_single") if aimed else ("recovered", "public")))
    one = upper_end(round(share * images), images, LEVEL / (images + 2)) if images else 1.0
    return one * guesses if aimed else one


def recovery_sentence(bound: Mapping[str, Any]) -> str:
    """State one of the `recovery_bounds` in a sentence.

    >>> recovery_sentence({"of": "watched", "unit": "example", "noise": 1.0, "releases": 1, "rate": 1.0,
    ...     "guess": 0.01, "bound": 0.0924})
    'an attacker who knows all other examples recovers and identifies this one with probability at most 9.24% (guess \
1%, sigma 1, one release)'
    >>> recovery_sentence({"of": "watched", "unit": "example", "noise": 1.0, "releases": 1, "rate": 1.0,
    ...     "guess": 0.983, "bound": 0.99999})
    'no limit for an attacker who knows all other examples: a guess at this one alone is right with probability up to \
98.3%, as far as the public examples tell, and the baseline is only its estimate; more of them in each class lower it'
    """
    facts = [f"sigma {rounded(bound['noise'])}", releases(bound)]
    if bound["unit"] == "client":
        who, whom = "an attacker who knows the data of all other clients", "any example of this one"
    else:
        who, whom = "an attacker who knows all other examples", "this one"
    if bound["bound"] is not None and at_most(bound["bound"]) == "100%":
        why = f"too little noise ({', '.join(facts)})"
        if 2 * bound["guess"] >= 1:
            upper = f"a guess at {whom} alone is right with probability up to {percent(bound['guess'])}"
            why = (
                f"{upper}, as far as the public examples tell, and the baseline is only its estimate; more of them in "
            )
            why += "each class lower it"
        return f"no limit for {who}: {why}"
    who = f"{who} recovers and identifies {whom}"
    if bound["bound"] is not None:
        chance = f"{at_most(bound['bound'])} (guess {percent(bound['guess'])}, {', '.join(facts)})"
        return f"{who} with probability at most {chance}"
    quoted = (f"{at_most(most)} for a guess of {float(guess):g}" for guess, most in bound["quoted"].items())
    return f"{who} with probability at most {', '.join(quoted)} ({', '.join(facts)}; the guess is unknown)"


def at_most(share: float) -> str:
    """Write a share as a percentage of three digits, rounded up.

    >>> at_most(0.0923617), at_most(0.99999), at_most(0.0), at_most(8.7218e-7)
    ('9.24%', '100%', '0%', '8.73e-05%')
    """
    return f"{rounded_up(100 * share):.3g}%"


def releases(bound: Mapping[str, Any]) -> str:
    """Describe which noisy sums a recovery bound covers."""
    count = "one release" if bound["releases"] == 1 else plural(bound["releases"], "release")
    rate = "" if bound["rate"] == 1 else f" at rate {rounded(bound['rate'])}"
    return f"{count}{rate}{' planned' if bound['of'] == 'planned' else ''}"
