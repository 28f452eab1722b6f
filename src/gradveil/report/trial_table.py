"""The table of an audit's trials: its columns and the order of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradveil.audit.attack_check import examine
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.baselines import baseline, risk_of
from gradveil.audit.findings import hits
from gradveil.audit.result_rows import BASELINES, Row, TrialSetting
from gradveil.audit.run_directory import Trial
from gradveil.audit.verdict import LEVELS, Verdict, price
from gradveil.core.formatting import duration, listing, number, percent, size
from gradveil.core.space import ExampleWords
from gradveil.federated.training_groups import proven
from gradveil.report.pareto import front_of, fronts_by_defence
from gradveil.report.table import Column, as_csv, text_column

Get = Callable[[Row], Any]
"""The value of a trial in a column."""


def _info(key: str) -> Get:
    return lambda row: row.info.get(key)


def _sum(key: str) -> Get:
    return lambda row: row.summary.get(key)


def _statuses(row: Row) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(row.statuses.items()))


def _score(key: str, title: str, meaning: str) -> Column[Row]:
    return Column(key, title, meaning, lambda row: row.summary.get(f"{key}_mean", row.mean(key)), number)


def _headline(row: Row) -> Any:
    return row.summary.get(f"{row.words.headline}_mean", row.headline)


def _spread(row: Row) -> Any:
    return row.summary.get(f"{row.words.headline}_std")


def _guess(name: str) -> Column[Row]:
    title, meaning = BASELINES[name]
    return Column(name, title, f"share of images recovered by {meaning}", lambda row: row.control(name), percent)


TRAINED_ON = {"Recovered as trained on": "success_transformed", "Identified as trained on": "identified_transformed"}
"""Counts against the transformed images that a batch defence trains on: title, and flag of an image's scores."""


def _trained_on(title: str, flag: str) -> Column[Row]:
    return Column(flag, title, f"images {title.lower()} by the client", lambda row: hits(row, flag), number)


