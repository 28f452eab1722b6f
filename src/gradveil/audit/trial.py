"""One trial of an audit: a client, a defence, an attack and a seed; its updates and the attack on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.inversion.inversion import Inversion
from gradveil.attacks.inversion.rehearsal import adds_noise, shifted
from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.learned import Learned
from gradveil.attacks.protocol import (
    Active,
    Attack,
    HasObjective,
    HasPlan,
    Matcher,
    Observation,
    Persistent,
    Progress,
    Reconstruction,
    Remark,
    traits,
)
from gradveil.attacks.simulated_updates import Simulated
from gradveil.audit.argument_checks import answer
from gradveil.audit.attack_selection import (
    UNDEFENDED,
    TrialAddress,
    first_met,
    has_control,
    method,
    open_ended,
    pairs,
)
from gradveil.audit.audit_config import AUTO, RunConfig
from gradveil.audit.budgets import (
    UNPLANNED,
    Budget,
    BudgetShare,
    Plans,
    read_budget,
    restarts_worth,
    share_left,
    spends,
    weight,
    within,
)
from gradveil.audit.error_bound import leaked, taylor_errors
from gradveil.audit.experiment import Experiment
from gradveil.audit.grants import active_facts, first, grant, looks_at_last, received, resent, rounds_used, told, ways
from gradveil.audit.observe import Truth, observe, raw_update, updates
from gradveil.audit.run_warnings import privacy_facts
from gradveil.client import Client
from gradveil.client.layer_noise import layer_noise
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, norm
from gradveil.core.types import Batch
from gradveil.core.user_code import users
from gradveil.core.working_time import working_time
from gradveil.defences import Aligned, Dual, Feedback, OptimalPruning, Pruning
from gradveil.defences.guarantees import stages
from gradveil.federated.training_state import Standing
from gradveil.metrics import cosine, dense_bytes, relative_distance
from gradveil.theory.first_order_utility import utilities
from gradveil.theory.gradient_pruning import degraded_cosine, least_gamma, worst_cosine
from gradveil.wire.codec import encoded_size


def worth(sent: Tensors, raw: Tensors) -> Tensors:
    """Compute Definition 2's two utilities [V] of Chen, Gürsoy and Lei 2024, in units of an undefended step."""
    first, second = utilities(raw, sent)
    return {"first_order_utility": first, "second_order_utility": second}


def pruned(client: Client) -> dict[str, float] | None:
    """Return what is known of how much this client's pruning leaves out, None where it does not prune, or not alone.

    It is left out of P = g + e with error feedback, of g without. Of dual pruning `gamma_1_assumed` is the lower bound
    of gamma_1 that the paper prints, `least` our sharper one; both hold for shares that come out whole.
    """
    inner = [stage.inner if isinstance(stage, Feedback) else stage for _, stage in stages(client.send)]
    if not inner or client.step or client.batch or client.members > 1:
        return None
    if not all(isinstance(stage, Pruning) for stage in inner):
        return None
    if any(isinstance(stage, OptimalPruning) and stage.std for stage in inner):
        return None
    if len(inner) == 1 and isinstance(inner[0], Dual):
        printed, least = least_gamma(inner[0].top, inner[0].bottom)
        return {"least": least, "gamma_1_assumed": printed}
    return {}


def taylor_applies(client: Client) -> bool:
    """Return whether Proposition 1 of the papers is about this client: it sends one gradient, pruned from both ends."""
    inner = [stage.inner if isinstance(stage, Feedback) else stage for _, stage in stages(client.send)]
    ends = any(isinstance(stage, Dual | Aligned) for stage in inner)
    return pruned(client) is not None and ends and client.local is None


def left_out(
    distance: Tensor, known: Mapping[str, float] | None, held_back: Sequence[Mapping[str, float]] = ()
) -> dict[str, Any] | None:
    """Return gamma_1 and Theorem 1's degradation of a perfect match, as means over the target clients.

    `promised` is the cosine distance from the raw gradient that the theorem prints, sqrt(gamma_1); `worst` is what a
    gradient equal to what was sent has, 1 - sqrt(1 - gamma_1). The Euclidean one is sqrt(gamma_1) of the raw length.
    After rounds with error feedback (`held_back`) gamma_1 is that of P = g + e in the last one, over all clients, and
    the theorem says nothing of g.
    """
    if known is None:
        return None
    if held_back:
        return {"gamma": held_back[-1]["gamma"], "residual": held_back[-1]["residual"], **known}
    gamma, perfect = distance.square(), torch.zeros_like(distance)
    found = {
        "gamma": gamma,
        "promised": degraded_cosine(perfect, gamma),
        "worst": worst_cosine(perfect, gamma),
    }
    return {**{name: float(value.mean()) for name, value in found.items()}, **known}


