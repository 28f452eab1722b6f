"""Defences: transforms of updates, surgeries of models, their composition, and the table of them by name."""

from gradveil.core.arguments import Argument
from gradveil.defences.aligned import Aligned
from gradveil.defences.ats import Ats
from gradveil.defences.base import NONE, Chain, Defence, ModelSurgery, chain
from gradveil.defences.batch import InstaHide, LabelSmoothing, Mixup
from gradveil.defences.clip import Clip
from gradveil.defences.dgc import Dgc
from gradveil.defences.entry import DefenceEntry
from gradveil.defences.feedback import Feedback
from gradveil.defences.grammar import entries, parse
from gradveil.defences.model import CvbSurgery, DropoutSurgery, KeyLockSurgery, PrecodeSurgery
from gradveil.defences.noise import Gaussian, Laplacian
from gradveil.defences.optimal import OptimalNoise, OptimalPruning
from gradveil.defences.outpost import Outpost
from gradveil.defences.presets import DEFENCES
from gradveil.defences.prune import Dual, Magnitude, Pruning
from gradveil.defences.quantise import Quantise, Sign
from gradveil.defences.sampling import MinMax
from gradveil.defences.soteria import Soteria
from gradveil.defences.standin import StandIn

__all__ = [
    "DEFENCES",
    "NONE",
    "Aligned",
    "Argument",
    "Ats",
    "Chain",
    "Clip",
    "CvbSurgery",
    "Defence",
    "DefenceEntry",
    "Dgc",
    "DropoutSurgery",
    "Dual",
    "Feedback",
    "Gaussian",
    "InstaHide",
    "KeyLockSurgery",
    "LabelSmoothing",
    "Laplacian",
    "Magnitude",
    "MinMax",
    "Mixup",
    "ModelSurgery",
    "OptimalNoise",
    "OptimalPruning",
    "Outpost",
    "PrecodeSurgery",
    "Pruning",
    "Quantise",
    "Sign",
    "Soteria",
    "StandIn",
    "chain",
    "entries",
    "parse",
]
