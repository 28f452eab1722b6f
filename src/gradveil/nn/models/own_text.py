"""A user's own module of token numbers: its word table and positions are found by watching it read a text."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from gradveil.core.errors import FOREIGN, fail
from gradveil.nn.models.hugging_face_text import INNER, HuggingFaceText, reads_tokens
from gradveil.nn.surgery import BatchNorm, replace_layernorm
from gradveil.nn.token_layout import TokenLayout, TokenModel

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
        read, head = _watched(self.inner, example)
        words = [path for path, given in read.items() if torch.equal(given, example)]
        if len(words) != 1:
            found = f"{len(words)} tables ({', '.join(words)})" if words else "no nn.Embedding as they are"
            what = f"looks the token numbers up in {found}; gradients of texts are read off one table"
            raise fail("model", what, "look all numbers up in one nn.Embedding, or give a model of transformers")
        count = torch.arange(example.shape[1])
        places = {
            path: int(given.flatten()[0])
            for path, given in read.items()
            if given.numel() == len(count) and torch.equal(given.flatten() - given.flatten()[0], count)
        }
        places.pop(words[0], None)
        table: nn.Embedding = self.inner.get_submodule(words[0])  # type: ignore[assignment]
        table.sparse = False
        positions, offset = next(iter(places.items()), (None, 0))
        self.layout = TokenLayout(
            family="own",
            words=f"{INNER}.{words[0]}",
            norm="",
            attention=(),
            layers=0,
            causal=False,
            padding=padding_of_table(table),
            positions=None if positions is None else f"{INNER}.{positions}",
            offset=offset,
            head=None if head is None else f"{INNER}.{head}",
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K]."""
        return self.inner(ids)


def reading_tokens(model: nn.Module, example: Tensor) -> tuple[TokenModel, tuple[str, ...]]:
    """Return a model that takes token numbers as long as an example [1, T], and what was changed in it."""
    if isinstance(model, TokenModel):
        return model, ()
    if reads_tokens(model) or word_table(model) is None:
        return HuggingFaceText(model, example.shape[1]), (WRAPPED,)
    changed = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    return OwnText(model, example), (WATCHED,) if changed else ()


def word_table(model: nn.Module) -> nn.Embedding | None:
    """Return the largest table of a model: that of words, if the model reads texts."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, key=lambda table: table.num_embeddings, default=None)


def padding_of_table(table: nn.Embedding) -> int:
    """Return the number of padding: the one that the table names, or 0."""
    return 0 if table.padding_idx is None else table.padding_idx


def _watched(model: nn.Module, example: Tensor) -> tuple[dict[str, Tensor], str | None]:
    """Return what each table of a model is given when it reads an example, and the linear layer that ends it."""
    read: dict[str, Tensor] = {}
    answers: dict[str, Tensor] = {}
    model = deepcopy(model)  # running statistics and rows that are shortened stay as they are
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval()  # in training mode it may refuse a single example
    names = {module: path for path, module in model.named_modules()}

    def before(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        read[names[module]] = given[0].detach()

    def after(module: nn.Module, _: object, answer: Tensor) -> None:
        answers[names[module]] = answer

    handles = [each.register_forward_pre_hook(before) for each in names if isinstance(each, nn.Embedding)]
    handles += [each.register_forward_hook(after) for each in names if isinstance(each, nn.Linear)]
    try:
        with torch.no_grad():
            outputs = model(example)
    except FOREIGN as error:
        first = (str(error).strip().splitlines() or [""])[0]
        what = f"fails on token numbers {list(example.shape)}: {type(error).__name__}: {first}"
        raise fail("model", what, "give a module whose forward takes token numbers [B, T] alone") from error
    finally:
        for handle in handles:
            handle.remove()
    return read, next((path for path, answer in answers.items() if answer is outputs), None)