@dataclass(frozen=True)
class Recovered:
    """What one share of a trial's targets gave: tensors with leading V, plain facts, and a status for every target."""

    tensors: Tensors
    facts: dict[str, Any]
    statuses: tuple[str, ...]


def recover(
    experiment: Experiment,
    trial: TrialAddress,
    numbers: range,
    progress: Callable[[Progress], None],
    plans: Plans = UNPLANNED,
    standing: Standing | None = None,
) -> Recovered:
    """Make the updates of these target clients, from where their training stands, and attack them.

    `plans` keeps the attack's plan, which is chosen for this machine as it is now: told before the attack starts,
    known again after an interruption. The same plan gives bit-identical results.
    """
    honest = (
        experiment.client(trial.client, trial.defence, trial.seed, standing),
        experiment.undefended(trial.client, trial.seed),
    )
    attack = experiment.attacks[trial.attack]
    client, plain = (received(experiment, attack, each, trial.seed) for each in honest)
    seen, truth = observe(experiment, trial, client, numbers, standing, resent(experiment, attack, client))
    sent = seen[-1].update
    made = attacked(experiment, trial, client, seen, truth, numbers, progress, plans)
    raw = sent if trial.defence == UNDEFENDED else raw_update(client, plain, seen[-1].params, truth)
    tensors = {
        **tensors_of(made.found, seen[-1]),
        **judged(made, seen, truth),
        "distance": relative_distance(sent, raw),
        "cosine": cosine(sent, raw),
        **worth(sent, raw),
        **_noise_by_layer(client, seen[-1], truth),
    }
    if client.batch:
        tensors["transformed"] = truth.transformed.inputs
    leak, unbounded = _leaked(experiment, trial, client, seen, truth)
    alone = experiment.config.rounds == 1  # a share then computes its own targets only, and no mean over all
    held = [] if alone else list(map(asdict, truth.held_back))
    carried = alone and bool(trial.trained) and bool(truth.held_back)
    if taylor_applies(client) and not held and not carried and not isinstance(attack, Active):
        whole = torch.vmap(norm)(raw)
        given = experiment, trial.seed, client, plain, seen[-1], truth
        tensors["mse_taylor"] = taylor_errors(*given, tensors["distance"].to(whole.device) * whole)
    own = set(plain.noise_spec(plain.params(), first(truth)))
    drawn = {name: how for name, how in ways(attack, client, first(truth)).items() if name not in own}
    sizes = {name: value[0].numel() for name, value in sent.items()}
    facts = {
        "unbounded": unbounded,
        "pruned": None if carried else pruned(client),
        "held_back": held,
        "drawn": drawn,
        "carries": bool(client.init(seen[-1].params)),
        "layers": sizes,
    }
    return recovered(experiment, client, made, sent, truth, tensors | leak, facts)


def _leaked(
    experiment: Experiment, trial: TrialAddress, client: Client, seen: Sequence[Observation], truth: Truth
) -> tuple[Tensors, str | None]:
    """Return what the updates tell: the same to all who only look, each active attacker gets updates of its own."""
    if isinstance(experiment.attacks[trial.attack], Active):
        return leaked(experiment, trial.seed, client, seen, truth)
    where = trial.client, trial.defence, trial.seed, trial.trained, seen[0].target_clients
    if where not in experiment.leaks:
        experiment.leaks[where] = leaked(experiment, trial.seed, client, seen, truth)
    return experiment.leaks[where]


@dataclass(frozen=True)
class Made:
    """An attack that was made: by whom, with what knowledge, and what he found."""

    attack: Attack
    simulated_client: Client
    knowledge: Knowledge
    grants: list[str]
    secrets: list[str]
    key: Key
    found: Reconstruction
    row_iterations: int
    left: float | None
    """The share of its own iterations that a budget left it; None where it left all."""


