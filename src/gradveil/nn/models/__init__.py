"""Models of published studies by short name, and custom models by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Generator, nn

from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail, refuse
from gradveil.core.formatting import suggestion
from gradveil.core.plugins import Catalogue, Plugin
from gradveil.core.user_code import imported
from gradveil.nn.initial_weights import drawing_from, initialise
from gradveil.nn.lora import with_lora
from gradveil.nn.models.libraries import LIBRARIES, Wanted, build_of_library
from gradveil.nn.models.mlp import mlp
from gradveil.nn.models.resnet import resnet18, resnet20, resnet32, resnet34
from gradveil.nn.models.small_cnn import cnn6, convnet, lenet_zhu, mnist_cnn_glaus, mnist_conv, scheliga_cnn
from gradveil.nn.models.tabular import tabular_mlp, tabular_resnet
from gradveil.nn.models.text_library import adopt_text_model, build_text_model
from gradveil.nn.models.token_transformers import small_decoder, small_encoder
from gradveil.nn.models.vgg import vgg11, vgg13, vgg16
from gradveil.nn.models.vit import vit


@dataclass(frozen=True)
class ModelEntry:
    """One model: `factory(*, channels, size, classes, norm, groups, activation, ...)`, description and citation."""

    factory: Callable[..., nn.Module]
    description: str
    citation: str

    @property
    def takes(self) -> set[str]:
        """The facts of an example that the factory needs: of images, of rows."""
        return {*inspect.signature(self.factory).parameters} & FACTS

    @property
    def defaults(self) -> dict[str, Any]:
        """The study's settings: every keyword argument with its default."""
        return {name: p.default for name, p in inspect.signature(self.factory).parameters.items()}


FACTS = {"channels", "size", "columns", "vocabulary", "length", "padding"}
"""What models may be told of an example, see `Space.model_facts`."""

_DLG = "Zhu, Liu, Han: Deep Leakage from Gradients (NeurIPS 2019)"
_RGAP = "Zhu, Blaschko: R-GAP: Recursive Gradient Attack on Privacy (ICLR 2021)"
_IG = "Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients (NeurIPS 2020)"
_OPTIMAL = "Chen, Gürsoy, Lei 2024: Optimal Defenses Against Gradient Reconstruction Attacks"
_SCHELIGA = "Scheliga, Mäder, Seeland: Combining Stochastic Defenses to Resist Gradient Inversion"
_COCKTAIL = "Kariyappa et al.: Cocktail Party Attack (ICML 2023)"
_GLAUS = "Yang et al. 2023: GLAUS, an attack on unbiased gradient sampling"
_RESNET = "He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (CVPR 2016)"
_VGG = "Simonyan, Zisserman: Very Deep Convolutional Networks (ICLR 2015)"

_VASWANI = "Vaswani et al.: Attention Is All You Need (NeurIPS 2017)"
_TABLEAK = "Vero, Balunović, Dimitrov, Vechev: TabLeak: Tabular Data Leakage in Federated Learning (ICML 2023)"
_TABULAR = "Gorishniy, Rubachev, Khrulkov, Babenko: Revisiting Deep Learning Models for Tabular Data (NeurIPS 2021)"

