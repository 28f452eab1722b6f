"""Data sets of images and tables, bundled or from files, and their partitions among clients."""

from gradveil.data.dataset import Dataset, Splits
from gradveil.data.partition import by_flower, dirichlet, grouped, iid, pathological
from gradveil.data.pixel_range import Bounds
from gradveil.data.registry import DATA_DIR, DATASETS, DatasetEntry, load, located
from gradveil.data.tables import table

__all__ = [
    "DATASETS",
    "DATA_DIR",
    "Bounds",
    "Dataset",
    "DatasetEntry",
    "Splits",
    "by_flower",
    "dirichlet",
    "grouped",
    "iid",
    "load",
    "located",
    "pathological",
    "table",
]
