"""Chains: several transforms of an update in a fixed order, used as one transform."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import NoiseSpec
from gradveil.core.tree import Tensors, below, select, under
from gradveil.core.types import (
    Batch,
    BatchTransform,
    Context,
    Domain,
    HasMessages,
    Multiplier,
    Searches,
    Stage,
    Transform,
)

NAMELESS = "own"
"""Name of the only stage of a chain that is made for a custom transform."""


def no_stage(name: str, transform: object) -> Iterator[Problem]:
    """Yield the reason why an object cannot be a stage of a chain."""
    if isinstance(transform, type):
        yield Problem(f"chain.{name}", f"is the class {transform.__name__}", f"make one: {transform.__name__}(...)")
    elif isinstance(transform, BatchTransform):
        yield Problem(f"chain.{name}", "changes the batch, not an update", "give it to the defence as batch=(...,)")
    elif not isinstance(transform, Transform):
        yield Problem(
            f"chain.{name}", f"is {transform!r}, not a Transform", "derive it from gradveil.core.types.Transform"
        )
    elif not isinstance(getattr(transform, "stage", None), Stage):
        found = f"has the stage {transform.stage!r}" if hasattr(transform, "stage") else "has no stage"
        what = f"{found}, and so no place in a chain"
        yield Problem(f"chain.{name}", what, "say stage = Stage.CLIP, NOISE, PRUNE, STANDIN or QUANTISE in its class")


@dataclass(frozen=True)
class Chain(Transform, HasMessages):
    """Named transforms in order. Their names prefix noise and state: `noise.conv1.weight`, `prune.residual.fc`."""

    stages: tuple[tuple[str, Transform], ...]

    def __post_init__(self) -> None:
        """Raise with every problem if the order is illegal."""
        problems = [problem for name, transform in self.stages for problem in no_stage(name, transform)]
        refuse(problems)
        problems += [
            Problem(f"chain.{name}", "acts on each example, in a chain of its own", "name its stages in this chain")
            for name, stage in self.stages
            if not stage.per_example and split(stage)[0] is not None
        ]
        for (a, first), (b, second) in zip(self.stages, self.stages[1:], strict=False):
            if second.stage < first.stage:
                order = "clip < noise < prune / stand-in < quantise"
                problems.append(Problem(f"chain.{b}", f"comes after '{a}', which undoes it", f"legal order: {order}"))
            if second.per_example and not first.per_example:
                remedy = "put per-example transforms first"
                problems.append(Problem(f"chain.{b}", f"acts on each example, '{a}' on their mean", remedy))
        refuse(problems)

    def __iter__(self) -> Iterator[tuple[str, Transform]]:
        """Iterate over (name, transform)."""
        return iter(self.stages)

    @property
    def stage(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - a chain ends where its last one does
        """The stage of the last transform."""
        return self.stages[-1][1].stage

    @property
    def guarantee(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The guarantees of all stages."""
        return "; ".join(f"{name}: {transform.guarantee}" for name, transform in self)

    @property
    def exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if a stage is exact."""
        return any(transform.exact for _, transform in self)

    @property
    def needs_public(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if a stage needs public images."""
        return any(transform.needs_public for _, transform in self)

    @property
    def added_inputs(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inputs that all stages add."""
        return sum(transform.added_inputs for _, transform in self)

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return the initial states of the stages."""
        return {k: v for name, stage in self for k, v in under(name, stage.init(params)).items()}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Unite the noise of the stages."""
        return self._declared(lambda stage: stage.noise(params))

    def directions(self, batch: Batch) -> NoiseSpec:
        """Unite the directions of the stages."""
        return self._declared(lambda stage: stage.directions(batch))

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Unite the intermediates of the stages."""
        return self._declared(lambda stage: stage.intermediates(params))

    def _declared(self, declare: Callable[[Transform], NoiseSpec]) -> NoiseSpec:
        spec = NoiseSpec()
        for name, stage in self:
            spec = spec | declare(stage).under(name)
        return spec

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        """Apply the stages in order."""
        after: Tensors = {}
        for name, transform in self:
            own = _of_stage(context, name)
            update, inner = transform.apply(update, select(state, name), select(noise, name), own)
            after |= under(name, inner)
        return update, after

    def multiplier(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Multiplier | None:
        """Return the product of the stages' multipliers; None if a stage does more than multiply."""
        whole = Multiplier()
        for name, transform in self:
            own = transform.multiplier(params, select(noise, name), below(name, off))
            if own is None:
                return None
            whole = whole.then(own)
        return whole

    def speakers(self) -> int:
        """Return the largest number of speakers that a stage needs."""
        return max((stage.speakers() for _, stage in self if isinstance(stage, HasMessages)), default=0)

    def takes_turns(self) -> bool:
        """Return whether the stages that need speakers all let clients speak in turn."""
        ways = [s.takes_turns() for _, s in self if isinstance(s, HasMessages) and s.speakers()]
        return bool(ways) and all(ways)

    def proposal(self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Return the proposals of all stages; each sees the update as the stages before it left it."""
        said: Tensors = {}
        for name, transform in self:
            given = select(state, name), select(noise, name), _of_stage(context, name)
            if isinstance(transform, HasMessages):
                said |= under(name, transform.proposal(update, *given))
            update, _ = transform.apply(update, *given)
        return said

    def announce(self, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Tensors:
        """Return the messages of all stages."""
        messages: Tensors = {}
        for name, transform in self:
            if isinstance(transform, HasMessages):
                messages |= under(name, transform.announce(select(proposals, name), previous, number))
        return messages

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return the evidence of the *last* stage, and of stages whose zeros remain visible after the later ones."""
        found: Tensors = {}
        for name, transform in reversed(self.stages):
            found |= under(name, transform.evidence(sent, exact))
            exact = False
            if not transform.shows_zeros:
                break
        return found

    def in_round(self, number: int) -> Chain:
        """Return the chain of round `number`."""
        now = tuple((name, transform.in_round(number)) for name, transform in self)
        return self if all(a is b for (_, a), (_, b) in zip(now, self.stages, strict=True)) else Chain(now)


def last_stage(transform: Transform | None) -> Transform | None:
    """Return the last stage of a chain, and any other transform as it is."""
    return transform.stages[-1][1] if isinstance(transform, Chain) and transform.stages else transform


def split(transform: Transform | None) -> tuple[Transform | None, Transform | None]:
    """Split a transform into the part applied to each example's gradient and the part applied to their mean."""
    if not isinstance(transform, Chain):
        return (transform, None) if transform is not None and transform.per_example else (None, transform)
    each = tuple(stage for stage in transform if stage[1].per_example)
    mean = transform.stages[len(each) :]
    return (Chain(each) if each else None), (Chain(mean) if mean else None)


def relaxed(transform: Transform | None, domain: Domain | None) -> Transform | None:
    """Return a chain with what its stages search as named tensors; any other transform as it is."""
    if not isinstance(transform, Chain) or domain is None:
        return transform
    return Chain(
        tuple((name, stage.relaxed(domain) if isinstance(stage, Searches) else stage) for name, stage in transform)
    )


def chain(**stages: Transform) -> Chain:
    """Build a chain of named transforms: `chain(clip=Clip(1.0), noise=Gaussian(0.1), prune=Magnitude(0.9))`.

    The legal order is clip < noise < prune / stand-in < quantise.
    """
    if not stages:
        raise fail("chain", "has no stage", "name at least one transform: chain(clip=Clip(1.0))")
    return Chain(tuple(stages.items()))


def _of_stage(context: Context, name: str) -> Context:
    return replace(context, messages=select(context.messages, name)) if context.messages else context
