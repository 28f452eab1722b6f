"""The noise of deployed clients: nanoseconds an entry of each part, and the error of Phi^-1 in float64.

OMP_NUM_THREADS=1 python -m benchmarks.secure_noise [--entries 11000000] [--sigma 1] [--error]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from decimal import Context, Decimal, localcontext

import torch

from gradveil.core.noise import Normal, halves
from gradveil.core.secure_noise import SecretKey, tail
from gradveil.core.types import Batch
from gradveil.core.types import Context as Seen
from gradveil.defences.deployed_noise import Grid, LatticeGaussian

BITS = 1 << 20
"""Words at once."""


def main() -> None:
    """Measure, and print a line a part."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--entries", type=int, default=11_000_000)
    options.add_argument("--sigma", type=float, default=1.0)
    options.add_argument("--error", action="store_true", help="measure the error of Phi^-1 too")
    given = options.parse_args()
    key, entries = SecretKey(), given.entries
    grid = Grid.of(1.0, entries)
    stage = LatticeGaussian(given.sigma, grid=grid)
    update = {"w": torch.randn(entries, generator=torch.Generator()) / math.sqrt(entries)}
    context = Seen(update, Batch(torch.zeros(1, 1), torch.zeros(1)))
    noise: dict[str, torch.Tensor] = {}

    def bits() -> None:
        stream = key.stream()
        for _ in range(-(-entries // BITS)):
            stream.words(BITS)

    def drawn() -> None:
        noise.update(stage.noise(update).sample(key))

    parts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("bits", bits),
        ("normal numbers", lambda: key.draw(Normal(), (entries,), torch.float64)),
        ("whole numbers", drawn),
        ("rounding and adding", lambda: stage.apply(update, {}, noise, context)),
    )
    print(f"{entries:,} entries, noise of {grid.scale(given.sigma):.4g} steps of 2^{math.log2(grid.step):.0f}")
    spent: dict[str, float] = {}
    for name, part in parts:
        start = time.perf_counter()
        part()
        spent[name] = time.perf_counter() - start
        print(f"{name:20} {spent[name] / entries * 1e9:6.1f} ns an entry, {spent[name]:.2f} s")
    whole = spent["whole numbers"] + spent["rounding and adding"]
    print(f"{'an update':20} {whole / entries * 1e9:6.1f} ns an entry, {whole:.2f} s")
    if given.error:
        error()


def error(count: int = 20_000) -> None:
    """Print the greatest errors of z = Phi^-1(u) against Phi in 100 digits."""
    drawn = SecretKey().stream().words(count)
    drawn[: count // 4] >>= torch.arange(count // 4).remainder(24).numpy().astype("u8")  # down to u = 2^-25, z = -5.4
    _, u = halves(drawn)
    found = torch.special.ndtri(torch.from_numpy(u)).tolist()
    relative = absolute = 0.0
    with localcontext(Context(prec=110)):
        for word, z in zip(drawn.tolist(), found, strict=True):
            exact = (2 * Decimal(word >> 1) + 1) / Decimal(2**65)
            off = abs(float(tail(Decimal(-z)) - exact)) * math.sqrt(2 * math.pi) * math.exp(z * z / 2)
            if -z > 2**-3:
                relative = max(relative, off / -z)
            else:
                absolute = max(absolute, off)
    print(f"Phi^-1: 2^{math.log2(relative):.1f} relatively, 2^{math.log2(absolute):.1f} absolutely where |z| <= 1/8")


if __name__ == "__main__":
    main()
