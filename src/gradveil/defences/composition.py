"""Composition of defences: `chain` for transforms, `Defence` for the four places where a client can be defended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, below, multiplied, select, tmap, under
from gradveil.core.types import Batch, BatchTransform, Context, Stage, Transform
from gradveil.core.user_code import called, users
from gradveil.nn.initial_weights import drawing_from

ModelSurgery = Callable[[nn.Module, torch.Generator], nn.Module]
"""(model, generator for new layers) -> a new model; the given one stays as it is."""


def no_stage(name: str, transform: object) -> Iterator[Problem]:
    """Yield the reasons why something is no stage of a chain."""
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


def wrong_slots(model: Any, batch: Any) -> Iterator[Problem]:
    """Yield the problems of what is to change a model or a batch."""
    surgeries, transforms = (
        cast(Sequence[Any] | None, held if isinstance(held, tuple | list) else None) for held in (model, batch)
    )
    if surgeries is None or not all(callable(surgery) for surgery in surgeries):
        what = f"is {model!r}, not a tuple of functions"
        yield Problem("defence.model", what, "give a tuple of functions (module, generator) -> module: model=(mine,)")
    if transforms is None or not all(isinstance(transform, BatchTransform) for transform in transforms):
        what = f"is {batch!r}, not a tuple of batch transforms"
        yield Problem("defence.batch", what, "give a tuple of them, made and not classes: batch=(mine,)")


def operated(surgery: ModelSurgery, model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Apply a surgery; one of a user's draws initial weights from the generator, whatever it does with it."""
    if not users(surgery):
        return surgery(model, generator)
    where = f"surgery {getattr(surgery, '__name__', type(surgery).__name__)}"
    takes = "it is called with (module, generator) and returns a module"
    with drawing_from(generator):
        made: Any = called(where, "it", lambda: surgery(model, generator), takes)
    if not isinstance(made, nn.Module):
        what = f"returned {type(made).__name__}, not a torch.nn.Module"
        raise fail(where, what, "return the module to be trained in the place of the one it is given")
    return made


