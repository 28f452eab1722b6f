"""`Defence`: the four places where a client can be defended, and how two defences are composed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from gradveil.client import Client
from gradveil.core.chain import Chain, split
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.core.types import BatchTransform, Transform
from gradveil.core.user_code import called, users
from gradveil.nn.initial_weights import drawing_from

ModelSurgery = Callable[[nn.Module, torch.Generator], nn.Module]
"""(model, generator for new layers) -> a new model; the given one stays as it is."""


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
class Defence:
    """Up to four slots that change a client: its model, its batch, each local gradient, and what is sent once a round.

    A defence of a client is a client again; `a + b` is a defence that does `a` first.
    """

    name: str
    model: tuple[ModelSurgery, ...] = ()
    batch: tuple[BatchTransform, ...] = ()
    step: Chain | None = None
    send: Chain | None = None

    def __repr__(self) -> str:
        """Name the defence, and the slots that it fills."""
        slots = [slot for slot in ("model", "batch", "step", "send") if getattr(self, slot)]
        return f"Defence({self.name!r}, changes {', '.join(slots) or 'nothing'})"

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
            elif slot == "send" and split(held)[0] is not None:
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
