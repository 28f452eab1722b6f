"""Labels of random streams. They are frozen: a changed label changes the numbers behind recorded results.

A new stream takes a new label. `tests/core/test_streams.py` holds the labels, the names of all noise tensors, and the
first numbers of some streams.
"""

from enum import StrEnum


class Stream(StrEnum):
    """One part of the address of a random stream (`Key.child`)."""

    # Clients and trainings
    CLIENT = "client"
    ROUND = "round"
    STEP = "step"
    EPOCH = "epoch"
    MODEL = "model"
    TRAINING = "training"
    PARTITION = "partition"
    VALIDATION = "validation"
    SELECTED = "selected-clients"
    ABSENT = "absent-clients"
    EXAMPLES = "examples"
    # Audits
    ATTACK = "attack"
    CRAFT = "crafted-model"
    BOUND = "bound"
    SIMULATED = "simulated-client"
    INPUTS = "inputs"
    PLACEHOLDERS = "placeholder-images"
    CONTROL = "control"
    MISMATCH = "mismatch"
    BASELINE = "baseline"
    ALL = "all-classes"
    BOOTSTRAP = "bootstrap"
    GALLERY = "gallery"
    MIXING = "mixing"
    # Attacks
    IMAGES = "images"
    LABELS = "labels"
    ITERATIONS = "iterations"
    SOLVED = "solved-start"
    CANDIDATES = "candidates"
    ORDER = "order"
    FIRST = "first-guess"
    REPEAT = "repeat"
    NETWORK = "network"
    LESSONS = "generator-batches"
    CHECK = "check"
    HASH = "digest"
    NOISE = "noise"
    AUXILIARY = "auxiliary-clients"
    DISTURBANCE = "disturbance"
    FISHING = "fishing"
    PROBES = "probes"
    REHEARSAL = "rehearsal"
    SIZES = "trap-sizes"
    PLACES = "trap-places"
    MEASURES = "imprint-measures"
    BEHIND = "weights-behind-imprint"
    # Defences and their tests
    REPLACEMENT = "module-replacement"
    POLICY = "policy"
    POLICIES = "policies"
    START = "start"
    SEARCH = "search"
    ATS = "ats"
    INSTAHIDE = "instahide"
    PUBLIC = "public"
    PROBE = "probe"
    STAGE = "stage"
    COPIES = "copies"
    CLAIM = "noise-claim"