COLUMNS: tuple[Column[Row], ...] = (
    text_column("defence", "Defence", "transform of the client's update", lambda row: row.defence or "none"),
    text_column("attack", "Attack", "the attack that was run", _info("attack")),
    text_column(
        "attacker", "Attacker", "what the attacker knows of the defence", lambda row: ATTACKERS[row.attacker][0]
    ),
    Column("asr", "Share recovered", "share of images with an SSIM above the threshold", lambda row: row.asr, percent),
    Column("asr_low", "CI low", "lower end of the 95% Wilson interval", lambda row: row.bounds[0], percent),
    Column("asr_high", "CI high", "upper end of the 95% Wilson interval", lambda row: row.bounds[1], percent),
    Column("recovered", "Recovered", "images recovered", lambda row: row.recovered, number),
    Column("identifiable", "Identifiable", "images recovered and identified", lambda row: row.identifiable, number),
    *(_trained_on(title, flag) for title, flag in TRAINED_ON.items()),
    Column("baseline", "Baseline", "share of identifiable images expected of the best guess", baseline, percent),
    Column("risk", "Risk", "rate beyond baseline and mismatch control", lambda row: risk_of(row).value, percent),
    Column("images", "Images", "images attacked", lambda row: row.images, number),
    Column("target_clients", "Target clients", "clients attacked", lambda row: len(row.trial.records), number),
    *(_guess(name) for name in BASELINES),
    Column(
        "wrong_target_client",
        "Mismatch control",
        "share recovered when reconstructions are scored against another client's image",
        lambda row: row.control("wrong_target_client"),
        percent,
    ),
    Column("ssim", "SSIM", "mean SSIM", _headline, number),
    Column("ssim_std", "SSIM std", "its standard deviation over images", _spread, number),
    Column("ssim_max", "SSIM max", "highest of all images", lambda row: max(row.headlines, default=None), number),
    Column("ssim_min", "SSIM min", "lowest of all images", lambda row: min(row.headlines, default=None), number),
    Column(
        "ssim_transformed",
        "SSIM trained on",
        "structural similarity to the transformed images of a batch defence, mean",
        lambda row: row.mean("ssim_transformed"),
        number,
    ),
    _score("psnr", "PSNR", "peak signal-to-noise ratio in dB, mean"),
    _score("mse", "MSE", "mean squared error of pixels in [0, 1], mean"),
    Column(
        "mse_bound",
        "MSE bound",
        "lower bound of every attacker's mean error, for images drawn from the prior",
        _sum("mse_bound"),
        number,
        missing_reason=lambda row: row.info.get("unbounded"),
    ),
    Column("lpips", "LPIPS", "learned perceptual distance, mean", lambda row: row.mean("lpips"), number),
    Column("label_accuracy", "Labels", "share of the labels recovered", _sum("label_accuracy"), percent),
    Column(
        "identified",
        "Identified",
        "share whose nearest image among all private images is the target client",
        lambda row: row.mean("identified"),
        percent,
    ),
    Column(
        "bytes_sent", "Bytes sent", "bytes of one update on the wire, packed and deflated", _info("bytes_sent"), size
    ),
    Column("bytes_dense", "Bytes dense", "bytes of every entry of the update, zeros too", _info("bytes_dense"), size),
    Column(
        "distance",
        "Distance",
        "relative l2 distance of the sent update to the same model's without noise, clipping and pruning; of pruning, "
        "sqrt(gamma_1): how far the gradient of a perfect match may be from the raw one",
        _info("distance"),
        number,
    ),
    Column("cosine", "Cosine", "cosine of the sent and the raw update", _info("cosine"), number),
    Column(
        "first_order_utility",
        "Utility",
        "expected loss decrease of a small step along the update, as a share of the undefended update's",
        _info("first_order_utility"),
        percent,
    ),
    Column(
        "second_order_utility",
        "2nd utility",
        "minus the square of the utility: the lower, the more the noise varies the step; -1 undefended",
        _info("second_order_utility"),
        number,
    ),
    Column("gamma_1", "gamma_1", "share of the update's energy that pruning left out", _sum("gamma_1"), number),
    Column(
        "cosine_worst",
        "Perfect match",
        "cosine distance between the raw gradient and one that equals the sent update; for pruning only",
        _sum("cosine_worst"),
        number,
    ),
    Column(
        "cosine_promised",
        "Promised",
        "the bound of this distance in Theorem 1 of the paper, sqrt(gamma_1)",
        _sum("cosine_promised"),
        number,
    ),
    Column(
        "mse_taylor",
        "Taylor MSE",
        "error of Proposition 1 in Xue et al. 2024: first order, for attackers who match the whole pruned update",
        _sum("mse_taylor"),
        number,
    ),
    Column(
        "below_taylor",
        "Below it",
        "targets that were reconstructed with a lower error than that",
        _sum("below_taylor"),
        number,
    ),
    text_column("proven", "Proven", "epsilon, where the run describes its training", lambda row: proven(row.info)),
    Column(
        "objective_initial",
        "Obj. start",
        "median objective at the random start",
        lambda row: row.health("objective_initial"),
        number,
    ),
    Column(
        "objective", "Obj. end", "median objective of the reconstructions", lambda row: row.health("objective"), number
    ),
    Column(
        "objective_truth",
        "Obj. truth",
        "median objective of the private images, which the attack has to reach",
        lambda row: row.health("objective_truth"),
        number,
    ),
    Column("diverged", "Diverged", "share of runs that diverged", lambda row: row.health("diverged"), percent),
    text_column("statuses", "Statuses", "how the attack runs on the target clients ended", _statuses),
    Column(
        "restarts", "Restarts", "attack runs per target client; the lowest objective wins", _info("restarts"), number
    ),
    Column("seconds", "Time", "working time of the attack, summed over processes", _sum("seconds"), duration),
    Column(
        "iterations_per_second",
        "it/s",
        "iterations per second of working time, all runs",
        _info("iterations_per_second"),
        number,
    ),
    Column("seed", "Seed", "seed of the run", lambda row: row.seed),
    text_column("model", "Model", "the model that is trained", _info("model")),
    text_column("data", "Data", "data set of the target clients", _info("data")),
    Column("round", "Round", "federated round", lambda row: row.setting.round),
    Column("trained", "Trained", "rounds of training before the attack", lambda row: row.setting.trained),
    Column(
        "accuracy", "Accuracy", "share of test images classified correctly before the attack", _sum("accuracy"), percent
    ),
    Column("final_accuracy", "At the end", "the same at the end of the training", _sum("final_accuracy"), percent),
    Column("round_bytes_up", "Sent per round", "bytes that all clients send per round", _sum("round_bytes_up"), size),
    Column(
        "round_bytes_down",
        "Received per round",
        "bytes that the server sends per round",
        _sum("round_bytes_down"),
        size,
    ),
    Column("round_seconds", "Time per round", "seconds of work", _sum("round_seconds"), duration),
    Column("client_seconds", "Time per update", "seconds of one client's work", _sum("client_seconds"), number),
    text_column("client", "Client", "content of the update", _info("client")),
    Column("batch", "Batch", "images per client", lambda row: row.setting.batch),
    Column("params", "Parameters", "parameters of the model", _info("params"), number),
    text_column("trial", "Trial", "folder of the trial in the run directory", _info("trial")),
)
"""Every column, in the order shown."""

