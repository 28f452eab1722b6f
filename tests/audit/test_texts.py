"""An audit of texts runs as one of images: trials, verdicts, records and report."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from gradveil.audit.attack_selection import attacks_against
from gradveil.audit.attackers.run_attackers import decide, widened
from gradveil.audit.audit_config import RunConfig
from gradveil.audit.findings import findings_of
from gradveil.audit.preflight import open_experiment
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Bernoulli, Noise, NoiseSpec, Normal
from gradveil.core.types import Stage, Transform
from gradveil.defences import Defence, chain
from gradveil.report import audit_page
from gradveil.report.marked_sentences import marked_sentences
from tests.audit.runs import execute
from tests.report.parsed_page import read

SETTINGS = {
    "name": "texts",
    "data": {"name": "reviews"},
    "model": {"name": "small-encoder", "options": {"width": 96}},
    "target_clients": 2,
}


def test_adaptive_stands_for_attacks_on_texts():
    expected = ["span-rank", "span", "embedding-search"]
    assert list(attacks_against(["adaptive"], "prune(0.9)", kind="texts")) == expected


@pytest.mark.parametrize("frozen", [False, True])
def test_the_rows_of_embeddings_are_read_where_they_are_trained(frozen):
    trained = {"client": [{"trainable": ["blocks.*", "head.*"]}]} if frozen else {}
    experiment = open_experiment(RunConfig(**SETTINGS, **trained, attacks=["adaptive"], defences=["none"]))
    widest, decisions, _ = widened(experiment, decide(experiment))
    assert ("embedding-rows" in widest.attacks) != frozen
    assert [each.reason for each in decisions] == (["the word embedding 'words.weight' is frozen"] if frozen else [""])


def test_attention_that_is_not_trained_is_no_base_for_spans():
    client = [{"trainable": ["words.*", "head.*"]}]
    with pytest.raises(GradveilError, match="are frozen and have no adapters"):
        open_experiment(RunConfig(**SETTINGS, client=client, attacks=["span-rank"], defences=["none"]))


def test_a_bottleneck_before_the_head_hides_no_sentence(tmp_path):
    attacks = ["span-rank", "embedding-search(steps=1)"]
    recorded, _ = execute(RunConfig(**SETTINGS, attacks=attacks, defences=["precode(k=8)"]), tmp_path / "run")
    assert all(trial.failed is None for trial in recorded.trials)
    assert findings_of(recorded).verdicts[0].level == "broken"


def test_texts_are_attacked_in_double_precision_too(tmp_path):
    attacks = ["span", "span-rank", "embedding-rows", "embedding-search(steps=1)"]
    recorded, _ = execute(RunConfig(**SETTINGS, precision="float64", attacks=attacks), tmp_path / "run")
    assert all(trial.failed is None for trial in recorded.trials)
    assert findings_of(recorded).verdicts[0].level == "broken"


@pytest.mark.parametrize("text", ['dropout(where="blocks.0")', 'precode(position="words")'])
def test_layers_that_attacks_read_are_left_in_their_places(text):
    with pytest.raises(GradveilError, match="is, or holds, a layer that attacks on texts read"):
        open_experiment(RunConfig(**SETTINGS, attacks=["span"], defences=[text]))


def test_another_threshold_is_the_default_of_texts():
    assert RunConfig(**SETTINGS, attacks=["span"], defences=["none"]).threshold == 0.9


def test_attacks_by_gradients_are_refused_for_texts():
    with pytest.raises(GradveilError) as caught:
        open_experiment(RunConfig(**SETTINGS, attacks=["ig"], defences=["none"]))
    assert any("pictures" in problem.what for problem in caught.value.problems)


def test_sentences_are_recovered_recorded_and_shown(tmp_path):
    config = RunConfig(**SETTINGS, attacks=["span", "embedding-rows"], defences=["none"])
    recorded, _ = execute(config, tmp_path / "run")
    result = findings_of(recorded)
    strongest = result.verdicts[0]
    assert (strongest.identifiable, strongest.images, strongest.level) == (2, 2, "broken")
    pairs = marked_sentences(strongest.best.info)
    assert len(pairs) == 2
    assert not any(span.differs for pair in pairs for span in pair.truth)
    page = audit_page(recorded)
    assert "--no-images" not in page
    first, below = read(page).text.split("Basis:", 1)
    sentence = " ".join(part.words for part in pairs[0].truth)
    assert first.count(sentence) == 2, "the truth, and below it the reconstruction"
    assert "Private sentences" in first
    assert "The sentences are private data" in below
    assert all(word not in page for word in ("true images", "Mean image", "reconstruction of images"))


def test_more_clients_than_tokens_are_attacked_behind_pruning(tmp_path):
    settings = SETTINGS | {"target_clients": 6, "data": {"name": "reviews", "tokens": 4}}
    recorded, _ = execute(RunConfig(**settings, attacks=["embedding-rows"], defences=["dgp"]), tmp_path / "run")
    assert all(trial.failed is None for trial in recorded.trials), "tokens have no distance to bound an error in"


@dataclass(frozen=True)
class Mirrored(Transform):
    """Send the columns of every matrix in the opposite order, which is public."""

    stage: ClassVar[Stage] = Stage.QUANTISE

    def apply(self, update, state, noise, context):
        return {name: value.flip(-1) for name, value in update.items()}, dict(state)


@dataclass(frozen=True)
class Impulses(Transform):
    """Add huge noise to a tenth of the entries."""

    stage: ClassVar[Stage] = Stage.NOISE

    def noise(self, params):
        size = {name: Noise(tuple(p.shape), Normal()) for name, p in params.items()}
        hit = {f"{name}.hit": Noise(tuple(p.shape), Bernoulli(0.1), discrete=True) for name, p in params.items()}
        return NoiseSpec(size | hit)

    def apply(self, update, state, noise, context):
        return {n: value + 100 * noise[f"{n}.hit"] * noise[n] for n, value in update.items()}, dict(state)


mirrored = Defence("mirrored", send=chain(mirrored=Mirrored()))
impulses = Defence("impulses", send=chain(impulses=Impulses()))


@pytest.mark.parametrize(
    ("defence", "said"), [("mirrored", "explains the update worse"), ("impulses", "fits the noise")]
)
def test_a_closed_form_that_explains_the_update_worse_than_the_truth_shows_no_protection(tmp_path, defence, said):
    """The true words come back from the mirrored matrices, and from the nine tenths of the entries without noise."""
    defences, frozen = ["none", f"tests.audit.test_texts:{defence}"], [{"trainable": ["blocks.*", "head.*"]}]
    config = RunConfig(**SETTINGS, client=frozen, attacks=["span-rank"], defences=defences)
    recorded, _ = execute(config, tmp_path / "run")
    verdict = next(each for each in findings_of(recorded).verdicts if not each.undefended)
    assert (verdict.identifiable, verdict.level) == (0, "inconclusive")
    assert any(said in doubt for doubt in verdict.doubts)


def test_exact_sentences_explain_the_update_as_the_truth_does(tmp_path):
    recorded, _ = execute(RunConfig(**SETTINGS, attacks=["span"], defences=["none"]), tmp_path / "run")
    health = findings_of(recorded).verdicts[0].best.info["health"]
    assert max(health["match"], health["match_truth"]) < 1e-6
