"""A user's own module of token numbers: its word table and positions are found by watching it read a text."""

from __future__ import annotations

from torch import Tensor, nn

from gradveil.nn.models.hugging_face_text import HuggingFaceText, reads_tokens
from gradveil.nn.models.unlisted_text import UnlistedText, unlisted
from gradveil.nn.models.watched_layout import watched_layout, word_table
from gradveil.nn.surgery import replace_layernorm
from gradveil.nn.token_layout import TokenModel

WRAPPED = "attention computed eagerly behind an additive mask, LayerNorm by its formula"
"""Changes that a wrapped model of transformers has."""
WATCHED = "LayerNorm by its formula"
"""The change that a wrapped module of the user has, if it holds one."""


class OwnText(TokenModel):
    """A classifier of token numbers [B, T] of which the word table is known, and the layers behind it are not.

    It holds a copy, with LayerNorm by its formula. Attacks read the table's rows, or compare the gradients of all
    layers; those that solve for the inputs of attention do not apply.
    """

    def __init__(self, inner: nn.Module, example: Tensor) -> None:
        """Wrap a module and watch it read an example [1, T]; refuse one that looks no token numbers up."""
        super().__init__()
        self.inner = replace_layernorm(inner)
        for module in self.inner.modules():
            if isinstance(module, nn.TransformerEncoder):  # nested tensors know few operations, and no derivatives
                module.use_nested_tensor = False
        self.training = inner.training
        self.input_shape = tuple(example.shape[1:])
        self.layout = watched_layout(self.inner, self.inner, example)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K]."""
        return self.inner(ids)


def reading_tokens(model: nn.Module, example: Tensor) -> tuple[TokenModel, tuple[str, ...]]:
    """Return a model that takes token numbers as long as an example [1, T], and what was changed in it."""
    if isinstance(model, TokenModel):
        return model, ()
    if unlisted(model):
        return UnlistedText(model, example.shape[1]), (WRAPPED,)
    if reads_tokens(model) or word_table(model) is None:
        return HuggingFaceText(model, example.shape[1]), (WRAPPED,)
    changed = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    return OwnText(model, example), (WATCHED,) if changed else ()
