"""Scores of a trial: reconstructions against the ground truth, controls, and the images that clients trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.noise_likelihood import likelier
from gradveil.attacks.protocol import Remark, in_words
from gradveil.audit.attack_selection import TrialAddress, attacker, undefended
from gradveil.audit.baselines import Gallery, Guessing, without_copies
from gradveil.audit.error_bound import mse_bound, recovery_bounds
from gradveil.audit.experiment import Experiment
from gradveil.audit.run_directory import Trial
from gradveil.audit.trial import Recovered, left_out
from gradveil.client import BatchDefences
from gradveil.client.layer_noise import layers_of
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, placed
from gradveil.data import Dataset
from gradveil.metrics import (
    Missing,
    label_accuracy,
    lpips,
    permute,
    scored,
)
from gradveil.metrics.part_leak import alike, part_leak

GALLERY = 2048
"""Private images of no target client that join the gallery, at most."""
PUBLIC = 4096
"""Public images that the chance of a guess is computed from, at most."""

_TOGETHER = 64
"""Batches that are transformed at once, at most."""
SHOWN = 64
"""Reconstructions of a trial whose nearest images are kept with the pictures, at most."""
NEIGHBOURS = 3
"""Images kept as the nearest to a reconstruction."""
COMPARED = 1000
"""Private examples of no target client that answers are compared with, part by part, at most."""


@dataclass(frozen=True)
class TrainedOnScores:
    """Scores [V, B] of reconstructions against the images trained on, and yes-or-no answers and chances of each."""

    scores: dict[str, Tensor]
    recovered: Tensor
    identified: Tensor | None
    """None where there is one image only."""
    expected: Sequence[Sequence[dict[str, float | int]]]
    """The chances of an attacker that only guesses, see `audit.baselines.expected_of`."""

    def of(self, v: int, b: int) -> dict[str, Any]:
        """Return the record of one image, without its scores."""
        identified = {} if self.identified is None else {"identified_transformed": bool(self.identified[v, b])}
        chances = {"expected_transformed": self.expected[v][b]} if self.expected[v][b] else {}
        return {"success_transformed": int(self.recovered[v, b]), **identified, **chances}


def trained_on(
    experiment: Experiment, trial: TrialAddress, tensors: Mapping[str, Tensor], places: Tensor
) -> TrainedOnScores:
    """Score reconstructions [V, B, C, H, W] against the images that the target clients trained on.

    Each batch is matched one to one by least MSE to the images trained on, whatever its match among the private images.
    An image is recovered where its SSIM is above the run's threshold. It is identified where the own image is nearest
    in L2 among all images that the target clients trained on, and up to 2,048 other private images after the same
    transforms (one draw). Where an attack undid the transforms, its reconstruction before that is scored.
    """
    view = experiment.views(tensors["transformed"])
    space = experiment.space
    matched = space.match(experiment.views(tensors.get("before_undoing", tensors["inputs"])), view)[1]
    scores = space.scores(matched, view)
    client = experiment.client(trial.client, trial.defence, trial.seed)
    batches = BatchDefences(client.batch, client.domain)
    others = _others(experiment, trial, places)
    inputs = experiment.batch(others).inputs
    gallery = torch.cat(
        [view.flatten(0, 1), experiment.views(_made(batches, inputs, _batch(experiment, trial), trial.seed))]
    )
    own = torch.arange(places.numel()).view(places.shape)
    return TrainedOnScores(
        {f"{name}_transformed": value for name, value in scores.items()},
        space.passes(scores[space.headline], experiment.config.threshold),
        space.identified(matched, own, gallery) if len(gallery) > 1 else None,
        _expected(experiment, trial, batches, places, others, gallery),
    )


def _batch(experiment: Experiment, trial: TrialAddress) -> int:
    return experiment.config.client[trial.client].batch


def _others(experiment: Experiment, trial: TrialAddress, places: Tensor) -> Tensor:
    """List the places of private images that no target client holds, in whole batches."""
    own, size = set(places.flatten().tolist()), _batch(experiment, trial)
    others = [place for place in range(len(experiment.private)) if place not in own][:GALLERY]
    return torch.tensor(others[: len(others) // size * size], dtype=torch.long)


def _made(batches: BatchDefences, inputs: Tensor, size: int, seed: int) -> Tensor:
    """Pass images [N, C, H, W] through the client's batch transforms, batch by batch."""
    count, key, made = len(inputs) // size, Key(seed, (Stream.GALLERY,)), [inputs[:0]]
    whole, rest = inputs[: count * size].unflatten(0, (count, size)), inputs[None, count * size :]
    number = 0
    for some in (*whole.split(_TOGETHER), rest):
        if not some.numel():
            continue
        targets = torch.zeros(some.shape[1], dtype=torch.long, device=some.device)
        spec = batches.spec(Batch(some[0], targets))
        drawn = [spec.sample(key.child(number + i), some.device) for i in range(len(some))]
        noise = {name: torch.stack([each[name] for each in drawn]) for name in drawn[0]}
        transformed = torch.vmap(lambda one, own, y=targets: batches.apply(Batch(one, y), own).inputs)(some, noise)
        made.append(transformed.flatten(0, 1))
        number += len(some)
    return torch.cat(made)


