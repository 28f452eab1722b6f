"""Models of texts as users write them: a mean of words, a convolution, a recurrence, a transformer."""

import torch
from torch import Tensor, nn


class OwnClassifier(nn.Module):
    """Embeds token numbers, and reads the vectors [B, T, d] by a layer of the subclass."""

    def __init__(self, vocabulary: int, width: int = 32, padding: int | None = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.head = nn.Linear(width, 2)

    def read(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.read(self.table(ids)))


class LastWord(OwnClassifier):
    """Reads one word of each text."""

    def read(self, x: Tensor) -> Tensor:
        return x[:, -1]


class Convolution(OwnClassifier):
    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary)
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)

    def read(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).tanh().mean(2)


class Recurrent(OwnClassifier):
    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary)
        self.steps = nn.LSTM(32, 32, batch_first=True)

    def read(self, x: Tensor) -> Tensor:
        return self.steps(x)[0][:, -1]


class Cells(OwnClassifier):
    """A recurrence that the user loops over."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary)
        self.cell = nn.LSTMCell(32, 32)

    def read(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


class Packed(OwnClassifier):
    """Skips padding by packed sequences."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.steps = nn.GRU(32, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        counts = (ids != 0).sum(1).clamp(min=1)
        pack = nn.utils.rnn.pack_padded_sequence
        return self.head(self.steps(pack(self.table(ids), counts, batch_first=True, enforce_sorted=False))[1][-1])


class Tied(OwnClassifier):
    """Reads its logits off the word table."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.head(self.table(ids).mean(1)).tanh(), self.table.weight[:2, :2])


class Normalised(OwnClassifier):
    """Normalises by the batch, in training mode too."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.norm = nn.BatchNorm1d(32)

    def read(self, x: Tensor) -> Tensor:
        return self.norm(x.mean(1))


class Transformer(OwnClassifier):
    """Positions are learned in a table of exactly as many rows as a text has tokens."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary)
        self.places = nn.Embedding(length, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2)

    def read(self, x: Tensor) -> Tensor:
        return self.layers(x + self.places(torch.arange(x.shape[1]))).mean(1)


class Masked(Transformer):
    """Hides padding from attention: in evaluation torch would turn to nested tensors."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.layers(x, src_key_padding_mask=ids == 0).mean(1))


class Columns(OwnClassifier):
    """Looks single columns up, as models of rows do: no text."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids[:, 0]))


def small(vocabulary: int) -> nn.Module:
    """Embeds fewer words than the data have."""
    return OwnClassifier(vocabulary // 2)