def attacked(
    experiment: Experiment,
    trial: TrialAddress,
    client: Client,
    seen: Sequence[Observation],
    truth: Truth,
    numbers: range,
    progress: Callable[[Progress], None],
    plans: Plans,
) -> Made:
    """Attack what was seen of these target clients; of the truth an attack gets what is granted to it by name."""
    attack = experiment.attacks[trial.attack]
    simulated_client = client if attack.simulated_client == "full" else client.undefended_update()
    knowledge, grants, secrets = grant(experiment, attack, simulated_client, _looked_at(attack, seen).params, truth)
    key = Key(trial.seed, (Stream.ATTACK,))

    def time_of(tried: Attack) -> float:
        given = seen, simulated_client, knowledge, key
        if isinstance(tried, Inversion):
            return tried.search(*given).seconds
        began = working_time(experiment.config.device)
        tried(*given)
        return working_time(experiment.config.device) - began

    noisy = (
        isinstance(attack, Inversion)
        and bool(attack.variants)
        and experiment.config.budget is not None
        and adds_noise(simulated_client, _looked_at(attack, seen), knowledge)
    )
    attack = _afforded(experiment, trial, attack, numbers, noisy, time_of, plans)
    # A search that stops early by its own choice is not stopped by the budget.
    left = share_left(experiment.attacks[trial.attack], attack, lessons(experiment, seen[-1].examples))
    remarks, rehearsed, report = tuple[Remark, ...](), 0.0, progress
    if isinstance(attack, Inversion) and attack.variants:
        began = working_time(experiment.config.device)
        scores = plans.settled("variants", partial(attack.rehearse, seen, simulated_client, knowledge, key, progress))
        report = shifted(progress, attack.rehearsed(seen, scores))
        attack, remark = attack.chosen(scores)
        remarks, rehearsed = (remark,), working_time(experiment.config.device) - began
    done = 0

    def count(step: Progress) -> None:
        nonlocal done
        done = step.row_iterations
        report(step)

    plan: tuple[int, ...] = ()
    if isinstance(attack, HasPlan):
        plan = plans.settled("rows", partial(attack.plan, seen, simulated_client, knowledge, key))
    found = answer(
        attack, seen, simulated_client, knowledge, lambda: attack(seen, simulated_client, knowledge, key, count, plan)
    )
    if users(attack):  # whether it simulates what it says shows in how well its answer explains the update
        like = next(iter(seen[0].params.values()))
        inputs, classes = found.inputs.detach().to(like), found.targets.clamp(0, experiment.classes - 1)
        match = Simulated(simulated_client, seen).match(inputs, classes.to(inputs.device), key)
        found = replace(found, match=match.to(found.objective))
    found = replace(found, remarks=(*found.remarks, *remarks), seconds=found.seconds + rehearsed)
    done = done or int(found.iterations.sum()) * found.objectives.shape[1]
    return Made(attack, simulated_client, knowledge, grants, secrets, key, found, done, left)


def _looked_at(attack: Attack, seen: Sequence[Observation]) -> Observation:
    """Return the round that an attack looks at, or the first of several."""
    return seen[-1] if looks_at_last(attack) else seen[0]


def tensors_of(found: Reconstruction, seen: Observation) -> Tensors:
    """Name what an attack gave back, and the sizes of what it was given."""
    tensors = {
        "inputs": found.inputs,
        "targets": found.targets,
        "objective": found.objective,
        "objectives": found.objectives,
        "initial": found.initial,
        "iterations": found.iterations,
        "restart": found.restart,
        "bytes_dense": dense_bytes(seen.update),
        "bytes_sent": _bytes_sent(seen),
    }
    if found.before_undoing is not None:
        tensors["before_undoing"] = found.before_undoing
    if found.certainty is not None:
        tensors["certainty"] = found.certainty
    if found.match is not None:
        tensors["match"] = found.match
    return tensors | {f"trace.{count}": value for count, value in found.trace.items()}


def recovered(
    experiment: Experiment,
    client: Client,
    made: Made,
    sent: Tensors,
    truth: Truth,
    tensors: Tensors,
    facts: Mapping[str, Any],
) -> Recovered:
    """Put tensors and facts together, fit to be written."""
    whole = _facts(experiment, client, made, sent, first(truth)) | {"row_iterations": made.row_iterations, **facts}
    # Clones: an attack may return views of one tensor, which cannot be written side by side.
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return Recovered(kept, whole, tuple(made.found.status))


