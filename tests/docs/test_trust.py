"""The page on trust names options that exist, keys that are obeyed, and code that runs."""

import inspect
import re
import sys
from pathlib import Path

from flwr.cli.run import run
from flwr.superlink.cli import flower_superlink
from flwr.supernode.cli import flower_supernode

from gradveil.integrations.flower import node_policy
from tests.docs.test_pages import DOCS, execute

TEXT = (DOCS / "explanation/trust.md").read_text("utf-8")
OPTIONS = {
    "flower-supernode": (
        "--trusted-entities",
        "--root-certificates",
        "--insecure",
        "--allow-runtime-dependency-installation",
        "--isolation",
        "--node-config",
        "--auth-supernode-private-key",
        "--superlink",
    ),
    "flower-superlink": ("--enable-supernode-auth",),
    "flwr": ("--run-config",),
}


def test_options_of_the_page_are_options_of_flower():
    helps = {
        "flower-supernode": sys.modules[flower_supernode.__module__]._parse_args_run_supernode().format_help(),
        "flower-superlink": sys.modules[flower_superlink.__module__]._parse_args_run_superlink().format_help(),
        "flwr": Path(inspect.getsourcefile(run)).read_text("utf-8"),
    }
    missing = [(program, name) for program, names in OPTIONS.items() for name in names if name not in helps[program]]
    assert missing == []


def test_every_option_of_the_page_is_checked():
    assert set(re.findall(r"--[a-z][a-z-]+", TEXT)) == {option for options in OPTIONS.values() for option in options}


def test_keys_of_the_page_are_the_ones_that_are_obeyed():
    assert set(re.findall(r"gradveil-[a-z]+", TEXT)) == node_policy._KNOWN


def test_the_server_of_the_page_is_one():
    bounds = execute("explanation/trust.md")["strategy"].bounds
    assert (bounds.max_norm, bounds.max_examples, bounds.statistics) == (10.0, 5000, "refuse")
