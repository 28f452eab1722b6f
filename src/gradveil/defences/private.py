"""The table's mechanisms of differential privacy: clip what one example, or one client, can change, and add noise."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from gradveil.core.allowed import BOUND, KEPT, STRENGTH
from gradveil.core.arguments import Argument
from gradveil.core.errors import fail
from gradveil.defences.base import Defence, chain
from gradveil.defences.clip import Clip
from gradveil.defences.entry import KNOWING, DefenceEntry
from gradveil.defences.fading import FadingClip, FadingNoise
from gradveil.defences.noise import ON, Gaussian


def _dp(clip: float, sigma: float, on: Literal["sum", "mean"]) -> Defence:
    """DP-SGD: clip each example's gradient to `clip`, then add noise of std sigma * clip on the sum (or mean)."""
    return Defence("dp", step=chain(clip=Clip(clip, per_example=True), noise=_scaled("dp", clip, sigma, on)))


def _fed_cdp(clip: float, sigma: float, decay: float) -> Defence:
    """Clip each tensor of each example's gradient, and add noise; both are multiplied by `decay` after every round.

    The authors' schedule could not be verified; this one keeps the noise multiplier, and so what is proven.
    """
    by_layer, noise = Clip(clip, per_example=True, scope="layer"), _scaled("fed-cdp", clip, sigma, "sum")
    if decay != 1:
        by_layer, noise = FadingClip(**_settings(by_layer), decay=decay), FadingNoise(**_settings(noise), decay=decay)
    return Defence("fed-cdp", step=chain(clip=by_layer, noise=noise))


def _user_dp(clip: float, sigma: float) -> Defence:
    return Defence("user-dp", send=chain(clip=Clip(clip), noise=_scaled("user-dp", clip, sigma, "mean")))


def _settings(transform: Clip | Gaussian) -> dict[str, Any]:
    return {field.name: getattr(transform, field.name) for field in fields(transform)}


def _scaled(name: str, clip: float, sigma: float, on: Literal["sum", "mean"]) -> Gaussian:
    if sigma and clip == float("inf"):
        raise fail(f"{name}.clip", "is infinite, and the noise is sigma times as large", "give a finite norm")
    return Gaussian(sigma * clip if sigma else 0.0, on, scaled_to=clip)


PRIVATE = (
    DefenceEntry(
        name="dp",
        factory=_dp,
        description="DP-SGD: clip each example's gradient, add normal noise of sigma times the clip norm",
        changes=("step",),
        guarantee="differential privacy of examples; epsilon follows from sigma, sampling rate and steps",
        cost="2 gradients; all bytes",
        citation="Abadi et al. 2016, Deep Learning with Differential Privacy",
        adaptive=KNOWING,
        arguments=(Argument("clip", BOUND, 20.0), Argument("sigma", STRENGTH, 1e-3), Argument("on", ON, "sum")),
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
    DefenceEntry(
        name="fed-cdp",
        factory=_fed_cdp,
        description="Fed-CDP: clip each example's gradient layer by layer, add normal noise of sigma times the norm",
        changes=("step",),
        guarantee="differential privacy of examples; over L parameter tensors the sensitivity is clip sqrt(L)",
        cost="about 2 gradients; all bytes",
        citation="Wei et al. 2021, Gradient-Leakage Resilient Federated Learning (ICDCS)",
        adaptive=KNOWING,
        arguments=(Argument("clip", BOUND, 4.0), Argument("sigma", STRENGTH, 6.0), Argument("decay", KEPT, 1.0)),
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
    DefenceEntry(
        name="user-dp",
        factory=_user_dp,
        description="Clip the whole update that a client sends, add normal noise of sigma times the norm",
        changes=("send",),
        guarantee="differential privacy of clients, towards whoever sees one update or a sum of them",
        cost="a random number an entry; all bytes",
        citation="McMahan et al. 2018, Learning Differentially Private Recurrent Language Models (ICLR)",
        adaptive=KNOWING,
        arguments=(Argument("clip", BOUND, 1.0), Argument("sigma", STRENGTH, 1.0)),
        identity={"clip": float("inf"), "sigma": 0.0},
    ),
)
"""Entries of the table `gradveil.defences.DEFENCES`, after its noise."""
