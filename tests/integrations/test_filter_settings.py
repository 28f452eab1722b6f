"""The privacy filters of project files are read, and their real epsilon is computed."""

import json

import pytest

from gradveil.cli.app import run
from gradveil.core.errors import GradveilError
from gradveil.defences import parse
from gradveil.integrations.filter_settings import judge, read_filters


def nvflare(kind="SVTPrivacy", **arguments):
    """Settings of an NVFlare client with one filter."""
    path = f"nvflare.app_common.filters.{kind.lower()}.{kind}"
    chosen = {"tasks": ["train"], "filters": [{"path": path, "args": arguments}]}
    return json.dumps({"format_version": 2, "executors": [], "task_result_filters": [chosen]})


CONF = """
format_version = 2  # a comment
task_result_filters = [
  {
    tasks = ["train"]
    filters = [{ path = nvflare.app_common.filters.PercentilePrivacy, args { percentile = 20, gamma = 0.02 } }]
  }
]
"""
FLOWER = """
[tool.flwr.app.config]
num-server-rounds = 100
dp-clipping-norm = 1.0
dp-sensitivity = 1.0
dp-epsilon = 1.0
dp-delta = 1e-5
"""


def judged(tmp_path, text, name="config_fed_client.json", parameters=7_033_300, rounds=1):
    (tmp_path / name).write_text(text)
    (settings,) = read_filters(tmp_path / name)
    return judge(settings, parameters, rounds)


def test_sparse_vector_costs_the_values_too(tmp_path):
    result = judged(tmp_path, nvflare(), rounds=100)
    assert result.filter.where == "task_result_filters[0].filters[0]"
    assert result.line.endswith("SVTPrivacy: epsilon 70,333 a round, 7,033,310 over 100 rounds")
    assert "703,330 values" in result.problems[0].what
    parse(result.defence)
    released = judged(tmp_path, nvflare(epsilon_release=1.0), parameters=1000)
    assert released.epsilon == pytest.approx(1.1)
    assert "noise_var=0.01," in released.defence  # the noise of 100 values that share an epsilon of 1


def test_sparse_vector_counts_the_budgets_of_its_selection(tmp_path):
    explicit = judged(tmp_path, nvflare(epsilon_threshold=5.0, epsilon_query=50.0, epsilon_release=1.0))
    assert explicit.epsilon == pytest.approx(56)
    older = judged(tmp_path, nvflare(noise_var=1e-9), parameters=100_000).problems[-1]
    assert "epsilon 36.9" in older.what  # (0.1 + 0.1 * 20,000^(2/3)) / 2


@pytest.mark.parametrize(
    ("old", "new", "guaranteed"),
    [("task_result_filters", "task_data_filters", False), ('["train"]', '["submit_model"]', True)],
)
def test_filter_beside_the_updates_is_reported(tmp_path, old, new, guaranteed):
    result = judged(tmp_path, nvflare().replace(old, new))
    assert (result.epsilon is not None) == guaranteed
    assert result.problems[0].what.startswith("filters ")


def test_other_settings_that_end_alike_are_not_the_mods(tmp_path):
    others = "adam-epsilon = 1e-8\nearly-stop-min-delta = 0.1\n"
    assert judged(tmp_path, FLOWER + others, "pyproject.toml").epsilon == pytest.approx(1.6, abs=0.1)
    with pytest.raises(GradveilError, match="adam-epsilon"):
        judged(tmp_path, FLOWER.replace("dp-delta", "delta") + others, "pyproject.toml")


def test_hocon_and_percentile_have_no_epsilon(tmp_path):
    result = judged(tmp_path, CONF, "config_fed_client.conf")
    assert result.epsilon is None
    assert result.defence == "percentile(percentile=20, gamma=0.02)"
    assert parse(result.defence).send


def test_local_dp_is_accounted_for_the_change_of_a_clipped_update(tmp_path):
    result = judged(tmp_path, FLOWER, "pyproject.toml", rounds=100)
    assert result.filter.where == "tool.flwr.app.config"
    assert result.epsilon is not None
    assert result.over is not None
    assert 1.5 < result.epsilon < 3 < result.over
    assert [problem.what.partition(" ")[0] for problem in result.problems] == ["sensitivity", "epsilon", "over"]
    enough = judged(tmp_path, FLOWER.replace("sensitivity = 1.0", "sensitivity = 2.0"), "pyproject.toml")
    assert enough.epsilon is not None
    assert enough.epsilon < 1
    parse(result.defence)


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("{}", "config_fed_client.json", "has no privacy filter"),
        ("{ [", "config_fed_client.json", "cannot be read"),
        ("a = [", "pyproject.toml", "cannot be read"),
    ],
)
def test_files_without_filters_are_refused(tmp_path, text, name, key):
    (tmp_path / name).write_text(text)
    with pytest.raises(GradveilError, match=key):
        read_filters(tmp_path / name)


def test_class_of_the_project_has_no_epsilon_that_is_known(tmp_path):
    result = judged(tmp_path, nvflare().replace("nvflare.app_common", "mine"))
    assert result.epsilon is None
    assert "mine.filters" in result.problems[0].what


@pytest.mark.parametrize("before", ["[{}]", '{{"sites": [{}]}}'])
def test_filter_of_what_is_received_has_no_epsilon_wherever_it_stands(tmp_path, before):
    result = judged(tmp_path, before.format(nvflare().replace("task_result", "task_data")))
    assert result.epsilon is None


def test_large_delta_is_warned_of(tmp_path):
    result = judged(tmp_path, FLOWER.replace("1e-5", "0.5"), "pyproject.toml")
    assert any(problem.what.startswith("delta = 0.5") for problem in result.problems)


WRONG = [{"epsilon": 0}, {"fraction": 2}, {"gamma": "much"}, {"epsilon": float("inf")}]
WRONG += [{"epsilon_release": "1"}, {"epsilon_query": -1.0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_arguments_are_errors_with_their_place(tmp_path, wrong):
    problems = judged(tmp_path, nvflare(**wrong)).problems
    assert [problem.where.rpartition(".")[2] for problem in problems] == [*wrong]
    assert {problem.severity for problem in problems} == {"error"}
    assert judged(tmp_path, nvflare("PercentilePrivacy", gamma="much")).defence == ""


def test_command_prints_epsilon_problem_and_remedy(tmp_path, capsys):
    path = tmp_path / "config_fed_client.json"
    path.write_text(nvflare())
    assert run(["check", "--filters", str(path)]) == 2
    assert "--parameters" in capsys.readouterr().err
    assert run(["check", "--filters", str(path), "--parameters", "7033300", "--rounds", "10"]) == 0
    out = capsys.readouterr().out
    assert "epsilon 70,333 a round, 703,331 over 10 rounds" in out
    assert "    -> " in out
    assert run(["check", "--filters", str(path), "--parameters", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["filter"] == "SVTPrivacy"
