"""The bag of words from embedding gradients, in the order that position rows give it: no search, no second layer.

Fowl et al. 2022, "Decepticons: Corrupted Transformers Breach Privacy in Federated Learning for Language Models", and
Gupta et al. 2022, "Recovering Private Text in Federated Learning of Language Models" (FILM), read the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from gradveil.attacks.knowledge import How, Knowledge
from gradveil.attacks.protocol import Observation, Progress, Prospect, Reconstruction, Remark, in_closed_form
from gradveil.attacks.sequences.token_answers import padded, text_space, token_problems, token_targets
from gradveil.attacks.sequences.word_rows import WordRows, word_rows
from gradveil.client import Client
from gradveil.core.errors import Problem
from gradveil.core.noise import Key
from gradveil.core.settings import Checked, Range
from gradveil.nn.token_layout import TokenModel
from gradveil.spaces.text_space import TextSpace


@dataclass(frozen=True)
class EmbeddingRows(Checked):
    """Read the words of a batch off the rows of the word embedding's gradient."""

    name: str = "embedding-rows"
    words: Annotated[
        int, Range(1), "Words per example that are taken where noise or a tied output fills every row."
    ] = 24

    needs: ClassVar[str] = "tokens"
    simulated_client: ClassVar[Literal["naive", "full"]] = "naive"
    knowledge: ClassVar[Mapping[str, How]] = {}

    def problems(self, prospect: Prospect) -> Iterator[Problem]:
        """Refuse models whose embeddings are not known or frozen."""
        yield from token_problems(prospect.simulated_client, self.name)
        model = prospect.simulated_client.model
        if isinstance(model, TokenModel):
            name = f"{model.layout.words}.weight"
            if name not in prospect.simulated_client.trained():
                what = f"the word embedding '{name}' is frozen"
                yield Problem(f"attack.{self.name}", what, "train it, or choose span-rank")

    def __call__(
        self,
        observations: Sequence[Observation],
        simulated_client: Client,
        knowledge: Knowledge,
        key: Key,
        progress: Callable[[Progress], None] | None = None,
        plan: Sequence[int] = (),
    ) -> Reconstruction:
        """Return for each example the words with the largest shares of each position's row."""
        began = time.perf_counter()
        seen, space = observations[-1], text_space(knowledge)
        model = simulated_client.model
        assert isinstance(model, TokenModel)
        texts, bags, device = [], [], next(iter(seen.params.values())).device
        for client in range(len(seen.target_clients)):
            update = {name: value[client] for name, value in seen.update.items()}
            rows = word_rows(update, model.layout, self.words * seen.examples)
            bags.append(0.0 if rows is None else float(len(rows.bag)))
            texts.append(_arranged(rows, seen.examples, space, device))
        inputs = torch.stack(texts)
        targets = token_targets(seen, simulated_client, knowledge, inputs)
        misfit = torch.zeros(len(texts), device=device)
        result = in_closed_form(inputs, targets, misfit, torch.isfinite(misfit), began, progress)
        return replace(result, remarks=(Remark("{} words in the embedding's rows", tuple(bags)),))


def _arranged(rows: WordRows | None, examples: int, space: TextSpace, device: torch.device) -> Tensor:
    """Return texts [B, T]: at each position its B words, or the bag in the order of numbers, dealt out evenly."""
    if rows is None:
        return padded([], examples, space, device)
    if rows.shares is None:
        special = [number for number in (space.padding, space.start, space.end) if number is not None]
        words = rows.bag[~torch.isin(rows.bag, torch.tensor(special, device=device))]
        return padded([words[place::examples] for place in range(examples)], examples, space, device)
    count = min(examples, len(rows.bag))
    best = rows.bag[rows.shares.topk(count, dim=1).indices]
    columns = [best[:, min(place, count - 1)] for place in range(examples)]
    return padded([_until_end(column, space) for column in columns], examples, space, device)


def _until_end(words: Tensor, space: TextSpace) -> Tensor:
    ends = (words == space.end).nonzero().flatten() if space.end is not None else torch.zeros(0)
    return words[: int(ends[0]) + 1] if len(ends) else words