def _bytes_sent(seen: Observation) -> Tensor:
    """Count the bytes of each target client's update on the wire [V]."""
    rows = ({name: value[row] for name, value in seen.update.items()} for row in range(len(seen.target_clients)))
    return torch.tensor([encoded_size(row, seen.messages) for row in rows])


def _facts(experiment: Experiment, client: Client, made: Made, sent: Tensors, first: Batch) -> dict[str, Any]:
    """Say plainly what was attacked, by whom, what he was told, and what is proven of the client."""
    return {
        "params": sum(value[0].numel() for value in sent.values()),
        **privacy_facts(experiment, client, first),
        "simulated_client": made.attack.simulated_client,
        "custom": users(made.attack),
        "method": method(made.attack),
        "grants": [*experiment.facts, *made.grants],
        "secrets": made.secrets,
        "knowledge": told(made.attack),
        "rounds_used": rounds_used(made.attack, experiment.config.rounds),
        "in_parts": in_parts(client, first),
        "remarks": [(each.words, each.numbers, each.usual) for each in made.found.remarks],
        **active_facts(made.attack, client),
        # Of the attack alone; of a trial in several shares their sum: working time, not what a clock on the wall shows.
        "seconds": made.found.seconds,
        "plan": list(made.found.plan),
        "restarts": (restarts := made.found.objectives.shape[1]),
        "target_iterations": _spent(made, restarts),
        "budget_share": made.left,
        "simulated": _simulated(experiment, made.attack, len(first.inputs)),
    }


def _spent(made: Made, restarts: int) -> float:
    """Count the target-iterations of a search, as budgets count them; what a learner simulates is counted apart."""
    if not isinstance(made.attack, Inversion):
        return 0.0
    return made.row_iterations * restarts_worth(replace(made.attack, restarts=restarts)) / restarts


def _simulated(experiment: Experiment, attack: Attack, examples: int) -> int:
    """Count the updates that a learner simulated to learn from."""
    if not isinstance(attack, Learned):
        return 0
    of_a_pass = lessons(experiment, examples)
    return attack.epochs * (of_a_pass if attack.updates is None else min(attack.updates, of_a_pass))


def in_parts(client: Client, batch: Batch) -> bool:
    """Say whether local steps take the examples in parts, so that it matters who was in which."""
    local = client.local
    return local is not None and (local.sampling == "poisson" or local.batch * client.members < len(batch.inputs))


def _afforded(
    experiment: Experiment,
    trial: TrialAddress,
    attack: Attack,
    numbers: range,
    noisy: bool,
    time_of: Callable[[Attack], float],
    plans: Plans,
) -> Attack:
    """Cut the attack down to its share of the run's budget, if there is one."""
    config = experiment.config
    if config.budget is None or not _on_budget(config, trial.attack, attack):
        return attack
    sharers, examples = sharers_of(experiment, trial), config.client[trial.client].examples
    searches = min(config.rounds, examples) if isinstance(attack, Persistent) else 1
    share = BudgetShare(sharers, len(numbers), config.target_clients, lessons(experiment, examples), searches, noisy)
    return within(budget_of(config), attack, share, time_of, plans)


def sharers_of(experiment: Experiment, trial: TrialAddress) -> float:
    """Add up the attacks that share a trial's budget; a control has what its attack has on a defended client."""
    defence = first_met(experiment.config, trial.attack) if trial.control else trial.defence
    examples = experiment.config.client[trial.client].examples
    weights = (weight(each, examples) for each in spenders(experiment, trial.client, defence))
    return sum(weights) / weight(experiment.attacks[trial.attack], examples)


def spenders(experiment: Experiment, client: int, defence: str) -> list[Attack]:
    """List the attacks that share the budget of a defended client: those that apply to it, and search or learn."""
    on_it = [text for text, whose in pairs(experiment.config) if whose == defence]
    fit = (text for text in on_it if (client, defence, text) not in experiment.unfit)
    return [each for text in fit if _on_budget(experiment.config, text, each := experiment.attacks[text])]


