"""Custom defences: loaded by import path, checked by running them on trial data.

A bound rests on `Additive.variance`, one over the information of an entry's place. No law has less than that of its
draws: for noise z of density f, every function p and every direction,

    1 / information <= E[p(z)^2] / E[p'(z)]^2,    and with p(z) = z at most the variance,

with equality for p = f' / f (Cauchy and Schwarz). So draws refute a claim, and never prove one.

Those of this library are held to laws by its tests instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from scipy.stats import chi2  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor
from torch.func import vmap

from gradveil.client import Client
from gradveil.core.chain import Chain, split
from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail
from gradveil.core.noise import Key, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch, BatchTransform, Context, HasMessages, Transform
from gradveil.core.user_code import OwnEntry, called, own_entry, users
from gradveil.defences.additive_noise import Additive
from gradveil.defences.composition import Defence
from gradveil.defences.guarantees import stages
from gradveil.defences.stage_probes import AskedError, ask, data_dependent, public_of, sent_by
from gradveil.nn.check import check

_ENTRIES = 1 << 20
"""About how many entries are drawn."""
_DRAWS = (4, 64)
_CHANCE = 1e-9
"""How seldom draws may refute what is true."""
_MANY, _SLACK = 1 << 12, 1.15
"""Entries, and a factor, that other functions than p(z) = z take: their averages are less certain."""


def misstated(stage: Additive, client: Client, batch: Batch) -> str | None:
    """Say what draws refute of the claim that a stage adds independent noise of this variance to every entry."""
    claimed = stage.variance(len(batch.targets))
    if not claimed > 0:
        return None
    try:
        if data_dependent(stage, client, batch):
            return "adds what depends on the examples"
        rows = _added(stage, client, batch, 0.0)
        other = _added(stage, client, batch, claimed**0.5, draws=1)
    except AskedError:
        return "adds what depends on the examples"
    if any(not torch.allclose(value[:1], other[name], atol=1e-3 * claimed**0.5) for name, value in rows.items()):
        return "adds what depends on the update"
    for name, drawn in rows.items():
        most = min((bound for bound in _bounds(drawn.double()) if bound < claimed), default=None)
        if most is not None:
            what = f"its draws of '{name}' allow no more than {most:.3g}"
            return f"says variance({len(batch.targets)}) = {claimed:.3g}, and {what}"
    return None


def _added(stage: Additive, client: Client, batch: Batch, entry: float, draws: int = _DRAWS[1]) -> Tensors:
    """Return what is added to an update of equal entries: at most so many draws [K, *shape] of each parameter."""
    sent = sent_by(client)
    update = {name: torch.full_like(value, entry) for name, value in sent.items()}
    context = Context(sent, batch, gradient=ask, features=ask, sensitivity=ask, public=public_of(client, batch, update))
    spec = stage.noise(sent) | stage.directions(batch)
    count = min(draws, max(_DRAWS[0], _ENTRIES // sum(value.numel() for value in sent.values())))
    rows: list[Tensors] = []
    for draw in range(count):
        noise = spec.sample(Key(0, (Stream.CLAIM, draw)), batch.inputs.device)
        found = stage.apply(update, stage.init(sent), noise, context)[0]
        rows.append(tmap(torch.sub, {name: found[name] for name in update}, update))
    return {name: torch.stack([row[name] for row in rows]).cpu() for name in rows[0]}


def _bounds(drawn: Tensor) -> Iterator[float]:
    """Bound one over the information by draws [K, *shape]: of entries, and of what neighbours have in common."""
    yield _variance(drawn)
    for way in range(1, drawn.dim()):
        if drawn.shape[way] > 1:
            first, second = drawn.narrow(way, 0, drawn.shape[way] - 1), drawn.narrow(way, 1, drawn.shape[way] - 1)
            yield _variance((first - second) / 2**0.5)
            yield _variance((first + second) / 2**0.5)
    if drawn.numel() >= _MANY:
        for value, slope in map(_moments(drawn.flatten() - drawn.mean()), _FUNCTIONS):
            yield _SLACK * value / slope**2 if slope else float("inf")


def _variance(drawn: Tensor) -> float:
    """Return the largest variance that draws of these squares leave possible; neighbours may count twice."""
    count = max(2, drawn.numel() // 2)
    return float(drawn.var()) * count / float(chi2.ppf(_CHANCE, count - 1))  # pyright: ignore


Function = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Numbers in units of their median magnitude -> p of them, and its slope."""