def _expected(
    experiment: Experiment, trial: TrialAddress, batches: BatchDefences, places: Tensor, others: Tensor, gallery: Tensor
) -> list[list[dict[str, float | int]]]:
    """Compute the chances of a guess for each image trained on.

    Guesses are public images after the same transforms, and their means. Where images are mixed they have no class:
    an image of any class may then be guessed, and is one of all in the gallery.
    """
    mixes, targets = _mixes(batches, experiment.batch(places[0]).inputs), experiment.private.targets
    targets = torch.zeros_like(targets) if mixes else targets
    guessing = _guessing(experiment, trial, batches, mixes)
    images = Gallery(gallery, targets[torch.cat([places.flatten(), others])])
    found: list[list[dict[str, float | int]]] = []
    for labels in targets[places].tolist():
        each = [{"identified": one.share} if mixes else one.record() for one in images.of_batch(labels)]
        if guessing is not None:
            for record, chance in zip(each, guessing.of_batch(labels), strict=True):
                record |= {"recovered": chance.share, "public": chance.images}
        found.append(each)
    return found


def _mixes(batches: BatchDefences, inputs: Tensor) -> bool:
    """Report whether what becomes of an image depends on the others of its batch."""
    batch = Batch(inputs, torch.zeros(len(inputs), dtype=torch.long, device=inputs.device))
    noise = batches.spec(batch).sample(Key(0, (Stream.MIXING,)), inputs.device)
    changed = torch.cat([inputs[:1], 1 - inputs[1:]])
    each = (batches.apply(Batch(some, batch.targets), noise).inputs[0] for some in (inputs, changed))
    return not torch.equal(*each)


def _guessing(experiment: Experiment, trial: TrialAddress, batches: BatchDefences, mixes: bool) -> Guessing | None:
    """Return what guesses reach on images after the transforms: computed once per client and defence."""
    known, plain = experiment.guessing_trained, experiment.guessing
    if plain is None:
        return None
    where = trial.client, trial.defence
    if where not in known:
        public: Dataset = plain.public.subset(range(min(PUBLIC, len(plain.public))))
        made = _made(
            batches, public.inputs.to(experiment.config.device, experiment.dtype), _batch(experiment, trial), 0
        )
        targets = torch.zeros_like(public.targets) if mixes else public.targets
        limits = public.space.limits(made)  # a defence may leave them, and reconstructions are compared within them
        made = made if limits is None else made.clamp(*limits)
        images = replace(public, inputs=made.to("cpu", public.inputs.dtype), targets=targets)
        known[where] = Guessing(images, plain.threshold, plain.classes)
    return known[where]


OTHERS = 64
"""A reconstruction is compared with at most so many images of other clients, and a target with so many guesses."""


