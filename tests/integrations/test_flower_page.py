"""The page on Flower keeps its word: ten lines, and they run."""

import json
import re

import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.client import Client
from gradveil.core.errors import GradveilError
from gradveil.core.noise import Key
from gradveil.core.settings import REQUIRED
from gradveil.core.types import Domain
from gradveil.defences import DEFENCES, parse
from gradveil.federated.update_records import read_recorded
from gradveil.integrations.flower import protect
from gradveil.integrations.flower.answer import unsupported
from gradveil.integrations.flower.flower_records import record, tensors
from gradveil.nn.models import build
from gradveil.spaces import ImageSpace
from tests.docs.test_pages import DOCS, blocks
from tests.federated.small_federations import blobs
from tests.integrations.flower_in_process import Loopback, ledger


def own_training(net):
    """A user's `train()`, which gives every parameter a push."""

    def train(message, _context):
        after = {
            name: value + torch.linspace(0, 1, value.numel()).reshape(value.shape)
            for name, value in tensors(message.content["arrays"]).items()
        }
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": record(after), "metrics": metrics}), reply_to=message)

    return train


def test_ten_lines_protect_an_app(tmp_path):
    client, server, mod, _, simulated = blocks("how-to/protect-a-flower-app.md")
    (named,), (limited,) = blocks("how-to/flower-state-and-restarts.md"), blocks("how-to/flower-privacy-budget.md")
    lines = [line for block in (client, server) for line in block.splitlines() if line.strip()]
    assert len(lines) == 10
    audited: dict = {}
    exec(compile(simulated, "how-to/protect-a-flower-app.md", "exec"), audited)
    assert audited["result"].trials[0].info["update"].startswith("local training")

    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    images, labels = blobs(40, 3)
    space: dict = {"net": net, "images": images.float(), "labels": labels, "FedAvg": FedAvg}
    for source in (client, mod, named, limited):
        space |= {"app": ClientApp(), "your_own_training": own_training(net)}
        exec(compile(source, "how-to/protect-a-flower-app.md", "exec"), space)
        exec(compile(server, "how-to/protect-a-flower-app.md", "exec"), space)
        folder = tmp_path / str(len(source))
        for node in range(2):
            ledger(folder, node, "lungs-2026")
        grid = Loopback(space["app"], 2, **{"gradveil-folder": str(folder)})
        before = {name: value.clone() for name, value in space["client"].params().items()}
        result = space["strategy"].start(grid, record(before), num_rounds=2)
        assert not grid.errors
        assert not space["strategy"].refusals
        moved = {name: value - before[name] for name, value in tensors(result.arrays).items()}
        assert all(bool(value.any()) for value in moved.values())
    assert len(list(tmp_path.glob("*/partition-*/training-lungs-2026"))) == 4
    rounds = [json.loads(file.read_text())["rounds"] for file in tmp_path.glob("*/_ledgers/partition-*/lungs-2026")]
    assert sorted(rounds) == [0] * 6 + [2] * 2


def test_an_app_is_recorded_as_the_page_says(tmp_path, monkeypatch):
    *_, recorder, _ = blocks("how-to/protect-a-flower-app.md")
    monkeypatch.chdir(tmp_path)
    net = nn.Linear(3, 2)
    space: dict = {"app": ClientApp(), "your_own_training": own_training(net)}
    exec(compile(recorder, "how-to/protect-a-flower-app.md", "exec"), space)
    grid = Loopback(space["app"], 2)
    FedAvg(fraction_evaluate=0.0).start(grid, record(dict(net.named_parameters())), num_rounds=2)
    assert not grid.errors
    assert {(one.facts.client, one.facts.round) for one in read_recorded(tmp_path / "seen")} == {("0", 1), ("1", 1)}


def test_the_table_says_which_defences_go_where():
    rows = re.findall(
        r"^\| (?:[^|]*: )?([^|:]+) \| (yes|no) \| (yes|no) \|$",
        (DOCS / "how-to/protect-a-flower-app.md").read_text(),
        re.M,
    )
    supported = {name: (mod, helper) for names, mod, helper in rows for name in names.split(", ")}
    assert supported.keys() == DEFENCES.keys() - {"none"}
    model = build("lenet-zhu", channels=1, size=16, classes=3, generator=Key(0).generator())
    images = Domain(ImageSpace((1, 16, 16)), 3)
    for name, entry in DEFENCES.items():
        needs = any(argument.default is REQUIRED for argument in entry.arguments)
        text = f"{name}(0.5)" if needs else name
        local_client = parse(text)(Client(model, domain=images))
        works = (not _refused(lambda text=text: protect(text)), not unsupported(local_client))
        assert works == (
            supported.get(name, ("yes", "yes")) == ("yes", "yes"),
            supported.get(name, ("", "yes"))[1] == "yes",
        ), name


def _refused(make) -> bool:
    try:
        make()
    except GradveilError:
        return True
    return False