@dataclass(frozen=True)
class Chain(Transform):
    """Named transforms in a row. The names prefix noise and state: `noise.conv1.weight`, `prune.residual.fc`."""

    stages: tuple[tuple[str, Transform], ...]

    def __post_init__(self) -> None:
        """Refuse an illegal order when the chain is built, with every problem."""
        problems = [problem for name, transform in self.stages for problem in no_stage(name, transform)]
        refuse(problems)
        problems += [
            Problem(f"chain.{name}", "acts on each example, in a chain of its own", "name its stages in this chain")
            for name, stage in self.stages
            if not stage.per_example and stage.split()[0] is not None
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
        """Every stage's guarantee."""
        return "; ".join(f"{name}: {transform.guarantee}" for name, transform in self)

    @property
    def exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a stage is exact."""
        return any(transform.exact for _, transform in self)

    @property
    def needs_public(self) -> bool:
        """Whether a stage takes public images."""
        return any(transform.needs_public for _, transform in self)

    def init(self, params: Mapping[str, Tensor]) -> Tensors:
        """Unite the states of the stages."""
        return {k: v for name, transform in self for k, v in under(name, transform.init(params)).items()}

    def noise(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Unite the noise of the stages."""
        spec = NoiseSpec()
        for name, transform in self:
            spec = spec | transform.noise(params).under(name)
        return spec

    def directions(self, batch: Batch) -> NoiseSpec:
        """Unite the directions of the stages."""
        spec = NoiseSpec()
        for name, transform in self:
            spec = spec | transform.directions(batch).under(name)
        return spec

    def intermediates(self, params: Mapping[str, Tensor]) -> NoiseSpec:
        """Unite the intermediates of the stages."""
        spec = NoiseSpec()
        for name, transform in self:
            spec = spec | transform.intermediates(params).under(name)
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

    def factors(self, squares: Mapping[str, Tensor]) -> Tensors | None:
        """Multiply the factors of the stages, each of what the one before it leaves."""
        product = {name: torch.ones_like(square) for name, square in squares.items()}
        for _, transform in self:
            own = transform.factors({name: square * product[name].square() for name, square in squares.items()})
            if own is None:
                return None
            product = tmap(torch.mul, product, own)
        return product

    def only_masks(
        self, params: Mapping[str, Tensor], noise: Mapping[str, Tensor], off: Collection[str]
    ) -> Tensors | None:
        """Multiply the stages' masks."""
        found: Tensors = {}
        for name, transform in self:
            masks = transform.only_masks(params, select(noise, name), below(name, off))
            if masks is None:
                return None
            found = multiplied(found, masks)
        return found

    def speakers(self) -> int:
        """Count as many as the stage needs that needs most."""
        return max(transform.speakers() for _, transform in self)

    def proposal(self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context) -> Tensors:
        """Unite what the stages propose, each of what reaches it."""
        proposed: Tensors = {}
        for name, transform in self:
            given = select(state, name), select(noise, name), _of_stage(context, name)
            proposed |= under(name, transform.proposal(update, *given))
            update, _ = transform.apply(update, *given)
        return proposed

    def announce(self, proposals: Mapping[str, Tensor], previous: Mapping[str, Tensor], number: int) -> Tensors:
        """Unite the messages of the stages."""
        messages: Tensors = {}
        for name, transform in self:
            messages |= under(name, transform.announce(select(proposals, name), previous, number))
        return messages

    def evidence(self, sent: Mapping[str, Tensor], exact: bool = True) -> Tensors:
        """Return what the *last* stage gives away, and those before it whose zeros the later ones show."""
        found: Tensors = {}
        for name, transform in reversed(self.stages):
            found |= under(name, transform.evidence(sent, exact))
            exact = False
            if not transform.shows_zeros:
                break
        return found

    def in_round(self, number: int) -> Chain:
        """Return the stages as they are in a round."""
        now = tuple((name, transform.in_round(number)) for name, transform in self)
        return self if all(a is b for (_, a), (_, b) in zip(now, self.stages, strict=True)) else Chain(now)

    def split(self) -> tuple[Transform | None, Transform | None]:
        """Split at the last per-example stage."""
        each = tuple(stage for stage in self.stages if stage[1].per_example)
        mean = self.stages[len(each) :]
        return (Chain(each) if each else None), (Chain(mean) if mean else None)


def chain(**stages: Transform) -> Chain:
    """Name transforms and put them in a row.

    `chain(clip=Clip(1.0), noise=Gaussian(0.1), prune=Magnitude(0.9))`; an order other than
    clip < noise < prune / stand-in < quantise is refused.
    """
    if not stages:
        raise fail("chain", "has no stage", "name at least one transform: chain(clip=Clip(1.0))")
    return Chain(tuple(stages.items()))


@dataclass(frozen=True)
class Defence:
    """Up to four slots that change a client: its model, its batch, each local gradient, and what is sent once a round.

    A defence of a client is a client again; `a + b` is a defence that does `a` first.
    """

    name: str
    model: tuple[ModelSurgery, ...] = ()
    batch: tuple[BatchTransform, ...] = ()
    step: Chain | None = None
    send: Chain | None = None

    def __post_init__(self) -> None:
        """Refuse what stands in the wrong slot or without its wrapping, with every problem."""
        problems = list(wrong_slots(self.model, self.batch))
        if self.name == "none" and (self.model or self.batch or self.step or self.send):
            what = "is 'none', the name of the undefended client, and it changes the client"
            problems.append(Problem("defence.name", what, "give it another name"))
        slots: list[tuple[str, Any]] = [("step", self.step), ("send", self.send)]
        for slot, held in slots:
            if not (held is None or isinstance(held, Chain)):
                what = f"is {held!r}, not a chain of transforms"
                problems.append(Problem(f"defence.{slot}", what, f"name what is in it: {slot}=chain(mine=...)"))
            elif held is not None and slot == "send" and held.split()[0] is not None:
                what = "acts on each example's gradient, and what is sent is one update"
                problems.append(Problem("defence.send", what, "give it as step=chain(...)"))
        refuse(problems)

    def __call__(self, client: Client, key: Key | None = None) -> Client:
        """Return the defended client. `key` addresses the initial weights of new layers."""
        model = client.model
        for i, surgery in enumerate(self.model):
            model = operated(surgery, model, (key or Key(0)).child(Stream.REPLACEMENT, i).generator())
        return replace(
            client,
            model=model,
            batch=(*client.batch, *self.batch),
            step=_join(client.step, self.step),
            send=_join(client.send, self.send),
        )

    def speakers(self) -> int:
        """Count the clients that publish something before a round."""
        return self.send.speakers() if self.send else 0

    def __add__(self, other: Defence) -> Defence:
        """Compose two defences."""
        return Defence(
            name=" + ".join(part for part in (self.name, other.name) if part != "none") or "none",
            model=(*self.model, *other.model),
            batch=(*self.batch, *other.batch),
            step=_join(self.step, other.step),
            send=_join(self.send, other.send),
        )


NONE = Defence("none")
"""The undefended client: the control of every comparison."""


def _of_stage(context: Context, name: str) -> Context:
    return replace(context, messages=select(context.messages, name)) if context.messages else context


def _join(first: Transform | None, second: Chain | None) -> Chain | None:
    """Put two chains in a row, in the legal order, with unique names.

    Sorting by stage is stable, so `prune + dp` and `dp + prune` are the same defence.
    """
    if first is None or second is None:
        return second if first is None else _as_chain(first)
    stages: list[tuple[str, Transform]] = []
    for name, transform in (*_as_chain(first), *second):
        used = {existing for existing, _ in stages}
        unique = next(n for n in (name, *(f"{name}{i}" for i in range(2, 100))) if n not in used)
        stages.append((unique, transform))
    return Chain(tuple(sorted(stages, key=lambda stage: (stage[1].stage, not stage[1].per_example))))


def _as_chain(transform: Transform) -> Chain:
    return transform if isinstance(transform, Chain) else Chain((("transform", transform),))
