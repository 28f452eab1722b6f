"""Text models of transformers behind one tensor of token numbers: BERT, RoBERTa, DistilBERT and GPT-2 families."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradveil.core.errors import fail
from gradveil.nn.token_layout import TokenLayout, TokenModel, next_token_loss


def _encoder(stem: str, attention: str, types: bool, offset: int = 0) -> dict[str, Any]:
    distilled = "transformer" in attention
    names = ("q_lin", "k_lin", "v_lin") if distilled else ("query", "key", "value")
    layer = f"{stem}.{attention.partition('.attention')[0]}"
    middle = ("attention.output.LayerNorm", "intermediate")
    if distilled:
        middle = ("sa_layer_norm", "ffn.lin1", "ffn.activation")
    return {
        "words": f"{stem}.embeddings.word_embeddings",
        "positions": f"{stem}.embeddings.position_embeddings",
        "types": f"{stem}.embeddings.token_type_embeddings" if types else None,
        "norm": f"{stem}.embeddings.LayerNorm",
        "attention": tuple(f"{stem}.{attention}.{name}" for name in names),
        "out": f"{layer}.attention.out_lin" if distilled else f"{layer}.attention.output.dense",
        "middle": tuple(f"{layer}.{name}" for name in middle),
        "down": f"{layer}.ffn.lin2" if distilled else f"{layer}.output.dense",
        "carries_normalised": True,
        "offset": offset,
        "causal": False,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _encoder("bert", "encoder.layer.{}.attention.self", types=True),
    "electra": _encoder("electra", "encoder.layer.{}.attention.self", types=True),
    "roberta": _encoder("roberta", "encoder.layer.{}.attention.self", types=True, offset=-1),
    "distilbert": _encoder("distilbert", "transformer.layer.{}.attention", types=False),
    "gpt2": {
        "words": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.h.0.ln_1",
        "attention": ("transformer.h.{}.attn.c_attn",),
        "inputs_first": True,
        "causal": True,
    },
}
"""Families by `model_type` of their configurations. RoBERTa's first position is the row after its padding number."""
_PATHS = ("words", "positions", "types", "norm", "attention", "out", "middle", "down")


class HuggingFaceText(TokenModel):
    """A sequence classifier or causal model of transformers that takes token numbers [B, T] alone.

    Attention is computed eagerly, behind an additive mask of floats: with other masks, and with fused attention,
    `vmap(grad)` fails. Paths in the layout start with `inner`, the model of transformers.
    """

    def __init__(self, inner: nn.Module, length: int = 32) -> None:
        """Wrap a model of a known family; others are refused with the list."""
        super().__init__()
        config: Any = inner.config
        if config.model_type not in FAMILIES:
            what = f"the first layers of '{config.model_type}' are not known"
            raise fail("model", what, f"choose a model of: {', '.join(FAMILIES)}")
        family = dict(FAMILIES[config.model_type])
        padding = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
        missing = [path for path in (family["words"], family["norm"]) if not _has(inner, path)]
        if missing:
            what = f"{type(inner).__name__} has no {missing[0]}"
            raise fail("model", what, "give a ...ForSequenceClassification, or GPT2LMHeadModel")
        if getattr(config, "_attn_implementation", "eager") != "eager":
            inner.set_attn_implementation("eager")  # type: ignore[operator]
        self.inner = inner
        self.input_shape = (length,)
        if config.model_type == "roberta":
            family["offset"] = padding + 1
        within = {
            name: tuple(f"inner.{path}" for path in value) if isinstance(value, tuple) else f"inner.{value}"
            for name, value in family.items()
            if name in _PATHS and value is not None
        }
        others = {name: value for name, value in family.items() if name not in _PATHS}
        self.layout = TokenLayout(
            family=config.model_type,
            layers=config.num_hidden_layers,
            padding=padding,
            heads=config.num_attention_heads,
            **within,
            **others,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, K], or the mean next-token losses [B] of a causal model."""
        outputs = self.inner(input_ids=ids, attention_mask=self.keep_mask(ids)).logits
        return next_token_loss(outputs, ids, self.layout.padding) if self.layout.causal else outputs


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True
