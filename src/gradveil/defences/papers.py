"""Presets by paper: the defences of a paper's table, with the settings that it used there.

`PAPER/TABLE` in the place of a defence stands for all of them: `dual-gradient-pruning/ablation`. Papers are called as
their folders in `papers/`, where they have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches

from gradveil.core.errors import Problem, refuse


@dataclass(frozen=True)
class Paper:
    """A paper that defends or attacks updates, and the defences of its tables."""

    title: str
    citation: str
    tables: Mapping[str, tuple[str, ...]]
    """Name of a table to the texts of its defences, without the undefended client."""


def _dual(removed: str, ratio: int) -> str:
    """Write DGP with k1 + k2 = `removed` and k1 / k2 = 1 / `ratio`."""
    top = Decimal(removed) / (1 + ratio)
    return f"dgp(top={top}, bottom={Decimal(removed) - top}, feedback=true)"


PAPERS: dict[str, Paper] = {
    "combining-stochastic-defenses": Paper(
        "Combining stochastic defences against inversion",
        "Scheliga, Mäder, Seeland 2022, Combining Stochastic Defenses to Resist Gradient Inversion: An Ablation Study",
        {
            "ablation": (
                "dropout(p=0.25)",
                "dp(clip=20, sigma=1e-4)",
                "prune(ratio=0.5)",
                "precode",
                "cvb",
                "dp(clip=20, sigma=1e-4) + precode",
                "dp(clip=20, sigma=1e-4) + cvb",
            ),
            "probe": (
                "dp(clip=20, sigma=1e-3)",
                *(f"prune(ratio={ratio})" for ratio in (0.9, 0.95, 0.99)),
                "dropout(p=0.25)",
                "precode",
                "cvb",
            ),
        },
    ),
    "dual-gradient-pruning": Paper(
        "Zeros for the largest and the smallest entries, and error feedback",
        "Xue et al. 2024, Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks",
        {
            "main": (_dual("0.80", 15),),
            "ablation": tuple(_dual(removed, ratio) for removed in ("0.48", "0.80", "0.96") for ratio in (15, 7, 3)),
        },
    ),
    "aligned-dual-gradient-pruning": Paper(
        "Dual pruning within one broadcast mask",
        "Aligned Dual Gradient Pruning (anonymous preprint)",
        {"main": ("adgp(keep=0.2, top=0.05)",)},
    ),
    "gradient-stand-in": Paper(
        "AdaDefense: the step of an adaptive optimiser in place of the gradient",
        "Hu et al., AdaDefense: Improving Federated Learning Against Gradient Leakage by a Gradient Stand-in",
        {
            "main": ("standin",),
            "optimisers": ("standin", "standin(optimiser=adagrad)", "standin(optimiser=yogi)"),
            "published-code": ("standin(variant=published_code)",),
        },
    ),
    "optimal-defenses": Paper(
        "Noise and pruning where they hide most for what they cost",
        "Chen, Gürsoy, Lei 2024, Optimal Defenses Against Gradient Reconstruction Attacks",
        {
            "noise": tuple(
                text.format(scale)
                for scale in ("2e-3", "5e-3", "2e-2", "5e-2")
                for text in ("dp(clip=1, sigma={})", "optimal-noise(std={}, clamp=1)")
            ),
            "pruning-mnist": ("prune(ratio=0.9, scope=global)", "optimal-prune(ratio=0.8)"),
            "pruning-cifar": ("prune(ratio=0.9, scope=global)", "optimal-prune(ratio=0.7)"),
        },
    ),
}
"""Every paper whose settings are known by name."""


def spelled_out(texts: Iterable[str]) -> list[str]:
    """Put a table's defences in the place of `PAPER/TABLE`, each defence once; an unknown one is refused.

    >>> spelled_out(["none", "gradient-stand-in/published-code"])
    ['none', 'standin(variant=published_code)']
    """
    found: list[str] = []
    tabled: set[str] = set()
    problems: list[Problem] = []
    known = {f"{key}/{table}": each for key, paper in PAPERS.items() for table, each in paper.tables.items()}
    for i, text in enumerate(texts):
        name = text.strip().lower()
        if "/" not in name or "(" in name:
            found += [] if text in tabled else [text]
        elif name in known:
            found += [each for each in known[name] if each not in found]
            tabled.update(known[name])
        else:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            problems.append(
                Problem(f"defences[{i}]", f"no paper's table is called '{text}'", f"{hint}{', '.join(known)}")
            )
    refuse(problems)
    return found
