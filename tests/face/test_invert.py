"""`gradveil.invert`: one attack on one update, and what stands in its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import gradveil as gv
from gradveil.core import Context, Stage, Transform
from gradveil.core.tree import Tensors

MEAN, STD = (0.4,), (0.3,)


@dataclass(frozen=True)
class Shift(Transform):
    """Add the same to every update."""

    stage: ClassVar[Stage] = Stage.QUANTISE

    def apply(
        self, update: Tensors, state: Tensors, noise: Mapping[str, Tensor], context: Context
    ) -> tuple[Tensors, Tensors]:
        return {name: value + 100.0 for name, value in update.items()}, state


def network() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.Sigmoid(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
    return net


def example() -> tuple[Tensor, Tensor]:
    image = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    return (image - MEAN[0]) / STD[0], torch.tensor([2])


def gradient(net: nn.Module) -> Tensors:
    inputs, targets = example()
    names, values = zip(*net.named_parameters(), strict=True)
    loss = nn.functional.cross_entropy(net(inputs), targets)
    return dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def test_a_gradient_is_inverted_in_three_lines() -> None:
    net = network()
    found = gv.invert(net, gradient(net), "analytic", labels=[2], mean=MEAN, std=STD, truth=example())
    assert found.images.shape == (1, 1, 12, 12)
    assert found.metrics["psnr"] > 60
    assert found.metrics["label_accuracy"] == 1
    assert (found.labels.tolist(), found.status) == ([2], "converged")


def test_labels_are_found_and_no_truth_gives_no_metrics() -> None:
    net = network()
    found = gv.invert(net, gradient(net), "ig(iterations=5, labels=restore)", shape=(1, 12, 12), mean=MEAN, std=STD)
    assert (found.labels.tolist(), found.metrics) == ([2], {})
    assert found.images.min() >= 0
    assert found.images.max() <= 1


def test_without_labels_the_attack_restores_them_and_the_result_says_so() -> None:
    net = network()
    given: dict[str, Any] = {"truth": example()[0], "mean": MEAN, "std": STD}
    found = gv.invert(net, gradient(net), "ig(iterations=3)", **given)
    assert (found.labels.tolist(), found.restored) == ([2], True)
    assert "2 (restored from the update)" in str(found)
    assert "after 3 iterations" in str(found)
    assert not gv.invert(net, gradient(net), "ig(iterations=3)", labels=[2], **given).restored


def test_an_inverted_update_is_short_and_has_pictures_in_a_notebook() -> None:
    net = network()
    found = gv.invert(net, gradient(net), "analytic", truth=example(), mean=MEAN, std=STD)
    assert len(repr(found)) < 120
    assert len(str(found).splitlines()) <= 3
    assert "recovered, SSIM 1.00" in str(found)
    assert "iteration" not in str(found), "a closed form has none"
    html = found._repr_html_()
    assert html is not None
    assert html.count('<img src="data:image/png;base64,') == 2


def test_the_truth_changes_nothing_but_the_metrics() -> None:
    net = network()
    given: dict[str, Any] = {"labels": [2], "mean": MEAN, "std": STD}
    told = gv.invert(net, gradient(net), "ig(iterations=3)", truth=example(), **given)
    blind = gv.invert(net, gradient(net), "ig(iterations=3)", shape=(1, 12, 12), **given)
    assert torch.equal(told.images, blind.images)


def test_local_training_is_what_the_attacker_believes() -> None:
    net, local = network(), gv.Local(batch=1, lr=0.1, steps=1)
    update = {name: 0.1 * value for name, value in gradient(net).items()}
    given: dict[str, Any] = {"labels": [2], "truth": example(), "mean": MEAN, "std": STD, "local": local}
    found = gv.invert(net, update, "ig(iterations=1, objective=l2)", **given)
    assert found.reconstruction.inputs.shape == (1, 1, 1, 12, 12)


@pytest.mark.parametrize(
    ("attack", "changes", "part"),
    [
        ("ig", {"labels": [2], "shape": None}, "shape"),
        ("ig", {"labels": [1, 2], "examples": 1}, "labels"),
        ("wiig", {"labels": [2]}, "wiig"),
        ("curious", {"labels": [2]}, "curious"),
        ("nope", {"labels": [2]}, "attack[0]"),
        ("ig", {"labels": [2], "defence": "nope"}, "defence[0]"),
    ],
)
def test_what_stands_in_the_way_is_told(attack: str, changes: dict[str, Any], part: str) -> None:
    net = network()
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(net, gradient(net), attack, **{"shape": (1, 12, 12), **changes})
    assert any(part in f"{problem.where} {problem.what}" for problem in caught.value.problems)


def test_an_update_of_another_model_is_refused_by_name() -> None:
    net = network()
    update = gradient(net)
    update["9.weight"] = update.pop("1.weight")
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(net, update, labels=[2], shape=(1, 12, 12))
    (problem,) = caught.value.problems
    assert problem.where == "update"
    assert "lacks '1.weight'" in problem.what
    assert "holds '9.weight'" in problem.what


class Unused(nn.Module):
    """A model with a layer that its forward pass never calls, and layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(144, 16, bias=False), nn.Linear(16, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.flatten(1))))


