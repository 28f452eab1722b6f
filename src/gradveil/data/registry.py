"""The table of data sets, and `load`, which loads any of them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import Problem, fail, refuse
from gradveil.core.formatting import plural
from gradveil.core.noise import Key
from gradveil.core.streams import Stream
from gradveil.data import bundled, hub, tables, texts
from gradveil.data.dataset import Dataset, Splits
from gradveil.data.hub import marked, recolour, resize, stack

DATA_DIR = "GRADVEIL_DATA"
"""Environment variable with the data folder, used if `data_dir` (`--data-dir`) is not given."""

LABEL = "label"
"""The name of every data set's label column, whatever its source calls it."""

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, of pixels in [0, 1]."""


@dataclass(frozen=True)
class DatasetEntry:
    """Description of a data set, shown by `gradveil list`."""

    description: str
    source: str
    """Licence and citation, in a sentence."""
    bundled: bool = True
    """True if it needs neither files nor network."""
    statistics: Statistics | None = None
    """Published mean and std per channel, if any."""
    classes: tuple[str, ...] | None = None
    task: bool = True
    kind: str = "images"
    """`images`, `rows` or `texts`."""
    targets: int | None = None
    """How many of the private images target clients may hold, the first ones; None for all."""


_CENSUS = "Census-Income (KDD), UCI Machine Learning Repository 2000, from the US Census Bureau, CC BY 4.0."

_VADER = "vaderSentiment 3.3.2, C. J. Hutto and E. Gilbert, ICWSM 2014, MIT."


def _texts(count: str, what: str, name: str) -> DatasetEntry:
    files = f"text/{name}-{{train,test}}.parquet"
    return DatasetEntry(f"{count} sentences of {what}, 2 classes ({files})", _VADER, bundled=False, kind="texts")


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(
        "1797 handwritten digits, 8x8 grey, 10 classes (in scikit-learn)",
        "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository 1998, "
        "CC BY 4.0.",
        classes=tuple("0123456789"),
    ),
    "faces": DatasetEntry(
        "100 faces and 100 backgrounds, 25x25 grey, 2 classes (in scikit-image)",
        "A subset of Labeled Faces in the Wild: G. Huang, M. Mattar, H. Lee, E. Learned-Miller, Learning to Align from "
        "Scratch, NIPS 2012; for research.",
        classes=("face", "background"),
        targets=50,
    ),
    "patches": DatasetEntry(
        "544 colour crops of nine photographs, 80x80, labels without meaning: attacks only (in both)",
        "Photographs bundled with scikit-image (public domain, CC0, Middlebury 2014 stereo) and with scikit-learn "
        "(china and flower, CC BY 2.0, danielbuechele and vultilion).",
        classes=tuple("0123456789"),
        task=False,
    ),
    "mnist": DatasetEntry(
        "70,000 handwritten digits, 28x28 grey, 10 classes (mnist/{train,test}.parquet)",
        "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-Based Learning Applied to Document Recognition, "
        "Proceedings of the IEEE 86(11), 1998.",
        bundled=False,
        statistics=((0.1307,), (0.3081,)),
    ),
    "cifar10": DatasetEntry(
        "60,000 small photographs, 32x32 colour, 10 classes (cifar10/{train,test}.parquet)",
        "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, University of Toronto 2009.",
        bundled=False,
        statistics=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    "cifar100": DatasetEntry(
        "60,000 small photographs, 32x32 colour, 100 classes (cifar100/{train,test}.parquet)",
        "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, University of Toronto 2009.",
        bundled=False,
        statistics=((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    ),
    "census": DatasetEntry(
        "1200 rows of census-income, half of each class, 18 columns (in this package)", _CENSUS, kind="rows"
    ),
    "census-income": DatasetEntry(
        "25,000 rows of the US census of 1994-95, 18 columns, 2 classes (tables/census-income-{train,test}.parquet)",
        _CENSUS,
        bundled=False,
        kind="rows",
    ),
    "german-credit": DatasetEntry(
        "1000 bank customers, 20 columns, 2 classes (tables/german-credit-{train,test}.parquet)",
        "Statlog (German Credit Data), H. Hofmann, UCI Machine Learning Repository 1994, CC BY 4.0.",
        bundled=False,
        kind="rows",
    ),
    "reviews": DatasetEntry("504 sentences of film reviews, 2 classes", _VADER, kind="texts"),
    "movie-reviews": _texts("10,605", "film reviews", "movie-reviews"),
    "editorials": _texts("5,190", "newspaper editorials, with names and dates", "editorials"),
    "product-reviews": _texts("3,708", "product reviews", "product-reviews"),
}
"""Data sets by short name. `load` also takes `hf:owner/name[:configuration]`, `parquet:PATH`, `folder:PATH`, and the
path of a table: `PATH.csv` or `PATH.parquet`, or of texts: `texts:PATH.csv`."""

_SAME = {"hf:ylecun/mnist": "mnist", "hf:uoft-cs/cifar10": "cifar10", "hf:uoft-cs/cifar100": "cifar100"}
FORMS = ("hf:owner/name", "parquet:PATH", "folder:PATH", "PATH.csv", "PATH.parquet", "texts:PATH.csv")
"""Names of data of your own, which `load` and run files take besides those of the table."""


def located(name: str, data_dir: Path | str | None = None) -> Path:
    """Return the path of a file in the working directory or the data folder."""
    for folder in (Path(), data_dir, os.environ.get(DATA_DIR)):
        if folder is not None and (Path(folder) / name).is_file():
            return Path(folder) / name
    raise fail(name, "is no file here or in the data folder", "correct the name, or give --data-dir")


def kind_of(name: str) -> str:
    """Return the kind of a data set's examples by its name.

    >>> kind_of("german-credit"), kind_of("patients.csv"), kind_of("cifar10"), kind_of("texts:notes.csv")
    ('rows', 'rows', 'images', 'texts')
    """
    if texts.is_texts(name):
        return "texts"
    return "rows" if tables.is_table(name) else DATASETS[name].kind if name in DATASETS else "images"


def told_by_columns(name: str) -> str:
    """Return the name of a table as that of texts, if its file has the columns `text` and `label` and no other."""
    if not (tables.is_table(name) and Path(name).is_file()):
        return name
    return f"{texts.FORM}{name}" if {*tables.read_values(Path(name))} == {"text", "label"} else name


def is_known(name: str) -> bool:
    """Report whether a name is in the table, or has one of the forms of a path.

    >>> [name for name in ("face", "notes.csv", "texts:notes.csv", "folder:scans", "folder:") if is_known(name)]
    ['notes.csv', 'texts:notes.csv', 'folder:scans']
    """
    form, _, rest = name.partition(":")
    return name in DATASETS or tables.is_table(name) or (form in ("hf", "parquet", "folder", "texts") and bool(rest))


def load(
    name: str,
    *,
    size: int | None = 32,
    channels: int | None = None,
    normalise: Literal["dataset", "none"] | Statistics = "dataset",
    data_dir: Path | str | None = None,
    limit_public: int | None = None,
    limit_private: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    column: str | None = None,
    columns: Mapping[str, str] | None = None,
    client_seed: int | None = None,
    tokenizer: str | None = None,
    tokens: int | None = None,
    person: str | None = None,
) -> Splits:
    """Load the public and private images of a data set by its short name, Hugging Face name, or path.

    `size` is the side of the resized images in pixels, None for their own. `channels` 1 makes them grey, 3 colour. The
    limits keep the first images of each split and decode no others. `normalise`: `"dataset"` uses the published mean
    and std, or else those of the (decoded) public images; `"none"` leaves pixels in [0, 1]; a pair (means, stds) is
    used as it is. `column` names an additional column of the public images to read. `columns` declares columns of a
    table as "number" or "category", and `person` is its column that names persons, which is no input. With
    `client_seed` the private images are those of one of ten clients: a tenth of the training images, drawn and put in
    random order by the seed. The others stay public, and the test images are not read. Texts are cut after `tokens`, by
    a `tokenizer` of transformers: a folder or a name of the user's cache; without one the vocabulary is learned from
    public texts.

    >>> splits = load("digits", normalise="none", limit_private=8)
    >>> tuple(splits.private.inputs.shape), splits.private.targets.tolist()
    ((8, 1, 32, 32), [8, 4, 1, 7, 7, 3, 5, 1])
    """
    _check(name, size, channels, normalise, limit_public, limit_private)
    if columns and kind_of(name) != "rows":
        raise fail("columns", f"are kinds of a table's columns, and {name!r} holds {kind_of(name)}", "remove them")
    if person and kind_of(name) != "rows":
        raise fail("person", f"is a column of a table, and {name!r} holds {kind_of(name)}", "remove it")
    if (kind := kind_of(name)) != "images":
        folder = data_dir or os.environ.get(DATA_DIR)
        where = Path(folder).expanduser() if folder else None
        source = DATASETS[name].source if name in DATASETS else ""
        if kind == "texts":
            rows = texts.open_texts(name, where, label_column, source, tokenizer, tokens)
        else:
            rows = tables.open_rows(name, where, label_column, source, column, columns, person)
        if client_seed is not None:
            others, own = _client(len(rows.public), client_seed)
            rows = Splits(rows.public.subset(others), rows.public.subset(own))
        parts = zip(rows, (limit_public, limit_private), strict=True)
        return Splits(*(part.subset(range(len(part))[:limit]) for part, limit in parts))
    limits = (limit_public, limit_private)
    if name in DATASETS and DATASETS[name].bundled:
        entry, loaded = DATASETS[name], _from_wheels(name, size, column, client_seed)
    else:
        entry = DATASETS.get(_SAME.get(name, name), DatasetEntry(name, f"{name}, as given by the user.", bundled=False))
        data_folder = data_dir or os.environ.get(DATA_DIR)
        opened = _open(name, Path(data_folder).expanduser() if data_folder else None, image_column, label_column)
        open_to_all, held = hub.two_splits(opened)
        if client_seed is not None:
            others, own = _client(len(open_to_all.labels), client_seed)
            open_to_all, held = hub.pick(open_to_all, others.numpy()), hub.pick(open_to_all, own.numpy())
        loaded = _from_rows(open_to_all, held, size, limits, column)
    pixels = [recolour(part, channels, f"data {name!r}") for part in loaded.pixels]
    if pixels[0].shape[1:] != pixels[1].shape[1:]:
        what = f"public images are {tuple(pixels[0].shape[1:])}, private {tuple(pixels[1].shape[1:])}"
        raise fail(f"data {name!r}", what, "give size and channels")
    mean, std = _statistics(normalise, entry.statistics, pixels[0])
    scale = [torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std)]
    public, private = (
        Dataset(
            f"{name}/{split}",
            (part[:limit] - scale[0]) / scale[1],
            targets[:limit],
            loaded.classes,
            mean,
            std,
            entry.source,
            entry.task,
            marks=tuple(marks),
        )
        for split, part, targets, limit, marks in zip(
            ("public", "private"), pixels, loaded.targets, limits, loaded.marks, strict=True
        )
    )
    extra = loaded.targets[0].tolist() if column == LABEL else loaded.column
    return Splits(replace(public, column=tuple(extra[:limit_public])), private)


class _Loaded(NamedTuple):
    """Both splits, public first, before recolouring, normalisation and (for bundled data) limits."""

    classes: tuple[str, ...]
    pixels: tuple[Tensor, Tensor]
    targets: tuple[Tensor, Tensor]
    column: Sequence[Any] = ()
    marks: tuple[Sequence[int], Sequence[int]] = ((), ())


CLIENTS = 10
"""Number of clients among whom the training images are dealt where target images are those of one of them."""


def _client(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Deal images to clients; return the places of the other clients' images, and those of one client's."""
    order = torch.randperm(images, generator=Key(seed, (Stream.PARTITION,)).generator())
    held = max(1, images // CLIENTS)
    return order[held:].sort().values, order[:held]


def _from_wheels(name: str, size: int | None, column: str | None, client_seed: int | None) -> _Loaded:
    raw: bundled.Raw = getattr(bundled, name)()
    if client_seed is not None:
        others, own = _client(len(raw.public), client_seed)
        images, labels = raw.public, raw.public_labels
        raw = bundled.Raw(images[others], labels[others], images[own], labels[own])
    _affordable(len(raw.public) + len(raw.private), size)
    pixels = (resize(raw.public, size), resize(raw.private, size))
    values = hub.no_columns(column) if column not in (None, LABEL) else ()
    return _Loaded(DATASETS[name].classes or (), pixels, (raw.public_labels, raw.private_labels), values)


def _from_rows(
    public: hub.SourceSplit,
    private: hub.SourceSplit,
    size: int | None,
    limits: tuple[int | None, int | None],
    column: str | None,
) -> _Loaded:
    classes, public_labels, private_labels = hub.number(public, private)
    first = torch.tensor(public_labels[: limits[0]], dtype=torch.int64)
    second = torch.tensor(private_labels[: limits[1]], dtype=torch.int64)
    _affordable(len(first) + len(second), size)
    marks: tuple[list[int], list[int]] = ([], [])
    pixels = (
        stack(marked(public.decode(range(len(first))), marks[0]), size, public.where),
        stack(marked(private.decode(range(len(second))), marks[1]), size, private.where),
    )
    values = public.column(column) if column not in (None, LABEL) else ()
    return _Loaded(classes, pixels, (first, second), values, marks)


def _affordable(images: int, size: int | None) -> None:
    """Raise before any image is decoded if the images exceed this machine's memory."""
    needed = 4 * images * (size or 0) ** 2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        amounts = f"take {needed / 1e9:,.0f} GB or more, and there are {memory / 1e9:,.0f}"
        raise fail("size", f"is {size}: {plural(images, 'image')} {amounts}", "lower it, or read fewer images")


def _statistics(
    normalise: Literal["dataset", "none"] | Statistics, published: Statistics | None, public: Tensor
) -> Statistics:
    if normalise == "none":
        return (0.0,), (1.0,)
    if not isinstance(normalise, str):
        return tuple(normalise[0]), tuple(normalise[1])
    if published is not None and len(published[0]) in (1, public.shape[1]):
        return published
    # A channel that never changes is only centred.
    std, mean = torch.std_mean(public.double(), dim=(0, 2, 3), correction=0)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))
    return tuple(round(value, 4) for value in mean.tolist()), tuple(max(round(v, 4), 1e-4) for v in std.tolist())


