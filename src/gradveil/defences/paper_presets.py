"""Presets by paper: the defences of a paper's table, with its settings.

`PAPER/TABLE` instead of a defence expands to all defences of a table: `dual-gradient-pruning/ablation`. A paper has the
name of its folder in `gradveil/papers`, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from itertools import product

from gradveil.core.errors import Problem, refuse


@dataclass(frozen=True)
class PaperDefences:
    """A paper on defences or attacks, and the defences of its tables."""

    title: str
    citation: str
    tables: Mapping[str, tuple[str, ...]]
    """Texts of a table's defences by table name, without the undefended client."""


def _dual(removed: str, ratio: int) -> str:
    """Write DGP (with error feedback) with k1 + k2 = `removed` and k1 / k2 = 1 / `ratio`."""
    top = Decimal(removed) / (1 + ratio)
    return f"dgp(top={top}, bottom={Decimal(removed) - top})"


def _bottleneck(kernel: int, beta: str) -> tuple[str, str]:
    """Write CVB with the exact divergence, and with that of the published code."""
    text = f"cvb(kernel={kernel}, beta={beta}"
    return f"{text})", f"{text}, kl=published_code)"


def _combined(*choices: tuple[str, ...]) -> tuple[str, ...]:
    """Write every combination of one choice each, but for none of all."""
    return tuple(" + ".join(filter(None, parts)) for parts in product(*choices) if any(parts))


