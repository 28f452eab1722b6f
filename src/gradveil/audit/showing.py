"""What a model shows without any search: a warning for `check`, and for audits that do not look."""

from __future__ import annotations

from collections.abc import Iterator

from gradveil.attacks.analytic import Analytic
from gradveil.audit.scene import Scene
from gradveil.core.errors import Problem
from gradveil.nn.shown import shown


def closed_forms(scene: Scene) -> Iterator[Problem]:
    """Warn of clients that send the gradient of one image, of a model that shows what goes into it.

    Not where the run has the attack that solves those equations.
    """
    if any(isinstance(attack, Analytic) for attack in scene.attacks.values()):
        return
    several = len(scene.config.client) > 1
    for index, settings in enumerate(scene.config.client):
        if settings.examples > 1 or settings.local is not None:
            continue
        client = scene.undefended(index, scene.config.seeds[0])
        channels, height, width = (int(side) for side in scene.victims.inputs.shape[1:])
        layer, _ = shown(client.model, client.params(), (channels, height, width), client.trained())
        if layer is not None:
            what = "one image comes back in closed form: "
            what += f"the gradient of '{layer.errors}' says what went into '{layer.path}'"
            remedy = f"attack it so: --attack analytic; more examples an update or not sending '{layer.errors}' ends it"
            yield Problem(f"client[{index}]" if several else "client", what, remedy, severity="warning")
