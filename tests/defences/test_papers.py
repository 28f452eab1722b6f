"""Presets by paper: every text can be read, and a table's name stands for its defences."""

from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from torch import nn

from gradveil.audit.run_file import assemble
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.paper_presets import PAPERS, spelled_out
from gradveil.theory.accounting import Participation, epsilon
from tests.audit.runs import config, settings
from tests.laws.cases import CLIENTS, Tiny, draw

TABLES = [(key, table) for key, paper in PAPERS.items() for table in paper.tables]


@pytest.mark.parametrize(("key", "table"), TABLES)
def test_paper_defences_parse(key: str, table: str):
    names = [parse(text).name for text in PAPERS[key].tables[table]]
    assert len(set(names)) == len(names) >= 1
    assert "none" not in names


@pytest.mark.parametrize(("key", "table"), TABLES)
def test_paper_defences_change_the_update(key: str, table: str):
    plain = CLIENTS["sgd"]
    if (key, table) == ("provable-defense", "published-code"):  # whose percentile is above nothing if features are < 0
        plain = replace(
            plain, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Sigmoid(), nn.Linear(9, 3)).double()
        )
    params, batch, noise, _ = draw(plain)
    undefended = plain.update(params, batch, noise, {})[0]
    for text in PAPERS[key].tables[table]:
        sent = parse(text)(plain)
        update = sent.update(*draw(sent))[0]
        assert all(value.isfinite().all() for value in update.values())
        assert any(name not in undefended or not update[name].equal(undefended[name]) for name in update)


PUBLISHED = {
    "generic-model-extension/main": {"k": 256, "beta": 1e-3},
    "key-lock/main": {"width": 1024},
    "key-lock/training": {"width": 1024, "act": "relu"},
    "provable-defense/published-code": {"percentile": 1, "delta": 0.1, "variant": "published_code"},
    "adaptive-defenses/main": {"scale": 0.8, "prune": 80, "phi": 40, "beta": 0.125},
    "deep-gradient-compression/warm-up": {"keep": 0.001, "momentum": 0.9, "warmup": 5},
    "deep-gradient-compression/no-warm-up": {"keep": 0.001, "momentum": 0.9, "warmup": 0},
    "unbiased-sampling/main": {"ratio": 0.95},
    "instance-hiding/inside": {"k": 4, "cap": 0.65, "mix": "own"},
    "instance-hiding/cross": {"k": 6, "cap": 0.65, "mix": "public", "least": 0.3},
}


@pytest.mark.parametrize("table", PUBLISHED)
def test_paper_settings_are_the_published_ones(table: str):
    (text,) = spelled_out([table])
    defence = parse(text)
    parts = [
        *defence.model,
        *defence.batch,
        *(each for slot in (defence.step, defence.send) if slot for _, each in slot),
    ]
    assert len(parts) == 1
    assert {name: getattr(parts[0], name) for name in PUBLISHED[table]} == PUBLISHED[table]


def test_paper_fed_cdp_clips_at_4_with_noise_24():
    (text,) = spelled_out(["gradient-leakage-resilient/main"])
    stages = dict(parse(text).step)
    assert (stages["clip"].norm, stages["clip"].scope, stages["clip"].per_example) == (4, "layer", True)
    assert stages["noise"].std == 6 * 4


def test_paper_aligned_pruning_noise_has_its_epsilon():
    pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")
    (text,) = (text for text in PAPERS["aligned-dual-gradient-pruning"].tables["comparison"] if "dp" in text[:7])
    stages = dict(parse(text).send)
    assert epsilon(stages["noise"].std / stages["clip"].norm, Participation(1, delta=1e-5)) == pytest.approx(
        10.7, abs=0.05
    )


def test_paper_dgp_removes_the_published_share():
    shares = [parse(text).send.stages[0][1].inner for text in PAPERS["dual-gradient-pruning"].tables["ablation"]]
    assert [round(each.top + each.bottom, 9) for each in shares] == [0.48] * 3 + [0.8] * 3 + [0.96] * 3
    assert [round(each.bottom / each.top, 6) for each in shares] == [15, 7, 3] * 3


def test_paper_noises_have_one_scale():
    """What both add to the mean of 16 images has the same root mean square: normals of 1 show the deviations."""
    generator = Key(0, ("sixteen",)).generator()
    inputs = torch.randn(16, *Tiny.input_shape, generator=generator, dtype=torch.float64)
    batch = Batch(inputs, torch.randint(0, 3, (16,), generator=generator))

    def added(text: str) -> float:
        client = parse(text)(CLIENTS["gradient"])
        params = client.params()
        noise = client.noise_spec(params, batch).sample(Key(1))
        shown = [
            client.update(params, batch, {n: v if "probe" in n else v * 0 + one for n, v in noise.items()}, {})[0]
            for one in (1.0, 0.0)
        ]
        return float(torch.cat([(a - shown[1][name]).flatten() for name, a in shown[0].items()]).square().mean().sqrt())

    texts = PAPERS["optimal-defenses"].tables["noise"]
    scales = [added(text) for text in texts]
    assert scales == pytest.approx([scale for scale in (2e-3, 5e-3, 2e-2, 5e-2) for _ in range(2)], rel=1e-6)


def test_run_file_accepts_a_paper_table():
    run = assemble(settings(defences=["none", "Gradient-Stand-In/optimisers", "standin"]), ["target_clients=1"])
    assert run.defences == ["none", "standin", "standin(optimiser=adagrad)", "standin(optimiser=yogi)"]
    assert config(defences=["none"]).defences == ["none"]


def test_unknown_paper_table_suggests_the_nearest():
    with pytest.raises(GradveilError) as message:
        spelled_out(["none", "dual-gradient-pruning/ablations", "nobody/nothing"])
    assert [problem.where for problem in message.value.problems] == ["defences[1]", "defences[2]"]
    assert "did you mean 'dual-gradient-pruning/ablation'?" in str(message.value)


def test_papers_have_the_names_of_their_folders():
    entries = (files("gradveil") / "papers").iterdir()
    folders = {path.name for path in entries if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(PAPERS)
    studied = {"combining-stochastic-defenses", "convolutional-variational-bottlenecks", "optimal-defenses"}
    assert studied | {"dual-gradient-pruning", "aligned-dual-gradient-pruning", "gradient-stand-in"} <= folders
