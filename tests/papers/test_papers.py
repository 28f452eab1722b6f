"""Every paper's runs can be read, and have the paper's settings."""

from pathlib import Path

import pytest
import torch

from gradveil.attacks.attack_catalogue import make_attack
from gradveil.audit.run_file import read, read_training
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.paper_presets import PAPERS
from gradveil.nn.models import build
from gradveil.nn.stochastic_layers import KL_VARIANTS
from gradveil.papers import find_study

PAPERS_FOLDER = Path(__file__).parents[2] / "src/gradveil/papers"


@pytest.mark.parametrize(
    "run", sorted(PAPERS_FOLDER.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_run_files_are_sound_and_explained(run):
    config = read_training(str(run)) if run.stem.startswith("train-") else read(str(run))
    assert config.defences
    assert f"`{run.name}`" in (run.parent / "README.md").read_text("utf-8")


def test_optimal_defences_have_the_papers_own_settings():
    folder = PAPERS_FOLDER / "optimal-defenses"
    for name, batch, iterations, parameters in (("mnist", 16, 2000, 119_530), ("cifar10", 2, 1000, 2_904_970)):
        config = read(str(folder / f"{name}.toml"))
        (attack,) = (make_attack(text) for text in config.attacks)
        stepper = attack.descent.stepper
        assert (stepper.lr, stepper.sign, attack.tv, attack.labels) == (0.2, "signed", 1e-6, "given")
        assert (config.iterations, config.client[0].batch) == (iterations, batch)
        sizes = {"channels": 1 if name == "mnist" else 3, "size": config.data.size, "classes": 10}
        model = build(config.model.name, **sizes, generator=Key(0).generator(), **config.model.options)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        assert any("LeakyReLU" in type(module).__name__ for module in model.modules())
    assert read(str(folder / "mnist.toml")).images_needed == 64
    assert read(str(folder / "cifar10.toml")).images_needed == 8
    training = read_training(str(folder / "train-published.toml"))
    assert (training.clients, training.batch, training.data.public) == (4, 16, 4096)
    assert (training.server.optimiser, training.server.lr) == ("adam", 1e-3)
    assert training.rounds * training.clients * training.batch == 3 * training.data.public


@pytest.mark.parametrize(("network", "parameters", "left"), [("cnn", 65_962, 660), ("vit", 1_609_216, 16_092)])
def test_combined_defences_leave_as_many_entries_as_the_paper_prints(network: str, parameters: int, left: int):
    settings = find_study("combining-stochastic-defenses").content.runs[f"cifar10-{network}"].settings
    model = build(settings["model"]["name"], channels=3, size=32, classes=10, generator=Key(0).generator())
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    client = parse("prune(0.99)")(Client(model))
    batch = Batch(torch.rand(1, 3, 32, 32, generator=Key(1).generator()), torch.zeros(1, dtype=torch.long))
    sent, _ = client.update(client.params(), batch, {}, client.init(client.params()))
    assert round(0.01 * parameters) == left
    assert left <= sum(int((value != 0).sum()) for value in sent.values()) <= left + len(sent)


def test_combined_defences_are_all_combinations():
    ablation, networks = (PAPERS["combining-stochastic-defenses"].tables[name] for name in ("ablation", "networks"))
    assert len({parse(text).name for text in ablation}) == len(ablation) == 23
    assert set(networks) < set(ablation)
    for run in ("ablation", "train-mnist"):
        file = PAPERS_FOLDER / "combining-stochastic-defenses" / f"{run}.toml"
        config = read_training(str(file)) if run.startswith("train") else read(str(file))
        assert [parse(text).name for text in config.defences] == [parse(text).name for text in ("none", *ablation)]


def pace(config):
    return [(entry.after / config.rounds, entry.times) for entry in config.pace]


@pytest.mark.parametrize("folder", ["dual-gradient-pruning", "aligned-dual-gradient-pruning"])
def test_dual_pruning_is_trained_with_the_papers_step_sizes(folder: str):
    config = read_training(str(PAPERS_FOLDER / folder / "train-cifar10.toml"))
    assert pace(config) == [(0.5, pytest.approx(0.01 / 0.1)), (0.7, pytest.approx(0.05 / 0.1))]
    assert (config.clients, config.partition.kind, config.server.lr) == (10, "iid", 0.1)
    assert config.rounds * config.clients * config.batch == 100 * 50_000, "a hundred epochs of CIFAR-10"


def test_the_stand_in_is_trained_as_in_the_paper():
    config = read_training(str(PAPERS_FOLDER / "gradient-stand-in" / "train-cifar10.toml"))
    assert (config.clients, config.rounds) == (3, 200)
    assert pace(config) == [(66 / 200, 0.1), (132 / 200, 0.01)]
    expected = {"lr": 0.01, "batch": 64, "epochs": 1, "optimiser": "sgd", "momentum": 0.9}
    expected |= {"nesterov": True, "weight_decay": 1e-4}
    assert config.local.model_dump().items() >= expected.items()


@pytest.mark.parametrize(
    ("name", "kernel", "beta", "tv"), [("cnn", 5, 0.1, 0.1), ("resnet18", 5, 5e-5, 0.1), ("vit", 3, 0.1, 1e-4)]
)
def test_bottlenecks_are_those_that_the_models_declare(name: str, kernel: int, beta: float, tv: float):
    config = read(str(PAPERS_FOLDER / "convolutional-variational-bottlenecks" / f"{name}.toml"))
    model = build(config.model.name, channels=3, size=32, classes=10, generator=Key(0).generator())
    assert (model.cvb_kernel, model.cvb_beta) == (kernel, beta)
    own = [parse(text).model[0] for text in config.defences[1:]]
    assert [(each.kernel, each.beta, each.kl) for each in own] == [(kernel, beta, kl) for kl in KL_VARIANTS]
    assert all(make_attack(text).tv == tv for text in config.attacks)
