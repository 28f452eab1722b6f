"""Images to audit with: bundled, from a hub, or from a folder; and how clients share them."""

from gradveil.data.dataset import Dataset, Splits
from gradveil.data.partition import dirichlet, iid, pathological
from gradveil.data.registry import DATA_DIR, DATASETS, DatasetEntry, load, located

__all__ = [
    "DATASETS",
    "DATA_DIR",
    "Dataset",
    "DatasetEntry",
    "Splits",
    "dirichlet",
    "iid",
    "load",
    "located",
    "pathological",
]