def _on_budget(config: RunConfig, text: str, attack: Attack) -> bool:
    """Return whether an attack draws on the run's budget: under `auto`, those without iterations of their own."""
    return spends(attack) and (config.budget != AUTO or open_ended(text, config.iterations))


def budget_of(config: RunConfig) -> Budget:
    """Return the budget of each defence; the control of a run has a share of `auto`, too."""
    assert config.budget is not None
    settings = len(config.seeds) * len(config.stages) * len(config.client)
    return read_budget(config.budget, settings * (len(config.defences) + has_control(config)))


def sharing(experiment: Experiment) -> dict[str, list[int]]:
    """Count those who share the budget of each defence, client by client; nothing where there is none that is fixed."""
    clients = range(len(experiment.config.client)) if experiment.config.budget not in (None, AUTO) else ()
    return {
        defence: [len(spenders(experiment, client, defence)) for client in clients]
        for defence in experiment.config.defences
    }


def lessons(experiment: Experiment, examples: int) -> int:
    """Count the updates of so many examples that the public images are good for."""
    return 0 if experiment.public is None else len(experiment.public) // examples


def _noise_by_layer(client: Client, seen: Observation, truth: Truth) -> Tensors:
    """Measure the noise that a client adds to each parameter of its last update."""
    told = replace(client, messages=dict(seen.messages))

    def sent_with(noise: Tensors) -> Tensors:
        return updates(told, seen.params, truth.raw, noise, truth.state)[0]

    return layer_noise(client.noise_spec(seen.params, first(truth)), truth.last, seen.update, sent_with)


def at_truth(made: Made, seen: Sequence[Observation], truth: Truth) -> Tensor:
    """Return the attacker's own objective [V] at the true examples, NaN if he cannot say: never used to choose.

    At their labels too, not at those that the attack read off an update, which are in no order. An attack that
    undoes a batch defence afterwards searches what the client trained on.
    """
    return judged(made, seen, truth)["at_truth"]


def judged(made: Made, seen: Sequence[Observation], truth: Truth) -> Tensors:
    """Return `at_truth`, and of attacks that compute it `match_at_truth` [V, ...]: the same without priors.

    `match_at_others`, of other target clients' inputs (of one alone: mirrored), says what is much in such units. Of an
    attack of the user's own the match is computed for it, by the client that it says it simulates.
    """
    attack, found = made.attack, made.found
    inputs = (
        truth.raw.inputs if attack.simulated_client == "full" and not traits(attack).undo else truth.transformed.inputs
    )
    knowledge = replace(made.knowledge, targets=truth.raw.targets)
    given = seen, made.simulated_client, knowledge, made.key, inputs, truth.noise, found.plan
    known = isinstance(attack, HasObjective)
    tensors = {"at_truth": attack.evaluate(*given) if known else torch.full_like(found.objective, torch.nan)}
    if users(attack):
        match = Simulated(made.simulated_client, seen).match(inputs, truth.raw.targets, made.key)
        return tensors | {"match_at_truth": match.to(found.objective)}
    if isinstance(attack, Matcher) and found.match is not None:
        tensors["match_at_truth"] = attack.match(*given)
        others = inputs.roll(1, 0) if len(inputs) > 1 else inputs.flip(-1)
        tensors["match_at_others"] = attack.match(*given[:4], others, *given[5:])
    return tensors


def merge(parts: Sequence[Recovered]) -> Recovered:
    """Put the shares of a trial's target clients together, in order."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    # Shares that measured their time budgets apart looked back at different iterations.
    shared = [name for name in first.tensors if all(name in part.tensors for part in parts)]
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in shared}
    facts: Mapping[str, Any] = {
        **first.facts,
        "seconds": sum(part.facts["seconds"] for part in parts),
        "row_iterations": sum(part.facts["row_iterations"] for part in parts),
        "target_iterations": sum(part.facts["target_iterations"] for part in parts),
        "budget_share": min((left for part in parts if (left := part.facts["budget_share"]) is not None), default=None),
        "plan": [rows for part in parts for rows in part.facts["plan"]],
        "remarks": [remark for part in parts for remark in part.facts["remarks"]],
    }
    return replace(
        first, tensors=tensors, facts=dict(facts), statuses=tuple(s for part in parts for s in part.statuses)
    )
