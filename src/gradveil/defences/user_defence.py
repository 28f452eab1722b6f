"""Custom defences: loaded by import path, checked by running them on trial data.

Error bounds rely on `Additive.variance`, one over the Fisher information of an entry's location. Draws bound this from
above: for noise z of density f, every function p and every direction,

    1 / information <= E[p(z)^2] / E[p'(z)]^2,    and with p(z) = z at most the variance,

with equality for p = f' / f (Cauchy-Schwarz). So draws can refute a claim, but never prove it. The defences of this
library are covered by its tests instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from scipy.special import gammaincinv  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor
from torch.func import vmap

from gradveil.client import Client
from gradveil.core.chain import NAMELESS, Chain, no_stage, split
from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail, refuse
from gradveil.core.noise import Key, NoiseSpec
from gradveil.core.streams import Stream
from gradveil.core.tree import Tensors, tmap
from gradveil.core.types import Batch, BatchTransform, HasMessages, Transform
from gradveil.core.user_code import OwnEntry, called, own_entry, users
from gradveil.defences.additive_noise import Additive
from gradveil.defences.composition import Defence
from gradveil.defences.guarantees import stages
from gradveil.defences.stage_probes import AskedError, asking, data_dependent, public_of, sent_by
from gradveil.nn.check import check

_ENTRIES = 1 << 20
"""Approximate number of entries that are drawn."""
_DRAWS = (4, 64)
_CHANCE = 1e-9
"""Probability that draws refute a true claim."""
_MANY, _SLACK = 1 << 12, 1.15
"""Entries needed, and safety factor, for functions other than p(z) = z: their averages are less certain."""


def misstated(stage: Additive, client: Client, batch: Batch) -> str | None:
    """Test by draws whether a stage adds independent noise of its declared variance; return the violation or None."""
    claimed = stage.variance(len(batch.targets))
    if not claimed > 0:
        return None
    try:
        if data_dependent(stage, client, batch):
            return "adds noise that depends on the examples"
        rows = _added(stage, client, batch, 0.0)
        other = _added(stage, client, batch, claimed**0.5, draws=1)
    except AskedError:
        return "adds noise that depends on the examples"
    if any(not torch.allclose(value[:1], other[name], atol=1e-3 * claimed**0.5) for name, value in rows.items()):
        return "adds noise that depends on the update"
    for name, drawn in rows.items():
        most = min((bound for bound in _bounds(drawn.double()) if bound < claimed), default=None)
        if most is not None:
            draws = f"its draws of '{name}' allow no more than {most:.3g}"
            return f"declares variance({len(batch.targets)}) = {claimed:.3g}, but {draws}"
    return None


def _added(stage: Additive, client: Client, batch: Batch, entry: float, draws: int = _DRAWS[1]) -> Tensors:
    """Return the noise added to an update of equal entries: at most `draws` draws [K, *shape] per parameter."""
    sent = sent_by(client)
    update = {name: torch.full_like(value, entry) for name, value in sent.items()}
    context = asking(sent, batch, public_of(client, batch, update))
    spec = stage.noise(sent) | stage.directions(batch)
    count = min(draws, max(_DRAWS[0], _ENTRIES // sum(value.numel() for value in sent.values())))
    rows: list[Tensors] = []
    for draw in range(count):
        noise = spec.sample(Key(0, (Stream.CLAIM, draw)), batch.inputs.device)
        noisy = stage.apply(update, stage.init(sent), noise, context)[0]
        rows.append(tmap(torch.sub, {name: noisy[name] for name in update}, update))
    return {name: torch.stack([row[name] for row in rows]).cpu() for name in rows[0]}


def _bounds(drawn: Tensor) -> Iterator[float]:
    """Bound one over the information by draws [K, *shape] of entries, and of sums and differences of neighbours."""
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
    """Return the largest variance compatible with these draws; neighbours may count twice."""
    count = max(2, drawn.numel() // 2)
    # Upper end of the confidence interval of a normal sample's variance: a quantile of chi-square. It is written out,
    # because scipy.stats takes half a second to import.
    return float(drawn.var()) * count / (2 * float(gammaincinv((count - 1) / 2, _CHANCE)))


Function = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Numbers in units of their median magnitude -> p of them, and its derivative."""