_OPTIONAL = {"lpips", "mse_bound", "objective_truth", "identified", "iterations_per_second", "restarts", "params"}
_OPTIONAL |= {"first_order_utility", "second_order_utility", "gamma_1", "cosine_worst", "cosine_promised"}
_OPTIONAL |= {"mse_taylor", "below_taylor"}
_OPTIONAL |= {*TRAINED_ON.values()}
_OPTIONAL |= {
    "trained",
    "accuracy",
    "final_accuracy",
    "round_bytes_up",
    "round_bytes_down",
    "round_seconds",
    "client_seconds",
}
DOUBT = "the attack may be broken, or guess"
"""Warning next to rates that may not be due to the defence."""


def columns(rows: Sequence[Row], judged: Sequence[Verdict]) -> list[Column[Row]]:
    """Choose the columns for finished trials and their verdicts: all but the optional ones that are empty."""
    result: list[Column[Row]] = []
    words = rows[0].words if rows else ExampleWords()
    comparisons, further = _comparisons(rows, judged), _further(rows)
    for column in [each for base in COLUMNS for each in (base, *(further if base.key == "lpips" else ()))]:
        is_filled = any(column.get(row) is not None or column.missing_reason(row) for row in rows)
        if is_filled or column.key not in _OPTIONAL:
            shown = replace(column, title=words.told(column.title), meaning=words.told(column.meaning))
            shown = replace(shown, flag=lambda row: _doubt(row, rows)) if column.key == "asr" else shown
            result += [shown, comparisons[column.key]] if column.key in comparisons else [shown]
    return result


def _further(rows: Sequence[Row]) -> list[Column[Row]]:
    """Make a column for each further metric that the run asked for."""
    known = {column.key for column in COLUMNS}
    names = dict.fromkeys(str(name) for row in rows for name in row.info.get("metrics") or ())
    return [_score(name, name, f"metric {name}, mean") for name in names if name not in known]


def _comparisons(rows: Sequence[Row], judged: Sequence[Verdict]) -> dict[str, Column[Row]]:
    """Make the columns that compare a trial with the others, by the key of the column that each one follows."""
    levels = {(verdict.setting, verdict.defence): LEVELS[verdict.level][0] for verdict in judged}
    fronts = fronts_by_defence(judged)
    check = "whether a low rate is due to the defence"
    share = "bytes sent as a share of what the same client sends without a defence"
    after: dict[str, Column[Row]] = {
        "attack": text_column("verdict", "Verdict", "the verdict on the defence", lambda row: _level(row, levels)),
        "asr_high": text_column("attack_check", "Attack check", check, lambda row: examine(row, rows).label),
        "bytes_sent": Column[Row]("bytes_share", "of undefended", share, lambda row: price(row, rows).share, percent),
    }
    if fronts:
        meaning = "the Pareto fronts that the defence is on"
        after["client_seconds"] = text_column("pareto", "Front", meaning, lambda row: front_of(row, fronts))
    return after


def _doubt(row: Row, rows: Sequence[Row]) -> str:
    return DOUBT if examine(row, rows).doubts else ""


def _level(row: Row, levels: Mapping[tuple[TrialSetting, str], str]) -> str:
    return "control" if row.is_control else levels[row.setting, row.defence]


def without_result(trials: Sequence[Trial], planned: Sequence[str]) -> list[tuple[str, str, str, str, str]]:
    """List the trials without scores: defence, attack, seed, status, and the reason; those not done by their names."""
    done = {str(trial.info.get("trial")) for trial in trials}
    ended = [
        (
            str(trial.info["defence"]),
            str(trial.info["attack"]),
            str(trial.info["seed"]),
            "does not apply" if trial.unfit else "failed",
            str(trial.failed),
        )
        for trial in trials
        if trial.failed is not None
    ]
    return ended + [(str(name), "", "", "not done yet", "") for name in planned if str(name) not in done]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sort trials by success rate, the highest first."""
    return sorted(rows, key=lambda row: -row.asr)


def unbounded(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List the defences without a known bound of the error, with the reason."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.words.has_prior and (reason := row.info.get("unbounded")):
            names.setdefault(str(reason), []).append(row.defence_name)
    return [(listing(dict.fromkeys(each)), reason) for reason, each in names.items()]


def trials_as_csv(rows: Sequence[Row], shown: Sequence[Column[Row]]) -> str:
    """Write the table as CSV."""
    return as_csv([{column.key: column.get(row) for column in shown} for row in rows], [c.key for c in shown])
