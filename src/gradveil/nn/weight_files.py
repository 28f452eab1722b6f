"""Parameters on disk: those a server sent, those of a trained model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.tree import Tensors, select
from gradveil.nn.normalisation import BatchStatistics, FrozenNorm

_KEPT = ("running_mean", "running_var", "num_batches_tracked")
"""What a BatchNorm of torch keeps, in its order."""
STATISTICS = tuple(f"*{name}" for name in _KEPT)
"""Names of what BatchNorm layers keep: no parameters, though they travel with them."""
_REMEDY = "give the parameters of this model, or name the model that they belong to"


def read_weights(file: Path) -> Tensors:
    """Read the tensors of a safetensors file; of a training that Gradveil wrote, the parameters it ends with."""
    try:
        with safe_open(file, "pt") as opened:
            ours = "gradveil" in (opened.metadata() or {})
            found: Tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
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
    if not ours:  # somebody's module may be called "best"
        return found
    return select(found, "best") or select(found, "params") or found


def _is_pickle(file: Path) -> bool:
    """Say whether a file begins as those of torch.save do: a zip archive, or a pickle by itself."""
    try:
        with file.open("rb") as opened:
            return opened.read(2)[:2] in (b"PK", b"\x80\x02")
    except OSError:
        return False


def misfits(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> list[Problem]:
    """Say which parameters of a model have no value of their shape among these."""
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    there = {name: tuple(value.shape) for name, value in weights.items()}

    if prefix := _prefix(expected, there):
        what = f"names each parameter with '{prefix}' before it, as where another module holds the model"
        remedy = f"write them without: {{name.removeprefix('{prefix}'): value for name, value in ...items()}}"
        return [Problem(where, what, remedy)]

    def found(name: str) -> str:
        longer = next((other for other in there if other.endswith(f".{name}")), None)
        return str(there[name]) if name in there else "missing" + (f" (there is '{longer}')" if longer else "")

    return [
        Problem(f"{where}, {name}", f"is {found(name)}, the model has {shape}", _REMEDY)
        for name, shape in expected.items()
        if there.get(name) != shape
    ]


def only_prefixed(problems: list[Problem], where: str) -> bool:
    """Whether nothing but a prefix is wrong: each name on its own need not be told then."""
    return [problem.where for problem in problems] == [where]


def _prefix(expected: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> str:
    """Return what stands before the name of each parameter, if nothing else is wrong: `module.` of `DataParallel`."""
    name = next(iter(expected), "")
    candidates = [other.removesuffix(name) for other in there if name and other.endswith(f".{name}")]
    held = (p for p in candidates if all(there.get(p + own) == shape for own, shape in expected.items()))
    return "" if name in there else next(held, "")


def once(model: nn.Module, named: Mapping[str, Tensor]) -> Tensors:
    """Name each tensor once: of those that have several names in the state dictionary, by the first.

    Its value is that of the last name, which `load_state_dict` leaves in the model.
    """
    names, first = dict[str, str](), dict[int, str]()
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(value), name)
    own = {names[name]: named[name] for name in names if name in named}  # in the model's order, whatever that of a file
    return {**own, **{name: value for name, value in named.items() if name not in names}}


def read_received(file: Path, model: nn.Module) -> tuple[Tensors, Tensors]:
    """Read what a server sent: a model's parameters, and its buffers and running statistics as far as they came.

    Another model's parameters or buffers are refused, with every difference. Statistics count that the model does not
    have: it may have been prepared to do without.
    """
    found = once(model, read_weights(file))
    buffers = {name: value for name, value in model.named_buffers() if name in found}
    shapes = {name: (tuple(found[name].shape), tuple(value.shape)) for name, value in buffers.items()}
    what = [
        Problem(f"{file}, {name}", f"is {there}, the model has {own}", _REMEDY)
        for name, (there, own) in shapes.items()
        if there != own
    ]
    own = {*buffers, *(name for name, _ in model.named_parameters())}
    what += [
        Problem(f"{file}, {name}", f"is {tuple(value.shape)}, and the model has no such tensor", _REMEDY)
        for name, value in found.items()
        if name not in own and not is_statistic(name)
    ]
    wrong = misfits(model, found, str(file))
    refuse(wrong if only_prefixed(wrong, str(file)) else [*wrong, *what])
    params = {name: found[name] for name, _ in model.named_parameters()}
    rest = {n: value for n, value in found.items() if n not in params and (n in buffers or is_statistic(n))}
    return params, rest


def is_statistic(name: str) -> bool:
    """Whether a tensor is what a BatchNorm layer keeps, by its name, and no parameter."""
    return any(fnmatchcase(name, pattern) for pattern in STATISTICS)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Give a model these parameters and buffers, in place, if there is one for each parameter; say whether.

    A layer that took a BatchNorm's place keeps the running statistics for whoever attacks it.
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
    found: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = [name for name, value in module._parameters.items() if value is not None]
        own += [n for n, v in module._buffers.items() if v is not None and n not in module._non_persistent_buffers_set]
        if isinstance(module, BatchStatistics | FrozenNorm):
            own += [name for name in _KEPT if name not in own]
        found += [f"{path}.{name}" if path else name for name in own]
    return found


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Hash names and values (SHA-256): the same weights from another file are the same weights."""
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        whole.update(weights[name].flatten().view(torch.uint8).numpy().tobytes() if weights[name].numel() else b"")
    return whole.hexdigest()