def backward(net: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor | None]:
    nn.functional.cross_entropy(net(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("named", [True, False], ids=["None", "missing"])
def test_parameters_that_the_loss_does_not_depend_on_need_no_gradient(named: bool) -> None:
    net = Unused()
    update = backward(net, *example())
    assert update["spare.weight"] is None
    given = {name: value for name, value in update.items() if named or value is not None}
    found = gv.invert(net, given, "ig(iterations=2)", labels=[2], mean=MEAN, std=STD, truth=example())  # type: ignore[arg-type]
    assert found.images.shape == (1, 1, 12, 12)
    del given["last.weight"]
    with pytest.raises(gv.GradveilError, match=r"requires_grad_\(False\)") as caught:
        gv.invert(net, given, labels=[2], shape=(1, 12, 12))  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == ["update['last.weight']"]


def test_an_update_without_gradients_is_refused() -> None:
    net = network()
    nothing: dict[str, Any] = dict.fromkeys(gradient(net))
    with pytest.raises(gv.GradveilError, match="every value is None"):
        gv.invert(net, nothing, shape=(1, 12, 12))


@pytest.mark.parametrize("attack", [None, "adaptive"])
def test_closed_forms_come_before_a_search(attack: str | None) -> None:
    net = network()
    found = gv.invert(net, gradient(net), attack, mean=MEAN, std=STD, truth=example())
    assert found.attack.startswith("analytic")
    assert found.metrics["psnr"] > 60
    assert (found.labels.tolist(), found.restored) == ([2], True)


def test_a_batch_is_separated_before_a_search_is_made() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 3))
    inputs = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    update: dict[str, Any] = backward(net, inputs, torch.tensor([0, 1, 2]))
    found = gv.invert(net, update, labels=[0, 1, 2], truth=(inputs, [0, 1, 2]), bounds=(-4, 4))
    assert found.attack.startswith("unmix")
    assert found.metrics["psnr"] > 40


def test_of_answers_that_leave_some_of_the_update_the_nearest_is_taken() -> None:
    net = network()  # sigmoids: the mixture is separated, but not exactly
    inputs = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    update: dict[str, Any] = backward(net, inputs, torch.tensor([0, 1, 2]))
    given: dict[str, Any] = {"labels": [0, 1, 2], "truth": (inputs, [0, 1, 2]), "bounds": (-4, 4)}
    best = gv.invert(net, update, **given)
    mixed, separated = (gv.invert(net, update, name, **given) for name in ("analytic", "unmix"))
    assert torch.equal(best.images, separated.images)
    assert best.metrics["psnr"] > mixed.metrics["psnr"]


def chain(width: int) -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, width, 4, stride=2, bias=False)
    return nn.Sequential(convolution, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(25 * width, 3))


def test_a_recursion_is_made_only_where_its_equations_settle_the_input() -> None:
    inputs, targets = example()
    given: dict[str, Any] = {"labels": [2], "truth": (inputs, targets), "mean": MEAN, "std": STD}
    wide, narrow = chain(12), chain(2)
    found = gv.invert(wide, backward(wide, inputs, targets), **given)  # type: ignore[arg-type]
    assert found.attack == "r-gap"
    assert found.metrics["psnr"] > 40
    assert gv.invert(narrow, backward(narrow, inputs, targets), **given).attack.startswith("portfolio")  # type: ignore[arg-type]