PAPERS: dict[str, PaperDefences] = {
    "deep-leakage": PaperDefences(
        "Deep leakage from gradients",
        "Zhu, Liu, Han 2019, Deep Leakage from Gradients (NeurIPS)",
        {},
    ),
    "combining-stochastic-defenses": PaperDefences(
        "Combining stochastic defences against inversion",
        "Scheliga, Mäder, Seeland 2024, Combining Stochastic Defenses to Resist Gradient Inversion: An Ablation Study",
        {
            "ablation": _combined(
                ("", "dropout(p=0.25)"),
                ("", "dp(clip=20, sigma=1e-4)"),
                ("", "prune(ratio=0.5)"),
                ("", "precode", "cvb"),
            ),
            "networks": (
                "dropout(p=0.25)",
                *_combined(("", "dp(clip=20, sigma=1e-4)"), ("", "precode", "cvb")),
                *_combined(("dropout(p=0.25)",), ("dp(clip=20, sigma=1e-4)",), ("precode", "cvb")),
            ),
            "divergence": (*_combined(("", "dp(clip=20, sigma=1e-4)"), ("cvb", "cvb(kl=published_code)")),),
            "probe": (
                "dp(clip=20, sigma=1e-3)",
                *(f"prune(ratio={ratio})" for ratio in (0.9, 0.95, 0.99)),
                "dropout(p=0.25)",
                "precode",
                "cvb",
            ),
        },
    ),
    "dual-gradient-pruning": PaperDefences(
        "Zeros for the largest and the smallest entries, and error feedback",
        "Xue et al. 2024, Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks",
        {
            "main": (_dual("0.80", 15),),
            # The original settings of the others are not restated. The deviation of the noise is printed, no clip norm.
            "comparison": (
                "ats",
                "soteria",
                "precode",
                "gaussian(std=1e-2)",
                "topk(keep=0.2, feedback=true)",
                "outpost",
                _dual("0.80", 15),
            ),
            "ablation": tuple(_dual(removed, ratio) for removed in ("0.48", "0.80", "0.96") for ratio in (15, 7, 3)),
        },
    ),
    "aligned-dual-gradient-pruning": PaperDefences(
        "Dual pruning within one broadcast mask",
        "Aligned Dual Gradient Pruning (anonymous preprint)",
        {
            "main": ("adgp(keep=0.2, top=0.05)",),
            # The noise: epsilon 10.7 at delta 1e-5 of one update. The preprint does not give the clip norm. It gives
            # error feedback to the noise, too; here the noise has none, since the residual would cancel it.
            "comparison": (
                "soteria",
                "ats",
                "precode",
                "user-dp(clip=1, sigma=0.4733)",
                "topk(keep=0.2, feedback=true)",
                "adgp(keep=0.2, top=0.05)",
            ),
            # Our addition: masks that are chosen without a trusted party.
            "selections": ("adgp(keep=0.2, top=0.05, selection=vote)", "adgp(keep=0.2, top=0.05, selection=previous)"),
        },
    ),
    "gradient-stand-in": PaperDefences(
        "AdaDefense: the step of an adaptive optimiser in place of the gradient",
        "Hu et al. 2024, Gradients Stand-in for Defending Deep Leakage in Federated Learning",
        {
            "main": ("standin",),
            # Adagrad and Yogi are in the authors' program only, not in the paper.
            "optimisers": ("standin", "standin(optimiser=adagrad)", "standin(optimiser=yogi)"),
            "published-code": ("standin(variant=published_code)",),
            # The paper prints sqrt(v + eps) in Algorithm 1 and Eq. 5, sqrt(v) + eps in Eqs. 12 to 15.
            "epsilon": ("standin(eps_in=root)", "standin(eps_in=sum)"),
        },
    ),
    "optimal-defenses": PaperDefences(
        "Noise and pruning with the best trade-off of protection and cost",
        "Chen, Gürsoy, Lei 2024, Optimal Defenses Against Gradient Reconstruction Attacks",
        {
            # Scales and clamp of the authors' program; its "DP-SGD" clamps the entries of the batch's mean gradient.
            "noise": tuple(
                text.format(scale)
                for scale in ("2e-3", "5e-3", "2e-2", "5e-2")
                for text in ("gaussian(std={}, clamp=1)", "optimal-noise(std={}, clamp=1)")
            ),
            "large-noise": tuple(
                text.format(scale)
                for scale in ("5e-2", "1e-1", "2e-1")
                for text in ("gaussian(std={}, clamp=1)", "optimal-noise(std={}, clamp=1)")
            ),
            # Our addition: DP-SGD proper, which clips the norm of each example's gradient.
            "norm-clipping": ("dp(clip=1, sigma=5e-3, on=mean)", "dp(clip=1, sigma=2e-2, on=mean)"),
            "ratios": tuple(
                text.format(ratio)
                for ratio in ("0.5", "0.6", "0.7", "0.8", "0.9", "0.95")
                for text in ("prune(ratio={}, scope=global)", "optimal-prune(ratio={})")
            ),
            "pruning-mnist": ("prune(ratio=0.9, scope=global)", "optimal-prune(ratio=0.8)"),
            "pruning-cifar": ("prune(ratio=0.9, scope=global)", "optimal-prune(ratio=0.7)"),
        },
    ),
    "generic-model-extension": PaperDefences(
        "PRECODE: a variational bottleneck in front of the classifier",
        "Scheliga, Mäder, Seeland 2022, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage",
        {"main": ("precode(k=256, beta=1e-3)",)},
    ),
    "convolutional-variational-bottlenecks": PaperDefences(
        "CVB: a variational bottleneck of convolutions behind an early block",
        "Scheliga, Mäder, Seeland 2024, Privacy Preserving Federated Learning with Convolutional Variational "
        "Bottlenecks",
        {
            "cnn": _bottleneck(5, "0.1"),
            "resnet18": _bottleneck(5, "5e-5"),
            "vit": _bottleneck(3, "0.1"),
        },
    ),
    # The published code attacks locks that end with a sigmoid, and trains locks that end with ReLU.
    "key-lock": PaperDefences(
        "FedKL: a normalisation whose scale and shift follow from a secret key",
        "Ren et al. 2023, Gradient Leakage Defense with Key-Lock Module for Federated Learning",
        {"main": ("keylock(width=1024)",), "training": ("keylock(width=1024, act=relu)",)},
    ),
    # The paper hides 50 to 60% of the features: both ends. A notebook of the authors hides 1%.
    "provable-defense": PaperDefences(
        "Soteria: hide the features that reveal most of the image",
        "Sun et al. 2021, Soteria: Provable Defense against Privacy Leakage in Federated Learning (CVPR)",
        {
            "main": ("soteria(percentile=50)", "soteria(percentile=60)"),
            "published-code": ("soteria(percentile=1, variant=published_code)",),
        },
    ),
    "automatic-transformation-search": PaperDefences(
        "ATS: each image is transformed by one of two searched policies",
        "Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation Search (CVPR)",
        {"main": ('ats(policy="3-1-7")', 'ats(policy="43-18-18")', 'ats(policy="3-1-7+43-18-18")')},
    ),
    "adaptive-defenses": PaperDefences(
        "Outpost: noise where the risk is high, with falling probability",
        "Wang, Hugh, Li 2023, More than Enough is Too Much: Adaptive Defenses against Gradient Leakage",
        {"main": ("outpost(scale=0.8, prune=80, phi=40, beta=0.125)",)},
    ),
    "gradient-leakage-resilient": PaperDefences(
        "Fed-CDP: each example's gradient clipped layer by layer, and noise",
        "Wei et al. 2021, Gradient-Leakage Resilient Federated Learning (ICDCS)",
        {"main": ("fed-cdp(clip=4, sigma=6)",)},
    ),
    # Settings of the published code for CIFAR-10 and ImageNet; its warm-up counts epochs, this one rounds.
    "deep-gradient-compression": PaperDefences(
        "DGC: momentum and unsent entries stay with the client",
        "Lin et al. 2018, Deep Gradient Compression: Reducing the Communication Bandwidth (ICLR)",
        {
            "warm-up": ("dgc(keep=0.001, momentum=0.9, warmup=5)",),
            "no-warm-up": ("dgc(keep=0.001, momentum=0.9, warmup=0)",),
        },
    ),
    # The setting that GLAUS attacks: a twentieth of the entries is sampled.
    "unbiased-sampling": PaperDefences(
        "MinMax sampling: a few entries, drawn and enlarged so that the mean is right",
        "MinMax sampling, as Yang et al. 2023 (GLAUS) attack it",
        {"main": ("minmax(ratio=0.95)",)},
    ),
    # Settings of the published code.
    "instance-hiding": PaperDefences(
        "InstaHide: images mixed with the client's own, or with public ones, and signs flipped",
        "Huang, Song, Li, Arora 2020, InstaHide: Instance-hiding Schemes for Private Distributed Learning (ICML)",
        {
            "inside": ("instahide(k=4, cap=0.65)",),
            "cross": ("instahide(k=6, cap=0.65, mix=public, least=0.3)",),
        },
    ),
}
"""Papers with named settings. QSGD is missing: it quantises buckets of a few hundred entries, not layers."""


def spelled_out(texts: Iterable[str]) -> list[str]:
    """Expand each `PAPER/TABLE` to its defences, each defence once; an unknown name is refused.

    >>> spelled_out(["none", "gradient-stand-in/published-code"])
    ['none', 'standin(variant=published_code)']
    """
    expanded: list[str] = []
    tabled: set[str] = set()
    problems: list[Problem] = []
    known = {f"{key}/{table}": each for key, paper in PAPERS.items() for table, each in paper.tables.items()}
    for i, text in enumerate(texts):
        name = text.strip().lower()
        if "/" not in name or "(" in name:
            expanded += [] if text in tabled else [text]
        elif name in known:
            expanded += [each for each in known[name] if each not in expanded]
            tabled.update(known[name])
        else:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            problems.append(
                Problem(f"defences[{i}]", f"unknown table of a paper: '{text}'", f"{hint}{', '.join(known)}")
            )
    refuse(problems)
    return expanded
