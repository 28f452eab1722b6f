"""Defences: transforms of updates, surgeries of models, their composition, and the table of them by name."""

from gradveil.core.chain import Chain, chain
from gradveil.core.settings import Argument, Choice, Flag, Range
from gradveil.defences.additive_noise import Additive, Gaussian, Laplacian
from gradveil.defences.aligned import Aligned
from gradveil.defences.ats import Ats
from gradveil.defences.batch_defences import InstaHide, LabelSmoothing, Mixup, TokenDropout
from gradveil.defences.composition import NONE, Defence, ModelSurgery
from gradveil.defences.compression import Dgc, MinMax, Quantise, Sign
from gradveil.defences.defence_catalogue import ALL_DEFENCES, DEFENCES, entries, parse
from gradveil.defences.dp import Clip
from gradveil.defences.entry import DefenceEntry
from gradveil.defences.error_feedback import Feedback
from gradveil.defences.feature_hiding import Outpost, Soteria
from gradveil.defences.guarantees import Privacy, examine
from gradveil.defences.low_rank import LowRank
from gradveil.defences.model_defences import CvbSurgery, DropoutSurgery, KeyLockSurgery, PrecodeSurgery
from gradveil.defences.optimal import OptimalNoise, OptimalPruning
from gradveil.defences.pruning import Dual, Magnitude, Pruning
from gradveil.defences.standin import StandIn

__all__ = [
    "ALL_DEFENCES",
    "DEFENCES",
    "NONE",
    "Additive",
    "Aligned",
    "Argument",
    "Ats",
    "Chain",
    "Choice",
    "Clip",
    "CvbSurgery",
    "Defence",
    "DefenceEntry",
    "Dgc",
    "DropoutSurgery",
    "Dual",
    "Feedback",
    "Flag",
    "Gaussian",
    "InstaHide",
    "KeyLockSurgery",
    "LabelSmoothing",
    "Laplacian",
    "LowRank",
    "Magnitude",
    "MinMax",
    "Mixup",
    "ModelSurgery",
    "OptimalNoise",
    "OptimalPruning",
    "Outpost",
    "PrecodeSurgery",
    "Privacy",
    "Pruning",
    "Quantise",
    "Range",
    "Sign",
    "Soteria",
    "StandIn",
    "TokenDropout",
    "chain",
    "entries",
    "examine",
    "parse",
]
