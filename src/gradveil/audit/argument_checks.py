"""Checks of what callers pass: arguments of `gradveil.audit`, and what custom attacks return."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from gradveil.attacks.knowledge import How, Knowledge, Known
from gradveil.attacks.noise_likelihood import COLUMNS
from gradveil.attacks.protocol import Attack, CanRefuse, Observation, Reconstruction, Remark, Status
from gradveil.client import Client
from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail, refuse
from gradveil.core.types import Batch, Loss
from gradveil.core.user_code import users
from gradveil.core.working_time import working_time
from gradveil.nn import surgery
from gradveil.nn.check import check
from gradveil.nn.check.static import batch_problems, target_problems
from gradveil.nn.model_outputs import adopted
from gradveil.nn.module_paths import called, count_classes

_STATUSES = get_args(Status)


def declared(attack: Attack, public: bool) -> Iterator[Problem]:
    """Say what an attack cannot believe or know: anything else would silently be taken for something.

    `public` says whether public examples are given, which an attack of one's own may count on.
    """
    for method, other in (("craft", "planted"), ("planted", "craft")):
        if hasattr(attack, method) and not hasattr(attack, other):
            what = f"is missing, and a malicious server's attack has it beside {method}()"
            yield Problem(f"{other}()", what, "add it: craft() returns the changed client, planted() says the change")
    simulated_client: Any = getattr(attack, "simulated_client", None)
    knowledge: Any = getattr(attack, "knowledge", None)
    if simulated_client not in ("naive", "full"):
        remedy = "say 'naive' (the client without its update's defences) or 'full' (with them)"
        yield Problem("simulated_client", f"is {simulated_client!r}", remedy)
    if not isinstance(knowledge, Mapping):
        remedy = "say what it knows of each named tensor: {'model.*': Optimise()}, or {} for nothing"
        yield Problem("knowledge", f"is {knowledge!r}", remedy)
        return
    for pattern, how in cast(Mapping[str, Any], knowledge).items():
        if not isinstance(how, How):
            remedy = "say Known(), Optimise(), Sample(), Infer() or Neutral() of gradveil.attacks.knowledge"
            yield Problem(f"knowledge['{pattern}']", f"is {how!r}", remedy)
    if "public" in knowledge and not public and users(attack) and not isinstance(attack, CanRefuse):
        what = "asks for public examples, and none are given"
        remedy = "give public=(inputs, labels), or data with public examples; an attack that does without says so in "
        yield Problem("knowledge['public']", what, f"{remedy}problems(prospect)")


_DREW = Remark(
    "it drew from torch's global generator: numbers depend on what ran before it, and another run gives others; "
    "key.child(target_client, restart).generator() gives the same",
    (1.0,),
)


def answer(
    attack: Attack,
    seen: Sequence[Observation],
    simulated_client: Client,
    knowledge: Knowledge,
    run: Callable[[], Any],
) -> Reconstruction:
    """Run an attack on what it is handed, and check what it returns.

    One of a user's own has to leave what it is handed as it is, and is timed where it does not say how long it took.
    """
    if not users(attack):
        return checked(attack.name, run(), seen[-1], knowledge)
    before = {name: value._version for name, value in _handed(seen, simulated_client, knowledge)}
    drawn = torch.get_rng_state()
    device = next(iter(seen[-1].params.values())).device
    began = working_time(device)
    made = run()
    took = working_time(device) - began
    found = checked(attack.name, made, seen[-1], knowledge)
    if changed := [
        name for name, value in _handed(seen, simulated_client, knowledge) if value._version != before.get(name)
    ]:
        what = f"changes what it is handed in place: {changed[0]}"
        raise fail(f"attack {attack.name}", what, "make new tensors: value * 2, not value.mul_(2)")
    told = (_DREW,) if not torch.equal(drawn, torch.get_rng_state()) else ()
    return replace(found, remarks=(*found.remarks, *told), seconds=found.seconds or took)


def _handed(
    seen: Sequence[Observation], simulated_client: Client, knowledge: Knowledge
) -> Iterator[tuple[str, Tensor]]:
    for each in seen:
        for kind, tensors in (("params", each.params), ("update", each.update), ("messages", each.messages)):
            yield from ((f"'{name}' of the {kind} of round {each.round}", value) for name, value in tensors.items())
    for kind, found in (
        ("parameter", simulated_client.model.named_parameters()),
        ("buffer", simulated_client.model.named_buffers()),
    ):
        yield from ((f"{kind} '{name}' of the simulated client's model", value) for name, value in found)
    public = knowledge.public or ()
    if knowledge.targets is not None:
        yield "knowledge.targets", knowledge.targets
    yield from ((f"knowledge.public[{place}]", value) for place, value in enumerate(public))
    for name, how in knowledge.tensors.items():
        if isinstance(how, Known) and how.value is not None:
            yield f"knowledge.tensors['{name}']", how.value


def checked(name: str, found: Any, seen: Observation, knowledge: Knowledge) -> Reconstruction:
    """Refuse what is no reconstruction of these target clients, with every problem; what is not finite has diverged."""
    where = f"attack {name}"
    if not isinstance(found, Reconstruction):
        what = "nothing" if found is None else type(found).__name__
        raise fail(where, f"returned {what}", "return a gradveil.attacks.protocol.Reconstruction")
    refuse(list(_wrong(where, found, len(seen.target_clients), seen.examples, knowledge)))
    broken = ~found.inputs.detach().isfinite().flatten(1).all(1)
    status = tuple("diverged" if off else old for off, old in zip(broken.tolist(), found.status, strict=True))
    return replace(found, status=status)


def _wrong(
    where: str, found: Reconstruction, target_clients: int, examples: int, knowledge: Knowledge
) -> Iterator[Problem]:
    images = (target_clients, examples, *knowledge.space.shape)
    restarts = tuple(getattr(found.objectives, "shape", ()))[1:2] or (1,)
    columns = 2 + COLUMNS if tuple(getattr(found.match, "shape", ()))[1:] == (2 + COLUMNS,) else 2
    wanted: Sequence[tuple[str, Any, tuple[int, ...], str]] = (
        ("inputs", found.inputs, images, "[V, B, C, H, W]"),
        ("targets", found.targets, (target_clients, examples), "[V, B] class numbers"),
        ("objective", found.objective, (target_clients,), "[V]"),
        ("iterations", found.iterations, (target_clients,), "[V] whole numbers"),
        ("restart", found.restart, (target_clients,), "[V] whole numbers"),
        ("objectives", found.objectives, (target_clients, *restarts), "[V, restarts]"),
        ("initial", found.initial, (target_clients,), "[V]"),
        *(
            (("before_undoing", found.before_undoing, images, "[V, B, C, H, W]"),)
            if found.before_undoing is not None
            else ()
        ),
        *(
            (("match", found.match, (target_clients, columns), f"[V, 2 or {2 + COLUMNS}]"),)
            if found.match is not None
            else ()
        ),
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
    if isinstance(status, str) or len(status) != target_clients or any(word not in _STATUSES for word in status):
        remedy = f"return one word a target client: ({', '.join(map(repr, _STATUSES))})"
        yield Problem(f"{where}: status", f"is {status!r}", remedy)


_BATCH = (
    "give (inputs, targets [N]), a dict of both, a data set or a DataLoader; inputs are images [N, C, H, W], or "
    "rows of numbers [N, D] in floating point"
)


def wrong_arguments(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Find arguments of the wrong kind, before anything is done with one of them."""
    pictured = given["pictured"]
    found = list(_wrong_pair("batch", given["batch"], pictured))
    if (public := given["public"]) is not None:
        found += _wrong_pair("public", public, pictured)
        found += [] if found else _wrong_public(public, given["batch"])
    yield from found
    size, bounds, out, progress = (given[name] for name in ("client_batch", "bounds", "out", "progress"))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        yield Problem("client_batch", f"is {size!r}", "give a whole number of at least 1")
    if not (
        bounds is None or bounds == "unit" or (_are_numbers(bounds) and len(bounds) == 2 and bounds[0] < bounds[1])
    ):
        yield Problem("bounds", f"is {bounds!r}", "give 'unit' for [0, 1], a pair (low, high) with low < high, or None")
    for name in ("mean", "std"):
        value = given[name]
        if value is not None and not (_are_numbers(value) and len(value)):
            yield Problem(name, f"is {value!r}", "give a list with one number, or one for each channel")
        elif value is not None and bounds is not None and pictured:
            yield Problem("bounds", f"are given beside {name}", f"leave out one of them: {name} says the bounds too")
            bounds = None
    if out is not None and not isinstance(out, str | os.PathLike):
        yield Problem("out", f"is {out!r}", "give the path of a folder")
    if not isinstance(given["prepare"], bool):
        yield Problem("prepare", f"is {given['prepare']!r}", "give True or False")
    if not isinstance(progress, bool):
        yield Problem("progress", f"is {progress!r}", "give True or False")
    if "train" in given["settings"]:
        yield Problem("train", "needs data to deal to clients", "leave it out, or use gradveil audit --train")
    for name in {"data", "model"} & set(given["settings"]):
        yield Problem(name, "is no setting here: it is what you give as an object", "leave it out")


