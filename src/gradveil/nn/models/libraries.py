"""Models of transformers, timm and torchvision by name: `hf:vit`, `timm:resnet18`, `torchvision:resnet18`.

Weights are drawn from a generator; pretrained ones are read from the user's cache, if asked for. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from gradveil.core.errors import FOREIGN, GradveilError, Problem, fail, refuse
from gradveil.nn.initial_weights import drawing_from
from gradveil.nn.model_outputs import logits_only

WHERE = "model.name"
"""Place of problems with a library's model."""


@dataclass(frozen=True)
class Wanted:
    """A model of a library: its name there, the images and classes that it is for, and the user's options."""

    name: str
    channels: int
    size: int
    classes: int
    options: Mapping[str, Any]

    @property
    def pretrained(self) -> bool:
        """Whether weights are read from the user's cache."""
        return bool(self.options.get("pretrained", False))

    @property
    def others(self) -> dict[str, Any]:
        """The options that are the library's own."""
        return {name: value for name, value in self.options.items() if name != "pretrained"}

    def called(self, library: str) -> str:
        """Describe the model in a message."""
        return f"'{self.name}' of {library}"


def build_of_library(name: str, wanted: Wanted, generator: Generator) -> nn.Module:
    """Build a model named `library:name` that returns logits [B, classes]."""
    library = LIBRARIES[name.partition(":")[0]]
    if not isinstance(wanted.options.get("pretrained", False), bool):
        what = f"is {wanted.options['pretrained']!r}"
        raise fail("model.options.pretrained", what, "give true to read weights from your cache, or leave it out")
    with drawing_from(generator):
        model = library(wanted)
    return logits_only(model)


