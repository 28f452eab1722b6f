"""`gradveil account`, `bound` and `ledger`: epsilon and noise, error bounds, spent privacy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gradveil.cli.index import read_index
from gradveil.cli.shared_options import DataDirOption, DefenceOption, completed, own_code
from gradveil.core.errors import GradveilError, fail, refuse
from gradveil.core.formatting import number, percent, plural, rounded_up

if TYPE_CHECKING:
    from gradveil.audit.experiment import Experiment
    from gradveil.theory.accounting import Accountant, Sampling

_ACCOUNT_HELP = {
    "sigma": "Noise multiplier: the noise's standard deviation on the sum, over the clip norm.",
    "epsilon": "Look for the noise multiplier with this epsilon.",
    "steps": "Noisy sums (steps of DP-SGD, rounds of user-dp) in the whole training.",
    "rate": "Share of the examples (of the clients, for user-dp) that is in each sum.",
    "sampling": "poisson: each is in a sum with probability RATE; shuffled: fixed batches, no amplification.",
    "accountant": "pld is nearly exact; rdp is what most papers print.",
    "guess": "Probability that a guess without the update is right. Repeatable. Default: 0.1, 1e-3 and 1e-6.",
}


def account(
    sigma: Annotated[float | None, typer.Option(help=_ACCOUNT_HELP["sigma"])] = None,
    target: Annotated[float | None, typer.Option("--epsilon", help=_ACCOUNT_HELP["epsilon"])] = None,
    delta: Annotated[float, typer.Option(help="Should be well below one over the number of examples.")] = 1e-5,
    rate: Annotated[float, typer.Option(help=_ACCOUNT_HELP["rate"])] = 1.0,
    steps: Annotated[int, typer.Option(help=_ACCOUNT_HELP["steps"])] = 1,
    sampling: Annotated[str, typer.Option(metavar="poisson|shuffled", help=_ACCOUNT_HELP["sampling"])] = "poisson",
    accountant: Annotated[str, typer.Option(metavar="pld|rdp", help=_ACCOUNT_HELP["accountant"])] = "pld",
    guess: Annotated[list[float] | None, typer.Option(help=_ACCOUNT_HELP["guess"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Compute epsilon for a noise multiplier, or the noise multiplier for an epsilon, and what they say of recovery.

    It holds for noise that does not depend on the data, on sums of clipped vectors: `dp`, `user-dp`. Heuristic defences
    have no epsilon.
    """
    from rich.console import Console

    from gradveil.theory.accounting import Participation, assumptions, epsilon, multiplier
    from gradveil.theory.reconstruction_robustness import GUESSES, recovery_bound

    if (sigma is None) == (target is None):
        what = "needs exactly one of --sigma and --epsilon"
        raise fail("account", what, "give the one that you know: gradveil account --sigma 1 --steps 1000 --rate 0.01")
    with _as_options():
        training = Participation(steps, rate, delta, cast("Sampling", sampling), cast("Accountant", accountant))
        noise = multiplier(target, training) if sigma is None and target is not None else cast(float, sigma)
        value = epsilon(noise, training)
        limits = {each: recovery_bound(each, [(noise, training)]) for each in guess or GUESSES}
    taken = assumptions(training)
    if as_json:
        values = {"sigma": noise, "epsilon": value if math.isfinite(value) else None, "delta": delta}
        values |= {"rate": rate, "steps": steps, "sampling": sampling, "accountant": accountant, "assumes": taken}
        values["recovery"] = [{"guess": each, "at_most": most} for each, most in limits.items()]
        typer.echo(json.dumps(values, indent=1))
        return 0
    console = Console(soft_wrap=True, markup=False)
    console.print(
        f"epsilon {number(value, 4) if math.isfinite(value) else 'infinite'} at delta {delta:g}", style="bold"
    )
    console.print(
        f"noise multiplier (sigma) {noise:.4g}: the noise's standard deviation on the sum, over the clip norm"
    )
    quoted = ", ".join(f"{rounded_up(most):.3g} (guess {each:g})" for each, most in limits.items())
    console.print(f"recovery of an example, by any attacker: at most {quoted}")
    console.print(f"Assumed: {taken}.", style="dim")
    return 0


