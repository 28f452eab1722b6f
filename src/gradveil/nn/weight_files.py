"""Parameter files: of a server's message, or of a trained model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.tree import Tensors, qualified, select
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm

_KEPT = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's BatchNorm, in its order."""
STATISTICS = tuple(f"*{name}" for name in _KEPT)
"""Patterns for the names of BatchNorm buffers, which are sent along with the parameters."""
_REMEDY = "give the parameters of this model, or name the model that they belong to"


def read_weights(file: Path) -> Tensors:
    """Read the tensors of a safetensors file; of a Gradveil training, only its best or final parameters."""
    try:
        with safe_open(file, "pt") as opened:
            of_gradveil = "gradveil" in (opened.metadata() or {})
            tensors: Tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        if _is_pickle(file):
            what = "was written by torch.save: a pickle, which can run code when it is read"
            remedy = "write its parameters once as safetensors, if you trust it: "
            remedy += (
                f"safetensors.torch.save_file(torch.load('{file.name}', weights_only=True), 'weights.safetensors')"
            )
            remedy += "; of a checkpoint the part that holds them: torch.load(...)['model'], or ['state_dict']"
            raise fail(str(file), what, remedy) from error
        raise fail(str(file), f"cannot be read: {error}", "give a safetensors file of a model's parameters") from error
    if not of_gradveil:  # a custom module may be called "best"
        return tensors
    return select(tensors, "best") or select(tensors, "params") or tensors


def _is_pickle(file: Path) -> bool:
    """Return whether a file starts like those of torch.save: a zip archive or a bare pickle."""
    try:
        with file.open("rb") as opened:
            return opened.read(2)[:2] in (b"PK", b"\x80\x02")
    except OSError:
        return False


def misfits(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> list[Problem]:
    """Return a problem for each parameter of a model without a value of its shape in `weights`."""
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    there = {name: tuple(value.shape) for name, value in weights.items()}

    if prefix := _prefix(expected, there):
        problem = f"has the prefix '{prefix}' before each parameter's name, as if another module held the model"
        remedy = f"remove it: {{name.removeprefix('{prefix}'): value for name, value in ...items()}}"
        return [Problem(where, problem, remedy)]

    def state(name: str) -> str:
        longer = next((other for other in there if other.endswith(f".{name}")), None)
        return str(there[name]) if name in there else "missing" + (f" (there is '{longer}')" if longer else "")

    return [
        Problem(f"{where}, {name}", f"is {state(name)}, the model has {shape}", _REMEDY)
        for name, shape in expected.items()
        if there.get(name) != shape
    ]


def only_prefixed(problems: list[Problem], where: str) -> bool:
    """Return whether the only problem is a prefix."""
    return [problem.where for problem in problems] == [where]


def _prefix(expected: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> str:
    """Return the prefix of all parameter names, such as `module.` of `DataParallel`, if everything else fits."""
    name = next(iter(expected), "")
    candidates = [other.removesuffix(name) for other in there if name and other.endswith(f".{name}")]
    fitting = (p for p in candidates if all(there.get(p + known) == shape for known, shape in expected.items()))
    return "" if name in there else next(fitting, "")


def once(model: nn.Module, named: Mapping[str, Tensor]) -> Tensors:
    """Keep only the first name of tensors with several names in the state dictionary.

    The value is that of the last name, as in a model after `load_state_dict`.
    """
    names, first = dict[str, str](), dict[int, str]()
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(value), name)
    of_model = {names[name]: named[name] for name in names if name in named}  # in the model's order, not the file's
    return {**of_model, **{name: value for name, value in named.items() if name not in names}}


def read_received(file: Path, model: nn.Module) -> tuple[Tensors, Tensors]:
    """Read a server's message: the model's parameters, and those of its buffers and running statistics that it has.

    Raises with every difference if they belong to another model. Running statistics that the model lacks are allowed,
    because `prepare` may have removed them.
    """
    received = once(model, read_weights(file))
    buffers = {name: value for name, value in model.named_buffers() if name in received}
    known = {*buffers, *(name for name, _ in model.named_parameters())}
    shapes = {name: (tuple(received[name].shape), tuple(value.shape)) for name, value in buffers.items()}
    others = [
        Problem(f"{file}, {name}", f"is {there}, the model has {expected}", _REMEDY)
        for name, (there, expected) in shapes.items()
        if there != expected
    ]
    others += [
        Problem(f"{file}, {name}", f"is {tuple(value.shape)}, and the model has no such tensor", _REMEDY)
        for name, value in received.items()
        if name not in known and not is_statistic(name)
    ]
    of_parameters = misfits(model, received, str(file))
    refuse(of_parameters if only_prefixed(of_parameters, str(file)) else [*of_parameters, *others])
    params = {name: received[name] for name, _ in model.named_parameters()}
    rest = {n: value for n, value in received.items() if n not in params and (n in buffers or is_statistic(n))}
    return params, rest


def is_statistic(name: str) -> bool:
    """Return whether a name is that of a BatchNorm buffer."""
    return any(fnmatchcase(name, pattern) for pattern in STATISTICS)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Load parameters and buffers into a model in place, if all parameters fit; return whether they do.

    A layer that replaced a BatchNorm keeps the running statistics for attackers.
    """
    if misfits(model, weights, ""):
        return False
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in weights and weights[name].shape == value.shape:
                value.copy_(weights[name])
        for path, module in model.named_modules():
            if isinstance(module, BatchStatistics):
                module.remember(select(weights, path))
    return True


def names_in_order(model: nn.Module) -> list[str]:
    """List the names of the state dictionary as they were before BatchNorm layers were replaced."""
    names: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        local = [name for name, value in module._parameters.items() if value is not None]
        transient = module._non_persistent_buffers_set
        local += [n for n, v in module._buffers.items() if v is not None and n not in transient]
        if isinstance(module, BatchStatistics | FrozenNorm):
            local += [name for name in _KEPT if name not in local]
        names += [qualified(path, name) for name in local]
    return names


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Hash names and values (SHA-256): the same weights from another file are the same weights."""
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        whole.update(weights[name].flatten().view(torch.uint8).numpy().tobytes() if weights[name].numel() else b"")
    return whole.hexdigest()
