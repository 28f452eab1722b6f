"""A device that is not the CPU, for machines that have none: its tensors say that they lie there, and the CPU computes.

What mixes tensors of two devices, makes one on the wrong device, or reads one's memory fails as it would on a GPU. Run
as a program it attacks the same target clients of each run on the CPU and there, and prints what came out (JSON). In a
process of its own: torch knows of the device from then on.

Forward-mode derivatives do not work on such tensors: bounds are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from gradveil.audit import trial as trial_module
from gradveil.audit.attack_selection import trials
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.preflight import open_experiment
from gradveil.audit.run_file import resolve
from gradveil.audit.trial import recover
from gradveil.core.errors import GradveilError

NAME = "elsewhere"
aten = torch.ops.aten
_MIXES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
"""What may take tensors of two devices: copies, and places that lie on the CPU."""


class There(Tensor):
    """A tensor on the other device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        facts = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return Tensor._make_wrapper_subclass(cls, inner.size(), device=torch.device(NAME, 0), **facts)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        """Torch refuses this of every subclass."""
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of another device to numpy: use .cpu() first")

    def __repr__(self, **_: Any) -> str:
        return f"There({self.inner!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what is asked for, and say that the result lies where it should."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    away, device = any(isinstance(x, There) for x in given), kwargs.get("device")
    if not away and (device is None or device.type != NAME):
        return func(*args, **kwargs)
    if away and func not in _MIXES and any(x.dim() for x in given if not isinstance(x, There)):
        shapes = [(x.device.type, tuple(x.shape)) for x in given]
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {shapes}")
    here = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if device is not None:
        here["device"] = torch.device("cpu")

    def bare(x: Any) -> Any:
        return x.inner if isinstance(x, There) else x

    found = func(*tree_map(bare, args), **tree_map(bare, here))
    if device is not None and device.type != NAME:
        return found
    if func is aten.copy_.default and not isinstance(args[0], There):
        return args[0]
    moved = tree_map(lambda x: There(x) if isinstance(x, Tensor) and not isinstance(x, There) else x, found)
    return return_and_correct_aliasing(func, args, kwargs, moved)


class _Making(TorchDispatchMode):
    """Makes what is asked for there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Module(backend_registration._DummyBackendModule):
    """What torch asks the module of a device: nothing is drawn there."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


@contextmanager
def elsewhere() -> Iterator[None]:
    """Let there be such a device."""
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=...) does not ask the mode
    try:
        with _Making():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def attacked(config: RunConfig) -> dict[str, Any]:
    """Attack what a run asks for: the images of each trial, or why there are none."""
    found: dict[str, Any] = {}
    experiment = open_experiment(config)
    for trial in trials(experiment.config):
        try:
            parts = recover(experiment, trial, range(config.target_clients), lambda _: None)
            found[f"{trial.attack} on {trial.defence}"] = parts.tensors["inputs"].double().tolist()
        except (RuntimeError, TypeError, GradveilError) as error:
            found[f"{trial.attack} on {trial.defence}"] = f"{type(error).__name__}: {error}"
    return found


def main(runs: str) -> None:
    """Print what came back of each run on either device."""
    torch.set_num_threads(1)
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    trial_module.leaked = lambda *_: ({}, "forward-mode derivatives do not work there")  # type: ignore[assignment]
    trial_module.taylor_errors = lambda *given: torch.full_like(given[-1], torch.nan)  # type: ignore[assignment]
    found: dict[str, dict[str, Any]] = {}
    for name, settings in json.loads(runs).items():
        config = resolve(settings)
        found[name] = {"here": attacked(config)}
        with elsewhere():
            found[name]["there"] = attacked(config.model_copy(update={"device": NAME}))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
