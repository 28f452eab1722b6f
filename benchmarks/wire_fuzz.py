"""Mutated updates for the decoder: each is refused in the one documented way, or decodes to an update of the model.

    python benchmarks/wire_fuzz.py [--inputs 1000000] [--seed 0] [--processes 2] [--output FILE]

Valid encodings of all kinds (dense, sparse, masked, deflated, every dtype) are damaged: bits and bytes, ranges cut,
doubled, inserted and swapped between encodings, numbers of the header replaced with the content cut or filled to fit
them. Most get a right checksum and digest, so that it is not these that refuse them. The receiver expects the true
model, and sometimes another one whose digest the input has. Memory is what `tracemalloc` sees. Each `CHUNK` of inputs
has a seed of its own, and the file is written after each, so that one stopped early tells how far it came.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.wire import header
from gradveil.wire.codec import WORKING_BYTES, Layout, WireError, decode, encode, inspect
from gradveil.wire.header import DIGEST, DTYPES

CHUNK = 25_000
"""Inputs of one seed."""
OVERHEAD = 1 << 16
"""Bytes of Python's objects beside the arrays: those of the header and of an error's traceback."""


class Seed(NamedTuple):
    """A valid encoding with its header, its model, and the mask that sender and receiver share."""

    data: bytes
    found: header.Header
    layout: Layout
    mask: dict[str, Tensor] | None


def seeds(generator: torch.Generator) -> list[Seed]:
    """Encode updates of all kinds."""
    made = []
    for dtype in DTYPES:
        for density in (0.0, 0.004, 0.05, 0.3, 0.7, 1.0):
            shapes = {"w": (2, 3, 5, 5), "b": (), "fc": (30, 20)} if density else {"b": (0, 2), "fc": (4000,)}
            # Of one density all are coded together, with another one in between they are not.
            for other in (density, 1.0 - density):
                update = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
                shares = {name: other if name == "fc" else density for name in shapes}
                kept = {n: torch.rand(value.shape, generator=generator) < shares[n] for n, value in update.items()}
                update = {name: value * kept[name] for name, value in update.items()}
                for masked, deflate in ((False, False), (True, False), (False, True)):
                    mask = kept if masked else None
                    values = torch.float16 if density == 0.3 else None
                    made.append(_seed(encode(update, mask=mask, deflate=deflate, values=values), update, mask))
    # Few entries within a mask, more than are coded together without it.
    large = {name: torch.randn(40_000, generator=generator) for name in ("w", "fc")}
    kept = {name: torch.rand(value.shape, generator=generator) < 0.002 for name, value in large.items()}
    large = {name: value * kept[name] for name, value in large.items()}
    made.append(_seed(encode(large, mask=kept), large, kept))
    broken = {"fc": torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 1.0])}
    return [*made, _seed(encode(broken, nonfinite="keep"), broken, None)]


def _seed(data: bytes, update: dict[str, Tensor], mask: dict[str, Tensor] | None) -> Seed:
    layout = Layout.of(update)
    return Seed(data, inspect(data, layout), layout, mask)


def sealed(body: bytes) -> bytes:
    """Give a body its right checksum."""
    return body + zlib.crc32(body).to_bytes(4, "little")


def mutate(seed: Seed, other: Seed, draw: np.random.Generator) -> bytes:
    """Damage an encoding in one to four ways, most often with a right checksum."""
    if draw.random() < 0.4:
        return _restructured(seed, draw)
    data = bytearray(seed.data[:-4])
    for _ in range(int(draw.integers(1, 5))):
        _MUTATIONS[int(draw.integers(len(_MUTATIONS)))](data, other.data, draw)
    if draw.random() < 0.8:
        end = _digest(seed).stop
        data[:end] = seed.data[:end]
    return sealed(bytes(data)) if draw.random() < 0.9 else bytes(data) + seed.data[-4:]


def _digest(seed: Seed) -> slice:
    """Say where the digest of the layout stands."""
    start = 6 + len(seed.found.mask)
    return slice(start, start + DIGEST)


_FIELDS = ("sent", "low", "unary", "among", "planes", "names", "values")
"""What is replaced; of names, the number that are coded together."""


def _restructured(seed: Seed, draw: np.random.Generator) -> bytes:
    """Replace numbers of the header, and cut or fill the content to the length that they ask for."""
    found = seed.found
    entries = list(found.entries)
    for _ in range(int(draw.integers(1, 3))):
        index = int(draw.integers(len(entries)))
        entry = entries[index]
        field = _FIELDS[int(draw.integers(len(_FIELDS)))]
        near = int(draw.integers(-2, 3))
        if field in ("sent", "unary", "among"):
            size = max(0, getattr(entry, field) + near) if draw.random() < 0.7 else int(draw.integers(0, 3000))
            entry = entry._replace(**{field: size})
        elif field == "low":
            entry = entry._replace(low=int(draw.integers(0, 33)))
        elif field == "planes" and entry.planes:
            entry = entry._replace(planes=tuple(max(0, p + int(draw.integers(-2, 3))) for p in entry.planes))
        elif field == "names":
            entry = entry._replace(names=entry.names[:1] * int(draw.integers(0, 5)))
        elif field == "values":
            entry = entry._replace(values=DTYPES[int(draw.integers(len(DTYPES)))])
        entries[index] = entry
    content = seed.data[found.start : -4]
    needed = sum(entry.position_bytes + entry.value_bytes for entry in entries)
    filled = content[:needed] + draw.bytes(max(0, needed - len(content)))
    if filled and draw.random() < 0.5:
        turned = bytearray(filled)
        _bits(turned, b"", draw)
        filled = bytes(turned)
    return sealed(header.write(found.layout, entries, found.mask, found.deflated) + filled)


def _place(data: bytearray, draw: np.random.Generator) -> int:
    """Choose a place, every other time near the beginning, where the header is."""
    return int(draw.integers(0, min(len(data), 120 if draw.random() < 0.5 else len(data)) + 1))


def _bits(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    if data:
        data[min(_place(data, draw), len(data) - 1)] ^= 1 << int(draw.integers(8))


def _byte(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    if data:
        data[min(_place(data, draw), len(data) - 1)] = (0, 1, 2, 127, 128, 255, int(draw.integers(256)))[
            int(draw.integers(7))
        ]


def _cut(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    place = _place(data, draw)
    del data[place : place + int(draw.integers(1, 20))]


def _truncate(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    del data[_place(data, draw) :]


def _insert(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    place = _place(data, draw)
    data[place:place] = draw.bytes(int(draw.integers(1, 20)))


def _double(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    place = _place(data, draw)
    data[place:place] = data[place : place + int(draw.integers(1, 40))]


def _splice(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    place, length = _place(data, draw), int(draw.integers(1, 60))
    data[place : place + length] = other[place : place + length]


def _huge(data: bytearray, other: bytes, draw: np.random.Generator) -> None:
    place = _place(data, draw)
    data[place : place + 1] = b"\xff" * int(draw.integers(1, 6)) + bytes([int(draw.integers(128))])


_MUTATIONS: tuple[Callable[[bytearray, bytes, np.random.Generator], None], ...] = (
    *(_bits, _byte, _cut, _truncate, _insert, _double, _splice, _huge),
)


def judge(data: bytes, seed: Seed, layout: Layout, nonfinite: str) -> str:
    """Decode; say how it ended. Whatever else than a `WireError` comes out is the caller's failure."""
    try:
        found = decode(data, layout, mask=seed.mask, nonfinite=nonfinite)  # type: ignore[arg-type]
    except WireError as error:
        # Of a differing model every tensor is named: one kind.
        return "another model" if len(error.problems) > 1 else " ".join(_words(error.problems[0].what))
    assert list(Layout.of(found).items()) == list(layout.items()), "decoded to another model"
    finite = all(bool(value.isfinite().all()) for value in found.values())
    assert nonfinite == "keep" or finite, "a value that is not finite came through"
    data = encode(found, mask=seed.mask, nonfinite="keep")
    again = decode(data, layout, mask=seed.mask, nonfinite="keep")
    same = all(torch.equal(again[n].nan_to_num(1.5), found[n].nan_to_num(1.5)) for n in found)
    assert same, "does not survive another journey"
    return "decoded"