@contextmanager
def _as_options() -> Iterator[None]:
    """Name problems by the options of the command line."""
    try:
        yield
    except GradveilError as error:
        raise GradveilError(replace(p, where=p.where.replace("privacy.", "--")) for p in error.problems) from error


_BOUND_HELP = {
    "run": "A run file (TOML), or the name of a bundled run.",
    "set": "Any setting of the run file: --set model.name='\"lenet-zhu\"'. Repeatable.",
}

_UTILITIES = {"utility": "first_order_utility", "2nd order": "second_order_utility"}


def bound(
    name: Annotated[str, typer.Argument(metavar="RUN", help=_BOUND_HELP["run"], autocompletion=completed("runs"))],
    target_clients: Annotated[
        int | None, typer.Option(help="Number of target clients behind the mean information.")
    ] = None,
    defence: DefenceOption = None,
    setting: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_BOUND_HELP["set"])] = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per defence.")] = False,
) -> int:
    """Compute limits of every attacker: the least mean squared error, and the largest probability of recovery.

    The error bound is for defences that add noise. It holds for images that are normal with the public images'
    spectrum; labels and the randomness of the model count as known. The result is the higher of two bounds: Bayesian
    Cramér-Rao, which needs a model without ReLU, and mutual information. Other defences have no known bound. Defences
    with a formal guarantee also bound the probability that any attacker recovers and identifies an image. The output
    also has the first- and second-order utility of a step, 1 and -1 without a defence; and for dual pruning the error
    of Proposition 1 of Xue et al. 2024, which is of first order and binds only attackers who match all of the pruned
    update.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from gradveil.audit.preflight import open_experiment
    from gradveil.audit.run_file import read

    own_code()
    config = read(name, {"target_clients": target_clients, "defences": defence or None}, setting or ())
    torch.set_num_threads(1)
    rows = list(_rows(open_experiment(config, data_dir)))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return 0
    console = Console(width=None if Console().is_terminal else 120, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    several = len({(row["client"], row["seed"]) for row in rows}) > 1
    pruned = any(row["mse_taylor"] is not None for row in rows)
    numbers = ("MSE bound", "of baseline", *_UTILITIES, *(("Taylor MSE",) if pruned else ()))
    for header in ("defence", *(("client", "seed") if several else ()), *numbers, "by"):
        table.add_column(header, overflow="fold")
    for row in rows:
        where = [row["client"], str(row["seed"])] if several else []
        share = row["mse_bound"] / row["mse_prior"] if row["mse_bound"] is not None else None
        left = [number(row[key]) for key in _UTILITIES.values()]
        left += [number(row["mse_taylor"])] if pruned else []
        reason = row["by"] or row["unbounded"]
        table.add_row(row["defence"], *where, number(row["mse_bound"]), percent(share), *left, reason)
    console.print(table)
    meaning = "No attacker can have a lower mean squared error (pixels in [0, 1]) in expectation, if images are normal "
    meaning += "with the public images' spectrum. Baseline: the mean image, which ignores the update. Utility: "
    meaning += "expected loss decrease of a small step, relative to the undefended update; minus its mean square."
    console.print(meaning, style="dim")
    for text in dict.fromkeys(f"{row['defence']}: {text}." for row in rows for text in row["proven"]):
        console.print(text)
    if pruned:
        console.print(_TAYLOR, style="dim")
    return 0


_TAYLOR = (
    "Taylor MSE: Proposition 1 of Xue et al. 2024 on dual pruning, mean over the target clients. It is of first order, "
    "and binds attackers whose image has all of the pruned update as its gradient. An attacker who reads the mask off "
    "the zeros compares only what was sent, and goes below it."
)


def _rows(experiment: Experiment) -> Iterator[dict[str, Any]]:
    import torch

    from gradveil.audit.attack_selection import TrialAddress
    from gradveil.audit.error_bound import leaked, mse_bound, recovery_bounds, recovery_sentence, taylor_errors
    from gradveil.audit.grants import first
    from gradveil.audit.observe import observe, raw_update
    from gradveil.audit.run_warnings import privacy_facts
    from gradveil.audit.score import expected_of
    from gradveil.audit.trial import taylor_applies, worth
    from gradveil.core.tree import norm
    from gradveil.metrics import relative_distance

    config = experiment.config
    for seed in config.seeds:
        for index, settings in enumerate(config.client):
            for text in experiment.defences:
                client = experiment.client(index, text, seed)
                address = TrialAddress("", index, text, "", seed)
                seen, truth = observe(experiment, address, client, range(config.target_clients))
                information, reason = leaked(experiment, seed, client, seen, truth)
                limit = (
                    {"mse": None, "prior": None, "by": None}
                    if reason
                    else mse_bound(experiment, information, settings.examples)
                )
                last, base = seen[-1], experiment.undefended(index, seed)
                raw = raw_update(client, base, last.params, truth)
                left = worth(last.update, raw)
                taylor = None
                if taylor_applies(client) and config.rounds == 1:
                    away = relative_distance(last.update, raw) * torch.vmap(norm)(raw)
                    taylor = taylor_errors(experiment, seed, client, base, last, truth, away)
                places = experiment.examples(index, range(config.target_clients), seed)
                chances = expected_of(experiment.guessing, experiment, places)
                records = [{"per_image": [{"expected": chance} for chance in each]} for each in chances]
                mechanisms = privacy_facts(experiment, client, first(truth))["mechanisms"]
                limits = recovery_bounds(experiment, address, mechanisms, records)
                yield {
                    "defence": text,
                    "client": settings.title,
                    "seed": seed,
                    "target_clients": config.target_clients,
                    "mse_bound": limit["mse"],
                    "mse_prior": limit["prior"],
                    "by": limit["by"],
                    "unbounded": reason,
                    "mse_taylor": None if taylor is None else float(taylor.nanmean()),
                    "recovery_bounds": limits,
                    "proven": [recovery_sentence(each) for each in limits],
                    **{name: float(value.mean()) for name, value in left.items()},
                }


_LEDGER_HELP = {
    "identity": "The client: the gradveil-identity of its SuperNode, or partition-NUMBER.",
    "training": "Name of the training in the app.",
    "folder": "Folder of the client's files: the gradveil-folder of its SuperNode.",
    "delta": "Should be well below one over the number of examples.",
}

ledger = typer.Typer(no_args_is_help=True)
"""The commands of a ledger."""

Identity = Annotated[str, typer.Option(help=_LEDGER_HELP["identity"])]
Name = Annotated[str, typer.Option("--training", help=_LEDGER_HELP["training"])]
Folder = Annotated[Path, typer.Option(help=_LEDGER_HELP["folder"])]
_FOLDER = Path(read_index()["options"]["folder"])


@ledger.callback()
def ledgers() -> None:
    """Count the differential privacy that a client in Flower spends, over all runs of a training.

    A client with a limit (epsilon) answers only if it has such a ledger.
    """


def create_ledger(identity: Identity, training: Name, folder: Folder = _FOLDER) -> int:
    """Create a client's ledger for a training. Create it once: it does not count earlier rounds."""
    from rich.console import Console

    from gradveil.federated.privacy_ledger import create, ledger_file

    file = ledger_file(folder.expanduser(), identity, training)
    create(file)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"Made {file}. It counts from zero. Keep a copy, and never remove it while the data is used.")
    return 0


