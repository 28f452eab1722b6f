"""The optimisation attack: one loop, of which the papers' attacks are settings.

The attacker simulates the client he believes in on dummy inputs, compares with what was sent, and descends on
everything he does not know. Victims x restarts are the rows of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.base import Observation, Progress, Reconstruction
from gradveil.attacks.infer import restore_labels, smallest_row
from gradveil.attacks.knowledge import How, Infer, Knowledge, Known, Optimise, Sample
from gradveil.attacks.objective import OBJECTIVES
from gradveil.attacks.optimise import CONVERGED, STATUSES, Descent, Solution, descend
from gradveil.attacks.plan import rows_at_once, written_bytes
from gradveil.attacks.prior import energy
from gradveil.client import Client
from gradveil.core.errors import fail
from gradveil.core.fused import total_variation
from gradveil.core.noise import Key, Noise
from gradveil.core.tree import Tensors, take, under
from gradveil.core.types import Batch
from gradveil.nn.paths import last_layer

Labels = Literal["given", "idlg", "restore", "joint"]
INPUTS, TARGETS = "inputs", "targets"


@dataclass(frozen=True)
class Inversion:
    """Settings of the one optimisation attack. `name` is what reports call it."""

    name: str
    objective: str = "cosine"
    tv: float = 0.0
    l2: float = 0.0
    descent: Descent = field(default_factory=Descent)
    restarts: int = 1
    start: Literal["normal", "uniform"] = "normal"
    box: bool = True
    labels: Labels = "given"
    belief: Literal["naive", "full"] = "naive"
    knowledge: Mapping[str, How] = field(default_factory=dict)

    def __call__(
        self,
        observations: Sequence[Observation],
        belief: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Reconstruct every victim's batch from the last round's update."""
        began = time.perf_counter()
        scene = _Scene(self, observations[-1], belief, knowledge, key)
        rows = scene.victims * self.restarts
        chunks = tuple(plan) or scene.plan()
        if sum(chunks) != rows:
            raise fail("attack.plan", f"covers {sum(chunks)} rows of {rows}", "give the plan of the same attack")
        done, parts = 0, []
        for size in chunks:
            report = _reporter(progress, scene, rows, done, size, self.descent.iterations) if progress else None
            parts.append(scene.descend(range(done, done + size), report))
            done += size
        solution = _join(parts)
        return scene.reconstruction(solution, time.perf_counter() - began, chunks)

    def plan(
        self, observations: Sequence[Observation], belief: Client, knowledge: Knowledge, key: Key
    ) -> tuple[int, ...]:
        """Choose how many rows to work on at once on this machine: what a call without a plan would take."""
        return _Scene(self, observations[-1], belief, knowledge, key).plan()


