"""Gradveil inside Flower: `answer` in `train()`, `protect` and `record` around it, `Protected` around the strategy."""

from gradveil.integrations.flower.answer import answer
from gradveil.integrations.flower.protect import protect
from gradveil.integrations.flower.recording import record
from gradveil.integrations.flower.replies import Protected, Refusal

__all__ = ["Protected", "Refusal", "answer", "protect", "record"]