def test_behind_a_defence_the_closed_forms_that_know_it_are_made() -> None:
    inputs, targets = example()
    net = chain(12)
    sent = backward(net, inputs, targets)
    kept = {name: torch.where(value.abs() > value.abs().quantile(0.2), value, 0) for name, value in sent.items()}
    given: dict[str, Any] = {"labels": [2], "truth": (inputs, targets), "mean": MEAN, "std": STD}
    found = gv.invert(net, kept, defence="prune(0.2)", **given)
    assert found.attack == "r-gap(labels=restore, simulated_client=full)"
    assert found.metrics["psnr"] > 20


def test_a_closed_form_that_is_farther_from_the_update_than_a_search_is_not_taken() -> None:
    net = network()
    torch.manual_seed(0)
    noisy = {name: value + value.std() * torch.randn_like(value) for name, value in gradient(net).items()}
    assert gv.invert(net, noisy, labels=[2], mean=MEAN, std=STD, truth=example()).attack == "portfolio"


def test_what_a_defence_adds_to_every_update_hides_nothing() -> None:
    net, shift = network(), gv.Defence("shift", send=gv.chain(shift=Shift()))
    sent = {name: value + 100.0 for name, value in gradient(net).items()}
    given: dict[str, Any] = {"labels": [2], "mean": MEAN, "std": STD, "truth": example()}
    plain = gv.invert(net, gradient(net), "cdia(iterations=500)", **given)
    shifted = gv.invert(net, sent, "cdia(iterations=500)", defence=shift, **given)
    assert plain.metrics["psnr"] > 15
    assert shifted.metrics["psnr"] > plain.metrics["psnr"] - 3


def test_a_truth_outside_the_range_of_inputs_is_refused_since_the_statistics_were_forgotten() -> None:
    net = network()
    inputs, targets = example()
    with pytest.raises(gv.GradveilError, match="mean= and std=") as caught:
        gv.invert(net, gradient(net), labels=[2], truth=(inputs, targets))
    assert [problem.where for problem in caught.value.problems] == ["truth"]


@pytest.mark.parametrize("factor", [0.03, 8.0])
def test_an_update_that_was_scaled_is_still_explained(factor: float) -> None:
    net = network()
    scaled = {name: factor * value for name, value in gradient(net).items()}
    found = gv.invert(net, scaled, labels=2, truth=example(), mean=MEAN, std=STD)
    assert found.attack == "analytic"
    assert found.distance < 1e-3
    assert "% off" in str(found)


class Prototypes(nn.Module):
    """A model whose last linear layer does not give the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = network(), nn.Parameter(torch.eye(3) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return (out - out.mean(1, keepdim=True)) @ self.classes


def sent(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensors:
    names, values = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(nn.functional.cross_entropy(net(inputs), labels), values)
    return dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_cross_entropy_of_torch_is_told_as_ours(loss: Any) -> None:
    turned = {name: -value for name, value in gradient(network()).items()}
    with pytest.raises(gv.GradveilError, match="sign turned"):
        gv.invert(network(), turned, "analytic", labels=[2], loss=loss, shape=(1, 12, 12), mean=MEAN, std=STD)


def test_what_the_bias_cannot_contradict_is_not_refused() -> None:
    inputs, labels = example()
    net = Prototypes()
    given: dict[str, Any] = {"truth": inputs, "mean": MEAN, "std": STD}
    for label in range(3):
        found = gv.invert(net, sent(net, inputs, torch.tensor([label])), "ig(iterations=1)", labels=[label], **given)
        assert found.of_truth < 1e-3
    plain, decay = network(), 0.5
    local = gv.Local(batch=1, lr=0.1, steps=1, weight_decay=decay)
    decayed = {n: 0.1 * (v + decay * dict(plain.named_parameters())[n].detach()) for n, v in gradient(plain).items()}
    assert gv.invert(plain, decayed, "ig(iterations=1)", labels=[2], local=local, **given).of_truth < 1e-3
    functional = Functional()
    assert gv.invert(functional, sent(functional, inputs, labels), "ig(iterations=1)", labels=[2], **given).given


class Functional(nn.Module):
    """A model that reads the weight of its linear layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.flatten(1), self.layer.weight, self.layer.bias)


def test_labels_of_the_truth_are_compared_too_in_any_order() -> None:
    net, inputs = network(), torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    update = sent(net, inputs, torch.tensor([2, 0]))
    with pytest.raises(gv.GradveilError, match="truth's labels"):
        gv.invert(net, update, "ig(iterations=1)", truth=(inputs, torch.tensor([1, 1])))
    found = gv.invert(net, update, "ig(iterations=1)", labels=[0, 2], truth=(inputs, torch.tensor([2, 0])))
    assert found.of_truth < 1e-3