def expected_of(
    guessing: Guessing | None, experiment: Experiment, places: Tensor
) -> list[list[dict[str, float | int]]]:
    """Compute for each target image [V, B] its chance to be recovered and identified by a guess.

    `public` and `gallery` are the numbers of images behind the two chances: public images that the best guess was
    compared with, private images of the class that it could be taken for (not there where some of these are copies of
    each other, or the guesses of a batch do better elsewhere). In a batch, `aimed` is the chance to be identified if
    the attacker knows the other images and aims all guesses at this one, `single` that one guess recovers it. `exact`
    is the chance to be recovered almost exactly. Without auxiliary data there is no chance of recovery, without a
    second private image none of identification; the chance to be recovered almost exactly is then that of the other
    private images: no guess without auxiliary data knows more of the images than these do.
    """
    targets = experiment.private.targets
    gallery = Gallery(experiment.private.views, targets) if len(targets) > 1 else None
    others = experiment.private_guessing if guessing is None else None
    found = [_exact_average(guessing, others, gallery, labels) for labels in targets[places].tolist()]
    for batch, where in zip(found, places.tolist(), strict=True):
        for record, twin in zip(batch, gallery.twins(where) if gallery else (), strict=False):
            # An image that is twice in a batch is twice in the sum, and known to those who know the other examples.
            record |= {"aimed": 1.0, "single": 1.0, "public_single": 0} if twin else {}
    return found


def _exact_average(
    guessing: Guessing | None, others: Guessing | None, gallery: Gallery | None, labels: Sequence[int]
) -> list[dict[str, float | int]]:
    """Compute the chances of the images of one batch."""
    found: list[dict[str, float | int]] = [{} for _ in labels]
    named = gallery.of_batch(labels) if gallery else [None] * len(labels)
    chances = guessing.of_batch(labels) if guessing else [None] * len(labels)
    above = guessing is not None and guessing.threshold < guessing.public.space.exactly
    exactly = guessing.of_batch(labels, exact=True) if guessing and above else []
    for record, name, chance in zip(found, named, chances, strict=True):
        record |= name.record() if name else {}
        record |= {"aimed": name.aimed} if name and len(labels) > 1 else {}
        if chance is None:
            continue
        # The image nearest to a guess is one of its gallery, and one at most of those that the guess passes for.
        nearest = name.share * (1 - (1 - chance.share) ** name.gallery) if name else 1.0
        record |= {"recovered": chance.share, "public": chance.images, "identifiable": min(chance.share, nearest)}
    if guessing is not None and len(labels) > 1:
        for record, label in zip(found, labels, strict=True):
            single = guessing.at_most(label)
            record |= {"single": single.share, "public_single": single.images}
    if others is not None:
        exactly = [others.at_most(label, len(labels), exact=True) for label in labels]
    for record, chance in zip(found, exactly, strict=False):
        record |= {"exact": chance.share, "public_exact": chance.images}
    return found


def best_guesses(guessing: Guessing | None, experiment: Experiment, places: Tensor) -> dict[str, dict[str, Any]]:
    """Return for each attacked class its best guess, the guess's chance, and the numbers of images that it rests on."""
    if guessing is None:
        return {}
    labels = sorted(set(experiment.private.targets[places].flatten().tolist()))
    chances = {label: guessing.chance(label) for label in labels}
    return {
        str(label): {"guess": chance.guess, "chance": chance.share, **guessing.sample(label)._asdict()}
        for label, chance in chances.items()
    }


def controls_of(guessing: Guessing | None, experiment: Experiment, matched: Tensor, places: Tensor) -> dict[str, Any]:
    """Score what proves nothing: the right answers for the wrong targets, and answers that need no update at all.

    Exact averages over pairs: of each reconstruction with private images of its class from other clients (of any class
    where there is none; exact copies are one image); of each target with the mean image, the mean of its class, and
    public images of its class.
    `OTHERS` images at most stand for all of a class.
    """
    gallery = experiment.private.views
    numbers = without_copies(gallery)
    wrong = list(_mismatched(experiment, matched, places, gallery, numbers))
    controls = {"wrong_target_client": _average(wrong)} if wrong else {}
    if guessing is None:
        return controls
    by_class: dict[int, list[int]] = {}
    for place in places.flatten().tolist():
        by_class.setdefault(int(experiment.private.targets[place]), []).append(place)
    kinds: dict[str, list[dict[str, Tensor]]] = {"mean_image": [], "class_mean": [], "class_image": []}
    for label, own in by_class.items():
        means = torch.stack([guessing.mean(), guessing.class_mean(label)])
        truth = torch.tensor(own)
        scores = _compared(
            experiment, means, gallery[truth], numbers[truth], _nearest(experiment, means, gallery, numbers)
        )
        for number, name in enumerate(("mean_image", "class_mean")):
            kinds[name].append({key: values[number : number + 1] for key, values in scores.items()})
        kinds["class_image"].append(_passing(experiment, guessing.images(label)[:OTHERS], gallery[own]))
    return controls | {name: _average(scores) for name, scores in kinds.items()}


