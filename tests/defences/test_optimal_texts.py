"""Optimal defences and Soteria on texts: their derivatives are by the word embeddings, since tokens have none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from gradveil.audit.audit_config import RunConfig
from gradveil.audit.preflight import open_experiment
from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.tree import Tensors
from gradveil.core.types import Batch
from gradveil.defences import parse
from gradveil.defences.feature_hiding import Soteria
from gradveil.gradients.input_sensitivity import example_squared_row_norms
from gradveil.gradients.objective import last_inputs, mean_gradient, usual_loss
from gradveil.nn import prepare
from gradveil.nn.models import build
from gradveil.nn.models.own_text import OwnText
from gradveil.nn.token_layout import TokenModel, perturbation_of
from gradveil.theory.input_jacobian import squared_row_norms
from tests.audit.runs import execute
from tests.nn.own_text_models import Convolution, Recurrent, Transformer

WORDS, LENGTH = 16, 4
PADDING = 0
BATCH = Batch(torch.tensor([[3, 5, 7, 9], [2, 4, 6, PADDING]]), torch.tensor([0, 1]))
"""No word twice: then a word's row of the table is the embedding of its one token."""


def model_named(name: str) -> Any:
    torch.manual_seed(0)
    if name == "hf:bert":
        pytest.importorskip("transformers")
        options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        facts = {"vocabulary": WORDS, "length": LENGTH, "padding": PADDING}
        return build(name, classes=2, generator=Key(0).generator(), example=facts, **options).double()
    if name in ("small-encoder", "small-decoder"):
        facts = {"vocabulary": WORDS, "length": LENGTH, "padding": PADDING}
        small = {"width": 8, "depth": 1, "heads": 2, "std": 0.5}
        return build(name, classes=2, generator=Key(0).generator(), example=facts, **small).double()
    own = {"convolution": Convolution, "recurrent": Recurrent, "transformer": Transformer}[name]
    read = OwnText(own(WORDS, LENGTH), BATCH.inputs[:1])
    made = read if name == "transformer" else prepare(read, batch=BATCH)[0]
    assert isinstance(made, TokenModel)
    return made.double()


def by_rows_of_the_table(model: TokenModel, batch: Batch) -> Tensors:
    """The squared row norms by definition, by derivatives for the table: another way to the same embeddings."""
    client, table = Client(model, usual_loss(model)), f"{model.layout.words}.weight"
    params = client.params()

    def gradient(rows: Tensor) -> Tensors:
        return mean_gradient(client.objective, {**params, table: rows}, {}, batch, {})

    each = jacrev(gradient)(params[table])
    words = batch.inputs[batch.inputs != PADDING]
    return {name: value[..., words, :].square().sum((-1, -2)) for name, value in each.items()}  # pyright: ignore


@pytest.mark.parametrize("name", ["small-encoder", "small-decoder", "convolution", "recurrent", "hf:bert"])
def test_row_norms_of_texts_are_those_by_the_embeddings_of_their_words(name):
    model = model_named(name)
    client, perturbation = Client(model, usual_loss(model)), perturbation_of(model)
    params = client.params()
    zeros = perturbation.zeros(BATCH.inputs).double()
    entries = zeros.numel()
    directions = entries**0.5 * torch.eye(entries).double().reshape(entries, *zeros.shape)
    squares = squared_row_norms(
        lambda batch: mean_gradient(client.objective, params, {}, batch, {}), BATCH, directions, 16, perturbation
    )
    expected = by_rows_of_the_table(model, BATCH)
    assert squares.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(squares[key], value, rtol=1e-8, atol=1e-14)
    assert all(bool(value.any()) for key, value in squares.items() if key.endswith("attention.value.weight"))


