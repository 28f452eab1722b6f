"""What the laws run over: a small network, clients, and at least one setting of every defence of the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.client import Client, Local
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors, under
from gradveil.core.types import Batch, Domain
from gradveil.defences import entries
from gradveil.spaces import ImageSpace

V, B, T = 3, 4, 2


class Tiny(nn.Module):
    """Two convolutions and a linear layer, smooth, in float64, with the positions that surgeries look for."""

    input_shape = (1, 8, 8)
    dropout_positions = ("block", "body.1")
    cvb_position = "block"
    cvb_kernel = 3

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(1, 3 * width, 3, stride=2, padding=1), nn.Tanh())
        self.body = nn.Sequential(nn.Conv2d(3 * width, 4 * width, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(16 * width, 3)
        self.double()
        generator = Key(0, ("tiny",)).generator()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.block(x)))


@dataclass(frozen=True)
class Law:
    """The settings at which a defence is tested: strong enough to change what is sent."""

    texts: tuple[str, ...]
    bound: float | None = None
    """The norm that nothing sent by the first setting exceeds."""
    surrogate: bool = False
    """Its derivative is a declared surrogate's: the exact one is zero almost everywhere."""
    identity: bool = True
    """Its transforms have settings at which they change nothing."""
    of: str = "images"
    """The examples that it is for: those of texts have tests of their own."""


LAWS = {
    "none": Law(("none",)),
    "clip": Law(("clip(norm=0.3)",), bound=0.3),
    "clip-example": Law(("clip-example(norm=0.3)",), bound=0.3),
    "gaussian": Law(("gaussian(std=0.1)", "gaussian(std=0.1, clamp=0.05)")),
    "laplace": Law(("laplace(scale=0.1)",)),
    "optimal-noise": Law(
        (
            "optimal-noise(std=0.1)",
            "optimal-noise(std=0.1, probes=3, layerwise=true)",
            "optimal-noise(std=0.1, clamp=0.05)",
            "optimal-noise(std=0.1, probes=6, of=example)",
            "optimal-noise(std=0.1, probes=3, every=2)",
            "optimal-noise(std=0.1, probes=5, of=example, every=2, memory=0.5, layerwise=true)",
            "optimal-noise(std=0.1, probes=3, clamp=0.3, form=global, batches=2)",
        )
    ),
    "optimal-prune": Law(
        (
            "optimal-prune(ratio=0.7)",
            "optimal-prune(ratio=0.7, scope=layer, probes=3)",
            "optimal-prune(ratio=0.7, feedback=true)",
            "optimal-prune(ratio=0.7, scope=layer, mixed=true)",
            "optimal-prune(ratio=0.7, mixed=true, std=0.05)",
            "optimal-prune(ratio=0.7, probes=6, of=example)",
            "optimal-prune(ratio=0.7, probes=3, every=2, memory=0.5, feedback=true)",
            "optimal-prune(ratio=0.7, probes=3, mixed=true, std=0.05, form=global, batches=2)",
        )
    ),
    "dp": Law(("dp(clip=0.3, sigma=0.5)", "dp(clip=0.3, sigma=0.5, on=mean)")),
    "fed-cdp": Law(("fed-cdp(clip=0.8, sigma=0.5)", "fed-cdp(clip=0.8, sigma=0.5, decay=0.5)")),
    "user-dp": Law(("user-dp(clip=0.3, sigma=0.5)",)),
    "prune": Law(("prune(ratio=0.7)", "prune(ratio=0.7, scope=global)", "prune(ratio=0.7, feedback=true)")),
    "topk": Law(("topk(keep=0.2)", "topk(keep=0.2, feedback=true)")),
    "dgp": Law(("dgp(top=0.1, bottom=0.5)", "dgp(top=0.1, bottom=0.5, feedback=false)")),
    "adgp": Law(
        (
            "adgp(keep=0.2, top=0.1, feedback=true)",
            "adgp(keep=0.3, selection=vote, feedback=false)",
            "adgp(selection=previous, feedback=false)",
        )
    ),
    "sign": Law(("sign", "sign(scale=unit)", "sign(feedback=true)"), surrogate=True, identity=False),
    "ternary": Law(("ternary", "ternary(clip=1.5)"), surrogate=True, identity=False),
    "quantise": Law(("quantise(bits=3)", "quantise(bits=4, scale=max)"), surrogate=True, identity=False),
    "minmax": Law(("minmax(ratio=0.7)",)),
    "svdefense": Law(("svdefense(energy=0.7)", "svdefense(energy=0.8, least=0.8, channels=equal)")),
    "standin": Law(
        (
            "standin",
            "standin(optimiser=yogi, beta1=0.5, beta2=0.9)",
            "standin(optimiser=adagrad)",
            "standin(variant=published_code)",
            "standin(eps_in=root)",
        ),
        surrogate=True,
        identity=False,
    ),
    "dgc": Law(("dgc(keep=0.1, warmup=3)", "dgc(keep=0.3, momentum=0.5, warmup=0)")),
    "soteria": Law(("soteria(percentile=60)", "soteria(percentile=80, variant=published_code)")),
    "outpost": Law(("outpost(beta=0.01)", "outpost(scale=0.5, prune=30, phi=70)"), surrogate=True),
    "percentile": Law(("percentile(percentile=60, gamma=0.05)", "percentile(gamma=inf, percentile=70, steps=2)")),
    "svt": Law(
        ("svt(gamma=0.05, tau=0.01, fraction=0.3)", "svt(gamma=0.1, noise_var=5, replace=false, steps=2)"),
        identity=False,
    ),
    "censor": Law(("censor(trials=3)", "censor(variant=published_code, trials=2)", "censor(trials=1)"), identity=False),
    "dcs": Law(("dcs(iterations=3)", "dcs(iterations=4, limit=8, mix=false, share=1)"), surrogate=True, identity=False),
    "local-dp": Law(("local-dp(clip=0.3, epsilon=4)",)),
    "label-smoothing": Law(("label-smoothing(alpha=0.3)",)),
    "mixup": Law(("mixup(alpha=1)", "mixup(alpha=0.3)")),
    "instahide": Law(("instahide(k=3)", "instahide(k=2, cap=1)", "instahide(mix=public)"), identity=False),
    "token-dropout": Law(("token-dropout(p=0.3)",), of="texts"),
    "ats": Law(("ats", 'ats(policy="3-1-7")', 'ats(policy="43-18-18")'), identity=False),
    "keylock": Law(("keylock", 'keylock(act=tanh, width=8, position="body.0")'), identity=False),
    "dropout": Law(("dropout(p=0.4)", 'dropout(p=0.4, where="body.0 block")')),
    "precode": Law(("precode(k=5, beta=0.1)", 'precode(k=5, position="head")')),
    "cvb": Law(("cvb(beta=0.1)", 'cvb(kernel=1, position="body.1", kl=published_code)')),
}
"""A defence of the table without an entry here fails `test_every_defence_has_law_settings`."""

