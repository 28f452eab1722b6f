"""What an attacker does with the updates that the server saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradveil.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gradveil.attacks.attack_catalogue import (
        ALL_ATTACKS,
        ATTACKS,
        SETTINGS,
        AttackEntry,
        GenerativeEntry,
        InversionEntry,
        make_attack,
    )
    from gradveil.attacks.closed_form.first_layer import Analytic
    from gradveil.attacks.closed_form.layer_by_layer import Recursive
    from gradveil.attacks.inversion.cma_es import CMAES
    from gradveil.attacks.inversion.descent import Cosine, Descent, Plateau, StepSchedule
    from gradveil.attacks.inversion.distances import OBJECTIVES
    from gradveil.attacks.inversion.generators import Generator
    from gradveil.attacks.inversion.image_sources import Pixels, Trained, Untrained
    from gradveil.attacks.inversion.inversion import Inversion
    from gradveil.attacks.inversion.optimisers import LBFGS, Adam, RMSprop
    from gradveil.attacks.knowledge import How, Infer, Knowledge, Known, Neutral, Optimise, Sample
    from gradveil.attacks.labels import find_labels, restore_labels
    from gradveil.attacks.learned import Learned
    from gradveil.attacks.malicious.fishing import Fishing
    from gradveil.attacks.malicious.hidden_units import CopiedRows, QuantileBiases
    from gradveil.attacks.malicious.loss_steering import Steering
    from gradveil.attacks.malicious.planted_block import Imprint, Planting, Trap
    from gradveil.attacks.many_rounds import Pooled
    from gradveil.attacks.protocol import (
        Active,
        Attack,
        CanRefuse,
        HasObjective,
        HasPlan,
        Matcher,
        Observation,
        Persistent,
        Progress,
        Prospect,
        Reconstruction,
        Remark,
        in_closed_form,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ALL_ATTACKS": "gradveil.attacks.attack_catalogue",
            "ATTACKS": "gradveil.attacks.attack_catalogue",
            "Active": "gradveil.attacks.protocol",
            "Adam": "gradveil.attacks.inversion.optimisers",
            "Analytic": "gradveil.attacks.closed_form.first_layer",
            "Attack": "gradveil.attacks.protocol",
            "AttackEntry": "gradveil.attacks.attack_catalogue",
            "CMAES": "gradveil.attacks.inversion.cma_es",
            "CanRefuse": "gradveil.attacks.protocol",
            "CopiedRows": "gradveil.attacks.malicious.hidden_units",
            "Cosine": "gradveil.attacks.inversion.descent",
            "Descent": "gradveil.attacks.inversion.descent",
            "Fishing": "gradveil.attacks.malicious.fishing",
            "GenerativeEntry": "gradveil.attacks.attack_catalogue",
            "Generator": "gradveil.attacks.inversion.generators",
            "HasObjective": "gradveil.attacks.protocol",
            "HasPlan": "gradveil.attacks.protocol",
            "How": "gradveil.attacks.knowledge",
            "Imprint": "gradveil.attacks.malicious.planted_block",
            "Infer": "gradveil.attacks.knowledge",
            "Inversion": "gradveil.attacks.inversion.inversion",
            "InversionEntry": "gradveil.attacks.attack_catalogue",
            "Knowledge": "gradveil.attacks.knowledge",
            "Known": "gradveil.attacks.knowledge",
            "LBFGS": "gradveil.attacks.inversion.optimisers",
            "Learned": "gradveil.attacks.learned",
            "Matcher": "gradveil.attacks.protocol",
            "Neutral": "gradveil.attacks.knowledge",
            "OBJECTIVES": "gradveil.attacks.inversion.distances",
            "Observation": "gradveil.attacks.protocol",
            "Optimise": "gradveil.attacks.knowledge",
            "Persistent": "gradveil.attacks.protocol",
            "Pixels": "gradveil.attacks.inversion.image_sources",
            "Planting": "gradveil.attacks.malicious.planted_block",
            "Plateau": "gradveil.attacks.inversion.descent",
            "Pooled": "gradveil.attacks.many_rounds",
            "Progress": "gradveil.attacks.protocol",
            "Prospect": "gradveil.attacks.protocol",
            "QuantileBiases": "gradveil.attacks.malicious.hidden_units",
            "RMSprop": "gradveil.attacks.inversion.optimisers",
            "Reconstruction": "gradveil.attacks.protocol",
            "Recursive": "gradveil.attacks.closed_form.layer_by_layer",
            "Remark": "gradveil.attacks.protocol",
            "SETTINGS": "gradveil.attacks.attack_catalogue",
            "Sample": "gradveil.attacks.knowledge",
            "Steering": "gradveil.attacks.malicious.loss_steering",
            "StepSchedule": "gradveil.attacks.inversion.descent",
            "Trained": "gradveil.attacks.inversion.image_sources",
            "Trap": "gradveil.attacks.malicious.planted_block",
            "Untrained": "gradveil.attacks.inversion.image_sources",
            "find_labels": "gradveil.attacks.labels",
            "in_closed_form": "gradveil.attacks.protocol",
            "make_attack": "gradveil.attacks.attack_catalogue",
            "restore_labels": "gradveil.attacks.labels",
        },
    )

__all__ = [
    "ALL_ATTACKS",
    "ATTACKS",
    "CMAES",
    "LBFGS",
    "OBJECTIVES",
    "SETTINGS",
    "Active",
    "Adam",
    "Analytic",
    "Attack",
    "AttackEntry",
    "CanRefuse",
    "CopiedRows",
    "Cosine",
    "Descent",
    "Fishing",
    "GenerativeEntry",
    "Generator",
    "HasObjective",
    "HasPlan",
    "How",
    "Imprint",
    "Infer",
    "Inversion",
    "InversionEntry",
    "Knowledge",
    "Known",
    "Learned",
    "Matcher",
    "Neutral",
    "Observation",
    "Optimise",
    "Persistent",
    "Pixels",
    "Planting",
    "Plateau",
    "Pooled",
    "Progress",
    "Prospect",
    "QuantileBiases",
    "RMSprop",
    "Reconstruction",
    "Recursive",
    "Remark",
    "Sample",
    "Steering",
    "StepSchedule",
    "Trained",
    "Trap",
    "Untrained",
    "find_labels",
    "in_closed_form",
    "make_attack",
    "restore_labels",
]
