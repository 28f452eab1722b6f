"""What an attack says of itself and gives back: refused where it is of the wrong kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor

from gradveil.attacks.base import Attack, Observation, Reconstruction, Remark, Status
from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.client import Client
from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.own import users

_STATUSES = get_args(Status)


def declared(attack: Attack) -> Iterator[Problem]:
    """Say what an attack cannot believe or know: anything else would silently be taken for something."""
    for method, other in (("craft", "planted"), ("planted", "craft")):
        if hasattr(attack, method) and not hasattr(attack, other):
            what = f"is missing, and a malicious server's attack has it beside {method}()"
            yield Problem(f"{other}()", what, "add it: craft() returns the changed client, planted() says the change")
    belief: Any = getattr(attack, "belief", None)
    knowledge: Any = getattr(attack, "knowledge", None)
    if belief not in ("naive", "full"):
        remedy = "say 'naive' (the client without its update's defences) or 'full' (with them)"
        yield Problem("belief", f"is {belief!r}", remedy)
    if not isinstance(knowledge, Mapping):
        remedy = "say what it knows of each named tensor: {'model.*': Optimise()}, or {} for nothing"
        yield Problem("knowledge", f"is {knowledge!r}", remedy)
        return
    for pattern, how in cast(Mapping[str, Any], knowledge).items():
        if not isinstance(how, How):
            remedy = "say Known(), Optimise(), Sample(), Infer() or Neutral() of gradveil.attacks.knowledge"
            yield Problem(f"knowledge['{pattern}']", f"is {how!r}", remedy)


_DREW = Remark(
    "it drew from torch's global generator: numbers depend on what ran before it, and another run gives others; "
    "key.child(victim, restart).generator() gives the same",
    (1.0,),
)


def answer(
    attack: Attack,
    seen: Sequence[Observation],
    belief: Client,
    knowledge: Knowledge,
    run: Callable[[], Any],
) -> Reconstruction:
    """Run an attack on what it is handed, and check what it returns; one of a user's own has to leave that as it is."""
    if not users(attack):
        return checked(attack.name, run(), seen[-1], knowledge)
    before = {name: value._version for name, value in _handed(seen, belief, knowledge)}
    drawn = torch.get_rng_state()
    found = checked(attack.name, run(), seen[-1], knowledge)
    if changed := [name for name, value in _handed(seen, belief, knowledge) if value._version != before.get(name)]:
        what = f"changes what it is handed in place: {changed[0]}"
        raise fail(f"attack {attack.name}", what, "make new tensors: value * 2, not value.mul_(2)")
    told = (_DREW,) if not torch.equal(drawn, torch.get_rng_state()) else ()
    return replace(found, remarks=(*found.remarks, *told))


def _handed(seen: Sequence[Observation], belief: Client, knowledge: Knowledge) -> Iterator[tuple[str, Tensor]]:
    for each in seen:
        for kind, tensors in (("params", each.params), ("update", each.update), ("messages", each.messages)):
            yield from ((f"'{name}' of the {kind} of round {each.round}", value) for name, value in tensors.items())
    for kind, found in (("parameter", belief.model.named_parameters()), ("buffer", belief.model.named_buffers())):
        yield from ((f"{kind} '{name}' of the believed client's model", value) for name, value in found)
    public = knowledge.public or ()
    for name, value in (("lower", knowledge.lower), ("upper", knowledge.upper), ("targets", knowledge.targets)):
        yield from [(f"knowledge.{name}", value)] if value is not None else []
    yield from ((f"knowledge.public[{place}]", value) for place, value in enumerate(public))
    for name, how in knowledge.tensors.items():
        if isinstance(how, Known) and how.value is not None:
            yield f"knowledge.tensors['{name}']", how.value


def checked(name: str, found: Any, seen: Observation, knowledge: Knowledge) -> Reconstruction:
    """Refuse what is no reconstruction of these victims, with every problem; what is not finite has diverged."""
    where = f"attack {name}"
    if not isinstance(found, Reconstruction):
        what = "nothing" if found is None else type(found).__name__
        raise fail(where, f"returned {what}", "return a gradveil.attacks.base.Reconstruction")
    refuse(list(_wrong(where, found, len(seen.victims), seen.examples, knowledge)))
    broken = ~found.inputs.detach().isfinite().flatten(1).all(1)
    status = tuple("diverged" if off else old for off, old in zip(broken.tolist(), found.status, strict=True))
    return replace(found, status=status)


def _wrong(where: str, found: Reconstruction, victims: int, examples: int, knowledge: Knowledge) -> Iterator[Problem]:
    images = (victims, examples, *knowledge.shape)
    restarts = tuple(getattr(found.objectives, "shape", ()))[1:2] or (1,)
    likely = tuple(getattr(found.match, "shape", ()))[1:] == (3,)
    wanted: Sequence[tuple[str, Any, tuple[int, ...], str]] = (
        ("inputs", found.inputs, images, "[V, B, C, H, W]"),
        ("targets", found.targets, (victims, examples), "[V, B] class numbers"),
        ("objective", found.objective, (victims,), "[V]"),
        ("iterations", found.iterations, (victims,), "[V] whole numbers"),
        ("restart", found.restart, (victims,), "[V] whole numbers"),
        ("objectives", found.objectives, (victims, *restarts), "[V, restarts]"),
        ("initial", found.initial, (victims,), "[V]"),
        *(
            (("before_undoing", found.before_undoing, images, "[V, B, C, H, W]"),)
            if found.before_undoing is not None
            else ()
        ),
        *((("match", found.match, (victims, 3 if likely else 2), "[V, 2 or 3]"),) if found.match is not None else ()),
        *((f"trace[{count}]", value, images, "[V, B, C, H, W]") for count, value in found.trace.items()),
    )
    for name, value, shape, said in wanted:
        if not isinstance(value, Tensor):
            yield Problem(f"{where}: {name}", f"is {type(value).__name__}", f"return a tensor {said}, {shape} here")
        elif tuple(value.shape) != shape:
            yield Problem(f"{where}: {name}", f"is {tuple(value.shape)}", f"return {said}, {shape} here")
        elif name in ("targets", "iterations", "restart") and value.is_floating_point():
            yield Problem(f"{where}: {name}", f"is {value.dtype}", "return whole numbers: .long()")
        elif name == "iterations" and bool((value < 0).any()):
            yield Problem(f"{where}: {name}", "is negative", "count the iterations that were made")
    seconds: Any = found.seconds
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        yield Problem(f"{where}: seconds", f"is {seconds!r}", "return the seconds that the attack took")
    if odd := [count for count in found.trace if not isinstance(count, int) or count < 1]:
        yield Problem(f"{where}: trace", f"has the key {odd[0]!r}", "name each by the number of iterations, from 1 on")
    status: Any = found.status
    if isinstance(status, str) or len(status) != victims or any(word not in _STATUSES for word in status):
        remedy = f"return one word a victim: ({', '.join(map(repr, _STATUSES))})"
        yield Problem(f"{where}: status", f"is {status!r}", remedy)
