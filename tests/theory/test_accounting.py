"""Epsilon from a noise multiplier and back, held to published accountants and to the exact Gaussian mechanism."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from gradveil.core.errors import GradveilError
from gradveil.theory.accounting import HOPELESS, Participation, assumptions, epsilon, multiplier, worst

pytest.importorskip("dp_accounting", reason="the environment is older than pyproject.toml: make")

STANDARD = Participation(steps=1000, rate=0.01)


def test_the_numbers_of_published_accountants():
    """Opacus' RDPAccountant gives 2.1014 and its PRVAccountant 1.838 at these settings."""
    assert epsilon(1.0, replace(STANDARD, accountant="rdp")) == pytest.approx(2.1014, abs=1e-4)
    assert epsilon(1.0, STANDARD) == pytest.approx(1.828, abs=1e-3)


def test_opacus_agrees():
    rdp = pytest.importorskip(
        "opacus.accountants.analysis.rdp", reason="the environment is older than pyproject.toml: make"
    )
    for sigma, rate, steps in ((1.0, 0.01, 1000), (0.7, 0.05, 200), (2.0, 1.0, 10)):
        orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
        spent = rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=steps, orders=orders)
        theirs, _ = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=1e-5)
        assert epsilon(sigma, Participation(steps, rate, accountant="rdp")) == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (3.0, 4)])
def test_without_sampling_it_is_the_gaussian_mechanism(sigma: float, steps: int):
    """The exact delta of T sums: Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu), mu = sqrt(T) / sigma (Balle, Wang)."""
    found = epsilon(sigma, Participation(steps))
    mu, phi = math.sqrt(steps) / sigma, NormalDist().cdf
    delta = phi(mu / 2 - found / mu) - math.exp(found) * phi(-mu / 2 - found / mu)
    assert delta == pytest.approx(1e-5, rel=0.01)
    assert epsilon(sigma, Participation(steps, accountant="rdp")) > found


def test_shuffled_batches_are_accounted_once_an_epoch_for_a_replaced_unit():
    shuffled = Participation(steps=30, rate=0.1, sampling="shuffled")
    assert shuffled.epochs == 3
    assert epsilon(4.0, shuffled) == pytest.approx(epsilon(2.0, Participation(steps=3)))
    assert Participation(steps=31, rate=0.1, sampling="shuffled").epochs == 4
    # A third of ten examples: three whole batches an epoch, so ten steps are a little more than three epochs.
    assert Participation(steps=10, rate=0.3, sampling="shuffled").epochs == 4


def test_a_unit_may_be_in_more_sums_than_whole_epochs_of_steps_say():
    """Ten rounds of five steps with four batches an epoch: two epochs are begun in each round."""
    told = Participation(steps=50, rate=0.25, sampling="shuffled", at_most=20)
    assert epsilon(4.0, told) == pytest.approx(epsilon(2.0, Participation(steps=20)))
    assert assumptions(told).startswith("each example is in at most 20 of 50 sums")


def test_the_worst_of_many_is_the_largest_of_all():
    settings = ((2.0, 90, 0.05), (2.0, 100, 0.02), (2.0, 100, 0.05), (2.8, 100, 0.05))
    several = [(sigma, Participation(steps, rate)) for sigma, steps, rate in settings]
    largest, noise, training = worst(several)
    assert largest == pytest.approx(max(epsilon(*one) for one in several))
    assert (noise, training) == (2.0, Participation(100, 0.05))


def test_skipped_orders_are_not_logged(caplog: pytest.LogCaptureFixture):
    assert epsilon(1.0, Participation(steps=90, rate=0.17, accountant="rdp")) > 1
    assert caplog.records == []


@pytest.mark.parametrize(("accountant", "target"), [("rdp", 0.5), ("rdp", 3.0), ("pld", 0.2), ("pld", 0.8)])
def test_calibration_is_the_inverse_and_errs_on_the_private_side(accountant, target):
    training = replace(STANDARD, accountant=accountant)
    sigma = multiplier(target, training)
    assert epsilon(sigma, training) <= target
    assert epsilon(sigma * (1 - 3e-4), training) > target


def test_less_noise_more_steps_a_higher_rate_and_a_smaller_delta_cost_privacy():
    base = epsilon(2.0, STANDARD)
    assert epsilon(1.9, STANDARD) > base
    for change in ({"steps": 2000}, {"rate": 0.02}, {"delta": 1e-6}):
        assert epsilon(2.0, replace(STANDARD, **change)) > base
    assert epsilon(0.0, STANDARD) == math.inf


def test_hopeless_settings_are_answered_and_not_computed_for_ever():
    assert epsilon(1e-3, Participation(steps=100)) > HOPELESS


def test_every_wrong_argument_is_refused_at_once():
    with pytest.raises(GradveilError) as found:
        Participation(steps=0, rate=0.0, delta=1.0, sampling="fixed", accountant="prv")  # type: ignore[arg-type]
    where = [problem.where for problem in found.value.problems]
    assert where == [f"privacy.{name}" for name in ("steps", "rate", "delta", "sampling", "accountant")]
    with pytest.raises(GradveilError, match=r"privacy\.sigma"):
        epsilon(-1.0, STANDARD)
    with pytest.raises(GradveilError, match=r"privacy\.epsilon"):
        multiplier(0.0, STANDARD)
    with pytest.raises(GradveilError, match="would need noise of more than"):
        multiplier(1e-8, Participation(steps=1000))


def test_assumptions_describe_the_sampling():
    assert "(Poisson)" in assumptions(STANDARD)
    assert "added or removed" in assumptions(STANDARD)
    assert "certainly" in assumptions(Participation(steps=1))
    said = assumptions(replace(STANDARD, sampling="shuffled"), "client")
    assert "at most 10 of 1,000 sums" in said
    assert "one client replaced" in said


@pytest.mark.parametrize(("sigma", "steps", "rate"), [(16.0, 40, 0.5), (2.0, 2, 1 - 1e-9), (3.0, 4, 1.0)])
def test_the_package_builds_the_same_losses_one_place_at_a_time(sigma: float, steps: int, rate: float):
    dp_accounting = pytest.importorskip("dp_accounting")
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = pytest.importorskip("dp_accounting.pld").PLDAccountant()
    accountant.compose(event, steps)
    for delta in (1e-2, 1e-5, 1e-8):
        found = epsilon(sigma, Participation(steps, rate, delta))
        assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)
