"""The table of trials: its columns, how each is shown, and the same as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.audit.attack_check import examine
from gradveil.audit.attack_selection import ATTACKERS
from gradveil.audit.baselines import baseline, risk_of
from gradveil.audit.findings import hits
from gradveil.audit.result_rows import BASELINES, Row, TrialSetting
from gradveil.audit.run_warnings import proven
from gradveil.audit.verdict import LEVELS, price, verdicts
from gradveil.core.formatting import duration, listing, number, percent, size
from gradveil.report.pareto import mark, marks

Get = Callable[[Row], Any]
"""A row's value in a column."""
Show = Callable[[Any], str]
"""How a value is written."""


@dataclass(frozen=True)
class Column:
    """One column: the value that sorts and goes to the CSV, and how people see it."""

    key: str
    title: str
    meaning: str
    get: Get
    show: Show = str
    numeric: bool = True
    lacking: Callable[[Row], str | None] = lambda row: None
    """Why a row has no value, where that is known."""


def _text(key: str, title: str, meaning: str, get: Get) -> Column:
    return Column(key, title, meaning, get, lambda value: str(value), numeric=False)


def _info(key: str) -> Get:
    return lambda row: row.info.get(key)


def _sum(key: str) -> Get:
    return lambda row: row.summary.get(key)


def _statuses(row: Row) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(row.statuses.items()))


def _score(key: str, title: str, meaning: str) -> Column:
    return Column(key, title, meaning, lambda row: row.summary.get(f"{key}_mean", row.mean(key)), number)


def _guess(name: str) -> Column:
    title, meaning = BASELINES[name]
    return Column(name, title, f"share of images recovered by {meaning}", lambda row: row.control(name), percent)


TRAINED_ON = {"Recovered as trained on": "success_transformed", "Identified as trained on": "identified_transformed"}
"""Counts of what a batch defence made of the images and the client trained on: title and flag of an image's scores."""


def _hit(title: str, flag: str) -> Column:
    return Column(flag, title, f"images {title.lower()} by the client", lambda row: hits(row, flag), number)


COLUMNS: tuple[Column, ...] = (
    _text("defence", "Defence", "what the client does to its update", lambda row: row.defence or "none"),
    _text("attack", "Attack", "the attack that was run", _info("attack")),
    _text("attacker", "Attacker", "what they know of the defence", lambda row: ATTACKERS[row.attacker][0]),
    Column("asr", "Share recovered", "share of images with an SSIM above the threshold", lambda row: row.asr, percent),
    Column("asr_low", "CI low", "lower end of the 95% Wilson interval", lambda row: row.bounds[0], percent),
    Column("asr_high", "CI high", "upper end of the 95% Wilson interval", lambda row: row.bounds[1], percent),
    Column("recovered", "Recovered", "images recovered", lambda row: row.recovered, number),
    Column("identifiable", "Identifiable", "images recovered and identified", lambda row: row.identifiable, number),
    *(_hit(title, flag) for title, flag in TRAINED_ON.items()),
    Column("baseline", "Baseline", "share of identifiable images expected of the best guess", baseline, percent),
    Column("risk", "Risk", "rate beyond baseline and mismatch control", lambda row: risk_of(row).value, percent),
    Column("images", "Images", "images attacked", lambda row: row.images, number),
    Column("target_clients", "TargetClients", "clients attacked", lambda row: len(row.trial.records), number),
    *(_guess(name) for name in BASELINES),
    Column(
        "wrong_target_client",
        "Mismatch control",
        "share recovered when reconstructions are scored against another client's image",
        lambda row: row.control("wrong_target_client"),
        percent,
    ),
    _score("ssim", "SSIM", "structural similarity, mean"),
    Column("ssim_max", "SSIM max", "highest of all images", lambda row: max(row.ssims, default=None), number),
    Column("ssim_min", "SSIM min", "lowest of all images", lambda row: min(row.ssims, default=None), number),
    Column(
        "ssim_transformed",
        "SSIM trained on",
        "structural similarity to what a batch defence made of the images, mean",
        lambda row: row.mean("ssim_transformed"),
        number,
    ),
    _score("psnr", "PSNR", "peak signal-to-noise ratio in dB, mean"),
    _score("mse", "MSE", "mean squared error of pixels in [0, 1], mean"),
    Column(
        "mse_bound",
        "MSE bound",
        "below it nobody's mean error lies, for images drawn from the prior",
        _sum("mse_bound"),
        number,
        lacking=lambda row: row.info.get("unbounded"),
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
        "how much a small step along what was sent lowers the loss, as a share of an undefended one's",
        _info("first_order_utility"),
        percent,
    ),
    Column(
        "second_order_utility",
        "2nd utility",
        "minus the square of that: the lower, the more noise varies the step; -1 undefended",
        _info("second_order_utility"),
        number,
    ),
    Column("gamma_1", "gamma_1", "share of the update's energy that pruning left out", _sum("gamma_1"), number),
    Column(
        "cosine_worst",
        "Perfect match",
        "cosine distance from the raw gradient of one that equals what was sent; of pruning alone",
        _sum("cosine_worst"),
        number,
    ),
    Column(
        "cosine_promised",
        "Promised",
        "the same as the paper's Theorem 1 has it, sqrt(gamma_1)",
        _sum("cosine_promised"),
        number,
    ),
    _text("proven", "Proven", "epsilon, where the run tells of its training", lambda row: proven(row.info)),
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
        "median objective of the true images: what the attack had to reach",
        lambda row: row.health("objective_truth"),
        number,
    ),
    Column("diverged", "Diverged", "share of runs that diverged", lambda row: row.health("diverged"), percent),
    _text("statuses", "Statuses", "how the target clients' runs ended", _statuses),
    Column(
        "restarts", "Restarts", "runs per target client; the attacker's objective chooses", _info("restarts"), number
    ),
    Column("seconds", "Time", "working time of the attack, summed over processes", _sum("seconds"), duration),
    Column(
        "iterations_per_second",
        "it/s",
        "iterations a second of working time, all runs",
        _info("iterations_per_second"),
        number,
    ),
    Column("seed", "Seed", "seed of the run", lambda row: row.seed),
    _text("model", "Model", "the model that is trained", _info("model")),
    _text("data", "Data", "where the target clients come from", _info("data")),
    Column("round", "Round", "federated round", lambda row: row.setting.round),
    Column("trained", "Trained", "rounds of training before the attack", lambda row: row.setting.trained),
    Column("accuracy", "Accuracy", "share of test images named rightly then", _sum("accuracy"), percent),
    Column("final_accuracy", "At the end", "the same at the end of the training", _sum("final_accuracy"), percent),
    Column("round_bytes_up", "Sent a round", "bytes that all clients send in a round", _sum("round_bytes_up"), size),
    Column("round_bytes_down", "Received a round", "bytes the server sends", _sum("round_bytes_down"), size),
    Column("round_seconds", "A round takes", "seconds of work", _sum("round_seconds"), duration),
    Column("client_seconds", "An update takes", "seconds of one client's work", _sum("client_seconds"), number),
    _text("client", "Client", "what the update is", _info("client")),
    Column("batch", "Batch", "images a client", lambda row: row.setting.batch),
    Column("params", "Parameters", "parameters of the model", _info("params"), number),
    _text("trial", "Trial", "folder of the trial in the run directory", _info("trial")),
)
"""Every column, in the order shown."""

