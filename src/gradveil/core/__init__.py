"""The vocabulary: named noise, transforms, trees of tensors, and errors that name a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.core.distributions import Agreed, Beta, OneOf, Shares, Signs
    from gradveil.core.errors import GradveilError, Problem, fail, refuse
    from gradveil.core.noise import Address, Bernoulli, Key, Laplace, Law, Noise, NoiseSpec, Normal, Schedule, Uniform
    from gradveil.core.secure_noise import Rounded, SecretKey
    from gradveil.core.settings import REQUIRED, Anything, Argument, Choice, Flag, NamedEntry, Range, TextValue
    from gradveil.core.streams import Stream
    from gradveil.core.tree import Tensors, norm, select, squared_norm, stack, straight_through, take, tmap, under
    from gradveil.core.types import Batch, BatchTransform, Context, Domain, Features, Loss, Public, Stage, Transform
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Address": "gradveil.core.noise",
            "Agreed": "gradveil.core.distributions",
            "Anything": "gradveil.core.settings",
            "Argument": "gradveil.core.settings",
            "Batch": "gradveil.core.types",
            "BatchTransform": "gradveil.core.types",
            "Bernoulli": "gradveil.core.noise",
            "Beta": "gradveil.core.distributions",
            "Choice": "gradveil.core.settings",
            "Context": "gradveil.core.types",
            "Domain": "gradveil.core.types",
            "Features": "gradveil.core.types",
            "Flag": "gradveil.core.settings",
            "GradveilError": "gradveil.core.errors",
            "Key": "gradveil.core.noise",
            "Laplace": "gradveil.core.noise",
            "Law": "gradveil.core.noise",
            "Loss": "gradveil.core.types",
            "NamedEntry": "gradveil.core.settings",
            "Noise": "gradveil.core.noise",
            "NoiseSpec": "gradveil.core.noise",
            "Normal": "gradveil.core.noise",
            "OneOf": "gradveil.core.distributions",
            "Problem": "gradveil.core.errors",
            "Public": "gradveil.core.types",
            "REQUIRED": "gradveil.core.settings",
            "Range": "gradveil.core.settings",
            "Rounded": "gradveil.core.secure_noise",
            "Schedule": "gradveil.core.noise",
            "SecretKey": "gradveil.core.secure_noise",
            "Shares": "gradveil.core.distributions",
            "Signs": "gradveil.core.distributions",
            "Stage": "gradveil.core.types",
            "Stream": "gradveil.core.streams",
            "Tensors": "gradveil.core.tree",
            "TextValue": "gradveil.core.settings",
            "Transform": "gradveil.core.types",
            "Uniform": "gradveil.core.noise",
            "fail": "gradveil.core.errors",
            "norm": "gradveil.core.tree",
            "refuse": "gradveil.core.errors",
            "select": "gradveil.core.tree",
            "squared_norm": "gradveil.core.tree",
            "stack": "gradveil.core.tree",
            "straight_through": "gradveil.core.tree",
            "take": "gradveil.core.tree",
            "tmap": "gradveil.core.tree",
            "under": "gradveil.core.tree",
        },
    )

__all__ = [
    "REQUIRED",
    "Address",
    "Agreed",
    "Anything",
    "Argument",
    "Batch",
    "BatchTransform",
    "Bernoulli",
    "Beta",
    "Choice",
    "Context",
    "Domain",
    "Features",
    "Flag",
    "GradveilError",
    "Key",
    "Laplace",
    "Law",
    "Loss",
    "NamedEntry",
    "Noise",
    "NoiseSpec",
    "Normal",
    "OneOf",
    "Problem",
    "Public",
    "Range",
    "Rounded",
    "Schedule",
    "SecretKey",
    "Shares",
    "Signs",
    "Stage",
    "Stream",
    "Tensors",
    "TextValue",
    "Transform",
    "Uniform",
    "fail",
    "norm",
    "refuse",
    "select",
    "squared_norm",
    "stack",
    "straight_through",
    "take",
    "tmap",
    "under",
]
