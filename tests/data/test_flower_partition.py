"""Partitions by flwr-datasets: its own clients, and what built-in partitions share with them."""

import io
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp

from gradveil.core.errors import GradveilError
from gradveil.data import by_flower, dirichlet, iid, load

COUNT = 60
# datasets 4.8 sorts with an argument that pyarrow 25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Parquet file of 60 images by seven writers, each image as grey as its place says."""
    pictures = []
    for place in range(COUNT):
        buffer = io.BytesIO()
        Image.fromarray(np.full((2, 2), place, dtype=np.uint8)).save(buffer, "PNG")
        pictures.append({"bytes": buffer.getvalue(), "path": None})
    labels, writers = [place % 3 for place in range(COUNT)], [f"w{place % 7}" for place in range(COUNT)]
    (tmp_path / "own").mkdir()
    for split in ("train", "test"):
        pq.write_table(
            pa.table({"image": pictures, "label": labels, "writer": writers, "place": list(range(COUNT))}),
            tmp_path / f"own/{split}.parquet",
        )
    return tmp_path / "own/train.parquet"


def opened(file: Path):
    return load(f"parquet:{file.parent}", size=None, normalise="none", column="writer").public


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"partition_by": "label", "alpha": 0.5, "min_partition_size": 2}),
        ("PathologicalPartitioner", {"partition_by": "label", "num_classes_per_partition": 2}),
        ("ShardPartitioner", {"partition_by": "label", "num_shards_per_partition": 2}),
        ("GroupedNaturalIdPartitioner", {"partition_by": "writer", "group_size": 2, "mode": "allow-smaller"}),
    ],
)
def test_parts_equal_those_of_federated_dataset(file: Path, name: str, options: dict) -> None:
    from flwr_datasets import FederatedDataset, partitioner

    logging.getLogger("flwr_datasets").setLevel(logging.ERROR)
    said = options if name.startswith("Grouped") else {"num_partitions": 4, **options}
    theirs = FederatedDataset(
        dataset="parquet",
        partitioners={"train": getattr(partitioner, name)(**said)},
        data_files={"train": str(file)},
        cache_dir=str(file.parent / "cache"),
    )
    data = opened(file)
    ours = by_flower(data, 4, name, options, "writer", 42)
    for number, part in enumerate(ours):
        greys = (data.inputs[part, 0, 0, 0] * 255).round().int().tolist()
        assert greys == part.tolist()
        row = theirs.load_partition(number, "train")
        assert sorted(row["place"]) == greys


def test_iid_equals_the_librarys_for_the_same_order(file: Path) -> None:
    data = opened(file)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(5))
    theirs = by_flower(data.subset(order), 7, "IidPartitioner", {}, None, False)
    ours = iid(COUNT, 7, torch.Generator().manual_seed(5))
    assert [order[part].sort().values.tolist() for part in theirs] == [part.tolist() for part in ours]


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_has_the_librarys_law(alpha: float) -> None:
    """Shares of a class that a client gets, over ten seeds; four times the concentration is told apart."""
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner

    targets, clients, seeds = torch.arange(2000) % 20, 4, range(10)
    table = datasets.Dataset.from_dict({"label": targets.tolist()})

    def shares(parts: list[torch.Tensor]) -> list[float]:
        return (targets[parts[0]].bincount(minlength=20) / 100).tolist()

    def own(concentration: float) -> list[float]:
        found = (dirichlet(targets, clients, concentration, torch.Generator().manual_seed(seed)) for seed in seeds)
        return [share for parts in found for share in shares(parts)]

    theirs: list[float] = []
    for seed in seeds:
        made = DirichletPartitioner(clients, "label", alpha, 0, self_balancing=False, seed=seed)
        made.dataset = table
        theirs += (torch.tensor(made.load_partition(0)["label"]).bincount(minlength=20) / 100).tolist()
    assert ks_2samp(own(alpha), theirs).pvalue > 0.05
    assert max(ks_2samp(own(alpha * factor), theirs).pvalue for factor in (0.25, 4.0)) < 0.01


@pytest.mark.parametrize(
    ("clients", "name", "options", "told"),
    [
        (4, "ChessPartitioner", {}, "choose among: .*IidPartitioner"),
        (4, "IidPartitioner", {"alpha": 1}, "IidPartitioner takes no alpha"),
        (4, "DirichletPartitioner", {"alpha": 1}, "refuses them"),
        (4, "DirichletPartitioner", {"partition_by": "place", "alpha": 1.0}, "cannot partition these examples"),
        (4, "NaturalIdPartitioner", {"partition_by": "writer"}, "clients: is 4 and NaturalIdPartitioner makes 7"),
    ],
)
def test_library_errors_are_reported(file, clients, name, options, told) -> None:
    with pytest.raises(GradveilError, match=told):
        by_flower(opened(file), clients, name, options, "writer", 42)
