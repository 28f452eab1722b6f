"""Run files of texts: models of transformers bring their tokenizer, and language models their loss."""

import pytest

from gradveil.audit.audit_config import RunConfig
from gradveil.audit.findings import findings_of
from gradveil.audit.preflight import open_experiment
from gradveil.core.errors import GradveilError
from gradveil.federated.training_config import TrainConfig
from gradveil.federated.training_setup import open_setting
from gradveil.nn.token_layout import own_loss
from tests.audit.runs import execute

RUN = {"name": "texts", "attacks": ["span"]}
TRAINING = {"name": "texts", "rounds": 1}


@pytest.mark.parametrize(("config", "raw"), [(RunConfig, RUN), (TrainConfig, TRAINING)])
@pytest.mark.parametrize(
    ("model", "data", "tokenizer"),
    [
        ("hf:minilm", {"name": "reviews"}, "hf:minilm"),
        ("hf:minilm", {"name": "reviews", "tokenizer": "other"}, "other"),
        ("hf:bert", {"name": "reviews"}, None),
        ("hf:minilm", {"name": "digits"}, None),
        ("small-encoder", {"name": "reviews"}, None),
    ],
)
def test_a_model_with_a_tokenizer_brings_it(config, raw, model, data, tokenizer):
    assert config(**raw, data=data, model={"name": model}).data.tokenizer == tokenizer


def test_a_tokenizer_is_for_texts():
    with pytest.raises(ValueError, match="tokenizer"):
        RunConfig(**RUN, data={"name": "digits", "tokenizer": "hf:minilm"}, model={"name": "mlp"})


def test_a_language_model_is_audited_with_its_own_loss(tmp_path):
    settings = {**RUN, "data": {"name": "reviews", "tokens": 12, "public": 40}, "target_clients": 1}
    config = RunConfig(**settings, model={"name": "small-decoder", "options": {"width": 96, "depth": 2}})
    recorded, _ = execute(config, tmp_path / "run")
    assert open_experiment(config).undefended(0, 0).loss is own_loss
    assert findings_of(recorded).verdicts[0].recovered == 1


def test_an_unknown_tokenizer_is_refused_by_its_setting():
    config = RunConfig(**RUN, data={"name": "reviews", "tokenizer": "no/where"}, model={"name": "small-encoder"})
    with pytest.raises(GradveilError) as caught:
        open_experiment(config)
    assert caught.value.problems[0].where == "data: tokenizer"


def test_a_language_model_has_no_accuracy_that_trainings_compare():
    config = TrainConfig(**TRAINING, data={"name": "reviews"}, model={"name": "small-decoder"})
    with pytest.raises(GradveilError) as caught:
        open_setting(config)
    assert [problem.where for problem in caught.value.problems] == ["model.name"]
