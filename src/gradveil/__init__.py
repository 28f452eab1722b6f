"""Gradveil: what an attacker can reconstruct from federated learning updates, and which defence stops it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

# Imported before the function of the same name is defined: later imports of its modules then leave the name alone.
import gradveil.audit as _package  # noqa: F401
from gradveil.core.errors import GradveilError
from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from gradveil.assurance.replay_audit import audit_epsilon
    from gradveil.attacks.knowledge import Knowledge
    from gradveil.attacks.protocol import Attack, Observation
    from gradveil.audit.api import Result
    from gradveil.audit.recorded.inverted_update import Inverted
    from gradveil.client.client import Client
    from gradveil.client.local_training import Local
    from gradveil.core.chain import chain
    from gradveil.core.noise import Key
    from gradveil.core.release import __version__
    from gradveil.core.types import Loss
    from gradveil.data.dataset import Splits
    from gradveil.data.given_examples import Examples
    from gradveil.defences.composition import Defence
    from gradveil.defences.defence_catalogue import parse
    from gradveil.federated.training_api import TrainResult
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Client": "gradveil.client.client",
            "Defence": "gradveil.defences.composition",
            "Key": "gradveil.core.noise",
            "Knowledge": "gradveil.attacks.knowledge",
            "Local": "gradveil.client.local_training",
            "Observation": "gradveil.attacks.protocol",
            "__version__": "gradveil.core.release",
            "audit_epsilon": "gradveil.assurance.replay_audit",
            "chain": "gradveil.core.chain",
            "parse": "gradveil.defences.defence_catalogue",
        },
    )

__all__ = [
    "Client",
    "Defence",
    "GradveilError",
    "Key",
    "Knowledge",
    "Local",
    "Observation",
    "__version__",
    "audit",
    "audit_epsilon",
    "chain",
    "invert",
    "open_run",
    "parse",
    "train",
]


def audit(
    model: nn.Module,
    batch: Examples,
    loss: Loss | None = None,
    defences: Sequence[str | Defence] = ("none",),
    attacks: Sequence[str | Attack] | None = None,
    *,
    client_batch: int = 1,
    local: Local | Mapping[str, Any] | None = None,
    members: int = 1,
    tokenizer: Any = None,
    length: int | None = None,
    bounds: Literal["unit"] | tuple[float, float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    public: Examples | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Attack a model on private examples, once for each defence and attack, and return what came back.

    `batch` is (inputs [N, C, H, W], targets [N] class numbers), as tensors or arrays, a dict of both (`pixel_values`
    and `labels`, say), a data set or a DataLoader (of which `target_clients=8` clients are read). Inputs [N, D] in
    floating point, or a data frame of numbers, are rows that the model reads as they are. Every `client_batch`
    examples are one target client (the last are nobody's where a defence lets other clients speak before a round:
    `adgp`). It sends one gradient, or trains first: `local=Local(lr=0.1, epochs=2, batch=8)`. With secure aggregation
    the server sees the sum of `members` clients only. `loss` takes (outputs, targets), cross-entropy if none is given.
    Defences and attacks are texts as on the command line (`"dp(clip=20, sigma=1e-3)"`, `"ig(iterations=500)"`) or
    objects. Without `attacks`, a search that simulates every defence (of images `portfolio`, of texts `span-rank`, of
    rows `tableak`) and the closed forms that apply are tried; no search is made of what a closed form breaks. A model
    of transformers that reads texts takes (strings, labels) with its `tokenizer`, or token numbers: a tensor, or a dict
    as tokenizers return it. Language models need no labels and have their own loss. `length` cuts texts to so many
    tokens.
    Images are (pixel - mean) / std with pixels in [0, 1]; without mean and std, `bounds` is the range of the inputs:
    `"unit"` for [0, 1], a pair, or None to take it from what is given. The range of rows is that of each column in
    `public`, otherwise in the batch, and with `mean` and `std` reports show number = input * std + mean. `public` is
    (inputs, targets) like the batch's own, none of them in it: for attackers who learn from such data, for defences
    that use it, and for the guesses that a rate is held against. `out` keeps the run directory, and calling again with
    the same settings resumes it. `prepare=True` attacks a copy in which what cannot be attacked is replaced: BatchNorm
    in training mode, hidden dropout, fused attention, in-place operations. Outputs and gradients are compared before
    and after on the batch, and a replacement that changes them is rejected by the module's name; every result and the
    report list what was replaced. Progress is printed on standard error, live on a terminal and in a notebook and as
    plain lines elsewhere; `progress=False` is silent. Further settings are those of a run file: `iterations`,
    `restarts`, `budget`, `threshold`, `precision`, `device`, `images`, `control`; and `cost={"rounds": 20, "local":
    {"lr": 0.1, "epochs": 1, "batch": 8}}`, which trains on the public examples with every defence, for its cost in
    accuracy.

    Attacks that set no iterations of their own share about three minutes of computing, over all defences
    (`budget="auto"`); the result says what that left out. `budget="10m"` is a time for each defence, `budget=None` runs
    what the attacks' authors used, which may take hours.

    The result has the verdict in a sentence (`result.verdict`), one per defence (`result.verdicts`), `report()` and
    `plot()`. If no defence
    is `"none"`, a short control attacks a few examples without one (`control=False` leaves it out). Everything wrong
    with model, batch and names is raised at once, before any attack, as a `GradveilError` with its `problems`.
    """
    from gradveil.audit.api import audit_model
    from gradveil.report import draw_figure, result_html, write_report

    return audit_model(
        model,
        batch,
        loss,
        settings.pop("defenses", defences),
        attacks,
        write_report=write_report,
        as_html=result_html,
        draw_figure=draw_figure,
        client_batch=client_batch,
        local=local,
        members=members,
        tokenizer=tokenizer,
        length=length,
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


def train(
    model: nn.Module,
    data: Splits | Examples,
    test: Examples | None = None,
    *,
    rounds: int,
    clients: int | None = None,
    defences: Sequence[str | Defence] = ("none",),
    loss: Loss | None = None,
    local: Local | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    bounds: Literal["unit"] | tuple[float, float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    prepare: bool = False,
    progress: bool = True,
    **settings: Any,
) -> TrainResult:
    """Train a model among clients, once with each defence, and return what that costs in accuracy and bytes.

    `data` is what the clients share and `test` says how good the trained model is: data sets, loaders, or (inputs [N,
    C, H, W] or [N, D], targets [N] class numbers) as for `gradveil.audit`; both at once as `gradveil.data.load` returns
    them. Texts come with the `tokenizer` of a model of transformers, as for `audit`.
    There are 10 `clients` if you do not say how many, or fewer if each would have less than a batch of `local`.
    Every training starts from the model's own weights; the model is left as it is. `local` is the clients' local
    training (`Local(batch=16, lr=0.1, epochs=1)`), without it each sends one gradient a round. `loss`, `defences`,
    `mean`, `std`, `bounds`, `prepare`, `out` and `progress` are as for `gradveil.audit`: with `out`, the same call goes
    on where it stopped. Further settings are those of a run file of `gradveil train`: `participation`,
    `partition={"kind": "dirichlet"}`, `server={"optimiser": "adam"}`, `validation`, `patience`, `central`, `device`.

    The result has `accuracy`, `bytes` (sent in a round) and `curve` (round by round) by defence, `weights(defence)`,
    `report()` and `plot()`. Everything wrong with model, data and names is raised at once, before any round, as a
    `GradveilError`.
    """
    from gradveil.federated.training_api import train_model
    from gradveil.report import draw_figure, write_report

    return train_model(
        model,
        data,
        test,
        rounds,
        clients,
        settings.pop("defenses", defences),
        loss,
        local,
        tokenizer=tokenizer,
        length=length,
        write_report=write_report,
        draw_figure=draw_figure,
        bounds=bounds,
        mean=mean,
        std=std,
        seed=seed,
        out=out,
        prepare=prepare,
        progress=progress,
        **settings,
    )


def open_run(path: Path | str) -> Result | TrainResult:
    """Open a run directory and return its result, as `audit` and `train` do: `open_run("runs/faces").plot()`.

    Runs of the command line are opened, too, and those that are not finished. Nothing is computed.
    """
    from pathlib import Path

    from gradveil.audit.api import opened
    from gradveil.audit.run_directory import AUDIT
    from gradveil.federated.training_api import opened_training
    from gradveil.federated.training_run import is_training
    from gradveil.report import draw_figure, result_html, write_report

    folder = Path(path)
    if is_training(folder) and not AUDIT.exists(folder):
        return opened_training(folder, write_report=write_report, draw_figure=draw_figure)
    return opened(folder, write_report=write_report, draw_figure=draw_figure, as_html=result_html)


def invert(
    model: nn.Module,
    update: Mapping[str, Any] | Sequence[Any],
    attack: str | Attack | None = None,
    *,
    tokenizer: Any = None,
    length: int | None = None,
    labels: Tensor | Sequence[int] | int | None = None,
    examples: int | None = None,
    shape: tuple[int, ...] | int | None = None,
    bounds: Literal["unit"] | tuple[float, float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    truth: Tensor | Examples | None = None,
    loss: Loss | None = None,
    defence: str | Defence = "none",
    local: Local | Mapping[str, Any] | None = None,
    public: Examples | None = None,
    seed: int = 0,
    prepare: bool = False,
) -> Inverted:
    """Attack one update of a model, and return what it shows of the examples that it was made from.

    `update` holds a tensor for each trained parameter, by name or in the order of `model.parameters()`: the mean
    gradient, or with `local` the parameters before local training minus those after it: an update with its sign
    turned is refused where the last layer's bias shows it, and so are labels that it contradicts. Parameters that the
    loss does not depend on may be None or missing. Without `labels` the attack restores them from the update, where
    it can, and the result says so. The update is of one example unless `labels`, `truth` or `examples` say of how
    many; an input has the `shape` (channels, height, width), that of the truth or of `model.input_shape`. Inputs are
    (pixel - mean) / std with pixels in [0, 1], or lie in `bounds` (if nothing is said in [0, 1], or between the least
    and the largest of `public` where those exceed it). `defence` is what the update's client has (attacks that
    simulate it learn of it); one that adds layers draws their weights from `seed`: give the `model` that has the
    client's instead. `public` are examples for attacks that train on them. `truth`, inputs or (inputs, labels), is
    only compared with the answer. `prepare=True` attacks a copy of the model, as `audit` does.

    Without a name, the table of attackers decides, as for audits: the closed forms that suit the update and the
    `defence` are tried first, such as `analytic`, `unmix` and `r-gap`. If a client with the examples of one sends
    nearly this update, it is taken. Otherwise a search is made (of images mostly `portfolio`, of rows `tableak`; with
    `adaptive` one after the other of the table's, until one explains the update), and the answer that comes nearest
    is taken. Texts are attacked by `span`, without attention by `embedding-search`. Models of texts take `tokenizer`
    as for `audit`, and `length`, the most tokens of a text. Of rows of a table, `truth` or `public` is a data set,
    which names the columns. Rows of numbers that the model reads as they are need no data set: inputs [N, D], a data
    frame, or `shape=(D,)`. Their range is `bounds`, otherwise that of each column of `public`, and without both one
    range for all columns, from the least to the largest number of `truth`.

    The result has `images` (pixels; of texts token numbers, and `texts`; of rows cells, and `rows`), `labels`, the name
    of the `attack`, its `objective`, `status`, the `distance` between the update and that of these examples, and with a
    truth `metrics`.
    """
    from gradveil.audit.recorded.invert import invert_update
    from gradveil.report import inverted_html

    return invert_update(
        model,
        update,
        attack,
        labels,
        loss,
        as_html=inverted_html,
        tokenizer=tokenizer,
        length=length,
        examples=examples,
        shape=shape,
        bounds=bounds,
        mean=mean,
        std=std,
        truth=truth,
        defence=defence,
        local=local,
        public=public,
        seed=seed,
        prepare=prepare,
    )