class _Scene:
    """Everything about one call that does not change during the descent."""

    def __init__(
        self, attack: Inversion, observation: Observation, belief: Client, knowledge: Knowledge, key: Key
    ) -> None:
        self.attack, self.belief, self.knowledge = attack, belief, knowledge
        self.observed, self.params = observation.update, observation.params
        self.example = next(iter(observation.params.values()))
        self.examples, self.ids = observation.examples, observation.victims
        self.victims = len(self.ids)
        self.lower, self.upper = knowledge.lower.to(self.example), knowledge.upper.to(self.example)
        self.key = key
        blank = Batch(
            self.example.new_zeros((self.examples, *knowledge.shape)),
            torch.zeros(self.examples, dtype=torch.long, device=self.example.device),
        )
        self.spec = belief.noise_spec(self.params, blank)
        self.state = belief.init(self.params)
        self.labels = self._labels()
        self.how = {name: knowledge.how(name) for name in self.spec}
        problems = [n for n, how in self.how.items() if isinstance(how, Optimise) and self.spec[n].discrete]
        if problems:
            remedy = "let it be known, sampled or neutral"
            raise fail(f"knowledge.{problems[0]}", "is discrete and cannot be optimised by gradients", remedy)
        self.sampled: dict[str, Noise] = {
            name: self.spec[name] for name, how in self.how.items() if isinstance(how, Sample) and how.every_iteration
        }
        self.pinned = self._pinned()

    def _labels(self) -> Tensor | None:
        """Return [V, B] labels, or None when they are optimised jointly."""
        how = self.attack.labels
        if how == "given":
            if self.knowledge.targets is None:
                raise fail(
                    "knowledge.targets", "were never granted", "grant them, or choose labels: idlg, restore, joint"
                )
            return self.knowledge.targets.to(self.example.device)
        if how == "joint":
            return None
        last = last_layer(self.belief.model)
        if how == "idlg" and self.examples == 1:
            return smallest_row(self.observed, last)
        return restore_labels(
            self.observed, last, self.examples, self.belief, self.params, self.knowledge, self.key.child("labels")
        )

    def _pinned(self) -> Tensors:
        """Intermediates (masks) that the attacker reads off what was sent, or was given: leading V."""
        wanted = {n: self.knowledge.how(n) for n in self.belief.intermediates(self.params)}
        pinned: Tensors = {
            n: how.value for n, how in wanted.items() if isinstance(how, Known) and how.value is not None
        }
        if any(isinstance(how, Infer) for how in wanted.values()):
            found = torch.func.vmap(self.belief.evidence)(self.observed)
            pinned |= {n: v for n, v in found.items() if isinstance(wanted.get(n), Infer)}
        return pinned

    def row_key(self, row: int) -> Key:
        """Address a row's draws by the victim's stable number and the restart."""
        victim, restart = divmod(row, self.attack.restarts)
        return self.key.child(self.ids[victim], restart)

    def start(self, rows: Sequence[int]) -> tuple[Tensors, Tensors]:
        """Draw the variables of these rows, and gather their constants."""
        fixed = {n: self.spec[n].off() for n in self.spec if not isinstance(self.how[n], Known | Optimise | Sample)}
        starts: list[Tensors] = []
        for row in rows:
            starts.append(self._start_row(self.row_key(row)))
        names = list(starts[0])
        stacked = {n: torch.stack([s[n] for s in starts]).to(self.example.device) for n in names}
        variables = {n: v for n, v in stacked.items() if not n.startswith("once.")}
        victims = torch.tensor([row // self.attack.restarts for row in rows], device=self.example.device)
        constants = under("observed", take(self.observed, victims))
        if self.labels is not None:
            constants[TARGETS] = self.labels[victims]
        expand = {n: v.to(self.example.device).expand(len(rows), *v.shape) for n, v in {**fixed, **self.state}.items()}
        constants |= {f"noise.{n}": expand[n] for n in fixed} | {f"state.{n}": expand[n] for n in self.state}
        constants |= {f"noise.{n[5:]}": v for n, v in stacked.items() if n.startswith("once.")}
        constants |= under("noise", take(self.pinned, victims))
        for n, how in self.how.items():
            if isinstance(how, Known) and how.value is not None:
                constants[f"noise.{n}"] = how.value.to(self.example.device)[victims]
        return variables, constants

    def _start_row(self, key: Key) -> Tensors:
        dtype = self.example.dtype
        shape = (self.examples, *self.knowledge.shape)
        draw = key.child(INPUTS).generator()
        if self.attack.start == "uniform":
            lower, upper = self.lower.cpu(), self.upper.cpu()
            inputs = lower + (upper - lower) * torch.rand(shape, dtype=dtype, generator=draw)
        else:
            inputs = torch.randn(shape, dtype=dtype, generator=draw)
        start = {INPUTS: inputs}
        if self.labels is None:
            size = (self.examples, self.knowledge.classes)
            start[TARGETS] = torch.randn(size, dtype=dtype, generator=key.child(TARGETS).generator())
        for name, how in self.how.items():
            if isinstance(how, Optimise):
                start[name] = self.spec[name].sample(key.child(name))
            elif isinstance(how, Sample) and not how.every_iteration:
                start[f"once.{name}"] = self.spec[name].sample(key.child(name))
        return start

    def streams(self, rows: Sequence[int]) -> dict[int, torch.Generator]:
        """Open each row's own stream of what the attacker samples afresh, iteration after iteration."""
        if not self.sampled:
            return {}
        return {row: self.row_key(row).child("iterations").generator() for row in rows}

    def fresh(self, rows: Tensor, streams: Mapping[int, torch.Generator]) -> Tensors:
        """Draw what the attacker samples afresh each iteration: the next values of each row's stream."""
        if not self.sampled:
            return {}
        drawn: dict[str, list[Tensor]] = {name: [] for name in self.sampled}
        for row in rows.tolist():
            for name, noise in self.sampled.items():
                drawn[name].append(noise.law.sample(noise.shape, noise.dtype, streams[row]))
        return {name: torch.stack(values).to(self.example.device) for name, values in drawn.items()}

    def loss(
        self, variables: Tensors, constants: Tensors, rows: Tensor, streams: Mapping[int, torch.Generator]
    ) -> Tensor:
        """Objective of each row: distance of the simulated update, plus priors."""
        inputs = variables[INPUTS]
        targets = torch.softmax(variables[TARGETS], -1) if self.labels is None else constants[TARGETS]
        noise = {n[6:]: v for n, v in constants.items() if n.startswith("noise.")}
        noise |= {n: v for n, v in variables.items() if n in self.spec} | self.fresh(rows, streams)
        state = {n[6:]: v for n, v in constants.items() if n.startswith("state.")}
        observed = {n[9:]: v for n, v in constants.items() if n.startswith("observed.")}
        sent, _ = self.belief.updates(self.params, Batch(inputs, targets), noise, state)
        value = OBJECTIVES[self.attack.objective](sent, observed)
        if self.attack.tv:
            value = value + self.attack.tv * total_variation(inputs)
        if self.attack.l2:
            value = value + self.attack.l2 * energy(inputs)
        for name, how in self.how.items():
            if isinstance(how, Optimise) and how.weight:
                value = value + how.weight * self.spec[name].law.penalty(variables[name])
        return value

    def project(self, name: str, value: Tensor) -> Tensor:
        """Keep variables in their boxes."""
        if name == INPUTS:
            return torch.clamp(value, self.lower, self.upper) if self.attack.box else value
        return self.spec[name].project(value) if name in self.spec else value

    def descend(self, rows: range, report: Callable[[int, Tensor], None] | None) -> Solution:
        """Attack these rows as one batch."""
        variables, constants = self.start(list(rows))
        first, streams = rows.start, self.streams(rows)

        def loss(v: Tensors, c: Tensors, numbers: Tensor, iteration: int) -> Tensor:
            return self.loss(v, c, numbers + first, streams)

        signed = {n for n, how in self.how.items() if isinstance(how, Optimise) and how.signed}
        unsigned = frozenset(set(variables) - {INPUTS} - signed)
        groups = torch.arange(first, rows.stop, device=self.example.device) // self.attack.restarts
        return descend(loss, variables, constants, self.attack.descent, self.project, unsigned, report, groups)

    def plan(self) -> tuple[int, ...]:
        """Choose how many rows to work on at once from what one row keeps for its derivative."""
        rows = self.victims * self.attack.restarts
        variables, constants = self.start([0])
        streams = self.streams([0])
        live = {n: v.requires_grad_() for n, v in variables.items()}
        number = torch.zeros(1, dtype=torch.long)
        self.loss(live, constants, number, streams)  # the first call of a shape also runs the reference
        kept = sum(v.numel() * v.element_size() for v in self.attack.descent.stepper.init(variables).values())
        written = written_bytes(lambda: self.loss(live, constants, number, streams))
        size = rows_at_once(written + kept, rows, self.example.device)
        full, rest = divmod(rows, size)
        return (size,) * full + ((rest,) if rest else ())

    def reconstruction(self, solution: Solution, seconds: float, plan: tuple[int, ...]) -> Reconstruction:
        """Choose each victim's restart by the attacker's own objective."""
        shape = (self.victims, self.attack.restarts)
        objectives = solution.objective.view(shape)
        # The first restart to reach the tolerance ends the others of its chunk: what those of another chunk would still
        # have found must not count, or the plan would choose.
        solved = (solution.status == CONVERGED).view(shape)
        first = torch.where(solved, solution.iterations.view(shape), torch.iinfo(torch.long).max)
        best = solved & (first == first.min(1, keepdim=True).values) | ~solved.any(1, keepdim=True)
        chosen = torch.where(best, objectives, torch.inf).argmin(1)
        rows = torch.arange(self.victims, device=chosen.device) * self.attack.restarts + chosen
        joint = solution.variables.get(TARGETS)
        targets = self.labels if joint is None else joint[rows].argmax(-1)
        assert targets is not None
        return Reconstruction(
            inputs=solution.variables[INPUTS][rows],
            targets=targets,
            objective=solution.objective[rows],
            status=tuple(STATUSES[code] for code in solution.status[rows].tolist()),
            iterations=solution.iterations[rows],
            seconds=seconds,
            restart=chosen,
            objectives=objectives,
            initial=solution.initial[rows],
            plan=plan,
        )


def _reporter(
    progress: Callable[[Progress], None], scene: _Scene, rows: int, done: int, size: int, budget: int
) -> Callable[[int, Tensor], None]:
    """Translate a chunk's report into the attack's."""

    def report(iteration: int, objectives: Tensor) -> None:
        active = len(objectives)
        value = float(objectives.median()) if active else float("nan")
        victims = (done + size - active) // scene.attack.restarts
        progress(Progress(victims, active, done * budget + size * iteration, rows * budget, value))

    return report


def _join(parts: Sequence[Solution]) -> Solution:
    """Put the chunks' solutions in a row."""
    joined = replace(parts[0])
    joined.variables = {n: torch.cat([part.variables[n] for part in parts]) for n in parts[0].variables}
    for name in ("objective", "initial", "iterations", "status"):
        setattr(joined, name, torch.cat([getattr(part, name) for part in parts]))
    return joined