_OPTIONAL = {"lpips", "mse_bound", "objective_truth", "identified", "iterations_per_second", "restarts", "params"}
_OPTIONAL |= {"first_order_utility", "second_order_utility", "gamma_1", "cosine_worst", "cosine_promised"}
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
"""Said of rates that need not be the defence's doing."""


@dataclass(frozen=True)
class TableCell:
    """One trial of the table."""

    sort: str
    text: str
    flag: str = ""
    why: str = ""
    """Why there is no value."""


def columns(rows: Sequence[Row]) -> list[Column]:
    """Choose the columns: all, without the optional ones that hold nothing."""
    compared = Column(
        "bytes_share",
        "of undefended",
        "bytes sent as a share of what the same client sends without a defence",
        lambda row: price(row, rows).share,
        percent,
    )
    check = "whether a low rate can be blamed on the defence"
    health = _text("attack_check", "Attack check", check, lambda row: examine(row, rows).label)
    judged = {(verdict.setting, verdict.defence): LEVELS[verdict.level][0] for verdict in verdicts(rows)}
    level = _text("verdict", "Verdict", "the verdict on the defence", lambda row: _level(row, judged))
    fronts = marks(rows)
    front = _text("pareto", "Front", "the Pareto fronts that the defence is on", lambda row: mark(row, fronts))
    after = {"attack": level, "bytes_sent": compared, "asr_high": health} | (
        {"client_seconds": front} if fronts else {}
    )
    found: list[Column] = []
    for column in COLUMNS:
        told = any(column.get(row) is not None or column.lacking(row) for row in rows)
        if told or column.key not in _OPTIONAL:
            found += [column, after[column.key]] if column.key in after else [column]
    return found


def _level(row: Row, judged: Mapping[tuple[TrialSetting, str], str]) -> str:
    return "control" if row.is_control else judged[row.setting, row.defence]


def body(rows: Sequence[Row], shown: Sequence[Column]) -> list[list[TableCell]]:
    """Build the rows, highest success rate first."""
    ordered = sorted(rows, key=lambda row: -row.asr)
    return [[_entry(row, column, rows) for column in shown] for row in ordered]


def _entry(row: Row, column: Column, rows: Sequence[Row]) -> TableCell:
    value = column.get(row)
    if value is None:
        return TableCell("", "–", why=column.lacking(row) or "")
    flag = DOUBT if column.key == "asr" and examine(row, rows).doubts else ""
    return TableCell(repr(float(value)) if column.numeric else str(value), column.show(value), flag)


def unbounded(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Say of which defences no bound of the error is known, and why."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if why := row.info.get("unbounded"):
            found.setdefault(str(why), []).append(row.defence_name)
    return [(listing(dict.fromkeys(names)), why) for why, names in found.items()]


def as_csv(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    """Write the same table as CSV, unrounded.

    Text that a spreadsheet would take for a formula gets an apostrophe.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.key for column in shown])
    for row in rows:
        writer.writerow([disarmed(column.get(row)) for column in shown])
    return out.getvalue()


def disarmed(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would run as a formula; None becomes empty."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return "" if value is None else value