MODELS: dict[str, ModelEntry] = {
    "lenet-zhu": ModelEntry(lenet_zhu, "3 sigmoid 5x5 convolutions of 12 channels, weights U(-0.5, 0.5)", _DLG),
    "cnn6": ModelEntry(cnn6, "6 bias-free convolutions with invertible activations", _RGAP),
    "convnet": ModelEntry(convnet, "8 convolutions with BatchNorm, 2.9 M parameters", f"{_IG}; {_OPTIMAL}"),
    "mnist-conv": ModelEntry(mnist_conv, "2 convolutions and 2 linear layers, LeakyReLU", _OPTIMAL),
    "scheliga-cnn": ModelEntry(scheliga_cnn, "3 valid 5x5 convolutions of stride 2, ReLU; needs 32x32", _SCHELIGA),
    "mnist-cnn-glaus": ModelEntry(mnist_cnn_glaus, "3 valid sigmoid 5x5 convolutions, weights U(-0.5, 0.5)", _GLAUS),
    "mlp": ModelEntry(mlp, "fully connected layers of all pixels, width 512, depth 2", _COCKTAIL),
    "vit": ModelEntry(vit, "vision transformer, patch 4, width 256, 4 blocks, 16 heads", _SCHELIGA),
    "resnet18": ModelEntry(resnet18, "ResNet-18 with GroupNorm; stem imagenet, cifar or no-pool", _RESNET),
    "resnet34": ModelEntry(resnet34, "ResNet-34 with GroupNorm; stem imagenet, cifar or no-pool", _RESNET),
    "resnet20": ModelEntry(resnet20, "ResNet-20 with BatchNorm, base width 16, option-A shortcuts", _RESNET),
    "resnet32": ModelEntry(resnet32, "ResNet-32 with BatchNorm, base width 16, option-A shortcuts", _RESNET),
    "vgg11": ModelEntry(vgg11, "VGG-11 with BatchNorm, linear layer 512 -> classes", _VGG),
    "vgg13": ModelEntry(vgg13, "VGG-13 with BatchNorm, linear layer 512 -> classes", _VGG),
    "vgg16": ModelEntry(vgg16, "VGG-16 with BatchNorm, linear layer 512 -> classes", _VGG),
    "tabular-mlp": ModelEntry(
        tabular_mlp,
        "for rows: fully connected layers, width 100, depth 2, ReLU; one-hot or embedded categories",
        _TABLEAK,
    ),
    "tabular-resnet": ModelEntry(
        tabular_resnet, "for rows: embeddings of categories, 2 residual blocks of width 64 with LayerNorm", _TABULAR
    ),
    "small-encoder": ModelEntry(
        small_encoder, "for texts: 2 pre-norm transformer layers of width 128, mean pooling, random weights", _VASWANI
    ),
    "small-decoder": ModelEntry(
        small_decoder, "for texts: a language model of 3 pre-norm causal layers of width 128, random weights", _VASWANI
    ),
}
"""Models of published studies by short name."""


def _plugged(plugin: Plugin) -> ModelEntry:
    """Return the entry of a plug-in's model."""
    factory = _factory(plugin.path)
    return ModelEntry(factory, (inspect.getdoc(factory) or plugin.path).splitlines()[0], "")


ALL_MODELS: Catalogue[ModelEntry] = Catalogue("models", "model", MODELS, _plugged)
"""`MODELS` and those of plug-ins."""


