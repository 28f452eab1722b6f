"""What attackers and audits compute of a client besides its updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import Tensor
from torch.func import vmap

from gradveil.client.client import Client
from gradveil.client.local_training import of_batch
from gradveil.core.chain import split
from gradveil.core.tree import Tensors, below, multiplied, select
from gradveil.core.types import Batch, Multiplier
from gradveil.gradients.inner_products import LARGE
from gradveil.nn.normalisation import batch_statistics


def transformed_batch(client: Client, batch: Batch, noise: Mapping[str, Tensor]) -> Batch:
    """Return the examples that a client computes with: a batch after the batch transforms.

    In local training an example is transformed again and again; this is the first time.
    """
    if client.members == 1 or not client.batch:
        return client.pipeline.batches.computed_with(batch, noise)
    members = Batch(*(value.unflatten(0, (client.members, -1)) for value in batch))
    return Batch(*(value.flatten(0, 1) for value in client.pipeline.batches.of_many(members, noise)))


def kept_direction(
    client: Client,
    params: Mapping[str, Tensor],
    examples: int,
    noise: Mapping[str, Tensor],
    off: Collection[str] = (),
) -> Tensors | None:
    """Return the masks by which updates and mean gradients of so many examples differ, apart from their lengths.

    None where they may differ in more. `off` names the noise that is off.
    """
    each_example = examples > 1 and split(client.step)[0] is not None
    if client.local is not None or client.members > 1 or each_example:
        return None
    sent = {name: params[name] for name in client.trained()}
    masks: Tensors = {}
    for name, slot in (("step", client.step), ("send", client.send)):
        own = slot.multiplier(sent, select(noise, name), below(name, off)) if slot else Multiplier()
        if own is None or not own.keeps_direction:
            return None
        masks = multiplied(masks, own.masks)
    return masks


def cosine_distances(
    client: Client,
    params: Tensors,
    batch: Batch,
    noise: Mapping[str, Tensor],
    targets: Tensors,
    squares: Tensor,
    off: Collection[str] = (),
) -> Tensor | None:
    """Compute 1 - cosine between many clients' updates and targets [V, *shape], |targets|^2 given, by a short way.

    None where there is none: updates must be masked gradients of a network with large layers. `off` names the noise
    that is off.
    """
    if not any(params[name].numel() >= LARGE for name in client.trained()):  # before the images are transformed
        return None
    masks = kept_direction(client, params, batch.inputs.shape[1], noise, off)
    if masks is None or client.pipeline.private.layers:
        return None
    return client.pipeline.distances(params, batch, noise, targets, squares, masks)


def layer_statistics(client: Client, params: Tensors, batch: Batch, noise: Tensors) -> Tensors:
    """Compute what enters the normalisation layers for batches [V, B, ...]: mean and variance, each [V, channels].

    Names are `<layer>.mean` and `<layer>.var`. What local steps draw is for parts of the batch: it is switched off.
    """
    layers = client.pipeline.private.layers
    if client.local is not None:
        once, device = replace(client, local=None), batch.inputs.device
        spec = once.noise_spec(params, Batch(batch.inputs[0], batch.targets[0]))
        off = {n: v.to(device).expand(len(batch.inputs), *v.shape) for n, v in spec.neutral().items()}
        return layer_statistics(once, params, batch, {**off, **{name: noise[name] for name in layers}})

    def one(own: Batch, own_noise: Tensors) -> Tensors:
        own = transformed_batch(client, own, of_batch(own_noise))
        if client.members == 1:
            inner = client.pipeline.model_noise(own_noise, len(own.inputs))
        else:
            kept, each = select({name: own_noise[name] for name in layers}, "model"), len(own.inputs) // client.members
            inner = {
                name: value.flatten(0, 1) for name, value in select(own_noise, "model").items() if name not in kept
            }
            # Each member's own layers, once for each of its examples, which stand one member after the other.
            inner |= {name: value.repeat_interleave(each, 0) for name, value in kept.items()}
        with batch_statistics(client.model) as found:
            client.objective.outputs(params, own.inputs, inner)
        return found

    return vmap(one)(batch, dict(noise))