def _open(name: str, data_dir: Path | None, image: str | None, label: str | None) -> dict[str, hub.SourceSplit]:
    form, _, rest = name.partition(":")
    if form == "hf":
        return hub.hugging_face(rest, image, label)
    if form in ("parquet", "folder"):
        path = (data_dir or Path()) / Path(rest).expanduser()
        return hub.folder(path) if form == "folder" else hub.parquet(path, image, label)
    remedy = f"set --data-dir (or {DATA_DIR}) to the folder that holds {name}/train.parquet and {name}/test.parquet"
    if data_dir is None:
        raise fail(f"data {name!r}", "needs files and no data folder is given", remedy)
    if not (data_dir / name).is_dir():
        raise fail(f"data {name!r}", f"{data_dir / name} is not there", remedy)
    return hub.parquet(data_dir / name, image, label)


def _check(
    name: str,
    size: int | None,
    channels: int | None,
    normalise: object,
    limit_public: int | None,
    limit_private: int | None,
) -> None:
    problems: list[Problem] = []
    if not is_known(name):
        problems.append(_unknown(name))
    if size is not None and size < 1:
        problems.append(Problem("size", f"is {size}", "give a side of at least 1 pixel, or none for the images' own"))
    if channels not in (None, 1, 3):
        problems.append(Problem("channels", f"is {channels}", "choose 1 (grey), 3 (colour), or none for their own"))
    if isinstance(normalise, str) and normalise not in ("dataset", "none"):
        problems.append(Problem("normalise", f"is {normalise!r}", "choose dataset, none, or a pair (means, stds)"))
    elif not isinstance(normalise, str) and not _is_pair(normalise):
        problems.append(Problem("normalise", f"is {normalise!r}", "give a pair (means, stds) with every std above 0"))
    for key, limit in (("limit_public", limit_public), ("limit_private", limit_private)):
        if limit is not None and limit < 1:
            problems.append(Problem(key, f"is {limit}", "keep at least 1 image, or leave it out to keep all"))
    refuse(problems)


def _is_pair(value: object) -> bool:
    if not isinstance(value, Sequence) or len(value) != 2:
        return False
    if not all(isinstance(part, Sequence) and len(part) in (1, 3) for part in value):
        return False
    return all(isinstance(x, int | float) for part in value for x in part) and all(x > 0 for x in value[1])


def _unknown(name: str) -> Problem:
    known = ", ".join((*DATASETS, *FORMS))
    close = difflib.get_close_matches(name.lower(), DATASETS, n=1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return Problem("data", f"no data set is called {name!r}", f"{suggestion}known: {known}")
