"""Models with explicit randomness, and module replacements that make a custom model auditable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.nn.keylock import KeyLock, with_keylock
    from gradveil.nn.models import ALL_MODELS, MODELS, ModelEntry, build
    from gradveil.nn.models.hugging_face_text import HuggingFaceText
    from gradveil.nn.module_paths import count_classes, first_layer, insert_after, insert_before, last_layer
    from gradveil.nn.normalisation import BatchStatistics, FrozenNorm, InstanceNorm, LayerNorm
    from gradveil.nn.stochastic import Stochastic, collect_penalties, model_noise, penalise
    from gradveil.nn.stochastic_layers import (
        ConvBottleneck,
        Dropout,
        VariationalBottleneck,
        with_cvb,
        with_dropout,
        with_precode,
    )
    from gradveil.nn.surgery import (
        prepare,
        remove_inplace,
        replace_activations,
        replace_batchnorm,
        replace_dropout,
        replace_layernorm,
        replace_recurrent,
    )
    from gradveil.nn.token_layout import own_loss
    from gradveil.nn.weight_files import put_weights, read_weights
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ALL_MODELS": "gradveil.nn.models",
            "BatchStatistics": "gradveil.nn.normalisation",
            "ConvBottleneck": "gradveil.nn.stochastic_layers",
            "Dropout": "gradveil.nn.stochastic_layers",
            "FrozenNorm": "gradveil.nn.normalisation",
            "HuggingFaceText": "gradveil.nn.models.hugging_face_text",
            "InstanceNorm": "gradveil.nn.normalisation",
            "KeyLock": "gradveil.nn.keylock",
            "LayerNorm": "gradveil.nn.normalisation",
            "MODELS": "gradveil.nn.models",
            "ModelEntry": "gradveil.nn.models",
            "Stochastic": "gradveil.nn.stochastic",
            "VariationalBottleneck": "gradveil.nn.stochastic_layers",
            "build": "gradveil.nn.models",
            "collect_penalties": "gradveil.nn.stochastic",
            "count_classes": "gradveil.nn.module_paths",
            "first_layer": "gradveil.nn.module_paths",
            "insert_after": "gradveil.nn.module_paths",
            "insert_before": "gradveil.nn.module_paths",
            "last_layer": "gradveil.nn.module_paths",
            "model_noise": "gradveil.nn.stochastic",
            "own_loss": "gradveil.nn.token_layout",
            "penalise": "gradveil.nn.stochastic",
            "prepare": "gradveil.nn.surgery",
            "put_weights": "gradveil.nn.weight_files",
            "read_weights": "gradveil.nn.weight_files",
            "remove_inplace": "gradveil.nn.surgery",
            "replace_activations": "gradveil.nn.surgery",
            "replace_batchnorm": "gradveil.nn.surgery",
            "replace_dropout": "gradveil.nn.surgery",
            "replace_layernorm": "gradveil.nn.surgery",
            "replace_recurrent": "gradveil.nn.surgery",
            "with_cvb": "gradveil.nn.stochastic_layers",
            "with_dropout": "gradveil.nn.stochastic_layers",
            "with_keylock": "gradveil.nn.keylock",
            "with_precode": "gradveil.nn.stochastic_layers",
        },
    )

__all__ = [
    "ALL_MODELS",
    "MODELS",
    "BatchStatistics",
    "ConvBottleneck",
    "Dropout",
    "FrozenNorm",
    "HuggingFaceText",
    "InstanceNorm",
    "KeyLock",
    "LayerNorm",
    "ModelEntry",
    "Stochastic",
    "VariationalBottleneck",
    "build",
    "collect_penalties",
    "count_classes",
    "first_layer",
    "insert_after",
    "insert_before",
    "last_layer",
    "model_noise",
    "own_loss",
    "penalise",
    "prepare",
    "put_weights",
    "read_weights",
    "remove_inplace",
    "replace_activations",
    "replace_batchnorm",
    "replace_dropout",
    "replace_layernorm",
    "replace_recurrent",
    "with_cvb",
    "with_dropout",
    "with_keylock",
    "with_precode",
]