def test_a_truth_of_one_row_is_no_answer() -> None:
    net, rows = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(1, 6)
    noise = {name: torch.randn_like(value) for name, value in net.named_parameters()}
    found = gv.invert(net, noise, "ig(iterations=1)", truth=rows, labels=[0], defence="gaussian(1)")
    assert found.metrics["cells"] < 1


def test_an_update_that_nothing_explains_says_so_and_so_does_one_that_its_truth_does_not() -> None:
    net, other = network(), network()
    nn.init.constant_(other[1].weight, 0.1)
    given: dict[str, Any] = {"labels": [2], "mean": MEAN, "std": STD}
    strange = gv.invert(other, gradient(net), "ig(iterations=2)", truth=example(), **given)
    assert strange.of_truth > 0.5
    assert "truth itself" in str(strange)
    unknown = gv.invert(other, gradient(net), "ig(iterations=2)", shape=(1, 12, 12), **given)
    assert "do not explain" in str(unknown)
    own = gv.invert(net, gradient(net), "analytic", truth=example(), **given)
    assert own.of_truth < 1e-3
    assert own.given
    assert len(str(own).splitlines()) == len(str(unknown).splitlines()) - 1


def test_several_examples_of_an_update_of_one_are_doubted() -> None:
    net = network()
    told = str(gv.invert(net, gradient(net), examples=3, shape=(1, 12, 12), mean=MEAN, std=STD))
    assert "All 3 are the same" in told


def test_of_several_images_those_that_came_back_are_counted() -> None:
    net, inputs = network(), torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    net.zero_grad()
    nn.functional.cross_entropy(net(inputs), torch.tensor([0, 2])).backward()
    update = {name: parameter.grad for name, parameter in net.named_parameters()}
    found = gv.invert(net, update, "ig(iterations=2)", labels=[0, 2], truth=inputs)
    assert found.metrics["recovered"] == 0
    assert "0 of 2 recovered" in str(found)


@pytest.mark.parametrize("attack", [None, "ig(iterations=2)"])
@pytest.mark.parametrize("local", [None, gv.Local(batch=1, lr=0.1, steps=2)])
def test_new_minus_old_parameters_are_refused(attack: str | None, local: gv.Local | None) -> None:
    net = network()
    turned = {name: -value for name, value in gradient(net).items()}
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(net, turned, attack, labels=2, local=local, truth=example(), mean=MEAN, std=STD)
    (problem,) = caught.value.problems
    assert problem.where == "update"
    assert "'3.bias' is below zero for 2 classes" in problem.what


def test_labels_that_the_update_contradicts_are_refused_unless_a_defence_may_have_changed_it() -> None:
    net = network()
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(net, gradient(net), labels=[1], truth=example(), mean=MEAN, std=STD)
    (problem,) = caught.value.problems
    assert problem.where == "labels"
    assert "below zero for class 2" in problem.what
    given: dict[str, Any] = {"labels": [1], "shape": (1, 12, 12), "defence": "gaussian(0.1)"}
    assert gv.invert(net, gradient(net), "ig(iterations=2)", **given).labels.tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"labels": [3]}, "labels"),
        ({"labels": [1.5]}, "labels"),
        ({"labels": "cat"}, "labels"),
        ({"labels": torch.eye(3)[:1].long()}, "labels"),
        ({"labels": [1, 2], "truth": torch.zeros(1, 1, 12, 12)}, "labels"),
        ({"shape": (12, 12, 3)}, "shape"),
        ({"bounds": (1.0, 0.0)}, "bounds"),
        ({"update": {"1.weight": torch.zeros(16, 144)}}, "update"),
        ({"update": {"conv.weight": torch.ones(2, 2)}}, "update"),
        ({"truth": torch.zeros(1, 12, 12, 3), "shape": None}, "truth"),
        ({"truth": torch.zeros(1, 1, 16, 9)}, "shape"),
        ({"labels": [-1]}, "labels"),
        ({"examples": "2"}, "examples"),
        ({"local": {"batch": 1, "steps": 1}}, "local.lr"),
        ({"local": {"batch": 1, "lr": 0.1, "step": 1}}, "local.step"),
        ({"truth": torch.zeros(1, 12, 12)}, "truth"),
        ({"model": lambda images: images}, "model"),
        ({"update": {"1.weight": 3}}, "update['1.weight']"),
        ({"update": [torch.ones(16, 144)]}, "update"),
        ({"update": []}, "update"),
    ],
)
def test_arguments_that_cannot_be_meant_are_told(changes: dict[str, Any], where: str) -> None:
    net = network()
    given: dict[str, Any] = {"model": net, "update": gradient(net), "shape": (1, 12, 12)} | changes
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(**given)
    assert where in [problem.where for problem in caught.value.problems]