@pytest.mark.parametrize("name", ["small-encoder", "convolution"])
def test_directions_of_single_texts_find_the_same_row_norms(name):
    model = model_named(name)
    client, batch = Client(model, usual_loss(model)), Batch(BATCH.inputs[:1], BATCH.targets[:1])
    entries = perturbation_of(model).zeros(batch.inputs).numel()
    directions = entries**0.5 * torch.eye(entries).double().reshape(entries, LENGTH, -1)
    offset = torch.tensor(0.5).double()
    squares = example_squared_row_norms(client.objective, client.params(), {}, batch, {}, directions, offset)
    for key, value in by_rows_of_the_table(model, batch).items():
        torch.testing.assert_close(squares[key], value, rtol=1e-8, atol=1e-14)


def test_features_of_soteria_are_differentiated_by_the_embeddings():
    model = model_named("small-encoder")
    client = Client(model)
    table, params = f"{model.layout.words}.weight", client.params()

    def features(rows: Tensor) -> Tensor:
        return last_inputs(client.objective, {**params, table: rows}, BATCH, {}).values

    slopes = jacrev(features)(params[table])
    assert isinstance(slopes, Tensor)
    own = torch.stack([slopes[i][:, ids[ids != PADDING]].flatten(1).norm(dim=1) for i, ids in enumerate(BATCH.inputs)])
    expected = (own / (features(params[table]).abs() + 0.1)).sum(0)
    context = client.pipeline.gradient.context(params, BATCH, {})
    torch.testing.assert_close(Soteria().relevance(context)[1], expected)


def test_directions_are_as_wide_as_the_embeddings():
    client = parse("optimal-noise(0.1, probes=3)")(Client(model_named("small-encoder")))
    assert client.noise_spec(client.params(), BATCH)["send.noise.probe"].shape == (3, 2, LENGTH, 8)


def test_a_perturbation_ends_with_its_context():
    model = model_named("small-encoder")
    perturbation = perturbation_of(model)
    before = model(BATCH.inputs)
    with perturbation.added(BATCH, torch.eye(LENGTH, 8).expand(2, -1, -1).double()) as batch:
        assert not torch.allclose(model(batch.inputs), before)
    assert torch.equal(model(BATCH.inputs), before)
    assert type(perturbation_of(nn.Linear(2, 2))).__name__ == "InputPerturbation"


@pytest.mark.parametrize("attack", ["span", "span-rank"])
def test_texts_are_attacked_behind_defences_that_look_at_derivatives(attack, tmp_path):
    settings = {
        "name": "texts",
        "data": {"name": "reviews", "tokens": 8, "public": 24, "gallery": 6},
        "model": {"name": "small-encoder", "options": {"width": 32, "depth": 1}},
        "target_clients": 2,
        "control": False,
    }
    defences = [
        "optimal-noise(std=1e-3)",
        "optimal-noise(std=1e-3, of=example, probes=4)",
        "optimal-noise(std=1e-3, form=global, batches=2)",
        "optimal-prune(0.5)",
        "soteria",
    ]
    recorded, _ = execute(RunConfig(**settings, attacks=[attack], defences=defences), tmp_path / "run")
    assert [trial.failed for trial in recorded.trials] == [None] * len(defences)


def test_a_model_that_cannot_be_differentiated_so_is_refused_before_the_run():
    model = {"name": "tests.nn.own_text_models:Transformer"}
    data = {"name": "reviews", "tokens": 8, "public": 24, "gallery": 6}
    settings = {"name": "texts", "data": data, "target_clients": 1, "attacks": ["embedding-rows"], "model": model}
    with pytest.raises(GradveilError) as caught:
        open_experiment(RunConfig(**settings, defences=["optimal-prune(0.5)"]))
    (problem,) = caught.value.problems
    assert problem.where == "defences[0] 'optimal-prune(0.5)', client"
    assert "by the word embeddings, which fails" in problem.what
    assert "model.prepare=true" in problem.remedy
    open_experiment(RunConfig(**settings, defences=["soteria"]))
    settings["model"] = model | {"prepare": True}
    open_experiment(RunConfig(**settings, defences=["optimal-prune(0.5)"]))
