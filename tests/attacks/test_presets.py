"""Settings of a preset reach the attack, or are refused where they mean nothing."""

import pytest

from gradveil.attacks.presets import make_attack
from gradveil.attacks.steps import Adam
from gradveil.core.errors import GradveilError


def test_step_size_and_sign_reach_the_optimiser():
    stepper = make_attack("ig(lr=0.2, sign=soft)").descent.stepper
    assert isinstance(stepper, Adam)
    assert (stepper.lr, stepper.sign) == (0.2, "soft")


def test_a_sign_means_nothing_to_lbfgs():
    with pytest.raises(GradveilError, match="is a setting of Adam"):
        make_attack("dlg(sign=soft)")


def test_unknown_signs_name_the_known_ones():
    with pytest.raises(GradveilError, match="one of: plain, signed, soft"):
        make_attack("ig(sign=hard)")
