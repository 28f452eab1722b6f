"""What the layers and parameters of a model say without running it."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradveil.core.errors import Problem
from gradveil.nn.equivalence import DROPOUTS
from gradveil.nn.surgery import BATCHNORMS, INSTANCENORMS, BatchNorm, InstanceNorms, replaceable, uses_batch

SURGERY = "gradveil.nn.surgery"
"""Where the remedies of these problems lie."""
_NEVER_EXPLICIT = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def layer_problems(model: nn.Module) -> list[Problem]:
    """Return the problems of all layers, then those of all parameters."""
    problems: list[Problem] = []
    for path, module in model.named_modules():
        problems += [
            Problem(path or "model", what, remedy)
            for what, remedy in (_randomness(module), _norm(module), _inplace(module), _recurrent(module))
            if what
        ]
    return problems + _parameter_problems(model)


def _randomness(module: nn.Module) -> tuple[str, str]:
    kind = type(module).__name__
    if not module.training:
        return "", ""
    if isinstance(module, DROPOUTS) and module.p > 0:
        what = f"{kind} draws its mask from the global generator, so no attacker can replay the update"
        if replaceable(module, DROPOUTS):
            return what, f"replace it: {SURGERY}.replace_dropout(model)"
        return what, "replace it by gradveil.nn.dropout.Dropout: only torch's own types without hooks are replaced"
    if isinstance(module, _NEVER_EXPLICIT):
        what = f"{kind} in training mode draws from the global generator, so no attacker can replay the update"
        return what, "replace it by gradveil.nn.dropout.Dropout, or put the module into evaluation mode"
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0:
        what = f"{kind} drops out inside (dropout={module.dropout}), from the global generator"
        return what, "set its dropout to 0 and use gradveil.nn.dropout.Dropout outside of it"
    return "", ""


def _norm(module: nn.Module) -> tuple[str, str]:
    kind = type(module).__name__
    if isinstance(module, BatchNorm) and uses_batch(module):
        ways = f"{SURGERY}.replace_batchnorm(model, 'batch_statistics'), or 'frozen' or 'group'"
        ways = ways if replaceable(module, BATCHNORMS) else f"{_KEPT}; or put it into evaluation mode"
        if module.running_mean is not None:
            return f"{kind} in training mode changes its running statistics in every forward pass", ways
        return f"batched derivatives through {kind}, which uses the batch's statistics, are wrong in torch", ways
    if isinstance(module, InstanceNorms) and module.track_running_stats:
        what = f"{kind} keeps running statistics"
        return what, f"make it with track_running_stats=False, then {SURGERY}.replace_layernorm(model)"
    if isinstance(module, nn.LayerNorm | InstanceNorms) and _forward_is_torchs(module):
        what = f"batched derivatives through torch's {kind} are silently wrong"
        explicit = f"replace it by an explicit one: {SURGERY}.replace_layernorm(model)"
        return what, explicit if replaceable(module, (nn.LayerNorm, *INSTANCENORMS)) else _KEPT
    return "", ""


_KEPT = (
    "write it with gradveil.nn.norms: only torch's own types without hooks are replaced, since a subclass may compute "
    "something else"
)


def _forward_is_torchs(module: nn.Module) -> bool:
    """Whether a layer runs torch's own forward; what another one does, only a run shows."""
    return type(module).forward in (nn.LayerNorm.forward, InstanceNorms.forward)


def _inplace(module: nn.Module) -> tuple[str, str]:
    if not getattr(module, "inplace", False):
        return "", ""
    what = f"{type(module).__name__}(inplace=True) overwrites what the second derivative needs"
    return what, f"switch it off: {SURGERY}.remove_inplace(model)"


def _recurrent(module: nn.Module) -> tuple[str, str]:
    if not isinstance(module, _RECURRENT):
        return "", ""
    what = f"{type(module).__name__} is recurrent, and torch cannot batch its derivatives over victims"
    return what, "audit a model without recurrent layers, or write the recurrence with nn.Linear"


def _parameter_problems(model: nn.Module) -> list[Problem]:
    names: dict[int, list[str]] = defaultdict(list)
    problems: list[Problem] = []
    trained = any(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        if len(names[id(parameter)]) > 1:
            continue
        if is_lazy(parameter):
            problems.append(Problem(name, "has no shape yet (a lazy layer)", "run one forward pass first"))
            continue
        problems += _value_problems(name, parameter)
        if trained and not parameter.requires_grad:
            what = "has requires_grad=False: it is not trained and not part of the update"
            problems.append(Problem(name, what, "parameter.requires_grad_(True), unless it is meant", "warning"))
    for name, buffer in model.named_buffers():
        if not is_lazy(buffer):
            problems += _value_problems(name, buffer)
    for shared in names.values():
        if len(shared) > 1:
            what = f"is the same tensor as {', '.join(shared[1:])}: the update holds it once, under this name"
            problems.append(Problem(shared[0], what, "untie them if each should have its own update", "warning"))
    if not names:
        what, remedy = "has no parameters, so there is no update to attack", "give a model with trainable layers"
        problems.append(Problem("model", what, remedy))
    elif not trained:
        what, remedy = "has no parameter with requires_grad=True", "model.requires_grad_(True)"
        problems.append(Problem("model", what, remedy))
    return problems + _mixture_problems(model)


def _value_problems(name: str, tensor: Tensor) -> list[Problem]:
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return []
    bad = int((~tensor.detach().isfinite()).sum())
    if not bad:
        return []
    what = f"holds NaN or infinity in {bad} of {tensor.numel()} entries"
    return [Problem(name, what, "load or train the weights again; a smaller learning rate may help")]


def _mixture_problems(model: nn.Module) -> list[Problem]:
    problems = []
    for what, values in (
        ("device", {str(p.device) for p in model.parameters()}),
        ("dtype", {str(p.dtype) for p in model.parameters()}),
    ):
        if len(values) > 1:
            found = f"its parameters lie on more than one {what}: {', '.join(sorted(values))}"
            problems.append(Problem("model", found, f"bring it to one: model.to({what}=...)"))
    return problems
