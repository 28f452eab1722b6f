"""Gradveil: what an attacker can reconstruct from federated learning updates, and which defence stops it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

# Imported before the function of the same name is defined: later imports of its modules then leave the name alone.
import gradveil.audit as _package  # noqa: F401
from gradveil.core.errors import GradveilError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from gradveil.attacks.protocol import Attack
    from gradveil.audit.api import Result
    from gradveil.core.types import Loss
    from gradveil.defences import Defence

    __version__: str
__all__ = ["GradveilError", "__version__", "audit"]


def audit(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss: Loss | None = None,
    defences: Sequence[str | Defence] = ("none",),
    attacks: Sequence[str | Attack] = ("ig",),
    *,
    client_batch: int = 1,
    bounds: Literal["unit"] | tuple[float, float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    public: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Attack a model on private examples, once for each defence and attack, and return what came back.

    `batch` is (inputs [N, C, H, W], targets [N] class numbers); every `client_batch` examples are one target client
    (the last are nobody's where a defence lets other clients speak before a round: `adgp`). `loss` takes (outputs,
    targets), cross-entropy if none is given. Defences and attacks are texts as on the command line (`"dp(clip=20,
    sigma=1e-3)"`, `"ig(iterations=500)"`) or objects. Inputs are (pixel - mean) / std with pixels in [0, 1]; without
    mean and std, `bounds` is the range of the inputs: `"unit"` for [0, 1], a pair, or None to take it from what is
    given. `public` is (inputs, targets) like the batch's own, none of them in it: for attackers who learn from such
    data, for defences that use it, and for the guesses that a rate is held against. `out` keeps the run directory, and
    calling again with the same settings resumes it. `prepare=True` attacks a copy in which what cannot be attacked is
    replaced: BatchNorm in training mode, hidden dropout, in-place operations. Outputs and gradients are compared before
    and after on the batch, and a replacement that changes them is rejected by the module's name; every result and the
    report list what was replaced. `progress` is printed on standard error: None does so on a terminal only, True also
    elsewhere, in plain lines, False never. Further settings are those of a run file: `iterations`, `restarts`,
    `threshold`, `precision`, `device`, `images`, `control`.

    The result has the verdict in a sentence (`result.verdict`), and one per defence (`result.verdicts`). If no defence
    is `"none"`, a short control attacks a few examples without one (`control=False` leaves it out). Everything wrong
    with model, batch and names is raised at once, before any attack, as a `GradveilError` with its `problems`.
    """
    from gradveil.audit.api import audit_model
    from gradveil.client import cross_entropy
    from gradveil.report import write_report

    return audit_model(
        model,
        batch,
        cross_entropy if loss is None else loss,
        defences,
        attacks,
        write_report=write_report,
        client_batch=client_batch,
        bounds=bounds,
        mean=mean,
        std=std,
        public=public,
        seed=seed,
        out=out,
        prepare=prepare,
        progress=progress,
        **settings,
    )


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: reading what pip installed takes longer than all else here."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("gradveil")
