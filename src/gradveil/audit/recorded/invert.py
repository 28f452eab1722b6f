"""An attack on one update of the caller's, from Python: what `gradveil.invert` does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.attacks.closed_form.defended_layers import Estimated
from gradveil.attacks.closed_form.first_layer import Analytic
from gradveil.attacks.closed_form.layer_by_layer import Recursive
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.knowledge import Knowledge, Known
from gradveil.attacks.labels import class_signs, sign_is_turned
from gradveil.attacks.learned import Learned
from gradveil.attacks.protocol import Active, Attack, CanRefuse, Observation, Prospect, Reconstruction
from gradveil.audit.argument_checks import answer, declared, model_problems, prepared
from gradveil.audit.attack_selection import ADAPTIVE
from gradveil.audit.attackers.run_attackers import attackers_of
from gradveil.audit.attackers.update_facts import UpdateFacts
from gradveil.audit.audit_config import FIRST_SEARCH
from gradveil.audit.grants import told
from gradveil.audit.recorded.inverted_update import Inverted
from gradveil.audit.trial import in_parts
from gradveil.client import Client, Local, usual_loss
from gradveil.core.errors import Problem, refuse
from gradveil.core.formatting import listing, plural
from gradveil.core.given_objects import named
from gradveil.core.noise import Key
from gradveil.core.space import Space
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Domain, Loss, placed
from gradveil.data import Dataset
from gradveil.data.given_examples import Examples, column_names, tensors_of
from gradveil.data.given_rows import are_vectors, space_of_vectors_sent
from gradveil.data.pixel_range import Bounds, pixel_statistics
from gradveil.data.tables import is_frame
from gradveil.data.text_arguments import named_as, text_arguments
from gradveil.defences import Defence, parse
from gradveil.metrics import label_accuracy
from gradveil.nn.module_paths import count_classes
from gradveil.nn.normalisation import running_statistics
from gradveil.nn.token_layout import TokenModel
from gradveil.spaces import ImageSpace

"""Attacks that solve equations for inputs of numbers: tried before a search, in this order."""
_EXACT, _EXPLAINS = 1e-3, 0.1
"""Relative distances to the update: up to which no other closed form is tried, and no search. 0.08 is common where
equations are solved by least squares; the first layer of a wrong image is off by about 1."""
_BEYOND = 0.01
"""Share of the range of inputs by which a truth may lie outside it."""
_COUNTS = 0.01
"""Share of the whole update's norm: the distance of a tensor that has less is relative to this. Some have none but for
rounding."""


def invert_update(
    model: nn.Module,
    update: Mapping[str, Any] | Sequence[Any],
    attack: str | Attack | None,
    labels: Tensor | Sequence[int] | int | None,
    loss: Loss | None,
    *,
    as_html: Callable[[Inverted], str] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    examples: int | None = None,
    shape: tuple[int, ...] | int | None = None,
    bounds: Bounds = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    truth: Tensor | Examples | None = None,
    defence: str | Defence = "none",
    local: Local | Mapping[str, Any] | None = None,
    public: Any = None,
    seed: int = 0,
    prepare: bool = False,
) -> Inverted:
    """Attack one update of the caller's. `gradveil.invert` says what the arguments mean."""
    if isinstance(model, nn.Module) and isinstance(update, list | tuple):
        update = _in_their_order(model, update)
    refuse(list(_wrong_objects(model, update, truth, local)))
    problems: list[Problem] = []
    update = cast("Mapping[str, Any]", update)
    local = Local(**local) if isinstance(local, Mapping) else local
    update = _as_the_model_names_them(
        model,
        {name: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for name, value in update.items()},
    )
    shape = (shape,) if isinstance(shape, int) else shape
    texts = text_arguments(model, truth, public, tokenizer, length, where="truth")
    space = _space_of(truth, public) if texts is None else texts.space
    against = named("defence", [defence], lambda text: parse(text, own=True), problems)
    if texts is not None:
        update = named_as(texts.model, model, update)
        model, shape, public = texts.model, cast("tuple[int, ...]", texts.space.shape), texts.public
        true_inputs, true_labels = texts.examples or (None, None)
    else:
        alone = truth is None or isinstance(truth, Tensor | np.ndarray) or is_frame(truth)
        true_inputs, true_labels = tensors_of((truth, []) if alone else truth, "truth", None, mean, std)
        true_labels = None if alone else true_labels
        names = column_names(truth) or column_names(public)
        public = None if public is None else tensors_of(public, "public", None, mean, std)
        if space is None:
            sides = shape or getattr(model, "input_shape", ())
            data = (true_inputs if public is None else public[0]), sides
            # A truth gives one range for all columns: that of each would be an answer.
            from_truth = bounds is None and public is None and are_vectors(true_inputs)
            least, most = torch.aminmax(true_inputs) if from_truth else (torch.zeros(()), torch.ones(()))
            ends: Bounds = (float(least), float(most)) if from_truth else bounds
            space = space_of_vectors_sent(*data, names, ends, mean, std)
    usual = attack is None or attack == ADAPTIVE
    made = {} if usual else named("attack", [attack], lambda text: make_attack(text, own=True), problems)
    loss = loss or usual_loss(model)
    like = next((value for value in model.parameters() if value.is_floating_point()), None)
    device = torch.device("cpu") if like is None else like.device
    given = _class_numbers(labels, problems)
    given = None if given is None else given.to(device)
    if space is not None:
        shape = cast("tuple[int, ...]", space.shape)
    elif shape is None:
        shape = (
            cast("tuple[int, ...] | None", getattr(model, "input_shape", None))
            if true_inputs is None
            else tuple(true_inputs.shape[1:])
        )
    if examples is None:
        examples = next((len(known) for known in (true_inputs, given) if known is not None), 1)
    problems += _wrong(given, true_inputs, true_labels, shape, examples, 3 if space is None else 1)
    refuse(problems)
    assert shape is not None
    update = {name: value for name, value in update.items() if value is not None}
    dtype = next(iter(update.values())).dtype if like is None else like.dtype
    words = space is not None and "tokens" in space.offers
    blank = torch.zeros(examples, *shape, dtype=torch.long if words else dtype)
    if space is None or space.pictured:  # layers without biases say nothing of zeros
        blank = torch.rand(blank.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    if space is not None and words and space.model_facts()["padding"] == 0:
        blank += 1  # a text of padding alone has nothing to look at
    blank = blank.to(device)
    try_on = (blank, torch.zeros(examples, dtype=torch.long, device=device))
    model, done, blocked = prepared(model, try_on, loss, prepare)
    refuse(blocked or model_problems(model, try_on, loss, examples, prepare))
    classes = count_classes(model, blank[:1])
    (centre, scale), _ = pixel_statistics(bounds, mean, std, [] if public is None else [public[0]])
    space = space or ImageSpace(shape, centre, scale)
    classified = {"labels": given, "truth's labels": true_labels if _are_classes(true_labels) else None}
    refuse(list(_unlikely(space, true_inputs, classified, classes, bounds is not None)))
    (protection,) = against.values()
    public = None if public is None else tuple(value.to(device) for value in public)
    domain = Domain(space, classes, *(public or ()))
    client = protection(Client(model, loss, local=local, domain=domain), Key(seed))
    refuse(list(_without_public(client, domain)))
    params = client.params()
    update = {name: value.to(params[name]) if name in params else value for name, value in update.items()}
    update = {**_unreached(client, update, try_on), **update}
    refuse(list(_misfits(client, update)))
    seen = Observation(client.params(), {n: v.detach().unsqueeze(0) for n, v in update.items()}, examples, (0,))
    plain = client.step is None and client.send is None and not client.batch
    known, whose = (true_labels, "truth's labels") if given is None else (given, "labels")
    if plain:
        refuse(list(_contradictions(seen, client, blank[:1], known if _are_classes(known) else None, whose)))
    sent = _SentUpdate(seen, client, given, None if public is None else Batch(*public), Key(seed, (Stream.ATTACK,)))
    attacks = list(made.values())
    if not attacks:
        facts = UpdateFacts(
            Client(model, loss, local=local, domain=domain),
            examples,
            domain,
            public=None if public is None else len(public[0]),
            changed=client.step is not None or client.send is not None,
            statistics=bool(running_statistics(model)),
        )
        attacks = _usual_attacks(facts, next(iter(against)), client, every=attack == ADAPTIVE)
    answers: list[tuple[float, Attack, bool, Reconstruction]] = []
    for left, (by, restored) in zip(reversed(range(len(attacks))), map(sent.with_labels, attacks), strict=True):
        wrong = list(sent.problems(by))
        if not left and not answers:
            refuse(wrong)
        enough = _EXPLAINS if _searches(by) else _EXACT
        if not wrong and not any(distance <= enough for distance, *_ in answers):
            found = sent.attacked(by)
            answers.append((math.nan if words else sent.distance(found), by, restored, found))
    distance, by, restored, found = min(answers, key=lambda answer: answer[0])
    images = space.view(found.inputs[0].detach())
    metrics = {}
    if true_inputs is not None:
        truth_views = space.view(true_inputs.detach().to(images.device))
        metrics = _scores(space, images, found.targets, truth_views, true_labels)
    labels_of = found.targets[0].detach()
    views = None if true_inputs is None else space.view(true_inputs.detach().cpu())
    taken = given is not None and told(by)["targets"] == "known"
    contradicted = list[int]() if given is None or taken or distance > _EXPLAINS else given.tolist()
    if sorted(contradicted) == sorted(labels_of.tolist()):
        contradicted = []
    told_labels, of_truth = given if true_labels is None else true_labels, math.nan
    if true_inputs is not None and told_labels is not None and _are_classes(told_labels) and plain and not words:
        whole = Batch(placed(true_inputs, device, dtype), told_labels.to(device))
        # What the client drew, and which examples were in which of its steps, nobody knows.
        drawn = set(client.noise_spec(params, whole)) - ({local.order} if local is not None else set())
        if not drawn and not in_parts(client, whole):
            of_truth = sent.distance_of(*(value.unsqueeze(0) for value in whole))
    return Inverted(
        images,
        labels_of,
        float(found.objective[0]),
        found,
        metrics,
        restored,
        views,
        as_html,
        space,
        by.name,
        distance,
        given=taken,
        contradicted=tuple(contradicted),
        of_truth=of_truth,
        prepared=tuple(done),
    )


def _class_numbers(labels: Any, problems: list[Problem]) -> Tensor | None:
    """Read labels as class numbers [B]; note what they are if they are none."""
    if labels is None:
        return None
    try:
        read = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        problems.append(Problem("labels", f"are {labels!r}", "give class numbers: labels=[3]"))
        return None
    if read.is_floating_point() or read.is_complex() or read.dtype == torch.bool or read.dim() > 1:
        what = f"are numbers of {read.dtype} and shape {tuple(read.shape)}, which name no classes"
        problems.append(
            Problem("labels", what, "give a class number for each example, of one-hot rows labels.argmax(1)")
        )
        return None
    return read.long().reshape(-1)


def _space_of(*given: Any) -> Space | None:
    """Return what the examples of the first data set are that knows, such as rows of a table."""
    return next((each.example for each in given if isinstance(each, Dataset) and each.example is not None), None)


def _usual_attacks(facts: UpdateFacts, defence: str, client: Client, every: bool) -> list[Attack]:
    """List what attacks such an update: closed forms, and behind them the first search, or every one."""
    space, model = facts.domain.space, facts.client.model
    if "tokens" in space.offers:
        blind = isinstance(model, TokenModel) and not model.layout.attention
        return [make_attack("embedding-search" if blind else "span")]
    known = [make_attack(text) for text in attackers_of(facts, defence, client)]
    closed, searches = ([each for each in known if _searches(each) == search] for search in (False, True))
    searches = searches or [make_attack(FIRST_SEARCH["images" if space.pictured else "rows"])]
    return [*closed, *(searches if every else searches[:1])]


def _searches(attack: Attack) -> bool:
    """Whether an attack searches or learns, rather than solves equations."""
    return isinstance(attack, Inversion | Learned)


@dataclass(frozen=True)
class _SentUpdate:
    """An update that was sent, and what is known of it."""

    seen: Observation
    client: Client
    """The client that sent it, as the attacker believes."""
    labels: Tensor | None
    public: Batch | None
    key: Key

    def with_labels(self, attack: Attack) -> tuple[Attack, bool]:
        """Let an attack that is given the labels restore them, if nobody gave them and it can; and say if it does."""
        if self.labels is not None:
            return attack, False
        if told(attack)["targets"] != "known":
            return attack, told(attack)["targets"] == "infer"
        if isinstance(attack, Inversion | Learned | Analytic | Estimated | Recursive):
            return replace(attack, labels="restore"), True
        return attack, False

    def attacked(self, attack: Attack) -> Reconstruction:
        """Make an attack."""
        observations, simulated, knowledge = (self.seen,), self._simulated(attack), self._knowledge(attack)
        made = lambda: attack(observations, simulated, knowledge, self.key)  # noqa: E731
        return answer(attack, observations, simulated, knowledge, made)

    def distance(self, found: Reconstruction) -> float:
        """Return `distance_of` what an attack found."""
        return self.distance_of(found.inputs, found.targets)

    def distance_of(self, inputs: Tensor, targets: Tensor) -> float:
        """Return how far what a client with these examples sends is from the update, relative, of the worst tensor.

        Of the client's noise nothing is known. One factor above zero is free for all tensors: clients clip, and sum or
        average.
        """
        again = self.seen.simulate(self.client, inputs, targets)
        again = {name: value.detach() for name, value in again.items()}
        both = sum(float((again[name] * value).sum()) for name, value in self.seen.update.items())
        factor = max(both, 0.0) / max(sum(float(value.square().sum()) for value in again.values()), math.ulp(0))
        sizes = {name: float(value.norm()) for name, value in self.seen.update.items()}
        least = _COUNTS * math.hypot(*sizes.values())
        off = {name: float((factor * again[name] - value).norm()) for name, value in self.seen.update.items()}
        worst = max(off[name] / max(size, least, math.ulp(0)) for name, size in sizes.items())
        return worst if math.isfinite(worst) else math.inf

    def problems(self, attack: Attack) -> Iterator[Problem]:
        """Say why this attack cannot be made on an update that is already there."""
        where, knowledge = f"attack {attack.name}", self._knowledge(attack)
        yield from (replace(p, where=f"{where}: {p.where}") for p in declared(attack, self.public is not None))
        if isinstance(attack, Active):
            what = "changes the model before an update is made, and this one is there already"
            yield Problem(where, what, "give the changed model and an attack that only looks, or use gradveil.audit")
        if told(attack)["targets"] == "known" and knowledge.targets is None:
            what = "needs the labels, and none are given"
            remedy = "give labels=[...], or choose an attack that restores them: ig(labels=restore)"
            yield Problem(where, what, remedy)
        for pattern, how in knowledge.tensors.items():
            if isinstance(how, Known) and how.value is None:
                what = f"needs the true values of '{pattern}', which nobody here knows"
                yield Problem(where, what, "choose an attack that finds or guesses them: cdia")
        if isinstance(attack, CanRefuse):
            public = 0 if knowledge.public is None else len(knowledge.public.targets)
            given = knowledge.space.shape, self.seen.examples, knowledge.classes, public
            prospect = Prospect(self._simulated(attack), *given)
            yield from (replace(p, where=f"{where}: {p.where}") for p in attack.problems(prospect))

    def _simulated(self, attack: Attack) -> Client:
        return self.client if attack.simulated_client == "full" else self.client.undefended_update()

    def _knowledge(self, attack: Attack) -> Knowledge:
        tensors = {name: how for name, how in attack.knowledge.items() if name not in ("targets", "public")}
        targets = None
        if self.labels is not None and told(attack)["targets"] == "known":
            targets = self.labels.unsqueeze(0)
        assert self.client.domain is not None
        return Knowledge(self.client.domain.space, self.client.domain.classes, tensors, targets, self.public)


def _wrong_objects(model: Any, update: Any, truth: Any, local: Any) -> Iterator[Problem]:
    """Find arguments that are not what they are for, before one of them is looked into."""
    if not isinstance(model, nn.Module):
        yield Problem("model", f"is {type(model).__name__}", "give the torch.nn.Module that the update is of")
    remedy = "give a dict of the tensors that were sent, by parameter name"
    if isinstance(update, list | tuple) and isinstance(model, nn.Module):
        sent, held = len(cast("Sequence[Any]", update)), len(list(model.parameters()))
        what = f"is a {type(update).__name__} of {sent}, and the model has {plural(held, 'parameter')}"
        yield Problem(
            "update", what, f"give a tensor or None for each, in the order of model.parameters(); or {remedy}"
        )
    elif not (isinstance(update, Mapping) and update):
        yield Problem("update", f"is {'empty' if isinstance(update, Mapping) else type(update).__name__}", remedy)
    else:
        values = cast("Mapping[Any, Any]", update)
        for name, value in values.items():
            if not (value is None or isinstance(value, Tensor | np.ndarray)):
                yield Problem(f"update['{name}']", f"is {type(value).__name__}", remedy)
        if all(value is None for value in values.values()):
            yield Problem("update", "holds no gradient: every value is None", "call loss.backward() first")
        elif all(
            value is None or (isinstance(value, Tensor | np.ndarray) and not value.any()) for value in values.values()
        ):
            yield Problem("update", "holds zeros alone, which say nothing of examples", "give what the client sent")
    if isinstance(truth, Tensor | np.ndarray) and truth.ndim == 3:
        what = f"is {tuple(truth.shape)}, which is a batch without channels or one image without a batch"
        last = truth.shape[2] == 3 and truth.shape[0] > 3
        one = "truth[None] of one image"
        one += ", truth.permute(2, 0, 1)[None] where its colours come last" if last else ""
        yield Problem("truth", what, f"give [N, channels, height, width]: {one}")
    if isinstance(local, Mapping):
        known, said = {field.name: field.default for field in fields(Local)}, set(map(str, cast("Any", local)))
        for name in sorted(said - known.keys()):
            yield Problem(f"local.{name}", "is no setting of local training", f"one of {', '.join(known)}")
        for name in sorted(name for name, usual in known.items() if usual is MISSING and name not in said):
            yield Problem(f"local.{name}", "is missing", f"give it: local=gradveil.Local({name}=...)")


def _in_their_order(model: nn.Module, update: Sequence[Any]) -> Mapping[str, Any] | Sequence[Any]:
    """Name the tensors of `torch.autograd.grad(loss, model.parameters())`, or of those parameters that are trained."""
    for names in (
        [name for name, _ in model.named_parameters()],
        [name for name, value in model.named_parameters() if value.requires_grad],
    ):
        if len(names) == len(update) > 0:
            return dict(zip(names, update, strict=True))
    return update


def _as_the_model_names_them(model: nn.Module, update: Mapping[str, Any]) -> dict[str, Any]:
    """Take names as DistributedDataParallel and torch.compile write them, which put a word before each."""
    own = {name for name, _ in model.named_parameters()}
    for prefix in ("module.", "_orig_mod."):
        if not own & update.keys() and all(name.startswith(prefix) for name in update):
            update = {name.removeprefix(prefix): value for name, value in update.items()}
    return dict(update)


def _wrong(
    labels: Tensor | None, inputs: Tensor | None, true_labels: Tensor | None, shape: Any, examples: Any, sides: int
) -> Iterator[Problem]:
    """Find arguments that cannot be meant, before anything is computed."""
    if shape is None or len(shape) != sides or not all(isinstance(side, int) and side >= 1 for side in shape):
        remedy = "say what one input looks like: shape=(channels, height, width) or (columns,), of a text length=tokens"
        yield Problem("shape", f"is {shape}", remedy)
    if shape is not None and inputs is not None and tuple(inputs.shape[1:]) != tuple(shape):
        yield Problem(
            "shape", f"is {shape}, and one input of the truth is {tuple(inputs.shape[1:])}", "leave shape= out"
        )
    if shape is not None and len(shape) == 3 and shape[2] == 3 and shape[0] not in (1, 3):
        yield Problem("shape", f"is {shape}: the three colours come last", f"put them first: {(3, *shape[:2])}")
    if isinstance(examples, bool) or not (isinstance(examples, int) and examples >= 1):
        yield Problem("examples", f"is {examples!r}", "give how many examples the update is made from")
        return
    for name, value in (("labels", labels), ("truth", inputs), ("truth's labels", true_labels)):
        if value is not None and len(value) != examples:
            what = f"hold {plural(len(value), 'example')}, and the update is of {examples}"
            yield Problem(name, what, "give one for each example")


def _unlikely(
    space: Space, truth: Tensor | None, labels: Mapping[str, Tensor | None], classes: int, bounded: bool
) -> Iterator[Problem]:
    """Find a truth that no attacker could reach, and classes that the model does not have.

    Numbers of a row may lie outside those of public rows, unless the caller `bounded` them.
    """
    for name, each in labels.items():
        if each is not None and len(each) and not 0 <= int(each.min()) <= int(each.max()) < classes:
            yield Problem(name, f"are {each.tolist()}", f"the model has {classes} classes: give 0 to {classes - 1}")
    if truth is None or "tokens" in space.offers:
        return
    limits = space.bounds(truth) if bounded else space.limits(truth)
    if limits is None:
        return
    low, high = limits
    beyond = _BEYOND * float((high - low).max())
    if bool((truth < low - beyond).any() or (truth > high + beyond).any()):
        what = f"has values from {float(truth.min()):.3g} to {float(truth.max()):.3g}, where inputs lie between "
        what += f"{float(low.min()):.3g} and {float(high.max()):.3g}"
        yield Problem("truth", what, "say what the inputs are: mean= and std=, or bounds=(low, high)")


def _without_public(client: Client, domain: Domain) -> Iterator[Problem]:
    """Refuse a defence that is made with public examples where there are none."""
    made_with = any(part is not None and part.needs_public for part in (client.step, client.send, *client.batch))
    if made_with and domain.public is None:
        yield Problem("public", "is missing, and the defence is made with it", "give public=(inputs, labels)")


def _unreached(client: Client, update: Mapping[str, Tensor], example: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return zeros for parameters that were not sent, where the loss does not depend on them."""
    params = client.params()
    missing = {name: params[name] for name in client.trained() if name not in update}
    if not missing:
        return {}
    live = dict(client.model.named_parameters())
    inputs, targets = example
    with torch.enable_grad():
        value = client.loss(client.model(inputs), targets).mean()
        slopes = torch.autograd.grad(value, [live[name] for name in missing], allow_unused=True)
    return {
        name: torch.zeros_like(param)
        for (name, param), slope in zip(missing.items(), slopes, strict=True)
        if slope is None
    }


def _misfits(client: Client, update: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Compare an update with what this client would send."""
    params = client.params()
    wanted = {name: tuple(params[name].shape) for name in client.trained()}
    missing, strange = sorted(wanted.keys() - update.keys()), [name for name in update if name not in wanted]
    if missing and strange:
        what = f"lacks {_some(missing)}, which the model trains, and holds {_some(strange)}, which it does not"
        yield Problem("update", what, "give the model that it was computed with, by its names")
        return
    for name in missing:
        remedy = "give it: the model trains it; if your client does not, call requires_grad_(False) on that parameter"
        yield Problem(f"update['{name}']", "is missing", remedy)
    for name, value in update.items():
        if name in strange:
            yield Problem(f"update['{name}']", "is no trained parameter of the model", "leave it out")
        elif tuple(value.shape) != wanted[name]:
            yield Problem(f"update['{name}']", f"is {tuple(value.shape)}", f"the model's is {wanted[name]}")
        elif value.layout != torch.strided:
            yield Problem(f"update['{name}']", f"is sparse ({value.layout})", "give value.to_dense()")
        elif not bool(value.isfinite().all()):
            yield Problem(f"update['{name}']", "holds NaN or infinity", "give one of a step that did not overflow")


def _some(names: Sequence[str]) -> str:
    """Name the first of some parameters, and count the others.

    >>> _some(["a", "b", "c"]), _some(["a"])
    ("'a' and 2 others", "'a'")
    """
    more = f" and {plural(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"


def _are_classes(labels: Tensor | None) -> bool:
    """Whether labels are class numbers [B], not probabilities or other targets."""
    return labels is not None and labels.dim() == 1 and labels.dtype == torch.long


def _contradictions(
    seen: Observation, client: Client, example: Tensor, labels: Tensor | None, whose: str
) -> Iterator[Problem]:
    """Find an update with its sign turned, and labels that the gradient of the logits' bias contradicts."""
    found = class_signs(client, seen.update, example)
    if found is None:
        return
    name, signs = found
    below, above = (set((sign * signs[0] > 0).nonzero().flatten().tolist()) for sign in (-1, 1))
    told = None if labels is None else set(labels.tolist())
    if sign_is_turned(signs[0], seen.examples):
        what = f"has its sign turned, as new minus old parameters have: '{name}' is below zero for {len(below)} "
        what += f"class{'' if len(below) == 1 else 'es'}, where only those of the "
        what += f"{plural(seen.examples, 'example')} can be"
        yield Problem("update", what, "give old minus new: {name: -value for name, value in update.items()}")
    elif told is not None and (missing := sorted(below - told)):
        what = f"are {sorted(told)}, and the gradient of '{name}' is below zero for class "
        what += f"{listing(map(str, missing))}, as it is only where an example has that label"
        remedy = "give the right ones, or leave them out: they are restored; or name what else the client does: its "
        remedy += "loss=, local= or defence="
        if above and above <= told:
            remedy += "; or give the negative of the update, if it is new minus old parameters"
        yield Problem(whose, what, remedy)


def _scores(
    space: Space, images: Tensor, labels: Tensor, truth: Tensor, true_labels: Tensor | None
) -> dict[str, float]:
    """Score images [B, C, H, W] against the truth, in the order that fits best."""
    matched = space.match(images.unsqueeze(0), truth.unsqueeze(0))[1]
    scores = space.scores(matched, truth.unsqueeze(0))
    found = {name: float(score.mean()) for name, score in scores.items()}
    if len(images) > 1 and "ssim" in found:
        found["recovered"] = float((scores["ssim"] > space.threshold).double().mean())
    if true_labels is not None:
        found["label_accuracy"] = float(label_accuracy(labels, true_labels.unsqueeze(0)).mean())
    return found
