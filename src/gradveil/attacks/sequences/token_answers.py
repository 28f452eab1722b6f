"""What attacks on texts share: the models they suit, padded texts as an answer, and its labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.attacks.simulated_updates import Simulated
from gradveil.client import Client
from gradveil.core.errors import Problem, fail
from gradveil.core.formatting import listing
from gradveil.nn.module_paths import call_on, last_layer
from gradveil.nn.token_layout import TokenModel
from gradveil.spaces.text_space import TextSpace


def token_problems(client: Client, name: str) -> Iterator[Problem]:
    """Refuse models that read no texts."""
    if not isinstance(client.model, TokenModel):
        what = f"reads texts from the first layers of a language model, and {type(client.model).__name__} is none"
        remedy = "choose small-encoder or small-decoder, or wrap a model of transformers in HuggingFaceText"
        yield Problem(f"attack.{name}", what, remedy)


def attention_problems(client: Client, name: str) -> Iterator[Problem]:
    """Refuse models whose first layers are not known, and updates without gradients of the first layer's attention."""
    yield from token_problems(client, name)
    if isinstance(client.model, TokenModel) and not client.model.layout.attention:
        what = "solves for the inputs of attention, and nothing says where this model has it"
        yield Problem(f"attack.{name}", what, "choose embedding-search or embedding-rows, or a model of transformers")
    elif isinstance(client.model, TokenModel):
        paths = [path.format(0) for path in client.model.layout.attention]
        read = (*(f"{path}.weight" for path in paths), *(f"{path}.lora_" for path in paths))
        if not any(trained.startswith(read) for trained in client.trained()):
            what = f"reads the gradients of attention, and {listing(paths)} are frozen and have no adapters"
            yield Problem(f"attack.{name}", what, "train one of them, or choose embedding-rows, which reads embeddings")


def text_space(knowledge: Knowledge) -> TextSpace:
    """Return the space of the texts; refuse other kinds."""
    if not isinstance(knowledge.space, TextSpace):
        what = f"recovers texts, and the examples are {knowledge.space.words.plural}"
        raise fail("attack", what, "choose an attack for this kind of examples")
    return knowledge.space


def padded(texts: Sequence[Tensor], count: int, space: TextSpace, device: torch.device) -> Tensor:
    """Return texts as token numbers [count, T]: cut and padded, missing ones all padding."""
    table = torch.full((count, space.shape[0]), space.padding, dtype=torch.long, device=device)
    for row, words in zip(table, texts, strict=False):
        row[: len(words)] = words[: len(row)]
    return table


def simulated(client: Client, observations: Sequence[Observation]) -> Simulated:
    """Simulate the client from the texts that it trains on: its batch defence has changed them already."""
    return Simulated(replace(client, batch=()), observations)


def token_targets(seen: Observation, client: Client, knowledge: Knowledge, inputs: Tensor) -> Tensor:
    """Return the granted labels, or those that the last bias proves for the recovered texts.

    The bias's gradient of class c is mean(p_c) - n_c / B, and the model computes p for the texts.
    """
    if knowledge.targets is not None:
        return knowledge.targets
    target_clients, examples = inputs.shape[:2]
    zeros = torch.zeros(target_clients, examples, dtype=torch.long, device=inputs.device)
    model = client.model
    if not isinstance(model, TokenModel) or model.layout.predicts_words:
        return zeros
    bias = seen.update.get(f"{model.layout.head or last_layer(model)}.bias")
    if bias is None:
        return zeros
    with torch.no_grad():
        outputs = torch.stack([call_on(model, {**seen.params, **client.objective.buffers()}, x) for x in inputs])
    if bias.shape[-1] != outputs.shape[-1]:  # the last layer does not give the outputs: a tied table does
        return zeros
    counts = examples * (outputs.softmax(-1).mean(1) - bias)
    for row, wanted in zip(zeros, counts, strict=True):
        for place in range(examples):
            row[place] = wanted.argmax()
            wanted[row[place]] -= 1
    return zeros.sort(1).values
