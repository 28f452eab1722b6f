"""Write `index.json` from the tables of attacks, defences, models and data: python -m gradveil.cli.make_index.

The command line shows the file, so that its help and `gradveil list` need no torch; a test compares it with the tables.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from gradveil.attacks.attack_catalogue import (
    ALL_ATTACKS,
    ATTACKS,
    KNOWN_BY_WORD,
    OF_NOISE,
    AttackEntry,
    known_as,
    noise_prior,
)
from gradveil.attacks.inversion.inversion import Inversion
from gradveil.audit.attack_selection import POSITIONS
from gradveil.audit.attackers.attacker_table import aimed_by
from gradveil.audit.gate import Accepted
from gradveil.audit.grants import told
from gradveil.audit.run_file import bundled, of_papers
from gradveil.cli.index import FILE, Row
from gradveil.core.errors import Problem
from gradveil.core.plugins import Plugin
from gradveil.core.settings import Argument, NamedEntry
from gradveil.data import DATASETS
from gradveil.defences import ALL_DEFENCES, DEFENCES, DefenceEntry
from gradveil.defences.paper_presets import PAPERS
from gradveil.federated.privacy_ledger import FOLDER
from gradveil.federated.training_config import TrainConfig
from gradveil.metrics import ALL_METRICS, METRICS, Metric
from gradveil.nn.models import ALL_MODELS, MODELS, ModelEntry
from gradveil.report.figures import KINDS
from gradveil.tune.ats_policies import FEWEST


def everything() -> dict[str, list[Row]]:
    """Make the rows of every kind."""
    return {
        "attacks": _attacks(),
        "defences": _defences(),
        "models": _models(),
        "data": _data(),
        "metrics": [_metric(name, entry) for name, entry in METRICS.items() if entry.of == "images"],
        "runs": _runs(),
        "papers": _papers(),
    }


def installed() -> tuple[dict[str, list[Row]], list[Problem]]:
    """Make the rows of names that installed packages add, and warn of those that cannot be used."""
    attacks, defences, models = ALL_ATTACKS.installed(), ALL_DEFENCES.installed(), ALL_MODELS.installed()
    metrics = ALL_METRICS.installed()
    rows = {
        "attacks": [_of_package(plugin, _row(plugin.name, entry, entry.arguments)) for plugin, entry in attacks[0]],
        "defences": [_of_package(plugin, _defence(plugin.name, entry)) for plugin, entry in defences[0]],
        "models": [_of_package(plugin, _model(plugin.name, entry)) for plugin, entry in models[0]],
        "metrics": [_of_package(plugin, _metric(plugin.name, entry)) for plugin, entry in metrics[0]],
    }
    return rows, [*attacks[1], *defences[1], *models[1], *metrics[1]]


def _of_package(plugin: Plugin, row: Row) -> Row:
    """Say which package a name is from."""
    return {**row, "description": f"{row['description']} (package {plugin.package})", "package": plugin.package}


def text() -> str:
    """Write the index: what is listed, words for how an attacker treats a secret, and what options may be."""
    options = {"accept": [each.value for each in Accepted], "images": FEWEST, "folder": FOLDER, "figures": _figures()}
    made = {"listed": everything(), "positions": POSITIONS, "options": options}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _attacks() -> list[Row]:
    made = {name: entry.make() for name, entry in ATTACKS.items()}
    return [
        {
            **_row(name, entry, _own(entry)),
            "simulated_client": made[name].simulated_client,
            "knowledge": told(made[name]),
        }
        for name, entry in ATTACKS.items()
    ]


def _own(entry: AttackEntry) -> Iterator[Argument]:
    """Give every setting the value that the preset has for it; leave out what its optimiser does not have."""
    attack = entry.make()
    descent = getattr(attack, "descent", None)
    for argument in entry.arguments:
        parts = (attack, descent, getattr(descent, "stepper", None), getattr(attack, "images", None))
        places = [place for place in parts if place is not None]
        values = [getattr(place, argument.name) for place in places if hasattr(place, argument.name)]
        if argument.default is not None:
            yield argument
        elif values:
            yield replace(argument, default=values[0])
        elif argument.name in KNOWN_BY_WORD and isinstance(attack, Inversion):
            yield replace(argument, default=known_as(attack, argument.name))
        elif argument.name in {each.name for each in OF_NOISE} and isinstance(attack, Inversion):
            yield replace(argument, default=noise_prior(attack, argument.name))


def _defences() -> list[Row]:
    return [_defence(name, entry) for name, entry in DEFENCES.items()]


def _defence(name: str, entry: DefenceEntry) -> Row:
    return {
        **_row(name, entry, entry.arguments),
        "changes": list(entry.changes),
        "cost": entry.cost,
        "guarantee": entry.guarantee,
        "traits": list(entry.traits),
        "adaptive": aimed_by("curious", entry),
        "malicious": aimed_by("malicious", entry),
    }


def _row(name: str, entry: NamedEntry, arguments: Any) -> Row:
    taken = tuple(arguments)
    return {
        "name": name,
        "description": entry.description,
        "citation": entry.citation,
        "usage": replace(entry, arguments=taken).signature(),
        "arguments": [argument.plain() for argument in taken],
    }


def _models() -> list[Row]:
    return [_model(name, entry) for name, entry in MODELS.items()]


def _model(name: str, entry: ModelEntry) -> Row:
    left_out = ("channels", "size", "classes", "generator")
    said = {key: value for key, value in entry.defaults.items() if value is not inspect.Parameter.empty}
    return {
        "name": name,
        "description": entry.description,
        "citation": entry.citation,
        "options": {key: value for key, value in said.items() if key not in left_out},
    }


def _data() -> list[Row]:
    return [{"name": n, "description": e.description, "citation": e.source} for n, e in DATASETS.items()]


def _metric(name: str, entry: Metric) -> Row:
    better = "higher" if entry.higher_is_better else "lower"
    legacy = "; of one program, not comparable with others" if entry.legacy else ""
    return {"name": name, "description": f"{entry.description}; {better} is closer{legacy}", "citation": ""}


def _runs() -> list[Row]:
    return [{"name": name, "description": _opening(text), "citation": ""} for name, text in bundled().items()]


def _opening(text: str) -> str:
    """Join the comment lines that open a run file: they describe it."""
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def _papers() -> list[Row]:
    runs = {"audit": of_papers(), "train": of_papers(TrainConfig)}
    return [
        {
            "name": name,
            "description": paper.title,
            "citation": paper.citation,
            "tables": {table: list(texts) for table, texts in paper.tables.items()},
            "runs": {
                f"gradveil {command} {run}": _opening(text)
                for command, texts in runs.items()
                for run, text in texts.items()
                if run.startswith(f"{name}/")
            },
        }
        for name, paper in PAPERS.items()
    ]


def _figures() -> dict[str, Row]:
    return {
        kind: {
            "title": entry.title,
            "metrics": list(dict.fromkeys([*entry.metrics, *entry.training_metrics])),
            "against": list(dict.fromkeys([*entry.against, *entry.training_against])),
        }
        for kind, entry in KINDS.items()
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