@pytest.mark.parametrize("frozen", [(), ("1.weight",)])
def test_an_update_may_be_a_list_in_the_order_of_the_parameters(frozen: tuple[str, ...]) -> None:
    net = network()
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    sent = {name: value for name, value in backward(net, *example()).items() if name not in frozen}
    given: dict[str, Any] = {"labels": [2], "shape": (1, 12, 12), "mean": MEAN, "std": STD}
    found = [gv.invert(net, update, "ig(iterations=2)", **given) for update in (sent, [*sent.values()])]
    assert torch.equal(found[0].images, found[1].images)


def test_a_model_of_one_bare_layer_is_read_as_any_other() -> None:
    layer, rows = nn.Linear(6, 3), torch.rand(1, 6, generator=torch.Generator().manual_seed(3))
    found = gv.invert(layer, backward(layer, rows, torch.tensor([1])), shape=6, bounds=(0, 1), truth=(rows, [1]))
    assert found.attack.startswith("analytic")
    assert (found.labels.tolist(), found.restored) == ([1], True)
    assert found.metrics["cells"] == 1


def test_labels_that_do_not_fit_the_examples_that_explain_the_update_are_told() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 3))
    inputs = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(2))
    update = backward(net, inputs, torch.tensor([0, 1, 2, 2]))
    given: dict[str, Any] = {"truth": inputs, "bounds": (-4, 4)}
    wrong, right = (gv.invert(net, update, "unmix", labels=labels, **given) for labels in ([0, 1, 1, 2], [2, 2, 1, 0]))
    assert (wrong.contradicted, right.contradicted) == ((0, 1, 1, 2), ())
    assert "The labels that were given, 0, 1, 1, 2, are not those of the update" in str(wrong)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_updates_of_wrapped_models_in_other_forms_are_taken(prefix: str) -> None:
    net = network()
    update = {prefix + name: value.double().numpy() for name, value in gradient(net).items()}
    local = {"batch": 1, "lr": 1.0, "steps": 1}
    found = gv.invert(net, update, labels=2, truth=example(), mean=MEAN, std=STD, local=local)
    assert found.metrics["psnr"] > 60
    vectors = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    rows = backward(vectors, torch.full((1, 6), 0.5), torch.tensor([1]))
    assert gv.invert(vectors, rows, shape=6, bounds=(0, 1)).images.shape == (1, 6)


@pytest.mark.parametrize("defence", ["dcs", "instahide(mix=public)"])
def test_a_defence_that_is_made_with_public_examples_asks_for_them(defence: str) -> None:
    net = network()
    given: dict[str, Any] = {"labels": [2], "mean": MEAN, "std": STD, "shape": (1, 12, 12), "defence": defence}
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(net, gradient(net), "ig(iterations=2)", **given)
    assert [problem.where for problem in caught.value.problems] == ["public"]
    public = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3
    found = gv.invert(net, gradient(net), "ig(iterations=2)", public=public, **given)
    assert found.images.shape == (1, 1, 12, 12)


def test_a_row_may_lie_outside_the_public_ones_but_not_outside_the_bounds() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    row, label = torch.full((1, 6), 1.5), torch.tensor([1])
    update: dict[str, Any] = backward(net, row, label)
    public = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2
    assert gv.invert(net, update, truth=(row, label), public=public).images.shape == (1, 6)
    with pytest.raises(gv.GradveilError) as caught:
        gv.invert(net, update, truth=(row, label), bounds=(0, 1))
    assert [problem.where for problem in caught.value.problems] == ["truth"]


def test_the_range_of_inputs_is_that_of_public_images_which_exceed_it() -> None:
    net = network()
    public = 3 * torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3
    found = gv.invert(net, gradient(net), "analytic", truth=example(), public=public)
    assert found.metrics["psnr"] > 60
