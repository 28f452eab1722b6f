"""Presets match their papers; settings reach the attack, or raise if they have no effect."""

from fnmatch import fnmatchcase

import pytest
import torch
from scipy.ndimage import median_filter

from gradveil.attacks.attack_catalogue import InversionEntry, make_attack
from gradveil.attacks.inversion.cma_es import CMAES
from gradveil.attacks.inversion.descent import Cosine, Descent, Plateau, StepSchedule
from gradveil.attacks.inversion.image_sources import Untrained
from gradveil.attacks.inversion.optimisers import LBFGS, Adam, RMSprop
from gradveil.attacks.inversion_presets import grnn
from gradveil.attacks.knowledge import Infer, Known, Optimise
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from tests.attacks.small_experiments import tiny

SIGNED = Adam(lr=1.0, sign="signed")
SCHELIGA = Descent(SIGNED, Plateau(patience=400, factor=0.1), iterations=20_000, tolerance=1e-5, patience=4000)
DROPOUT = Descent(Adam(lr=0.1, sign="signed"), Plateau(patience=800), 20_000, tolerance=1e-5, patience=4000)
TARGETED = {"objective": "cosine", "tv": 0.01, "box": True, "start": "normal", "restarts": 1, "descent": SCHELIGA}
PUBLISHED = {
    "dlg": {"objective": "l2", "tv": 0.0, "labels": "joint", "box": False, "start": "normal"},
    "idlg": {"objective": "l2", "tv": 0.0, "labels": "idlg", "box": False, "start": "normal"},
    "ig": {
        "objective": "cosine", "tv": 1e-4, "labels": "given", "box": True,
        "descent": Descent(Adam(lr=0.1, sign="signed"), StepSchedule((3 / 8, 5 / 8, 7 / 8), 0.1), iterations=24_000),
    },
    "grnn": {
        "objective": "l2-and-norm", "tv": 1e-3, "labels": "joint", "images": Untrained(latent=128),
        "descent": Descent(RMSprop(lr=1e-4, momentum=0.99), iterations=1000),
    },
    "ggl": {
        "objective": "l2", "labels": "idlg", "simulated_client": "full", "restarts": 50,
        "descent": Descent(CMAES(), iterations=500),
    },
    "gi": {
        "objective": "l2", "tv": 1e-4, "l2": 1e-6, "batchnorm": 0.1, "labels": "unique",
        "descent": Descent(Adam(lr=0.1), Cosine(warmup=50), iterations=20_000),
    },
    **dict.fromkeys(("ig-scheliga", "wiig", "gpia", "vbia", "dpia", "pig", "cdia"), TARGETED),
    "dia": {"objective": "cosine", "tv": 1e-5, "box": True, "start": "normal", "descent": DROPOUT},
}  # fmt: skip
"""What the papers set. Theirs is the last iterate where ours is the best (`keep`)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name):
    attack = make_attack(name)
    assert {field: getattr(attack, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_median_filters_the_images_that_are_found():
    scene = tiny()
    given = [scene.observation], scene.client, scene.knowledge, Key(0)
    plain, filtered = (make_attack(f"ig(iterations=3{more})")(*given) for more in ("", ", median=true"))
    images = plain.inputs.flatten(0, 1)
    expected = torch.stack([torch.from_numpy(median_filter(each[0].numpy(), 3, mode="mirror")) for each in images])
    torch.testing.assert_close(filtered.inputs.flatten(0, 1)[:, 0], expected)
    assert torch.equal(filtered.objective, plain.objective)


def test_knowledge_is_the_published_one():
    """The treatment of one tensor of each kind; only the gradient of images is signed."""
    names = ("model.a.dropout.mask", "model.a.cvb.eps", "send.noise.w", "step.noise.w", "send.prune.mask.w")

    def treated(attack):
        known = make_attack(attack).knowledge
        return [next((how for pattern, how in known.items() if fnmatchcase(name, pattern)), None) for name in names]

    drawn = treated("ig")
    assert drawn[2:] == [None] * 3
    assert treated("dia") == [Optimise(weight=1e-4), *drawn[1:]]
    assert treated("vbia") == [drawn[0], Optimise(), *drawn[2:]]
    assert treated("gpia") == [*drawn[:4], Infer()]
    noise = treated("dpia")[2:4]
    assert noise == [Optimise(weight=1.0, std=1.0)] * 2
    assert treated("dpia(noise_std=0.02, noise_weight=0.1)")[2:4] == [Optimise(weight=0.1, std=0.02)] * 2
    assert treated("cdia(additive=optimised, noise_std=0)")[2:4] == [Optimise(weight=1.0, std=0)] * 2
    assert treated("wiig") == [Known(), Known(), Known(), Known(), Infer()]
    assert treated("cdia") == [Optimise(weight=1e-4), Optimise(), None, None, Infer()]
    assert (treated("pig"), make_attack("pig").ignore, make_attack("pig").simulated_client) == (
        drawn,
        "stochastic",
        "naive",
    )


def test_step_size_and_sign_reach_the_optimiser():
    stepper = make_attack("ig(lr=0.2, sign=soft)").descent.stepper
    assert isinstance(stepper, Adam)
    assert (stepper.lr, stepper.sign) == (0.2, "soft")
    full = make_attack("dlg").descent.stepper
    assert isinstance(full, LBFGS)
    assert full.lr == 1


def test_sign_of_other_optimisers_raises():
    with pytest.raises(GradveilError, match=r"sign: .*LBFGS"):
        make_attack("dlg(sign=soft)")
    with pytest.raises(GradveilError, match=r"sign: .*RMSprop"):
        InversionEntry("mine", grnn, "somebody's own", "")(sign="soft")


def test_unknown_signs_name_the_known_ones():
    with pytest.raises(GradveilError, match="one of: plain, signed, soft"):
        make_attack("ig(sign=hard)")
