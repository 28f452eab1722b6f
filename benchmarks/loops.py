"""The loops that the speed benchmark compares, each as a process of its own that waits for work.

Started by `attack_speed.py`: `python loops.py KIND MODEL THREADS [DEVICE]`. Reads lines `target_clients iterations`,
writes the wall and processor seconds that these took; on a GPU the wall seconds twice. `breaching` runs in an
environment of its own (`peer_environment.sh`), which needs nothing but torch and that package: Gradveil's models are
imported there without the rest of Gradveil.
"""

from __future__ import annotations

import logging
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gradveil"
SHAPE = (3, 32, 32)
CLASSES = 10
TV = 1e-4
LR = 0.1

Work = Callable[[int, int], None]
"""(target clients, iterations): attack that many target clients for that many iterations."""


def model_of(name: str) -> nn.Module:
    """Build a model of the table with fixed weights."""
    from gradveil.nn.models import build

    return build(name, channels=SHAPE[0], size=SHAPE[1], classes=CLASSES, generator=torch.Generator().manual_seed(0))


def truth_of(target_clients: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Make images [V, 1, C, H, W] and labels [V, 1]: their content does not matter for speed."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand((target_clients, 1, *SHAPE), generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(CLASSES, (target_clients, 1), generator=generator)


def plain_loop(model: nn.Module, image: Tensor, label: Tensor, x: Tensor, iterations: int) -> list[float]:
    """Invert one gradient as existing tools do; return the objective of every iteration.

    Cosine over all layers, total variation, signed Adam, a box; `objective.backward()` also fills the gradients of the
    model's parameters.
    """
    weights = list(model.parameters())
    loss = nn.functional.cross_entropy
    target = torch.autograd.grad(loss(model(image), label), weights)
    x = x.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=LR)
    values: list[float] = []
    for _ in range(iterations):
        optimiser.zero_grad()
        model.zero_grad()
        found = torch.autograd.grad(loss(model(x), label), weights, create_graph=True)
        dot = sum((g * t).sum() for g, t in zip(found, target, strict=True))
        size = sum(g.pow(2).sum() for g in found)
        norm = sum(t.pow(2).sum() for t in target)
        down, right = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
        objective = 1 - dot / size.sqrt() / norm.sqrt() + TV * (down.abs().mean() + right.abs().mean())
        objective.backward()
        x.grad.sign_()
        optimiser.step()
        with torch.no_grad():
            x.clamp_(0, 1)
        values.append(objective.item())
    return values


def plain(name: str, device: str) -> Work:
    """One target client after the other."""
    model = model_of(name).to(device)

    def work(target_clients: int, iterations: int) -> None:
        images, labels = (values.to(device) for values in truth_of(target_clients))
        for image, label in zip(images, labels, strict=True):
            plain_loop(model, image, label, torch.rand(1, *SHAPE, device=device), iterations)

    return work


def inversion(iterations: int) -> Any:
    """Make the same attack as a setting of Gradveil's loop."""
    from gradveil.attacks.inversion.descent import Descent
    from gradveil.attacks.inversion.inversion import Inversion
    from gradveil.attacks.inversion.optimisers import Adam

    descent = Descent(Adam(lr=LR, sign="signed"), iterations=iterations, keep="last")
    return Inversion("speed", objective="cosine", tv=TV, descent=descent, start="uniform")


def gradveil_attack(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[..., Any]:
    """Set up Gradveil's attack on all targets: a function of the iterations and the plan, to a `Reconstruction`."""
    from gradveil.attacks.knowledge import Knowledge
    from gradveil.attacks.protocol import Observation
    from gradveil.client import Client
    from gradveil.core.noise import Key
    from gradveil.core.types import Batch
    from gradveil.spaces import ImageSpace

    client = Client(model)
    params = client.params()
    with torch.no_grad():
        sent, _ = client.updates(params, Batch(images, labels), {}, {})
    seen = Observation(params=params, update=sent, examples=1, target_clients=tuple(range(len(images))))
    knowledge = Knowledge(ImageSpace(SHAPE), CLASSES, targets=labels)

    def attack(iterations: int, plan: tuple[int, ...] = ()) -> Any:
        return inversion(iterations)([seen], client, knowledge, Key(0), plan=plan)

    return attack


def gradveil(name: str, device: str) -> Work:
    """All target clients at once, as many in a batch as the attack chooses.

    It chooses once for thousands of iterations, so that is done before the clock runs. As the command line and its
    workers do, the process keeps the memory that it frees.
    """
    from gradveil.core.freed_memory import keep_freed_memory

    keep_freed_memory()
    model = model_of(name).to(device)
    ready: dict[int, tuple[Callable[..., Any], tuple[int, ...]]] = {}

    def work(target_clients: int, iterations: int) -> None:
        if target_clients not in ready:
            attack = gradveil_attack(model, *(values.to(device) for values in truth_of(target_clients)))
            ready[target_clients] = attack, attack(1).plan
        attack, plan = ready[target_clients]
        attack(iterations, plan)

    return work


def peer_package() -> Any:
    """Import the published package, and Gradveil's models without the rest of Gradveil."""
    if not torch._C._dispatch_has_kernel("torchvision::nms"):
        # torchvision does not import beside a torch without its compiled operators, none of which is needed here.
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        peer_package.library = library  # type: ignore[attr-defined] - it is undone when it is collected
    package = types.ModuleType("gradveil")
    package.__path__ = [str(SOURCE)]
    sys.modules["gradveil"] = package
    import breaching as peer

    logging.disable(logging.CRITICAL)
    return peer


def breaching(name: str, device: str) -> Work:
    """One target client after the other by the published package, with its own "inverting gradients" settings."""
    if device != "cpu":
        raise SystemExit("breaching is compared on the CPU alone")
    peer = peer_package()
    model = model_of(name)
    loss = nn.CrossEntropyLoss()
    settings = peer.get_attack_config("invertinggradients")

    def work(target_clients: int, iterations: int) -> None:
        settings.optim.max_iterations = iterations
        attacker = peer.attacks.prepare_attack(model, loss, settings)
        facts = SimpleNamespace(shape=SHAPE, modality="vision", mean=(0.0,) * 3, std=(1.0,) * 3)
        weights = list(model.parameters())
        payload = [{"parameters": [w.detach() for w in weights], "buffers": list(model.buffers()), "metadata": facts}]
        for image, label in zip(*truth_of(target_clients), strict=True):
            sent = torch.autograd.grad(loss(model(image), label), weights)
            known = {"num_data_points": 1, "labels": label, "local_hyperparams": None}
            attacker.reconstruct(payload, [{"gradients": sent, "buffers": None, "metadata": known}], {})

    return work


KINDS: dict[str, Callable[[str, str], Work]] = {"plain": plain, "gradveil": gradveil, "breaching": breaching}


def serve(kind: str, model: str, threads: int, device: str = "cpu") -> None:
    """Answer `target_clients iterations` with the wall and processor seconds they took, until the input ends."""
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr
    work = KINDS[kind](model, device)
    for line in sys.stdin:
        target_clients, iterations = map(int, line.split())
        wall, busy = time.perf_counter(), time.process_time()
        work(target_clients, iterations)
        if device != "cpu":
            torch.cuda.synchronize()
            busy = time.process_time() - (time.perf_counter() - wall)
        print(time.perf_counter() - wall, time.process_time() - busy, file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