def build(
    name: str,
    *,
    classes: int,
    generator: Generator,
    channels: int | None = None,
    size: int | None = None,
    example: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Build a model with initial weights drawn from the generator.

    `name` is a name of `MODELS`, a plug-in's name, `"pkg.module:factory"`, or a model of a library: `"hf:NAME"`
    (transformers), `"timm:NAME"` or `"torchvision:NAME"`, whose option `pretrained=True` reads weights from the user's
    cache. The option `lora=RANK` adds adapters to a model of texts and freezes the rest.

    `example` says what one example is where that is no image of `channels` and `size`, see `Space.model_facts`. A
    custom factory is called with the options and those of these facts, `classes` and `generator` that it accepts; its
    random numbers come from the generator too. A custom model of images without `input_shape` gets (channels, size,
    size).

    >>> model = build("scheliga-cnn", channels=1, size=32, classes=10, generator=torch.Generator().manual_seed(0))
    >>> sum(parameter.numel() for parameter in model.parameters())
    65162
    """
    facts: dict[str, Any] = dict(example) if example is not None else {"channels": channels, "size": size}
    if "vocabulary" in facts and "lora" in options:
        rank = options.pop("lora")
        whole = build(name, classes=classes, generator=generator, example=facts, **options)
        return with_lora(whole, rank, generator)
    sizes = {**facts, "classes": classes}
    problems = [
        Problem(f"model.{key}", f"is {value!r}", "give a whole number of at least 1")
        for key, value in sizes.items()
        if key in _COUNTS and (not isinstance(value, int) or value < 1)
    ]
    if name.startswith("hf:") and "vocabulary" in facts:
        refuse(problems)
        return build_text_model(name, facts, classes, options, generator)
    if name.partition(":")[0] in LIBRARIES and name.partition(":")[2]:
        problems += _misfit(name, {"channels", "size"}, facts)
        refuse(problems)
        wanted = Wanted(name.partition(":")[2], sizes["channels"], sizes["size"], classes, options)
        return build_of_library(name, wanted, generator)
    plugin = ALL_MODELS.plugin(name)
    if ":" in name or plugin:
        path = plugin.path if plugin else name
        made = _build_users(
            path,
            {**sizes, "generator": generator},
            options,
            problems,
            (facts["channels"], facts["size"], facts["size"]) if "channels" in facts else None,
        )
        return adopt_text_model(made, facts, f"model {path}") if "vocabulary" in facts else made
    entry = MODELS.get(name)
    if entry is None:
        others = "of a library: hf:NAME, timm:NAME, torchvision:NAME; or give your own as 'pkg.module:factory'"
        remedy = f"{suggestion(name, ALL_MODELS, 'gradveil list models')}; {others}"
        refuse([*problems, Problem("model.name", f"unknown model '{name}'", remedy)])
    assert entry is not None
    refuse(_misfit(name, entry.takes, facts))
    refuse([*problems, *_unknown(options, set(entry.defaults) - set(sizes)), *_wrong(options, entry.defaults)])
    try:
        with torch.device("meta"):
            model = entry.factory(**{name: v for name, v in sizes.items() if name in entry.defaults}, **options)
    except GradveilError as error:
        raise GradveilError(Problem(f"model.{p.where}", p.what, p.remedy) for p in error.problems) from error
    return initialise(model.to_empty(device="cpu"), generator)


_COUNTS = ("channels", "size", "classes")


def _misfit(name: str, takes: set[str], facts: Mapping[str, Any]) -> list[Problem]:
    """Refuse a model that needs other facts of an example than there are: one of images for rows."""
    if missing := sorted(takes - set(facts)):
        what = f"'{name}' is built from {', '.join(missing)}, and the data have {', '.join(facts)}"
        remedy = (
            "choose a model for this kind of data: gradveil list models; "
            "or build it with example=data.public.space.model_facts()"
        )
        return [Problem("model.name", what, remedy)]
    return []


def _unknown(options: Mapping[str, Any], allowed: set[str]) -> list[Problem]:
    problems = []
    for key in options:
        if key not in allowed:
            near = get_close_matches(key, allowed, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            remedy = f"{hint}allowed: {', '.join(sorted(allowed)) or 'none'}"
            problems.append(Problem(f"model.{key}", "is not an option of this model", remedy))
    return problems


def _wrong(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Problem]:
    """Return options whose type differs from the default's; all numbers of these models are counts."""
    problems = []
    for key, value in options.items():
        usual = defaults.get(key, value)
        if type(value) is not type(usual) or (isinstance(value, int) and value < 1):
            wanted = "a whole number of at least 1" if isinstance(usual, int) else "a string in quotes"
            problems.append(Problem(f"model.{key}", f"is {value!r}", f"give {wanted}, such as {usual!r}"))
    return problems


def _build_users(
    path: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    problems: list[Problem],
    shape: tuple[int, int, int] | None,
) -> nn.Module:
    try:
        factory = _factory(path)
    except GradveilError as error:
        refuse([*problems, *error.problems])
        raise
    generator: Generator = arguments["generator"]
    if isinstance(factory, nn.Module):
        what = f"'{path.partition(':')[2]}' is a model, not a factory: each seed needs one of its own"
        remedy = "write a function that builds and returns it, such as def make(classes): ..., and name that"
        raise GradveilError([*problems, Problem(f"model {path}", what, remedy)])
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError as error:  # some builtins
        what = f"'{path.partition(':')[2]}' does not say what it takes"
        remedy = "wrap it in a function that does"
        raise GradveilError([*problems, Problem(f"model {path}", what, remedy)]) from error
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        problems += _unknown(options, set(parameters) - set(arguments))
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    arguments = {**arguments, **options}
    problems += _missing(path, parameters, arguments)
    refuse(problems)
    try:
        with drawing_from(generator):
            model = factory(**arguments)
    except GradveilError:
        raise
    except FOREIGN as error:
        what = f"raised {type(error).__name__}: {error}"
        raise fail(f"model {path}", what, f"it was called with {_shown(arguments)}") from error
    if not isinstance(model, nn.Module):
        what = f"returned {type(model).__name__}, not a torch.nn.Module"
        raise fail(f"model {path}", what, "return the model from the factory")
    if shape is not None and not hasattr(model, "input_shape"):
        object.__setattr__(model, "input_shape", shape)
    return model


def _missing(path: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the required parameters of a factory that are not among the arguments, except positional-only ones."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in parameters.items():
        if parameter.kind in named and parameter.default is parameter.empty and name not in arguments:
            what = f"needs '{name}', which is missing: the arguments are {_shown(arguments)}"
            remedy = f"set model.options.{name} = ... (or --set model.options.{name}=...), or give it a default"
            yield Problem(f"model {path}", what, remedy)


def _shown(arguments: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{key}={'...' if key == 'generator' else repr(value)}" for key, value in arguments.items())
        or "nothing"
    )


def _factory(path: str) -> Callable[..., Any]:
    factory = imported(path, f"model {path}")
    if not callable(factory):
        what = f"'{path.partition(':')[2]}' is a {type(factory).__name__}, not a factory"
        raise fail(f"model {path}", what, "name a function or class that returns a torch.nn.Module")
    return factory