def wrong_objects(model: Any, loss: Any) -> Iterator[Problem]:
    """Find a model or a loss of the wrong kind."""
    if not isinstance(model, nn.Module):
        what = f"is the class {model.__name__}" if isinstance(model, type) else f"is {type(model).__name__}"
        yield Problem("model", what, "give a torch.nn.Module, made and with its weights")
    elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        yield Problem("model", "lies on the meta device: it has shapes but no weights", "load weights into it")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        what = f"is the class {loss.__name__}" if isinstance(loss, type) else f"is {loss!r}"
        remedy = "give a function or module (outputs, targets) -> scalar or [N], or None"
        labels = isinstance(loss, list | tuple | Tensor)
        yield Problem("loss", what, "give labels together with the examples: (examples, labels)" if labels else remedy)


def _wrong_pair(where: str, given: Any, pictured: bool = True) -> Iterator[Problem]:
    parts = list(given) if isinstance(given, list | tuple) else []
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        held = f" of {', '.join(type(part).__name__ for part in parts)}" if parts else ""
        yield Problem(where, f"is {type(given).__name__}{held}", _BATCH)
        return
    inputs, targets = parts
    if pictured and inputs.dim() != 4:
        yield Problem(where, f"holds inputs of shape {tuple(inputs.shape)}, which are neither images nor rows", _BATCH)
    for name, part in (("inputs", inputs), ("targets", targets)):
        if part.layout != torch.strided:
            yield Problem(f"{where}.{name}", f"has layout {part.layout}", f"{name}.to_dense()")