COMBINED = (
    "dp(clip=0.3, sigma=0.5) + cvb + dropout",
    "precode(k=5) + prune(ratio=0.5, feedback=true) + dp(clip=0.3)",
    "dgp + gaussian(std=0.1) + clip(norm=0.3)",
    "prune(ratio=0.5) + dgp(top=0.1, bottom=0.1)",
    "clip(norm=0.3) + gaussian(std=0.1) + quantise(bits=4)",
    "prune(ratio=0.5) + quantise(bits=4, scale=max)",
    "mixup(alpha=1) + dropout + dp(clip=0.3, sigma=0.5) + dgp(top=0.1, bottom=0.5)",
)
OF_IMAGES = tuple(law for law in LAWS.values() if law.of == "images")
TEXTS = (*(text for law in OF_IMAGES for text in law.texts), *COMBINED)


def _parts(text: str) -> list[Law]:
    return [LAWS[entry.name] for entry in entries(text)]


SMOOTH = tuple(text for text in TEXTS if not any(law.surrogate for law in _parts(text)))
IDENTITY = tuple(text for text in TEXTS if all(law.identity for law in _parts(text)))


def draw_messages(model: nn.Module | None = None) -> Tensors:
    """What a server may have announced: for each parameter half of its positions."""
    key = Key(3, ("messages",))
    drawn = {
        name: torch.rand(p.shape, generator=key.child(name).generator()) < 0.5
        for name, p in (model or Tiny()).named_parameters()
    }
    return under("send.prune.mask", drawn)


PUBLIC = torch.rand(7, 1, 8, 8, generator=Key(0, ("public",)).generator(), dtype=torch.float64)
DOMAIN = Domain(ImageSpace.between(-4, 5, (1, 8, 8)), 3, 9 * PUBLIC - 4)
CLIENTS = {
    "gradient": Client(Tiny(), domain=DOMAIN, messages=draw_messages()),
    "sgd": Client(Tiny(), local=Local(batch=2, lr=0.3, steps=T, momentum=0.9), domain=DOMAIN, messages=draw_messages()),
    "adam": Client(
        Tiny(), local=Local(batch=2, lr=0.05, steps=T, optimiser="adam"), domain=DOMAIN, messages=draw_messages()
    ),
}


def draw_batch(key: Key) -> Batch:
    inputs = torch.randn(B, *Tiny.input_shape, generator=key.generator(), dtype=torch.float64)
    return Batch(inputs, torch.randint(0, 3, (B,), generator=key.child("targets").generator()))


def draw_state(client: Client, params: Tensors, key: Key) -> Tensors:
    """A state of a later round, after the client sent two updates: whatever is zero in the first is something now."""
    state = client.init(params)
    for number in range(2 if state else 0):
        own = key.child(number)
        batch = draw_batch(own)
        _, state = client.update(params, batch, client.noise_spec(params, batch).sample(own.child("noise")), state)
    return state


def draw(client: Client, number: int = 0) -> tuple[Tensors, Batch, Tensors, Tensors]:
    """Parameters, and the batch, noise and state of one target client."""
    key = Key(7, ("victim", number))
    params = client.params()
    batch = draw_batch(key.child("batch"))
    noise = client.noise_spec(params, batch).sample(key.child("noise"))
    return params, batch, noise, draw_state(client, params, key.child("state"))