def _power(k: int) -> Function:
    return lambda z: (z**k, k * z ** (k - 1))


def _step(width: float) -> Function:
    return lambda z: ((z / width).tanh(), (1 - (z / width).tanh().square()) / width)


_FUNCTIONS: tuple[Function, ...] = (*map(_power, (3, 5, 9, 17)), *map(_step, (0.1, 0.5, 2.0)))


def _moments(centred: Tensor) -> Callable[[Function], tuple[float, float]]:
    size = float(centred.abs().median()) or 1.0

    def of(function: Function) -> tuple[float, float]:
        value, slope = function(centred / size)
        return size**2 * float(value.square().mean()), float(slope.mean())

    return of


_ALL_AT_ONCE = (
    "compute with torch alone, without Python's `if` on values, .item() or NumPy: every audit does many clients at once"
)
_DECLARE = "declare what is random in noise(...), and draw nothing in apply"
_OUT_OF_PLACE = "make new tensors: value * 2, not value.mul_(2)"


def faults(defence: Defence, client: Client, batch: Batch) -> Iterator[Problem]:
    """Try what is a user's own in a client with this defence, on random updates and on its batch."""
    own = Batch(*(value[: len(value) // client.members] for value in batch))
    found = list(_parts(client, own))
    yield from found
    if not any(problem.severity == "error" for problem in found) and any(users(surgery) for surgery in defence.model):
        bounds = client.domain.space.bounds(own.inputs) if client.domain else None
        classes = client.domain.classes if client.domain else None
        yield from check(client.model, own, client.loss, bounds=bounds, classes=classes)


def _parts(client: Client, batch: Batch) -> Iterator[Problem]:
    for slot in ("step", "send"):
        for name, stage in stages(getattr(client, slot)):
            for where, own in _own(f"{slot}.{name}", stage):
                yield from _told(where, lambda where, own=own: _try_stage(where, own, client, batch))
    for number, transform in enumerate(client.batch):
        if users(transform):
            where = f"batch[{number}]"
            yield from _told(where, lambda where, one=transform: _try_batch(where, one, client, batch))


def _own(where: str, stage: Transform) -> Iterator[tuple[str, Transform]]:
    """Find a user's own stages: this one, or what one of this library holds (error feedback a compressor)."""
    if users(stage):
        yield where, stage
        return
    for part in fields(stage) if is_dataclass(stage) else ():
        inner = getattr(stage, part.name)
        if isinstance(inner, Transform):
            yield from _own(f"{where}.{part.name}", inner)


def _told(where: str, trial: Callable[[str], Iterable[Problem]]) -> Iterator[Problem]:
    """Turn the first thing that a trial finds wrong into problems."""
    try:
        yield from trial(where)
    except GradveilError as error:
        yield from error.problems


def _try_stage(where: str, stage: Transform, client: Client, batch: Batch) -> Iterable[Problem]:
    """Apply a stage to one random update, again, and to two at once."""
    if isinstance(stage, HasMessages) and stage.speakers():
        return ()  # It is told more than there is here.
    sent = sent_by(client)
    spec = _spec(where, "noise(params)", lambda: stage.noise(sent))
    spec = spec | _spec(where, "directions(batch)", lambda: stage.directions(batch))
    messages = called(where, "announce", lambda: stage.announce({}, {}, 0)) if isinstance(stage, HasMessages) else {}
    state = called(where, "init(params)", lambda: stage.init(sent))
    _check_tensors(f"{where}: init(params)", state, None)
    if state and stage.per_example:
        remedy = "leave init out, or act on the mean gradient: per_example = False"
        raise fail(where, "keeps a state and acts on each example, where none is carried on", remedy)

    def apply(update: Tensors, noise: Tensors) -> Tensors:
        public = public_of(client, batch, update)
        context = Context(sent, batch, {}, ask, ask, ask, messages, public)
        after: Any = stage.apply(update, dict(state), noise, context)
        pair = cast(tuple[Any, ...], after) if isinstance(after, tuple) else ()
        if len(pair) != 2:
            raise fail(where, f"apply returns {_kind(after)}", "return the update and the state: return sent, state")
        update_after, state_after = pair
        _check_tensors(f"{where}: the update that apply returns", update_after, update)
        _check_tensors(f"{where}: the state that apply returns", state_after, state)
        return {**update_after, **{f"state {name}": value for name, value in state_after.items()}}

    found = list(_try_out(where, apply, {name: _gradient(value, name) for name, value in sent.items()}, spec))
    found += _of_nothing(where, apply, sent, spec)
    if isinstance(stage, Additive) and (what := called(where, "its draws", lambda: misstated(stage, client, batch))):
        remedy = "return one over the information of an entry's place: at most the variance, for normal noise the same"
        raise fail(where, what, remedy)
    return found


def _try_batch(where: str, transform: BatchTransform, client: Client, batch: Batch) -> Iterable[Problem]:
    """Apply a batch transform to the client's examples, again, and to two clients' at once."""
    spec = _spec(where, "noise(batch)", lambda: transform.noise(batch))

    def apply(given: Tensors, noise: Tensors) -> Tensors:
        after: Any = transform.apply(Batch(given["inputs"], given["targets"]), noise, client.domain)
        if not isinstance(after, Batch):
            raise fail(where, f"apply returns {_kind(after)}", "return gradveil.core.types.Batch(inputs, targets)")
        _check_tensors(f"{where}: the batch that apply returns", {"inputs": after.inputs}, {"inputs": given["inputs"]})
        count, found = len(given["targets"]), after.targets
        classes = not found.is_floating_point() and tuple(found.shape) == (count,)
        if not classes and not (found.is_floating_point() and found.dim() == 2 and len(found) == count):
            what = f"apply returns targets {found.dtype} {tuple(found.shape)} for {count} examples"
            raise fail(where, what, "return class numbers [B], or class probabilities [B, K]")
        return {"inputs": after.inputs, "targets": found}

    return _try_out(where, apply, {"inputs": batch.inputs, "targets": batch.targets}, spec)


def _try_out(
    where: str, apply: Callable[[Tensors, Tensors], Tensors], given: Tensors, spec: NoiseSpec
) -> Iterator[Problem]:
    """Apply something once, again to the same, and to two targets at once; refuse the first thing that goes wrong.

    Warn where an attacker who simulates it has no derivative to follow.
    """
    like = next(value for value in given.values() if value.is_floating_point())
    noise, other = (_drawn(spec, number, like) for number in range(2))
    handed = {name: value.clone() for name, value in given.items()}
    names = f"noise holds {', '.join(noise) or 'nothing'}"
    try:
        first = called(where, "apply", lambda: apply(handed, dict(noise)), names)
    except AskedError:
        return  # It computes with what only a client has.
    if changed := [name for name, value in given.items() if not torch.equal(handed[name], value)]:
        raise fail(where, f"apply changes what it is handed in place: '{changed[0]}'", _OUT_OF_PLACE)
    for name, value in first.items():
        if not value.isfinite().all():
            what = f"apply makes NaN or infinity of finite values, in '{name}'"
            raise fail(where, what, "look for divisions by zero: gradients hold zeros")
    again = called(where, "apply", lambda: apply({n: value.clone() for n, value in given.items()}, dict(noise)))
    if any(not torch.equal(value, again[name]) for name, value in first.items()):
        raise fail(where, "apply gives something else each time, for the same arguments", _DECLARE)
    both = tuple({n: torch.stack([v, w[n]]) for n, v in u.items()} for u, w in ((given, given), (noise, other)))
    try:
        vmap(apply)(*both)
    except FOREIGN as error:
        what = f"cannot be applied to several clients at once: {type(error).__name__}: {error}"
        raise fail(where, what, f"{_ALL_AT_ONCE}; {_DECLARE}") from error
    yield from called(where, "its derivative", lambda: _without_slope(where, lambda v: apply(v, dict(noise)), given))


def _of_nothing(
    where: str, apply: Callable[[Tensors, Tensors], Tensors], like: Mapping[str, Tensor], spec: NoiseSpec
) -> Iterator[Problem]:
    """Warn of what makes NaN of layers whose gradient is zero: all of their units are off."""
    zeros = {name: torch.zeros_like(value) for name, value in like.items()}
    try:
        after = called(where, "apply", lambda: apply(zeros, _drawn(spec, 0, next(iter(zeros.values())))))
    except AskedError:
        return
    if broken := [name for name, value in after.items() if not value.isfinite().all()]:
        what = f"apply makes NaN or infinity of a layer whose gradient is zero, in '{broken[0]}'"
        remedy = "look for divisions by a norm or a largest value: add 1e-30 to it"
        yield Problem(where, what, remedy, "warning")


def _without_slope(where: str, apply: Callable[[Tensors], Tensors], given: Tensors) -> list[Problem]:
    """Warn where nothing of what is sent has a derivative in what came in."""
    free = {n: v.detach().clone().requires_grad_(v.is_floating_point()) for n, v in given.items()}
    sent = {name: value for name, value in apply(free).items() if name in given and value.requires_grad}
    wanted = [value for value in free.values() if value.requires_grad]
    total = sum(((value * _gradient(value, name)).sum() for name, value in sent.items()), start=torch.zeros(()))
    slopes = torch.autograd.grad(total, wanted, materialize_grads=True) if sent else ()
    if not any(bool(slope.any()) for slope in slopes):
        what = "has no derivative: who simulates it cannot search through it, and recovers less than who ignores it"
        remedy = "give attackers a smooth one: gradveil.core.tree.straight_through(sent, smooth)"
        return [Problem(where, what, remedy, "warning")]
    return []


def _spec(where: str, call: str, run: Callable[[], object]) -> NoiseSpec:
    spec = called(where, call, run)
    if not isinstance(spec, NoiseSpec):
        remedy = "return NoiseSpec({name: Noise(shape, law)}), empty if nothing is random"
        raise fail(where, f"{call} returns {_kind(spec)}", remedy)
    return spec


def _drawn(spec: NoiseSpec, number: int, like: Tensor) -> Tensors:
    """Draw the noise of a client, of the kind and in the place of its tensors."""
    return spec.to(like.dtype).sample(Key(0, (Stream.CLIENT, number)), like.device)


def _check_tensors(where: str, found: Any, like: Mapping[str, Tensor] | None) -> None:
    """Refuse what is no dictionary of tensors, or of other names, shapes and kinds than these."""
    if not isinstance(found, Mapping):
        raise fail(where, f"is {_kind(found)}", "return a dictionary of tensors")
    held = cast(Mapping[Any, Any], found)
    problems = [
        Problem(where, f"holds {_kind(value)} under {name!r}", "return tensors: torch.tensor(value)")
        for name, value in held.items()
        if not isinstance(value, Tensor)
    ]
    for name, value in (like or {}).items():
        given = held.get(name)
        if given is None:
            problems.append(Problem(where, f"lacks '{name}'", "return a tensor for each name that came in"))
        elif isinstance(given, Tensor) and (given.shape, given.dtype) != (value.shape, value.dtype):
            what = f"holds '{name}' as {given.dtype} {tuple(given.shape)}, handed in as {value.dtype} "
            problems.append(
                Problem(where, f"{what}{tuple(value.shape)}", "keep the shape and the dtype of what came in")
            )
    if like is not None and (more := [str(name) for name in held if name not in like]):
        remedy = "return the names that came in; a state's are those of init(params)"
        problems.append(Problem(where, f"holds names that did not come in: {', '.join(more)}", remedy))
    if problems:
        raise GradveilError(problems[:3])


def _kind(thing: Any) -> str:
    return "nothing" if thing is None else f"{type(thing).__name__}"


def _gradient(value: Tensor, name: str) -> Tensor:
    """Stand in for a gradient, which has zeros in it: of units that are off."""
    drawn = torch.randn(value.shape, dtype=value.dtype, generator=Key(0, (name,)).generator()).flatten()
    drawn[::3] = 0
    return drawn.view(value.shape).to(value.device)


_SURGERY = "is a surgery of the model", "name a defence that holds it: mine = Defence('mine', model=(surgery,))"
_MISTAKEN = {
    "module": _SURGERY,
    "model": _SURGERY,
    "update": ("acts on an update", "write it as the apply of a class derived from gradveil.core.types.Transform"),
    "batch": ("acts on a batch", "write it as the apply of a class derived from gradveil.core.types.BatchTransform"),
}
"""Arguments that no text can give: what their function is then, and what to do."""


def own_defence(path: str) -> OwnEntry:
    """Import a defence, a transform, or what returns one."""

    def is_one(found: Any) -> bool:
        return isinstance(found, Defence | Transform | BatchTransform)

    return own_entry(path, "defence", is_one, _defence, _MISTAKEN)


def _defence(made: Any, name: str) -> Defence:
    """Name a defence by its text; a transform takes its slot, one of single examples that of each gradient."""
    if isinstance(made, Defence):
        return replace(made, name=name)
    if isinstance(made, BatchTransform):
        return Defence(name, batch=(made,))
    if isinstance(made, Transform):
        stages = made if isinstance(made, Chain) else Chain((("own", made),))
        return Defence(name, send=stages) if split(stages)[0] is None else Defence(name, step=stages)
    what = f"returned {type(made).__name__}, not a defence"
    raise fail(name, what, "return a Defence, or a Transform or BatchTransform of yours")
