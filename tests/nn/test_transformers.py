"""Image classifiers of transformers with random weights: built by name, prepared, checked and audited."""

import pytest
import torch

import gradveil
from gradveil.core.errors import GradveilError
from gradveil.core.types import Batch
from gradveil.nn.check import check
from gradveil.nn.models import build
from gradveil.nn.surgery import prepare

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
NETS = {
    "hf:vit": SMALL,
    "hf:deit": SMALL,
    "hf:beit": SMALL,
    "hf:dinov2": {key: value for key, value in SMALL.items() if key != "intermediate_size"},
    "hf:swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "patch_size": 2, "window_size": 4},
    "hf:convnext": STAGES | {"drop_path_rate": 0.1},
    "hf:resnet": STAGES | {"embedding_size": 8},
    "hf:regnet": STAGES | {"embedding_size": 8, "groups_width": 4},
}


def net(name: str, **options: object) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    return build(name, channels=3, size=32, classes=5, generator=generator, **options)


@pytest.mark.parametrize(("name", "options"), NETS.items(), ids=NETS)
def test_a_classifier_can_be_audited_with_prepare(name: str, options: dict) -> None:
    model = net(name, **options)
    batch = Batch(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 4]))
    ready, _ = prepare(model, batch=batch)
    assert [problem for problem in check(ready, batch) if problem.severity == "error"] == []
    assert [n for n, _ in ready.named_parameters()] == [n for n, _ in model.named_parameters()]
    for module in (twin := net(name, **options)).modules():
        module.train(isinstance(module, torch.nn.BatchNorm2d))
    torch.testing.assert_close(ready(batch.inputs), twin(batch.inputs), rtol=1e-3, atol=1e-4)


def test_weights_are_those_of_the_generator() -> None:
    first, second = (net("hf:vit", **SMALL).state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_an_audit_takes_the_model_and_batch_of_transformers() -> None:
    images = {"pixel_values": torch.rand(1, 3, 32, 32), "labels": torch.tensor([3])}
    settings = {"attacks": ["ig(iterations=3)"], "prepare": True, "bounds": "unit", "progress": False}
    result = gradveil.audit(net("hf:vit", **SMALL), images, **settings)
    assert len(result.trials) == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hf:vitt", {}, "did you mean vit"),
        ("hf:nobody/such-model", {}, "not in your cache -> fetch it once: hf download nobody/such-model"),
        ("hf:vit", {"hidden_sise": 3}, "model.options.hidden_sise: .*did you mean 'hidden_size'"),
        ("hf:vit", {"pretrained": True}, "'vit' is a type of model, which has no weights"),
        ("hf:vit", {"pretrained": "yes"}, "model.options.pretrained: is 'yes'"),
    ],
)
def test_what_cannot_be_built_is_explained(name: str, options: dict, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        net(name, **options)


def test_a_folder_is_read_and_misfits_are_reported(tmp_path) -> None:
    saved = net("hf:vit", **SMALL)
    saved.save_pretrained(tmp_path)
    model = net(f"hf:{tmp_path}", pretrained=True)
    for name, value in saved.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    with pytest.raises(GradveilError, match=r"image_size 32, and the data have 64 -> --set data.size=32"):
        build(f"hf:{tmp_path}", channels=3, size=64, classes=5, generator=torch.Generator(), pretrained=True)


def test_pretrained_weights_are_those_of_the_cache(tmp_path, monkeypatch) -> None:
    """The head is drawn where the data have other classes; the cache has the layout of the hub's own."""
    repository = tmp_path / "models--nobody--small-vit"
    saved = net("hf:vit", **SMALL)
    saved.save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for module in ("transformers.utils.hub.constants", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path))
    generator = torch.Generator().manual_seed(1)
    model = build("hf:nobody/small-vit", channels=3, size=32, classes=7, generator=generator, pretrained=True)
    loaded = model.state_dict()
    body = {name: value for name, value in saved.state_dict().items() if not name.startswith("classifier")}
    assert body
    assert all(torch.equal(loaded[name], value) for name, value in body.items())
    assert loaded["classifier.weight"].shape == (7, SMALL["hidden_size"])
