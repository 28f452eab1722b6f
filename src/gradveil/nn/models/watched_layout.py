"""The layout of a model whose layers are not known: its tables and its head are found by watching it read a text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradveil.core.errors import FOREIGN, fail
from gradveil.nn.models.hugging_face_text import INNER
from gradveil.nn.surgery import BatchNorm
from gradveil.nn.token_layout import TokenLayout


def watched_layout(
    inner: nn.Module,
    read: Callable[[Tensor], Tensor],
    example: Tensor,
    padding: int | None = None,
    family: str = "own",
    asked_for: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> TokenLayout:
    """Watch a module read an example [1, T]; refuse one that looks no token numbers up, or in several tables."""
    given, head = _watched(inner, read, example)
    known = {id(value): name.removesuffix(".weight") for name, value in inner.named_parameters()}
    tables = [path for path, each in given.items() if any(asked_for(one, example) for one in each)]
    # Tables that share their weights, an encoder's and a decoder's, are known by the name of their parameter.
    words = list(dict.fromkeys(known[id(inner.get_parameter(f"{path}.weight"))] for path in tables))
    if len(words) != 1:
        found = f"{len(words)} tables ({', '.join(words)})" if words else "no nn.Embedding as they are"
        what = f"looks the token numbers up in {found}; gradients of texts are read off one table"
        raise fail("model", what, "look all numbers up in one nn.Embedding, or give a model of transformers")
    count = torch.arange(example.shape[1])
    places = {
        path: int(one.flatten()[0])
        for path, each in given.items()
        for one in each
        if one.numel() == len(count) and torch.equal(one.flatten() - one.flatten()[0], count)
    }
    for path in (*words, *tables):
        places.pop(path, None)
    table: nn.Embedding = inner.get_submodule(words[0])  # type: ignore[assignment]
    table.sparse = False
    positions, offset = next(iter(places.items()), (None, 0))
    return TokenLayout(
        family=family,
        words=f"{INNER}.{words[0]}",
        norm="",
        attention=(),
        layers=0,
        causal=False,
        padding=padding_of_table(table) if padding is None else padding,
        positions=None if positions is None else f"{INNER}.{positions}",
        offset=offset,
        head=None if head is None else f"{INNER}.{head}",
    )


def word_table(model: nn.Module) -> nn.Embedding | None:
    """Return the largest table of a model: that of words, if the model reads texts."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, key=lambda table: table.num_embeddings, default=None)


def padding_of_table(table: nn.Embedding) -> int:
    """Return the number of padding: the one that the table names, or 0."""
    return 0 if table.padding_idx is None else table.padding_idx


def _watched(
    model: nn.Module, read: Callable[[Tensor], Tensor], example: Tensor
) -> tuple[dict[str, list[Tensor]], str | None]:
    """Return what each table of a model is given when it reads an example, and the linear layer that ends it."""
    given: dict[str, list[Tensor]] = {}
    answers: dict[str, Tensor] = {}
    names = {module: path for path, module in model.named_modules()}

    def before(module: nn.Module, arguments: tuple[object, ...]) -> None:
        if isinstance(arguments[0], Tensor):  # RoFormer's positions are given a shape
            given.setdefault(names[module], []).append(arguments[0].detach())

    def after(module: nn.Module, _: object, answer: Tensor) -> None:
        answers[names[module]] = answer

    # Watching changes nothing: in training mode a BatchNorm moves its statistics, or refuses a single example, and a
    # table with `max_norm` shortens its rows.
    norms = [each for each in names if isinstance(each, BatchNorm) and each.training]
    limits = {each: each.max_norm for each in names if isinstance(each, nn.Embedding)}
    for each in norms:
        each.eval()
    for each in limits:
        each.max_norm = None
    handles = [each.register_forward_pre_hook(before) for each in limits]
    handles += [each.register_forward_hook(after) for each in names if isinstance(each, nn.Linear)]
    try:
        with torch.no_grad():
            outputs = read(example)
    except FOREIGN as error:
        first = (str(error).strip().splitlines() or [""])[0]
        what = f"fails on token numbers {list(example.shape)}: {type(error).__name__}: {first}"
        raise fail("model", what, "give a module whose forward takes token numbers [B, T] alone") from error
    finally:
        for handle in handles:
            handle.remove()
        for each in norms:
            each.train()
        for each, limit in limits.items():
            each.max_norm = limit
    return given, next((path for path, answer in answers.items() if answer is outputs), None)
