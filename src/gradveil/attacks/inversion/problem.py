"""The optimisation problem of an inversion: start, objective and noise of every row.

A row is one restart of one target client. Its variables are the inputs and other unknown tensors. Its constants are the
observed update, known tensors, and tensors that are off. Several rounds share the inputs, and the client's state passes
from round to round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.closed_form.mixed_features import mixed_features
from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.denoiser import ENOUGH, FEWEST, kept_denoiser, unlikeness
from gradveil.attacks.inversion.distances import (
    LIKELIHOOD,
    OBJECTIVES,
    Consensus,
    Distance,
    energy,
    feature_distance,
    median_cosine,
    of_gradients,
    right_angles,
    statistics_distance,
    statistics_wanted,
    variation,
)
from gradveil.attacks.inversion.generators import custom_network
from gradveil.attacks.inversion.image_sources import INPUTS, TARGETS, WEIGHTS, Canvas
from gradveil.attacks.inversion.inversion_settings import InversionSettings
from gradveil.attacks.inversion.known_noise import Whitening, added, candidates, stages
from gradveil.attacks.inversion.simulated_gradients import Loudness, loudness
from gradveil.attacks.inversion.surrogate_model import PLACE, PROBES, on_the_line, place, place_noise
from gradveil.attacks.inversion.undone_entries import without_map
from gradveil.attacks.knowledge import How, Infer, Knowledge, Known, Neutral, Optimise, Sample
from gradveil.attacks.labels import find_labels
from gradveil.attacks.noise_likelihood import (
    ADDED,
    COLUMNS,
    DRAWS,
    drawn_again,
    explained,
    log_likelihood,
    reuse,
    sharing,
)
from gradveil.attacks.protocol import Observation
from gradveil.client import Client, cosine_distances, layer_statistics
from gradveil.core.chain import last_stage, relaxed
from gradveil.core.errors import GradveilError, fail
from gradveil.core.noise import Key, Noise
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, qualified, select, take, under
from gradveil.core.types import Batch, DrawsEntries
from gradveil.gradients.fused import squared_lengths
from gradveil.nn.module_paths import caught_inputs, downstream, evaluating, last_layer

Streams = Mapping[int, Generator]
"""Row -> the random stream of its draws in every iteration."""


@dataclass(frozen=True)
class Draws:
    """Random draws, addressed by the target client's stable number and the restart."""

    key: Key
    target_clients: Sequence[int]
    """Their stable numbers."""
    restarts: int
    sampled: Mapping[str, Noise]
    """Random tensors of the client that the attacker samples in every iteration."""
    more: bool
    """True if rows draw other numbers in every iteration."""
    device: torch.device

    def key_of(self, row: int) -> Key:
        """Return the key of a row's draws."""
        target_client, restart = divmod(row, self.restarts)
        return self.key.child(self.target_clients[target_client], restart)

    def streams(self, rows: Sequence[int]) -> dict[int, Generator]:
        """Open the stream of each row, if anything is drawn from it."""
        if not self.sampled and not self.more:
            return {}
        return {row: self.key_of(row).child(Stream.ITERATIONS).generator() for row in rows}

    def fresh(self, rows: Tensor, streams: Streams) -> Tensors:
        """Draw the tensors that the attacker samples in every iteration: the next values of each row's stream."""
        if not self.sampled:
            return {}
        drawn: dict[str, list[Tensor]] = {name: [] for name in self.sampled}
        for row in rows.tolist():
            for name, noise in self.sampled.items():
                drawn[name].append(noise.law.sample(noise.shape, noise.dtype, streams[row]))
        return {name: torch.stack(values).to(self.device) for name, values in drawn.items()}

    def normal(
        self, rows: Tensor, streams: Streams, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draw N(0, 1) numbers of this shape for each of these rows."""
        drawn = [torch.randn(shape, dtype=dtype, generator=streams[row]) for row in rows.tolist()]
        return torch.stack(drawn).to(self.device)


@dataclass(frozen=True)
class ObservedRound:
    """One observed round: its parameters, the compared update, and the names of its tensors."""

    number: int
    params: Tensors
    observed: Tensors
    pinned: Tensors
    simulated_client: Client
    """The simulated client, with the public messages of the round."""

    def of(self, name: str) -> str:
        """Return the name of a tensor in this round; the first round uses the client's names."""
        return f"round{self.number}.{name}" if self.number else name


class InversionProblem:
    """Everything about one call that does not change during the descent."""

    def __init__(
        self,
        attack: InversionSettings,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        *,
        judges: bool = False,
    ) -> None:
        """Prepare the observed rounds: labels, masks, and the treatment of each random tensor.

        Where it `judges` given images, it repeats a search of the defence: a search by the attack would take its place.
        """
        if attack.undo_entries and (without := without_map(observations, simulated_client, key)) is not None:
            observations, simulated_client = without
        original, simulated_client = simulated_client, attack.believed(simulated_client)
        if attack.relaxes and not judges:
            step = relaxed(simulated_client.step, simulated_client.domain)
            simulated_client = replace(simulated_client, step=step)
        self.attack, self.simulated_client, self.knowledge, self.key = attack, simulated_client, knowledge, key
        observed = {"first": observations[:1], "last": observations[-1:], "all": observations}[attack.rounds]
        first = observed[0]
        self.example = next(iter(first.params.values()))
        self.device, self.dtype = self.example.device, self.example.dtype
        self.examples, self.target_clients = first.examples, len(first.target_clients)
        self.lower, self.upper = knowledge.space.bounds(self.example)
        blank = Batch(
            self.example.new_zeros((self.examples, *knowledge.space.shape)),
            torch.zeros(self.examples, dtype=torch.long, device=self.device),
        )
        self.spec = simulated_client.noise_spec(first.params, blank)
        self.state = simulated_client.init(first.params)
        pinnable = simulated_client.intermediates(first.params)
        self.inputs_of_a_round = (*self.spec, *pinnable)
        self.scales = {n: noise for n, noise in pinnable.items() if attack.whiten and ".scale." in n}
        self.ignored = self._ignored(blank.inputs)
        self.rounds = [self._round(observation) for observation in observed]
        self.noise: dict[str, Noise] = {r.of(name): noise for r in self.rounds for name, noise in self.spec.items()}
        self.how: dict[str, How] = {
            r.of(name): knowledge.how(name, r.number) for r in self.rounds for name in self.spec
        }
        if attack.surrogate != "none":
            for r in self.rounds:
                self.noise[r.of(PLACE)], self.how[r.of(PLACE)] = place_noise(), Optimise()
        self.known: Tensors = {
            n: how.value.to(self.device)
            for n, how in self.how.items()
            if isinstance(how, Known) and how.value is not None
        }
        if attack.subtract:
            self._subtract()
        raw = {r.of(n): v for r in self.rounds for n, v in r.observed.items()}
        self.loud = {r.number: found for r in self.rounds if (found := self._loudness(r)) is not None}
        self.raw = raw if self.loud else {}
        self.off = {n for n, how in self.how.items() if not isinstance(how, Known | Optimise | Sample)}
        # Counts of classes are those of the client's steps, of which a surrogate knows nothing.
        trains = self.rounds[0].simulated_client if attack.surrogate == "none" else first.believed(original)
        self.labels = find_labels(attack.labels, first, trains, knowledge, key.child(Stream.LABELS))
        space = knowledge.space
        facts = space.shape, self.lower, self.upper, knowledge.classes
        canvas = Canvas(
            self.examples, *facts, joint=self.labels is None, start=attack.start, relaxed=knowledge.space.relaxed
        )
        self.drawing = attack.images.open(canvas, key.child(Stream.IMAGES))
        for name, how in self.how.items():
            if isinstance(how, Optimise) and self.noise[name].discrete:
                fix = "let it be known, sampled or neutral"
                raise fail(f"knowledge.{name}", "is discrete and cannot be optimised by gradients", fix)
        sampled = {n: self.noise[n] for n, how in self.how.items() if isinstance(how, Sample) and how.every_iteration}
        more = attack.langevin > 0 or isinstance(attack.descent.stepper, CMAES)
        self.draws = Draws(key, first.target_clients, attack.restarts, sampled, more, self.device)
        self.consensus = Consensus(attack.restarts, attack.register) if attack.group else None
        self.whitening = Whitening() if attack.whiten else None
        self.judges = judges
        self.angle = attack.objective == "cosine" and not (attack.whiten or self.loud) and attack.surrogate == "none"

    def _ignored(self, inputs: Tensor) -> set[str]:
        """Return the names of the parameters that are left out of the distance."""
        if self.attack.ignore == "nothing":
            return set()
        reached = downstream(self.simulated_client.model, inputs)
        if not set(self.simulated_client.trained()) - reached:
            problem = "leaves out the layers that a bottleneck's noise reaches, and that is every trained layer"
            raise fail(f"attack {self.attack.name}", problem, "choose an attack that optimises the noise: vbia, cdia")
        return reached

    def _round(self, observation: Observation) -> ObservedRound:
        observed = {name: value for name, value in observation.update.items() if name not in self.ignored}
        # Pinned intermediates (masks, with a leading V) are known, or inferred from the update.
        treatment = {n: self.knowledge.how(n) for n in self.simulated_client.intermediates(observation.params)}
        pinned: Tensors = {
            n: how.value for n, how in treatment.items() if isinstance(how, Known) and how.value is not None
        }
        if any(isinstance(how, Infer) for how in treatment.values()):
            inferred = torch.func.vmap(self.simulated_client.evidence)(observation.update)
            pinned |= {n: v for n, v in inferred.items() if isinstance(treatment.get(n), Infer)}
        simulated_client = observation.believed(self.simulated_client)
        return ObservedRound(observation.round, observation.params, observed, pinned, simulated_client)

    def _subtract(self) -> None:
        """Subtract known additive noise from the observed updates, where this is exact."""
        off, state = self._wide(self.spec.neutral()), self._wide(self.state)
        drawn = [
            {**off, **r.pinned, **{n: self.known[r.of(n)] for n in off if r.of(n) in self.known}} for r in self.rounds
        ]
        shape = (self.target_clients, self.examples, *self.knowledge.space.shape)
        images = candidates(shape, (self.lower, self.upper), self.knowledge.classes, self.key.child(Stream.CANDIDATES))
        rounds = [(r.simulated_client, r.params) for r in self.rounds]
        for stage in stages(self.spec, self.rounds[0].params):
            names = [r.of(n) for r in self.rounds for n in stage]
            known = set(names) <= self.known.keys()
            if not known or (noise := added(rounds, images, drawn, stage, state)) is None:
                continue
            for r, of_round in zip(self.rounds, noise, strict=True):
                r.observed.update({n: value - of_round[n] for n, value in r.observed.items()})
            self.how.update(dict.fromkeys(names, Neutral()))
            self.known = {n: value for n, value in self.known.items() if n not in names}

    def _loudness(self, r: ObservedRound) -> Loudness | None:
        """Take what outweighs the gradient out of a round's update, and return it; None where nothing does."""
        if self.attack.surrogate != "none" or self.ignored:
            return None
        found = loudness(r.simulated_client, r.params, self.examples, self.key)
        if found is not None:
            r.observed.update(found.quiet(r.observed))
        return found

    def _wide(self, tensors: Mapping[str, Tensor]) -> Tensors:
        return {n: v.to(self.device).expand(self.target_clients, *v.shape) for n, v in tensors.items()}

    def __len__(self) -> int:
        """Count the rows: every restart of every target client."""
        return self.target_clients * self.attack.restarts

    @cached_property
    def denoiser(self) -> nn.Module | None:
        """The custom denoiser, or that of the public images; None where there are too few."""
        if self.attack.denoiser is not None:
            return custom_network(self.attack.denoiser, "denoiser").to(self.device)
        public = self.knowledge.public
        if public is None or len(public.inputs) < FEWEST:
            return None
        return kept_denoiser(self.knowledge.space.view(public.inputs[:ENOUGH].to(self.device).float()))

    @cached_property
    def last_layer(self) -> str:
        """The path of the classifier; empty for models that do not end in a linear layer of one vector an example."""
        model, blank = self.simulated_client.model, self.example.new_zeros((1, *self.knowledge.space.shape))
        try:
            last = last_layer(model, blank)
        except GradveilError:
            return ""
        with caught_inputs(model, last) as caught, evaluating(model), torch.no_grad():
            model(blank)
        return last if caught[-1].ndim == 2 else ""

    @cached_property
    def features(self) -> Tensor | None:
        """The last layer's inputs [V, B, F] in the first round, NaN where its gradient does not tell them apart.

        None if that is so for all target clients, or if random numbers, batch defences or steps come in between.
        """
        client = self.simulated_client
        drawn = any(name.startswith("model.") for name in self.spec)  # and so would inputs of the last layer be
        if not self.attack.features or self.labels is None or self.examples == 1 or drawn:
            return None
        if client.batch or client.local is not None or client.members > 1:
            return None
        r = self.rounds[0]
        names = [qualified(self.last_layer, name) for name in ("weight", "bias")]
        if not {*names} <= {*r.observed} or r.observed[names[1]].shape[1] != self.knowledge.classes:
            return None
        (weight, bias), layer = (r.observed[name] for name in names), (r.params[names[0]], r.params[names[1]])
        keys = [self.key.child(Stream.FEATURES, number) for number in self.draws.target_clients]
        clients = zip(zip(weight, bias, strict=True), self.labels, keys, strict=True)
        found = torch.stack([mixed_features(gradient, layer, labels, key) for gradient, labels, key in clients])
        return found if found.isfinite().any() else None

    def learn(self) -> None:
        """Train the generator of the images on auxiliary data, if the attack has one."""
        public = self.knowledge.public
        self.drawing.learn(None if public is None else public.inputs.to(self.device), self.key.child(Stream.IMAGES))

    def start(self, rows: Sequence[int]) -> tuple[Tensors, Tensors]:
        """Draw the variables of these rows, and gather their constants."""
        starts = [self._start_row(self.draws.key_of(row)) for row in rows]
        stacked = {n: torch.stack([s[n] for s in starts]).to(self.device) for n in starts[0]}
        # "once." marks noise that is drawn once and held, "stays." constants of the images' source.
        variables = {n: v for n, v in stacked.items() if not n.startswith(("once.", "stays."))}
        target_clients = torch.tensor([row // self.attack.restarts for row in rows], device=self.device)
        fixed = {n: self.noise[n].off() for n in self.off}
        wide = {n: v.to(self.device).expand(len(rows), *v.shape) for n, v in {**fixed, **self.state}.items()}
        constants = {f"noise.{n}": wide[n] for n in fixed} | {f"state.{n}": wide[n] for n in self.state}
        constants |= under("noise", select(stacked, "once")) | select(stacked, "stays")
        for r in self.rounds:
            constants |= under("observed", take({r.of(n): v for n, v in r.observed.items()}, target_clients))
            constants |= under("noise", take({r.of(n): v for n, v in r.pinned.items()}, target_clients))
            if self.angle:
                constants[f"squares.{r.number}"] = squared_lengths(list(r.observed.values()))[target_clients]
        constants |= under("raw", take(self.raw, target_clients))
        if self.labels is not None:
            constants[TARGETS] = self.labels[target_clients]
        constants |= under("noise", take(self.known, target_clients))
        if self.features is not None:
            constants["features"] = self.features[target_clients]
        if self.attack.batchnorm:
            constants |= under(
                "statistics", statistics_wanted(self.knowledge, self.simulated_client, target_clients, self.example)
            )
        return variables, constants

    def _start_row(self, key: Key) -> Tensors:
        drawn, stays = self.drawing.start(key)
        start = drawn | under("stays", stays)
        if self.labels is None and not self.drawing.labelled:
            size = (self.examples, self.knowledge.classes)
            start[TARGETS] = torch.randn(size, dtype=self.dtype, generator=key.child(TARGETS).generator())
        for name, how in self.how.items():
            if isinstance(how, Optimise) and name.endswith(PLACE):
                start[name] = self.noise[name].off().to(self.dtype)
            elif isinstance(how, Optimise):
                start[name] = self.noise[name].sample(key.child(name))
            elif isinstance(how, Sample) and not how.every_iteration:
                start[f"once.{name}"] = self.noise[name].sample(key.child(name))
        return start

    def loss(
        self,
        variables: Tensors,
        constants: Tensors,
        rows: Tensor,
        streams: Streams,
        iteration: int | None = None,
    ) -> Tensor:
        """Objective of each row, at the last iteration if none is given: distance of the updates, plus priors."""
        inputs, logits = self.drawing.draw(variables, constants)
        value = self._cost(inputs, variables.get(TARGETS, logits), variables, constants, rows, streams, iteration)
        unlikely = self.drawing.penalty(variables, constants)
        return value if unlikely is None else value + unlikely

    def _cost(
        self,
        inputs: Tensor,
        logits: Tensor | None,
        variables: Tensors,
        constants: Tensors,
        rows: Tensor,
        streams: Streams,
        iteration: int | None = None,
    ) -> Tensor:
        """Objective of each row at its images."""
        batch, noise = self._client_inputs(inputs, logits, variables, constants, rows, streams)
        value = self._distance(batch, noise, constants, rows, iteration)
        attack = self.attack
        if attack.tv:
            last = attack.descent.iterations - 1
            weight = attack.tv_at(last if iteration is None else iteration)
            value = value + weight * variation(inputs, attack.tv_over)
        if attack.l2:
            value = value + attack.l2 * energy(inputs)
        if attack.denoise and self.denoiser is not None:
            pixels = (inputs - self.lower) / (self.upper - self.lower)
            value = value + attack.denoise * unlikeness(self.denoiser, pixels)
        if "features" in constants:
            value = value + attack.features * self._strangeness(inputs, constants["features"], batch.targets)
        if wanted := select(constants, "statistics"):
            r = self.rounds[0]
            of_batch = layer_statistics(self.simulated_client, r.params, batch, {n: noise[r.of(n)] for n in self.spec})
            value = value + attack.batchnorm * statistics_distance(of_batch, wanted)
        if self.consensus is not None:
            value = value + attack.group * self.consensus(inputs, rows, iteration or 0)
        for name, how in self.how.items():
            if isinstance(how, Optimise) and how.weight:
                value = value + how.weight * how.prior(self.noise[name].law, variables[name])
        return value

    def _strangeness(self, inputs: Tensor, wanted: Tensor, labels: Tensor) -> Tensor:
        """Return how far [N] the last layer's inputs are from the wanted ones; zero where these are unknown."""
        client, params = self.simulated_client, self.rounds[0].params

        def at_images(images: Tensor) -> Tensor:
            with caught_inputs(client.model, self.last_layer) as caught:
                client.objective.outputs(params, images, {})
            return caught[-1]

        own = torch.func.vmap(at_images)(inputs)
        return feature_distance(own, wanted, labels if self.judges else None)

    def _client_inputs(
        self,
        inputs: Tensor,
        logits: Tensor | None,
        variables: Tensors,
        constants: Tensors,
        rows: Tensor,
        streams: Streams,
    ) -> tuple[Batch, Tensors]:
        """Return the batch and the noise of the simulated client."""
        targets = constants[TARGETS] if logits is None else torch.softmax(logits, -1)
        noise = select(constants, "noise")
        noise |= {n: v for n, v in variables.items() if n in self.noise} | self.draws.fresh(rows, streams)
        return Batch(inputs, targets), noise

    def _match(
        self,
        inputs: Tensor,
        logits: Tensor | None,
        variables: Tensors,
        constants: Tensors,
        rows: Tensor,
        streams: Streams,
    ) -> Tensor:
        """Return the distance without priors, that of the median layer, and noise likelihoods [N, 2 + COLUMNS]."""
        batch, noise = self._client_inputs(inputs, logits, variables, constants, rows, streams)
        distance = self._distance(batch, noise, constants, rows, None)
        compared = right_angles if self.attack.objective == "right-angles" else median_cosine
        median_layer = self._distance(batch, noise, constants, rows, None, compared)
        return torch.cat([torch.stack([distance, median_layer], 1), self._explained(batch, noise, constants, rows)], 1)

    def _explained(self, batch: Batch, noise: Tensors, constants: Tensors, rows: Tensor) -> Tensor:
        """Return the likelihood of the observed update given the images [N, COLUMNS], NaN without unknown noise.

        Noise of the send stage counts as unknown even if the attack optimises it, since it could explain any update. A
        target client's draws do not depend on the images.
        """
        send_noise = {r.of(n) for r in self.rounds for n in self.spec if n.startswith("send.")}
        unknown = [
            n
            for n, how in self.how.items()
            if not (isinstance(how, Known) or (isinstance(how, Optimise) and n not in send_noise))
        ]
        if not unknown or self.attack.surrogate != "none":  # a gradient has not the length of an update
            return torch.full((len(rows), COLUMNS), torch.nan, dtype=self.dtype, device=self.device)
        state, observed = select(constants, "state"), select(constants, "raw" if self.loud else "observed")
        target_clients = [self.draws.target_clients[row // self.attack.restarts] for row in rows.tolist()]
        keys = [self.key.child(Stream.DISTURBANCE, target_client) for target_client in target_clients]
        off = {n: self.noise[n].off().to(self.device) for n in unknown}
        quiet = {n: value.expand(len(rows), *value.shape) for n, value in off.items()}
        draws = [
            {
                n: torch.stack([self.noise[n].sample(key.child(number, n)) for key in keys]).to(self.device)
                for n in unknown
            }
            for number in range(DRAWS)
        ]
        sent, *noisy = (self._sent(batch, {**noise, **draw}, state) for draw in (quiet, *draws))
        all_additive = {r.of(n) for r in self.rounds for n in self.spec if n.startswith(ADDED)}
        additive = [n for n in unknown if n in all_additive]
        only_additive = noisy
        if additive and len(additive) < len(
            unknown
        ):  # other random tensors change many entries at once, as they should
            parts = [{**quiet, **{n: draw[n] for n in additive}} for draw in draws]
            only_additive = [self._sent(batch, {**noise, **part}, state) for part in parts]
        shared = torch.zeros_like(rows)
        if additive:
            first, second, *_ = draws
            address = self.key.child(Stream.DISTURBANCE, DRAWS)
            again = {n: drawn_again(off[n].shape, address.child(n).generator()).to(self.device) for n in additive}
            parts = ({n: torch.where(again[n][i], second[n], first[n]) for n in additive} for i in range(DRAWS))
            mixed = (self._sent(batch, {**noise, **quiet, **part}, state) for part in parts)
            numbers = sum(off[n].numel() for n in additive)
            shared = torch.maximum(
                sharing(sent, only_additive, numbers), reuse(sent, only_additive[0], only_additive[1], mixed)
            )
        return explained(log_likelihood(sent, noisy, observed), shared)

    def _sent(self, batch: Batch, noise: Tensors, state: Tensors) -> Tensors:
        """Simulate the client's updates in all rounds."""
        sent: Tensors = {}
        for r in self.rounds:
            of_round = {n: noise[r.of(n)] for n in self.inputs_of_a_round if r.of(n) in noise}
            update, state = r.simulated_client.updates(r.params, batch, of_round, state)
            sent |= {r.of(n): update[n] for n in r.observed}
        return sent

    def _distance(
        self,
        batch: Batch,
        noise: Tensors,
        constants: Tensors,
        rows: Tensor,
        iteration: int | None,
        distance: Distance | None = None,
    ) -> Tensor:
        """Return the mean distance over the rounds between simulated and observed updates.

        It is that of an iteration, by default of the last. The default distance is that of the attack's objective.
        """
        state = whitening_state = select(constants, "state")
        observed = select(constants, "observed")
        total: Tensor | None = None
        for r in self.rounds:
            of_round = {n: noise[r.of(n)] for n in self.inputs_of_a_round if r.of(n) in noise}
            compared = {n: observed[r.of(n)] for n in r.observed}
            # A cosine needs products with the update only: where possible, they are computed without forming it.
            if self.angle and distance is None:
                off = [n for n in self.spec if r.of(n) in self.off]
                squares = constants[f"squares.{r.number}"]
                value = cosine_distances(r.simulated_client, r.params, batch, of_round, compared, squares, off)
                if value is not None:
                    total = value if total is None else total + value
                    continue
            # Noise is off here, so that its scales do not matter. Switching them off saves their computation.
            quiet = {n: v.off().expand(len(rows), *v.shape).to(self.example) for n, v in self.scales.items()}
            sent, after = self._simulated(r, batch, {**of_round, **quiet}, state, compared, noise)
            if r.number in self.loud:
                sent = self.loud[r.number].quiet({n: sent[n] for n in compared})
            if self.whitening is not None:
                weights, whitening_state = self.whitening(
                    r.number, r.simulated_client, r.params, batch, of_round, whitening_state, rows, iteration or 0
                )
                sent, compared = ({n: part[n] * weights[n] for n in compared} for part in (sent, compared))
            state = after
            if distance is None and self.attack.objective == LIKELIHOOD:
                value = self._negative_log_likelihood(r, sent, compared, iteration)
            elif distance is None:
                value = OBJECTIVES[self.attack.objective](sent, compared)
                value = of_gradients(value, self.attack.objective, r.simulated_client, self.examples)
            else:
                value = distance(sent, compared)
            total = value if total is None else total + value
        assert total is not None, "at least one round is observed"
        return total / len(self.rounds) if len(self.rounds) > 1 else total

    def _negative_log_likelihood(
        self, r: ObservedRound, sent: Tensors, observed: Tensors, iteration: int | None
    ) -> Tensor:
        """Return how unlikely the client sends what was observed, in units of ten for each number of the examples.

        In these a total variation of weight 0.1 is a law of differences between neighbours with a mean of about one.
        """
        drawing, last = last_stage(r.simulated_client.send), self.attack.descent.iterations - 1
        assert isinstance(drawing, DrawsEntries), "an attack by likelihood is refused where nothing is drawn"
        width = self.attack.width_at(last if iteration is None else iteration)
        entries = drawing.negative_log_likelihood(sent, observed, width)
        total = torch.stack([value.flatten(1).sum(1) for value in entries.values()]).sum(0)
        return total / (10 * self.examples * prod(self.knowledge.space.shape))

    def _simulated(
        self, r: ObservedRound, batch: Batch, of_round: Tensors, state: Tensors, observed: Tensors, noise: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Simulate the updates of one round; with a surrogate, each row's at parameters of its own."""
        if self.attack.surrogate == "none":
            return r.simulated_client.updates(r.params, batch, of_round, state)
        parts: list[tuple[Tensors, Tensors]] = []
        for row, where in enumerate(noise[r.of(PLACE)]):
            params = on_the_line(r.params, {n: value[row] for n, value in observed.items()}, where)
            own = [{n: value[row : row + 1] for n, value in part.items()} for part in (of_round, state)]
            images = Batch(*(value[row : row + 1] for value in batch))
            parts.append(r.simulated_client.updates(params, images, *own))
        sent, after = ({n: torch.cat([part[i][n] for part in parts]) for n in parts[0][i]} for i in (0, 1))
        return sent, after

    def objective_at(self, target_clients: Sequence[int], inputs: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Return the objective of some target clients at inputs [V, B, ...] and values of optimised tensors.

        Known labels replace labels that were read off or are optimised.
        """
        return self._best(lambda given: self._cost(*self._arguments(target_clients, inputs, given)), inputs, noise)

    def match_at(self, target_clients: Sequence[int], inputs: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Return the match without priors of some target clients, with the arguments of `objective_at`."""
        return self._best(lambda given: self._match(*self._arguments(target_clients, inputs, given)), inputs, noise)

    def _best(
        self, value: Callable[[Mapping[str, Tensor]], Tensor], inputs: Tensor, noise: Mapping[str, Tensor]
    ) -> Tensor:
        """Return values at given images; of several places on the line of a surrogate, those of the smallest first."""
        with torch.no_grad():
            if self.attack.surrogate == "none":
                return value(noise)
            tried: list[Tensor] = []
            for share in PROBES:
                places = {r.of(PLACE): inputs.new_full((len(inputs),), place(share)) for r in self.rounds}
                tried.append(value({**noise, **places}))
            values = torch.stack(tried)
            best = values.flatten(2)[:, :, 0].argmin(0) if values.ndim > 2 else values.argmin(0)
            return values[best, torch.arange(len(best), device=best.device)]

    def match(self, rows: Sequence[int], results: Tensors) -> Tensor:
        """Return the match without priors of these rows at their results."""
        _, constants = self.start(rows)
        numbers = torch.tensor(rows, device=self.device)
        with torch.no_grad():
            return self._match(
                results[INPUTS], results.get(TARGETS), results, constants, numbers, self.draws.streams(rows)
            )

    def _arguments(
        self, target_clients: Sequence[int], inputs: Tensor, noise: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensors, Tensors, Tensor, Streams]:
        """Collect the arguments of `_cost` and `_match` at given inputs."""
        # All restarts of a target client have the same constants: the first stands for them.
        rows = [target_client * self.attack.restarts for target_client in target_clients]
        variables, constants = self.start(rows)
        variables |= {n: noise[n][target_clients].to(self.example) for n in variables if n in noise}
        logits = variables.get(TARGETS)
        if self.knowledge.targets is not None:
            labels = self.knowledge.targets[target_clients].to(self.device)
            if self.labels is None:
                hot = torch.nn.functional.one_hot(labels, self.knowledge.classes)
                # softmax maps these logits to the one-hot labels, up to e^-40.
                logits = 40.0 * hot.to(self.dtype)
            else:
                constants[TARGETS] = labels
        numbers, inputs = torch.tensor(rows, device=self.device), inputs[target_clients].to(self.example)
        return inputs, logits, variables, constants, numbers, self.draws.streams(rows)

    def results(self, variables: Tensors, constants: Tensors) -> Tensors:
        """Return the results of rows: their images first, then the other variables."""
        with torch.no_grad():
            images, logits = self.drawing.draw(variables, constants)
        others = {n: v for n, v in variables.items() if n != INPUTS and not n.startswith(f"{WEIGHTS}.")}
        return {INPUTS: images, **({} if logits is None else {TARGETS: logits}), **others}

    def project(self, name: str, value: Tensor) -> Tensor:
        """Keep variables in their boxes."""
        if name == INPUTS:
            return torch.clamp(value, self.lower, self.upper) if self.attack.box else value
        return self.noise[name].project(value) if name in self.noise else value