def _words(text: str) -> list[str]:
    """Take the beginning of a message, without its numbers."""
    return [word for word in text.split()[:5] if word.isalpha() and word not in {"float32", "missing"}]


def allowed(layout: Layout, data: bytes) -> int:
    """Bound the memory of decoding: the result, the work on what is coded together, and objects for the header."""
    entries = [torch.Size(described.shape).numel() for described in layout.values()]
    result = sum(n * described.dtype.itemsize for n, described in zip(entries, layout.values(), strict=True))
    largest = max([*entries, min(sum(entries), header.MOST_TOGETHER)])
    return 2 * result + WORKING_BYTES * largest + 200 * len(data) + 1000 * len(layout) + OVERHEAD


@contextmanager
def traced_memory() -> Iterator[None]:
    """Trace memory, and end it whatever happens: it makes Python code several times slower."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def fuzz(inputs: int, seed: int) -> tuple[Counter[str], float]:
    """Decode so many mutated inputs; return how they ended and the largest share of the allowed memory."""
    draw = np.random.default_rng(seed)
    known = seeds(torch.Generator().manual_seed(seed))
    ended: Counter[str] = Counter()
    worst = 0.0
    with traced_memory():
        for number in range(inputs):
            chosen, other = (known[int(i)] for i in draw.integers(len(known), size=2))
            data = mutate(chosen, other, draw)
            layout = chosen.layout
            if chosen.mask is None and draw.random() < 0.2:
                data, layout = _expected(data, chosen, other), other.layout
            nonfinite = "keep" if draw.random() < 0.5 else "refuse"
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            try:
                ended[judge(data, chosen, layout, nonfinite)] += 1
            except Exception:
                print(f"input {number}, {nonfinite}, {layout}:\n{data.hex()}", file=sys.stderr)
                raise
            share = (tracemalloc.get_traced_memory()[1] - before) / allowed(layout, data)
            if share > worst:
                worst = share
                assert share <= 1, f"input {number} took {share:.2f} of the allowed memory: {data.hex()}"
    return ended, worst


def _expected(data: bytes, seed: Seed, other: Seed) -> bytes:
    """Give an input the digest of another model, which the receiver then expects."""
    body = bytearray(data[:-4])
    body[_digest(seed)] = other.layout.digest()
    return sealed(bytes(body))


def main() -> None:
    """Run, and write down how the inputs ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    began = time.perf_counter()
    chunks = [min(CHUNK, given.inputs - start) for start in range(0, given.inputs, CHUNK)]
    facts: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "inputs": 0,
        "seed": given.seed,
        "worst_share_of_allowed_memory": 0.0,
    }
    every: Counter[str] = Counter()
    with ProcessPoolExecutor(given.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        turns = {pool.submit(fuzz, count, given.seed + i): count for i, count in enumerate(chunks)}
        for turn in as_completed(turns):
            ended, worst = turn.result()
            every += ended
            facts["inputs"] += turns[turn]
            facts["worst_share_of_allowed_memory"] = max(facts["worst_share_of_allowed_memory"], round(worst, 3))
            told = {**facts, "seconds": round(time.perf_counter() - began), "ended": dict(every.most_common())}
            print(json.dumps(told), flush=True)
            if given.output:
                given.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
