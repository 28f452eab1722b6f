"""Where the word embedding is also the output layer, its gradient is a sum: the softmax fills every row."""

import pytest
import torch

from gradveil.attacks.knowledge import Knowledge
from gradveil.attacks.protocol import Observation
from gradveil.attacks.sequences.embedding_rows import EmbeddingRows
from gradveil.attacks.sequences.span_attack import SpanAttack
from gradveil.client import Client
from gradveil.core.noise import Key
from gradveil.nn.initial_weights import initialise
from gradveil.nn.models.token_transformers import TextTransformer, small_decoder
from gradveil.nn.token_layout import own_loss
from gradveil.spaces.text_space import TextSpace

WORDS, LENGTH = 400, 10
SPACE = TextSpace((LENGTH,), tuple(f"w{i}" for i in range(WORDS)), padding=0, start=1, end=2)


@pytest.mark.parametrize("rows", [True, False])
def test_texts_of_a_tied_decoder_are_recovered(rows):
    model = initialise(small_decoder(vocabulary=WORDS, length=LENGTH, width=96), torch.Generator().manual_seed(0))
    assert isinstance(model, TextTransformer)
    model.head.weight = model.words.weight
    ids = torch.tensor([[1, 17, 230, 9, 311, 2, 0, 0, 0, 0], [1, 44, 17, 388, 120, 75, 6, 2, 0, 0]])
    client = Client(model, loss=own_loss)
    values = torch.autograd.grad(model(ids).mean(), list(model.parameters()))
    update = {name: value.unsqueeze(0) for (name, _), value in zip(model.named_parameters(), values, strict=True)}
    assert "head.weight" not in update
    seen = Observation(client.params(), update, 2, (0,))
    exact = SpanAttack(rows=rows)([seen], client, Knowledge(SPACE, 2), Key(0)).inputs
    assert torch.equal(SPACE.match(exact, ids.unsqueeze(0))[1][0], ids)
    words = EmbeddingRows()([seen], client, Knowledge(SPACE, 2), Key(0)).inputs
    assert set(ids.unique().tolist()) - {0, 1, 2} <= set(words.unique().tolist())