def _library(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise fail(WHERE, f"needs {package}, which is not installed", f"pip install {package}") from error
    except FOREIGN as error:  # a library built for another version of torch
        what = f"needs {package}, whose import fails: {type(error).__name__}: {error}"
        raise fail(WHERE, what, f"install the {package} that belongs to torch {torch.__version__}") from error


def _called(where: str, make: Callable[[], Any], remedy: str) -> Any:
    """Call a library's function; report what it raises."""
    try:
        return make()
    except GradveilError:
        raise
    except FOREIGN as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise fail(WHERE, f"{where} cannot be built: {type(error).__name__}: {first}", remedy) from error


def _unknown(wanted: Wanted, library: str, names: list[str]) -> GradveilError:
    near = get_close_matches(wanted.name, names, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return fail(WHERE, f"{library} has no image classifier '{wanted.name}'", f"{hint}it has: {_some(names)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} others" if len(names) > 12 else "")


def _transformers(wanted: Wanted) -> nn.Module:
    """Build an image classifier of transformers: a model type, a folder, or a model of the user's cache."""
    library = _library("transformers", "transformers")
    config = _config(library, wanted)
    owned = set(config.to_dict())
    if wanted.pretrained and wanted.name in _types():
        remedy = "give the name of a model of the hub, such as hf:google/vit-base-patch16-224, or a folder"
        raise fail("model.options.pretrained", f"'{wanted.name}' is a type of model, which has no weights", remedy)
    problems = [
        Problem(f"model.options.{name}", f"is no setting of {type(config).__name__}", _near(name, owned))
        for name in wanted.others
        if name not in owned
    ]
    fixed: dict[str, Any] = {"num_channels": wanted.channels, "image_size": wanted.size}
    if wanted.pretrained:
        for name, value in fixed.items():
            trained = getattr(config, name, value)
            if isinstance(trained, int) and trained != value:
                what = f"was trained with {name} {trained}, and the data have {value}"
                problems.append(Problem(WHERE, what, f"--set data.{_DATA[name]}={trained}"))
    else:
        given = {name: value for name, value in fixed.items() if name in owned and name not in wanted.others}
        for name, value in {**given, **wanted.others}.items():
            setattr(config, name, value)
    refuse(problems)
    config.num_labels = wanted.classes
    auto = library.AutoModelForImageClassification
    if not wanted.pretrained:
        return _called(wanted.called("transformers"), lambda: auto.from_config(config), "correct model.options")
    options = {"config": config, "local_files_only": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    remedy = f"fetch it once: hf download {wanted.name}"
    return _called(wanted.called("transformers"), lambda: auto.from_pretrained(wanted.name, **options).train(), remedy)


def _types() -> Mapping[str, Any]:
    """Return the classes of image classifiers by type of model: one, or several of which the first is usual."""
    auto = _library("transformers.models.auto.modeling_auto", "transformers")
    return auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def _config(library: ModuleType, wanted: Wanted) -> Any:
    """Return the configuration of a type, of a folder, or of a model of the cache."""
    if wanted.name in _types():
        config, classes = library.AutoConfig.for_model(wanted.name), _types()[wanted.name]
        config.architectures = [classes] if isinstance(classes, str) else [*classes[:1]]
        return config
    if "/" not in wanted.name and not Path(wanted.name).is_dir():
        raise _unknown(wanted, "transformers", sorted(_types()))
    try:
        return library.AutoConfig.from_pretrained(wanted.name, local_files_only=True)
    except FOREIGN as error:
        what = f"'{wanted.name}' is no folder with a config.json, and not in your cache"
        remedy = f"fetch it once: hf download {wanted.name}; or give a type, which needs no download: hf:vit"
        raise fail(WHERE, what, remedy) from error


def _near(name: str, known: set[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"choose from: {_some(sorted(known))}"


_DATA = {"num_channels": "channels", "image_size": "size"}
"""Settings of the data behind those of a configuration."""


def _timm(wanted: Wanted) -> nn.Module:
    """Build a model of timm."""
    library = _library("timm", "timm")
    if not library.is_model(wanted.name):
        raise _unknown(wanted, "timm", library.list_models())
    published = library.get_pretrained_cfg(wanted.name)
    options: dict[str, Any] = {"num_classes": wanted.classes, "in_chans": wanted.channels}
    if getattr(published, "fixed_input_size", False):
        options["img_size"] = wanted.size
    if wanted.pretrained:
        options["pretrained_cfg_overlay"] = {"file": _timm_file(wanted, published)}
    make = lambda: library.create_model(wanted.name, pretrained=wanted.pretrained, **{**options, **wanted.others})  # noqa: E731
    return _called(wanted.called("timm"), make, "correct model.options")


def _timm_file(wanted: Wanted, published: Any) -> str:
    """Return the file of pretrained weights in the user's cache."""
    hub = _library("huggingface_hub", "huggingface_hub")
    repository = getattr(published, "hf_hub_id", None)
    found = repository and hub.try_to_load_from_cache(repository, "model.safetensors")
    if not isinstance(found, str):
        name = repository or wanted.name
        what = f"weights of {wanted.called('timm')} are not in your cache"
        raise fail("model.options.pretrained", what, f"fetch them once: hf download {name} model.safetensors")
    return found


def _torchvision(wanted: Wanted) -> nn.Module:
    """Build a classifier of torchvision."""
    library = _library("torchvision.models", "torchvision")
    names = library.list_models(module=library)
    if wanted.name not in names:
        raise _unknown(wanted, "torchvision", names)
    if wanted.channels != 3:
        what = f"models of torchvision take colour, and the data have {wanted.channels} channels"
        raise fail(WHERE, what, "--set data.channels=3")
    builder = library.get_model_builder(wanted.name)
    options: dict[str, Any] = {"num_classes": wanted.classes, "weights": None, **wanted.others}
    if "vit_" in wanted.name:
        options.setdefault("image_size", wanted.size)
    if any(name in inspect.signature(builder).parameters for name in ("weights_backbone",)):
        raise _unknown(wanted, "torchvision", names)
    weights = _torchvision_weights(library, wanted) if wanted.pretrained else None
    model = _called(wanted.called("torchvision"), lambda: builder(**options), "correct model.options")
    if weights is not None:
        _fill(model, weights)
    return model


def _torchvision_weights(library: ModuleType, wanted: Wanted) -> dict[str, Tensor]:
    """Read the default weights from the user's cache."""
    best = library.get_model_weights(wanted.name).DEFAULT
    file = Path(torch.hub.get_dir()) / "checkpoints" / best.url.rpartition("/")[2]
    if not file.is_file():
        what = f"weights of {wanted.called('torchvision')} are not in your cache: {file} is not there"
        remedy = (
            f"fetch them once: python -c \"import torchvision; torchvision.models.{wanted.name}(weights='DEFAULT')\""
        )
        raise fail("model.options.pretrained", what, remedy)
    return best.get_state_dict(progress=False, check_hash=True)


def _fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights of the same shape; a classifier for other classes keeps its drawn weights."""
    own = model.state_dict()
    fitting = {n: v for n, v in weights.items() if n in own and own[n].shape == v.shape}
    model.load_state_dict(fitting, strict=False)


LIBRARIES: dict[str, Callable[[Wanted], nn.Module]] = {
    "hf": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
}
"""Libraries of models by the word before the colon."""