def _power(k: int) -> Function:
    return lambda z: (z**k, k * z ** (k - 1))


def _step(width: float) -> Function:
    return lambda z: ((z / width).tanh(), (1 - (z / width).tanh().square()) / width)


_FUNCTIONS: tuple[Function, ...] = (*map(_power, (3, 5, 9, 17)), *map(_step, (0.1, 0.5, 2.0)))


def _moments(centred: Tensor) -> Callable[[Function], tuple[float, float]]:
    size = float(centred.abs().median()) or 1.0

    def of(function: Function) -> tuple[float, float]:
        value, slope = function(centred / size)
        # d/dz p(z / size) = p' / size: the bound is in units of z^2.
        return size**2 * float(value.square().mean()), float(slope.mean())

    return of


_ALL_AT_ONCE = (
    "compute with torch alone, without `if` on values, .item() or NumPy: audits apply it to many clients at once"
)
_DECLARE = "declare random tensors in noise(...), and draw nothing in apply"
_OUT_OF_PLACE = "create new tensors: value * 2, not value.mul_(2)"


def faults(defence: Defence, client: Client, batch: Batch) -> Iterator[Problem]:
    """Try the custom parts of a client with this defence, on random updates and on its batch."""
    one = Batch(*(value[: len(value) // client.members] for value in batch))
    problems = list(_parts(client, one))
    yield from problems
    if not any(problem.severity == "error" for problem in problems) and any(
        users(surgery) for surgery in defence.model
    ):
        bounds = client.domain.space.limits(one.inputs) if client.domain else None
        classes = client.domain.classes if client.domain else None
        yield from check(client.model, one, client.loss, bounds=bounds, classes=classes)


def _parts(client: Client, batch: Batch) -> Iterator[Problem]:
    for slot in ("step", "send"):
        for name, stage in stages(getattr(client, slot)):
            for where, custom in _custom(f"{slot}.{name}", stage):
                yield from _problems(where, lambda where, custom=custom: _try_stage(where, custom, client, batch))
    for number, transform in enumerate(client.batch):
        if users(transform):
            where = f"batch[{number}]"
            yield from _problems(where, lambda where, one=transform: _try_batch(where, one, client, batch))


def _custom(where: str, stage: Transform) -> Iterator[tuple[str, Transform]]:
    """Find custom stages: this one, or parts of a built-in stage (the compressor of error feedback)."""
    if users(stage):
        yield where, stage
        return
    for part in fields(stage) if is_dataclass(stage) else ():
        inner = getattr(stage, part.name)
        if isinstance(inner, Transform):
            yield from _custom(f"{where}.{part.name}", inner)


def _problems(where: str, trial: Callable[[str], Iterable[Problem]]) -> Iterator[Problem]:
    """Yield the problems of a trial, which stops at its first error."""
    try:
        yield from trial(where)
    except GradveilError as error:
        yield from error.problems


def _try_stage(where: str, stage: Transform, client: Client, batch: Batch) -> Iterable[Problem]:
    """Apply a stage to a random update twice, and to two updates at once."""
    if isinstance(stage, HasMessages) and stage.speakers():
        return ()  # Messages of other clients are not available here.
    sent = sent_by(client)
    spec = _spec(where, "noise(params)", lambda: stage.noise(sent))
    spec = spec | _spec(where, "directions(batch)", lambda: stage.directions(batch))
    messages = called(where, "announce", lambda: stage.announce({}, {}, 0)) if isinstance(stage, HasMessages) else {}
    state = called(where, "init(params)", lambda: stage.init(sent))
    _check_tensors(f"{where}: init(params)", state, None)
    if state and stage.per_example:
        remedy = "leave init out, or act on the mean gradient: per_example = False"
        raise fail(where, "keeps a state and acts on each example, whose state is never carried over", remedy)

    def apply(update: Tensors, noise: Tensors) -> Tensors:
        public = public_of(client, batch, update)
        context = replace(asking(sent, batch, public), messages=messages)
        after: Any = stage.apply(update, dict(state), noise, context)
        pair = cast(tuple[Any, ...], after) if isinstance(after, tuple) else ()
        if len(pair) != 2:
            raise fail(where, f"apply returns {_kind(after)}", "return the update and the state: return sent, state")
        update_after, state_after = pair
        _check_tensors(f"{where}: the update that apply returns", update_after, update)
        _check_tensors(f"{where}: the state that apply returns", state_after, state)
        return {**update_after, **{f"state {name}": value for name, value in state_after.items()}}

    problems = list(_try_out(where, apply, {name: _gradient(value, name) for name, value in sent.items()}, spec))
    problems += _at_zero(where, apply, sent, spec)
    if isinstance(stage, Additive) and (wrong := called(where, "its draws", lambda: misstated(stage, client, batch))):
        remedy = (
            "return one over the Fisher information of an entry's location: at most the variance, or equal to it for "
        )
        raise fail(where, wrong, f"{remedy}normal noise")
    return problems


def _try_batch(where: str, transform: BatchTransform, client: Client, batch: Batch) -> Iterable[Problem]:
    """Apply a batch transform to the client's examples twice, and to those of two clients at once."""
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
    """Call `apply` twice with the same tensors, and with two clients at once; refuse at the first error.

    Warn if an attacker who simulates it would have no derivative to follow.
    """
    like = next(value for value in given.values() if value.is_floating_point())
    noise, other = (_drawn(spec, number, like) for number in range(2))
    handed = {name: value.clone() for name, value in given.items()}
    names = f"noise holds {', '.join(noise) or 'nothing'}"
    try:
        first = called(where, "apply", lambda: apply(handed, dict(noise)), names)
    except AskedError:
        return  # It needs gradients or features of private examples.
    if changed := [name for name, value in given.items() if not torch.equal(handed[name], value)]:
        raise fail(where, f"apply modifies its input '{changed[0]}' in place", _OUT_OF_PLACE)
    for name, value in first.items():
        if not value.isfinite().all():
            what = f"apply turns finite values into NaN or infinity, in '{name}'"
            raise fail(where, what, "look for divisions by zero: gradients hold zeros")
    again = called(where, "apply", lambda: apply({n: value.clone() for n, value in given.items()}, dict(noise)))
    if any(not torch.equal(value, again[name]) for name, value in first.items()):
        raise fail(where, "apply returns different results for the same arguments", _DECLARE)
    both = tuple({n: torch.stack([v, w[n]]) for n, v in u.items()} for u, w in ((given, given), (noise, other)))
    try:
        vmap(apply)(*both)
    except FOREIGN as error:
        what = f"cannot be applied to several clients at once: {type(error).__name__}: {error}"
        raise fail(where, what, f"{_ALL_AT_ONCE}; {_DECLARE}") from error
    yield from called(where, "its derivative", lambda: _without_slope(where, lambda v: apply(v, dict(noise)), given))


def _at_zero(
    where: str, apply: Callable[[Tensors, Tensors], Tensors], like: Mapping[str, Tensor], spec: NoiseSpec
) -> Iterator[Problem]:
    """Warn if a stage turns the gradient of a dead layer, which is zero, into NaN."""
    zeros = {name: torch.zeros_like(value) for name, value in like.items()}
    try:
        after = called(where, "apply", lambda: apply(zeros, _drawn(spec, 0, next(iter(zeros.values())))))
    except AskedError:
        return
    if broken := [name for name, value in after.items() if not value.isfinite().all()]:
        what = f"apply turns a layer gradient of zeros into NaN or infinity, in '{broken[0]}'"
        remedy = "look for divisions by a norm or a largest value: add 1e-30 to it"
        yield Problem(where, what, remedy, "warning")


def _without_slope(where: str, apply: Callable[[Tensors], Tensors], given: Tensors) -> list[Problem]:
    """Warn if the result has no derivative with respect to the input."""
    free = {n: v.detach().clone().requires_grad_(v.is_floating_point()) for n, v in given.items()}
    sent = {name: value for name, value in apply(free).items() if name in given and value.requires_grad}
    wanted = [value for value in free.values() if value.requires_grad]
    total = sum(((value * _gradient(value, name)).sum() for name, value in sent.items()), start=torch.zeros(()))
    slopes = torch.autograd.grad(total, wanted, materialize_grads=True) if sent else ()
    if not any(bool(slope.any()) for slope in slopes):
        what = "has no derivative: an attacker who simulates it recovers less than one who ignores it"
        remedy = "provide a smooth one for attacks: gradveil.core.tree.straight_through(sent, smooth)"
        return [Problem(where, what, remedy, "warning")]
    return []


def _spec(where: str, call: str, run: Callable[[], object]) -> NoiseSpec:
    spec = called(where, call, run)
    if not isinstance(spec, NoiseSpec):
        remedy = "return NoiseSpec({name: Noise(shape, law)}), empty if nothing is random"
        raise fail(where, f"{call} returns {_kind(spec)}", remedy)
    return spec


def _drawn(spec: NoiseSpec, number: int, like: Tensor) -> Tensors:
    """Draw the noise of a client, with the dtype and on the device of its tensors."""
    return spec.to(like.dtype).sample(Key(0, (Stream.CLIENT, number)), like.device)


def _check_tensors(where: str, result: Any, like: Mapping[str, Tensor] | None) -> None:
    """Refuse anything but a dictionary of tensors with the names, shapes and dtypes of `like`."""
    if not isinstance(result, Mapping):
        raise fail(where, f"is {_kind(result)}", "return a dictionary of tensors")
    held = cast(Mapping[Any, Any], result)
    problems = [
        Problem(where, f"holds {_kind(value)} under {name!r}", "return tensors: torch.tensor(value)")
        for name, value in held.items()
        if not isinstance(value, Tensor)
    ]
    for name, value in (like or {}).items():
        given = held.get(name)
        if given is None:
            problems.append(Problem(where, f"lacks '{name}'", "return a tensor for each name of the input"))
        elif isinstance(given, Tensor) and (given.shape, given.dtype) != (value.shape, value.dtype):
            what = f"holds '{name}' as {given.dtype} {tuple(given.shape)}, but the input is {value.dtype} "
            problems.append(Problem(where, f"{what}{tuple(value.shape)}", "keep the shape and the dtype of the input"))
    if like is not None and (more := [str(name) for name in held if name not in like]):
        remedy = "return the names of the input; a state has the names of init(params)"
        problems.append(Problem(where, f"holds unknown names: {', '.join(more)}", remedy))
    if problems:
        raise GradveilError(problems[:3])


def _kind(thing: Any) -> str:
    return "nothing" if thing is None else f"{type(thing).__name__}"


def _gradient(value: Tensor, name: str) -> Tensor:
    """Make up a gradient with zeros in it, like those of inactive units."""
    drawn = torch.randn(value.shape, dtype=value.dtype, generator=Key(0, (name,)).generator()).flatten()
    drawn[::3] = 0
    return drawn.view(value.shape).to(value.device)


_SURGERY = "replaces modules of the model", "wrap it in a defence: mine = Defence('mine', model=(surgery,))"
_MISTAKEN = {
    "module": _SURGERY,
    "model": _SURGERY,
    "update": ("acts on an update", "write it as the apply of a class derived from gradveil.core.types.Transform"),
    "batch": ("acts on a batch", "write it as the apply of a class derived from gradveil.core.types.BatchTransform"),
}
"""Parameter names of functions that are not factories of defences: problem and fix."""


def own_defence(path: str) -> OwnEntry:
    """Import a defence, a transform, or a function that returns one."""

    def is_defence(value: Any) -> bool:
        return isinstance(value, Defence | Transform | BatchTransform)

    return own_entry(path, "defence", is_defence, _defence, _MISTAKEN)


def _defence(made: Any, name: str) -> Defence:
    """Wrap a transform in a defence with this name: per-example transforms in `step`, others in `send` or `batch`."""
    if isinstance(made, Defence):
        return replace(made, name=name)
    if isinstance(made, BatchTransform):
        return Defence(name, batch=(made,))
    if isinstance(made, Transform):
        if not isinstance(made, Chain):
            refuse([replace(problem, where=name) for problem in no_stage(name, made)])
        stages = made if isinstance(made, Chain) else Chain(((NAMELESS, made),))
        return Defence(name, send=stages) if split(stages)[0] is None else Defence(name, step=stages)
    problem = f"returned {type(made).__name__}, not a defence"
    raise fail(name, problem, "return a Defence, Transform or BatchTransform")