def _wrong_public(public: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> Iterator[Problem]:
    """Public examples are like the batch's own, and none of them: else the truth would be handed over."""
    (inputs, targets), private = public, batch[0]
    if len(inputs) == 0 or tuple(targets.shape) != (len(inputs),) or targets.dtype != torch.long:
        what = f"holds {len(inputs)} inputs and targets {targets.dtype} {tuple(targets.shape)}"
        yield Problem("public", what, "give inputs, and as many class numbers (int64)")
    if inputs.shape[1:] != private.shape[1:]:
        sizes = (" x ".join(map(str, value.shape[1:])) for value in (inputs, private))
        yield Problem("public", "holds inputs of {}, the batch of {}".format(*sizes), "give inputs of one size")
        return
    own = {one.numpy().tobytes() for one in private.detach().cpu().float()}
    same = sum(one.numpy().tobytes() in own for one in inputs.detach().cpu().float())
    if same:
        yield Problem("public", f"holds {same} of the batch's own examples", "leave out what is private")


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(entry, float | int) and math.isfinite(entry) for entry in value
    )


def prepared(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss, wanted: bool
) -> tuple[nn.Module, list[str], list[Problem]]:
    """Adopt a model; replace in a copy what cannot be attacked, if wanted. Return it with changes and problems."""
    model = adopted(model, batch[0][:_FEW])
    if not wanted:
        return model, [], []
    try:
        net, done = surgery.prepare(model, batch=Batch(*batch), loss=loss)
    except GradveilError as error:
        return model, [], [replace(p, where=called(model, p.where)) for p in error.problems]
    except FOREIGN:
        return model, [], []  # The check of the model makes such a copy too, and says why there can be none.
    return net, done, []


_FEW = 4


def model_problems(
    model: nn.Module, batch: tuple[Tensor, Tensor], loss: Loss, client_batch: int, prepare: bool
) -> list[Problem]:
    """Check every example, and run the model on a few of them and as a client will: on `client_batch` examples.

    More than one example shows losses that mix up the examples; those of one client show models that need more.
    """
    inputs, targets = batch
    whole = Batch(inputs, targets)
    blocked = _stopped(batch_problems(model, whole, None, None))
    counts = sorted({max(client_batch, 2), client_batch}, reverse=True)
    problems: list[Problem] = []
    for some in [whole] if blocked else [Batch(inputs[:count], targets[:count]) for count in counts]:
        if not _stopped(problems):
            problems += [problem for problem in check(model, some, loss) if problem not in problems]
    if not _stopped(problems):
        problems += target_problems(targets, len(class_names(model, inputs[:client_batch])))
    hint = "" if prepare else "; or let it be done: prepare=True"
    problems = [replace(p, where=called(model, p.where)) for p in problems]
    return [replace(p, remedy=p.remedy + hint) if surgery.is_named_in(p.remedy) else p for p in problems]


def _stopped(problems: Sequence[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def class_names(model: nn.Module, inputs: Tensor) -> tuple[str, ...]:
    """Give the classes their numbers as names: as many as the model, which runs, has outputs, but two at least."""
    return tuple(str(number) for number in range(count_classes(model, inputs)))