def _mismatched(
    experiment: Experiment, matched: Tensor, places: Tensor, gallery: Tensor, numbers: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Compare each reconstruction with private images that other clients hold; copies of its own client's are none."""
    targets = experiment.private.targets
    count = max(8, min(OTHERS, 20_000 // places.numel()))
    pointed = _nearest(experiment, matched.flatten(0, 1), gallery, numbers).view(places.shape)
    for v, own in enumerate(places):
        outside = ~torch.isin(numbers, numbers[own])
        for b, place in enumerate(own.tolist()):
            others = (outside & (targets == targets[place])).nonzero().flatten()
            others = others if len(others) else outside.nonzero().flatten()
            if not len(others):
                return
            key = Key(0, (Stream.CONTROL, Stream.MISMATCH, place))
            chosen = others[torch.randperm(len(others), generator=key.generator())[:count]]
            yield _compared(experiment, matched[v, b : b + 1], gallery[chosen], numbers[chosen], pointed[v, b : b + 1])


def _compared(
    experiment: Experiment, guesses: Tensor, truth: Tensor, numbers: Tensor, nearest: Tensor
) -> dict[str, Tensor]:
    """Score guesses against images of these numbers, and whether they point at them."""
    scores = _passing(experiment, guesses, truth)
    identified = nearest[:, None] == numbers
    return scores | {"identified": identified, "identifiable": identified & scores["asr"]}


def _nearest(experiment: Experiment, views: Tensor, gallery: Tensor, numbers: Tensor) -> Tensor:
    """Return the number of the gallery image nearest to each view; -1 for one that is not finite.

    All copies of an image have its number.
    """
    nearest = experiment.space.nearest(views, gallery)
    return torch.where(nearest >= 0, numbers[nearest], -1)


def _passing(experiment: Experiment, guesses: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Score guesses against images: the headline score, and whether it is above the threshold."""
    similarity = experiment.space.similarity(guesses, truth)
    passes = experiment.space.passes(similarity, experiment.config.threshold)
    return {"asr": passes, f"{experiment.space.headline}_mean": similarity}


def _average(scores: list[dict[str, Tensor]]) -> dict[str, float]:
    """Average over targets, each of them over what it was compared with."""
    each = {name: torch.cat([one[name].double().mean(0) for one in scores]) for name in scores[0]}
    return {name: float(values.mean()) for name, values in each.items()}


@dataclass(frozen=True)
class TrialNames:
    """What reports call the defence and the attack, and whom to cite."""

    defence_title: str
    attack_title: str
    citations: tuple[str, ...] = ()


def score(experiment: Experiment, trial: TrialAddress, found: Recovered, named: TrialNames) -> Trial:
    """Compare what people see, each batch matched one to one.

    Where a batch defence changed the images, reconstructions are also scored against the images that the client trained
    on (`success_transformed`, `identified_transformed`); `success` is against the private images.
    """
    places = experiment.examples(trial.client, range(trial.clients(experiment.config.target_clients)), trial.seed)
    truth, candidate = experiment.views(experiment.batch(places).inputs), experiment.views(found.tensors["inputs"])
    order, matched = experiment.space.match(candidate, truth)
    scores = dict(experiment.space.scores(matched, truth))
    trained = trained_on(experiment, trial, found.tensors, places) if "transformed" in found.tensors else None
    scores |= trained.scores if trained else {}
    reasons = _perceptual(experiment, matched, truth, scores) | _further(experiment, matched, truth, scores)
    labels = permute(found.tensors["targets"], order)
    whole = len(experiment.private) > 1
    identified = experiment.space.identified(matched, places, experiment.private.views.double()) if whole else None
    records = []
    for v in range(len(places)):
        records.append(_record(experiment, found, places, labels, order, scores, identified, v))
    chances, copies = expected_of(experiment.guessing, experiment, places), _copies(truth)
    links = _links(experiment, matched, places)
    for v, record in enumerate(records):
        for b, image in enumerate(record["per_image"]):
            image["expected"] = chances[v][b]
            image |= copies.get((v, b), {})
            image |= trained.of(v, b) if trained else {}
            image |= links.get((v, b), {})
    controls = controls_of(experiment.guessing, experiment, matched, places)
    info = {**info_of(experiment, trial, found, named), "missing": reasons, "controls": controls}
    info["recovery_bounds"] = recovery_bounds(experiment, trial, found.facts.get("mechanisms", ()), records)
    info["best_guesses"] = best_guesses(experiment.guessing, experiment, places)
    info["metrics"] = [name for name in experiment.config.metrics if name in scores]
    info["parts"] = _parts(experiment, candidate, places)
    certainty = permute(found.tensors["certainty"], order) if "certainty" in found.tensors else None
    info |= experiment.space.of_trial(matched, truth, experiment.config.images, certainty)
    info["trace"] = _trace(experiment, found, truth)
    kept: dict[str, Tensor] = {}
    if experiment.config.images:
        kept = {"truth": truth, "reconstruction": experiment.space.repaired(matched)}
        if "transformed" in found.tensors:
            kept["truth_transformed"] = experiment.views(found.tensors["transformed"])
        if whole:
            kept["nearest"] = _neighbours(experiment, matched)
        kept = {name: placed(value, "cpu", torch.float32).contiguous() for name, value in kept.items()}
    return Trial(info, records, None, kept)


def _parts(experiment: Experiment, candidates: Tensor, places: Tensor) -> list[dict[str, Any]]:
    """Test the parts of the target examples that came back, tokens of texts, against others of class and length."""
    key = Key(0, (Stream.CONTROL, Stream.ORDER))
    own, inside = places.flatten().unique(return_inverse=True)
    others = torch.ones(len(experiment.private), dtype=torch.bool).index_fill(0, own, False).nonzero().flatten()
    others = others[torch.randperm(len(others), generator=key.generator())[:COMPARED]]
    chosen = experiment.private.subset(torch.cat([own, others]))
    public = None if experiment.guessing is None else experiment.guessing.public.views
    tests = experiment.space.shared_parts(candidates.flatten(0, 1), chosen.views, public)
    found = list[dict[str, Any]]()
    for name, (noun, counts, sizes, most, lengths) in tests.items():
        shared, most = (each.view(*places.shape, -1) for each in (counts, most))
        groups = alike(chosen.targets, lengths)
        test = part_leak(shared, most, sizes, inside.view(places.shape), groups, key.generator())
        found.append({"criterion": name, "noun": noun, **test._asdict()})
    return found


def _links(experiment: Experiment, matched: Tensor, places: Tensor) -> dict[tuple[int, int], dict[str, Any]]:
    """Return whether the record nearest to a reconstruction, its own aside, is of the same person; and its chance.

    It is known of persons with another record in the gallery. The chance is that of a record which is drawn at random
    from all others: the same, with the persons permuted.
    """
    persons = experiment.private.persons
    if not persons:
        return {}
    gallery, counts = experiment.private.views.double(), Counter(persons)
    shown = experiment.space.repaired(matched.flatten(0, 1)).double().to(gallery.device)
    nearest = iter(experiment.space.neighbours(shown, gallery, min(2, len(gallery))).tolist())
    found = dict[tuple[int, int], dict[str, Any]]()
    for v, batch in enumerate(places.tolist()):
        for b, own in enumerate(batch):
            other = next((place for place in next(nearest) if place != own), own)
            if persons[own] is not None and counts[persons[own]] > 1:
                chance = (counts[persons[own]] - 1) / (len(persons) - 1)
                found[v, b] = {"linked": persons[other] == persons[own], "linked_by_chance": chance}
    return found


def _neighbours(experiment: Experiment, matched: Tensor) -> Tensor:
    """Return the private images nearest to the first reconstructions: [N, K, *shape], the nearest first."""
    gallery = experiment.private.views
    shown = experiment.space.repaired(matched.flatten(0, 1)[:SHOWN])
    places = experiment.space.neighbours(shown, gallery, min(NEIGHBOURS, len(gallery)))
    return gallery[places]


def _further(experiment: Experiment, matched: Tensor, truth: Tensor, scores: dict[str, Tensor]) -> dict[str, str]:
    """Add the scores that the run asks for, or return under their names why they are missing."""
    missing: dict[str, str] = {}
    for name in experiment.config.metrics:
        if not experiment.space.pictured:
            missing[name] = f"is for images, not for {experiment.space.words.plural}"
            continue
        values = scored(name, matched, truth)
        if isinstance(values, str):
            missing[name] = values
        else:
            scores[name] = values
    return missing


def _copies(truth: Tensor) -> dict[tuple[int, int], dict[str, int]]:
    """Assign numbers to target images [V, B, ...] with exact copies among them, by (v, b): a guess may hit them all."""
    numbers = without_copies(truth.flatten(0, 1)).view(truth.shape[:2]).tolist()
    counts = Counter(number for row in numbers for number in row)
    return {
        (v, b): {"copy_of": number}
        for v, row in enumerate(numbers)
        for b, number in enumerate(row)
        if counts[number] > 1
    }


def _perceptual(experiment: Experiment, matched: Tensor, truth: Tensor, scores: dict[str, Tensor]) -> dict[str, str]:
    """Add LPIPS to the scores, or return the reason why not under its name."""
    net = experiment.config.lpips
    if not experiment.space.pictured:
        return {} if net is None else {"lpips": f"is for images, not for {experiment.space.words.plural}"}
    if net is None:
        return {"lpips": 'not asked for: set lpips = "alex" (or "vgg") in the run file'}
    found = lpips(matched, truth, net)
    if isinstance(found, Missing):
        return {"lpips": found.reason}
    scores["lpips"] = found
    return {}


def failure(experiment: Experiment, trial: TrialAddress, named: TrialNames, message: str, unfit: bool = False) -> Trial:
    """Make the record of a trial without a result: a status in the results, never a gap.

    It could not be finished; or the attack does not apply there (`unfit`), which is nobody's fault.
    """
    return Trial({**_address(experiment, trial, named), "failed": message, "unfit": unfit}, [])


def _record(
    experiment: Experiment,
    found: Recovered,
    places: Tensor,
    labels: Tensor,
    order: Tensor,
    scores: Mapping[str, Tensor],
    identified: Tensor | None,
    v: int,
) -> dict[str, Any]:
    space, tensors, target_clients = experiment.space, found.tensors, places.shape[0]
    truth = experiment.private.targets[places[v]]
    images = [
        {
            **{name: float(values[v, b]) for name, values in scores.items()},
            "success": int(space.passes(scores[space.headline][v, b], experiment.config.threshold)),
            "exact": bool(space.passes(scores[space.headline][v, b], space.exactly)),
            "identified": None if identified is None else bool(identified[v, b]),
            "matched": int(order[v, b]),
        }
        for b in range(places.shape[1])
    ]
    return {
        "target_client": experiment.config.first_target_client + v,
        "index": int(places[v, 0]),
        "label": truth.tolist(),
        "predicted": labels[v].tolist(),
        "status": found.statuses[v],
        "iterations": int(tensors["iterations"][v]),
        "seconds": found.facts["seconds"] / target_clients,
        "objective": float(tensors["objective"][v]),
        "restart": int(tensors["restart"][v]),
        **{name: fmean(image[name] for image in images) for name in scores},
        "success": int(all(image["success"] for image in images)),
        "label_accuracy": float(label_accuracy(labels[v : v + 1], truth[None])),
        "identified": None if identified is None else all(image["identified"] for image in images),
        "distance": float(tensors["distance"][v]),
        "cosine": float(tensors["cosine"][v]),
        "first_order_utility": float(tensors["first_order_utility"][v]),
        "second_order_utility": float(tensors["second_order_utility"][v]),
        "mse_taylor": _known(tensors["mse_taylor"][v]) if "mse_taylor" in tensors else None,
        "per_image": images,
    }


def _address(experiment: Experiment, trial: TrialAddress, named: TrialNames) -> dict[str, Any]:
    settings, defence = experiment.config.client[trial.client], experiment.defence(trial.defence)
    changes = [slot for slot in ("model", "batch", "step", "send") if getattr(defence, slot)]
    recorded = experiment.source.recorded_defence(experiment.config.first_target_client)
    return {
        "trial": trial.id,
        "control": trial.control,
        "model": experiment.config.model.name,
        "prepared": list(experiment.prepared),
        "data": experiment.config.data.name,
        "seed": trial.seed,
        "round": experiment.config.rounds - 1,
        "trained": trial.trained,
        "client": settings.title,
        "update": settings.update_of(experiment.space.words.noun),
        "local": settings.local is not None,
        "batch": settings.examples,
        "defence": trial.defence,
        "defence_title": named.defence_title,
        "changes": changes,
        "undefended": not changes and undefended(recorded or "none"),
        "recorded_defence": recorded,
        "attack": trial.attack,
        "attack_title": named.attack_title,
        "preset": experiment.attacks[trial.attack].name.partition("(")[0],
        "citations": list(named.citations),
        "threshold": experiment.config.threshold,
        **({"examples": words} if (words := experiment.space.words.record()) else {}),
    }


def info_of(experiment: Experiment, trial: TrialAddress, found: Recovered, named: TrialNames) -> dict[str, Any]:
    """Say what was attacked, by whom, and how the attack did as an attack."""
    facts, tensors, settings = found.facts, found.tensors, experiment.config.client[trial.client]
    seconds, address = facts["seconds"], _address(experiment, trial, named)
    whose = trial.defence, address["changes"], address["undefended"], facts["secrets"]
    return {
        **address,
        **{name: value for name, value in facts.items() if name != "mechanisms"},
        "attacker": attacker(experiment.attacks[trial.attack], *whose),
        "remarks": in_words(Remark(*each) for each in facts["remarks"]),
        "training": experiment.source.facts(trial.defence, trial.seed, trial.trained),
        "bytes_dense": float(tensors["bytes_dense"].double().mean()),
        "bytes_sent": float(tensors["bytes_sent"].double().mean()),
        "distance": float(tensors["distance"].mean()),
        "cosine": float(tensors["cosine"].mean()),
        "first_order_utility": float(tensors["first_order_utility"].mean()),
        "second_order_utility": float(tensors["second_order_utility"].mean()),
        "pruned": left_out(tensors["distance"], facts.get("pruned"), facts.get("held_back") or ()),
        "layers": layers_of(tensors, facts.get("layers") or {}),
        "iterations_per_second": facts["row_iterations"] / seconds if seconds else None,
        "bound": mse_bound(experiment, tensors, settings.examples) if len(tensors.get("nats", ())) else None,
        "health": {
            "objective": _median(tensors["objective"]),
            "objective_initial": _median(tensors["initial"]),
            "objective_truth": _median(tensors["at_truth"]),
            **_matches(tensors),
            "diverged": sum(status == "diverged" for status in found.statuses) / len(found.statuses),
        },
    }


def _matches(tensors: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Summarise how well the answers and the true images explain the update without priors, where that is known."""
    if "match" not in tensors or "match_at_truth" not in tensors:
        return {}
    answer, truth = tensors["match"], tensors["match_at_truth"]
    names = ("match", "layers", "likelihood")[: answer.shape[1]]
    found = {
        name: _median(values[:, place])
        for place, start in enumerate(names)
        for name, values in ((start, answer), (f"{start}_truth", truth))
    }
    if "match_at_others" in tensors:
        found["match_others"], found["layers_others"] = map(_median, tensors["match_at_others"][:, :2].unbind(1))
    if len(names) == 2:
        return found
    # Columns: match, layers, and behind them those of `explained`, with the extent of shared noise second.
    shared = torch.stack([answer[:, 3], truth[:, 3]]).amax(0)
    gap, spreads = likelier(answer, truth)
    return found | {
        "truth_likelier": _median(gap),
        "truth_likelier_z": _median(spreads),
        "noise_shared": _median(shared),
    }


def _trace(experiment: Experiment, found: Recovered, truth: Tensor) -> list[dict[str, float]]:
    """Score what the attack would have answered earlier: quality against budget."""
    space, rows = experiment.space, list[dict[str, float]]()
    for name, inputs in found.tensors.items():
        if name.startswith("trace."):
            similarity = space.scores(space.match(experiment.views(inputs), truth)[1], truth)[space.headline]
            rate = float(space.passes(similarity, experiment.config.threshold).double().mean())
            count = int(name.removeprefix("trace."))
            spread = float(similarity.std(correction=0))
            mean, of = float(similarity.mean()), space.headline
            rows.append({"iterations": count, "asr": rate, f"{of}_mean": mean, f"{of}_std": spread})
    return sorted(rows, key=lambda row: row["iterations"])


def _known(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def _median(values: Tensor) -> float | None:
    """Return the median of the finite values, None if there are none."""
    finite = values[torch.isfinite(values)]
    return float(finite.median()) if finite.numel() else None