def show_ledger(
    identity: Identity,
    training: Name,
    folder: Folder = _FOLDER,
    delta: Annotated[float, typer.Option(help=_LEDGER_HELP["delta"])] = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Report what a client has spent in a training: its rounds, and the epsilon of each unit."""
    from rich.console import Console

    from gradveil.defences.guarantees import NOTHING
    from gradveil.federated.privacy_ledger import accounted, ledger_file, read
    from gradveil.theory.accounting import PROBABILITY

    refuse(PROBABILITY.problems("--delta", delta))
    file = ledger_file(folder.expanduser(), identity, training)
    record = read(file)
    if record is None:
        raise fail(str(file), "is missing", "make it, once for this training: gradveil ledger create")
    epsilon, texts = accounted(record.spent, delta)
    lost = {spent.unit for spent in record.spent} - set(epsilon)
    texts += [f"{NOTHING} of each {unit}: a round of this training was sent without" for unit in sorted(lost)]
    if as_json:
        values = {"file": str(file), "rounds": record.rounds, "epsilon": epsilon, "delta": delta}
        typer.echo(json.dumps({**values, "guarantee": "; ".join(texts)}, indent=1))
        return 0
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"{plural(record.rounds, 'round')} counted: {'; '.join(texts) or 'nothing is spent'}")
    console.print(str(file), style="dim")
    return 0
