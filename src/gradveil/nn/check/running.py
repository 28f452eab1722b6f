"""Problems of a running model: the forward pass, its derivatives, and their batched forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.core.errors import FOREIGN, GradveilError, Problem
from gradveil.core.types import Batch
from gradveil.nn.check.inputs import input_remedy, visit_problems
from gradveil.nn.check.static import BY_FORMULA, target_problems
from gradveil.nn.formulas import (
    IN_PLACE,
    KINDS,
    BatchNormWay,
    Rewritten,
    by_formula,
    rewrite,
    rewrite_overwriting,
)
from gradveil.nn.forward_trace import Trace, follow
from gradveil.nn.model_outputs import logits_in, logits_only
from gradveil.nn.module_paths import call_on
from gradveil.nn.surgery import BatchNorm, InstanceNorms, prepare, uses_batch


def first_random(first: Trace, second: Trace) -> str | None:
    """Return the path of the first module with different outputs for equal inputs in two passes."""
    for a, b in zip(first.done, second.done, strict=False):
        if a.path != b.path or (_same(a.inputs, b.inputs) and not _same(a.outputs, b.outputs)):
            return a.path
    return None


def _same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return len(first) == len(second) and all(
        one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
        for one, two in zip(first, second, strict=True)
    )


Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a scalar, or one loss per example."""
_RANDOM = {
    *("dropout", "dropout1d", "dropout2d", "alpha_dropout", "feature_alpha_dropout", "rrelu", "rand", "randn"),
    *("rand_like", "randn_like", "randperm", "bernoulli", "bernoulli_", "normal_", "uniform_", "randint"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
}
"""Functions that draw from the global generator; attention does with dropout inside."""
TOLERANCE = 0.02
"""Relative error above which a batched derivative is wrong: rounding stays far below, the known faults far above."""


def run_problems(model: nn.Module, batch: Batch, loss: Loss) -> list[Problem]:
    """Run a prepared copy of the model, and return its problems.

    Where it fails, calls that `prepare` would compute by a formula are so, kind by kind: each that changes the problems
    is one itself, and the problems that remain are those of the rewritten model.
    """
    try:
        copy, _ = prepare(model)
    except FOREIGN as error:
        what = f"cannot be copied: {_text(error)}"
        return [Problem("model", what, "keep only parameters, buffers and modules as tensors of the model")]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        remaining = _problems_of(copy, batch, loss)
        if not _stopped(remaining):
            return remaining
        problems: list[Problem] = []
        for kind, rewritten in _rewritten(copy, batch.inputs.detach()[:2]):
            after = _problems_of(rewritten.model, batch, loss)
            if after != remaining:
                problems += [_call_problem(path, kind) for path in rewritten.paths[kind]]
                remaining = after
            if not _stopped(remaining):
                break
        return problems + remaining


def _stopped(problems: Iterable[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _rewritten(model: nn.Module, inputs: Tensor) -> Iterator[tuple[str, Rewritten]]:
    """Yield the model with the calls of one kind after the other computed by formulas."""
    way = BatchNormWay()
    new = rewrite_overwriting(model, inputs, way)
    if new is not None:
        model = new.model
        yield IN_PLACE, new
    for kind in KINDS:
        new = rewrite(model, inputs, way, kinds=[kind])
        if new is not None:
            model = new.model
            yield kind, new


def _call_problem(path: str, kind: str) -> Problem:
    """Return the problem of a module's own calls of one kind."""
    if kind == IN_PLACE:
        remedy = f"write x = x + 1, not x += 1, and F.relu(x), not F.relu_(x); or {BY_FORMULA}"
        return Problem(path, "overwrites a value that the derivatives need", remedy)
    fused = (
        "has no second derivative"
        if kind in ("fused attention", "hardsigmoid")
        else "has silently wrong batched derivatives"
    )
    return Problem(path, f"calls torch's {kind}, which {fused}", BY_FORMULA)


def _problems_of(model: nn.Module, batch: Batch, loss: Loss) -> list[Problem]:
    """Run a model forward and backward, and return its problems."""
    trace = Trace()
    problems, outputs = _forward_problems(model, batch.inputs.detach(), trace)
    if outputs is None:
        return problems
    if not isinstance(outputs, Tensor):
        named = f" with {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
        what = f"returns {type(outputs).__name__}{named}, not a tensor"
        if logits_in(outputs) is None:
            return [*problems, Problem("model", what, "wrap the model so that it returns the logits [B, K]")]
        remedy = "take its logits: gradveil.nn.prepare(model, batch=batch)"
        return [Problem("model", what, remedy), *_problems_of(logits_only(model), batch, loss)]
    if fatal := _output_problems(outputs, batch):
        return problems + fatal
    problems += visit_problems(model, trace)
    problems += _derivative_problems(model, batch, loss, trace)
    if not _stopped(problems):
        problems += _batching_problems(model, batch, loss, trace)
        problems += _probability_problems(outputs.detach(), batch.targets, loss)
    return problems


def _forward_problems(model: nn.Module, inputs: Tensor, trace: Trace) -> tuple[list[Problem], Any]:
    """Run a model forward twice, and return the problems of that and the outputs; no outputs if it fails."""
    copied, second = inputs.clone(), Trace()
    try:
        outputs = follow(model, lambda: model(copied), trace)
        follow(model, lambda: model(inputs.clone()), second)
    except GradveilError as error:
        return list(error.problems), None
    except FOREIGN as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in trace.under_way[-1].inputs) if trace.under_way else ""
        what = f"its forward pass fails for inputs of shape {tuple(inputs.shape)}"
        what += f" (here {shapes})" if shapes else ""
        return [Problem(trace.where, f"{what}: {_text(error)}", input_remedy(model, inputs))], None
    problems = []
    if not torch.equal(copied.nan_to_num(), inputs.nan_to_num()):
        path = next(iter(trace.overwriting), "model")
        what = f"overwrites the inputs ({', '.join(trace.overwriting.get(path, []))})"
        problems.append(Problem(path, what, "write x = x + 1 instead of x += 1"))
    random = first_random(trace, second)
    if random is not None:
        calls = sorted({f.__name__ for f in trace.functions.get(random, ()) if getattr(f, "__name__", "") in _RANDOM})
        named = f" ({', '.join(calls)})" if calls else ""
        what = f"two passes over the same inputs differ: it draws random numbers that are not arguments{named}"
        remedy = "use gradveil.nn.Dropout, or a module derived from gradveil.nn.Stochastic"
        if any("dropout" in call for call in calls):  # torch.nn.functional's
            remedy = f"call an nn.Dropout of the module, which gradveil.nn.replace_dropout takes; or {remedy}"
        problems.append(Problem(random, what, remedy))
    return problems, outputs


def _output_problems(outputs: Tensor, batch: Batch) -> list[Problem]:
    examples = len(batch.inputs)
    if outputs.dim() == 0 or len(outputs) != examples:
        what = f"returns outputs of shape {tuple(outputs.shape)} for {examples} examples"
        return [Problem("model", what, "keep the batch dimension first: logits [B, K]")]
    problems = []
    bad = int((~outputs.detach().isfinite()).sum())
    if bad:
        what = f"returns NaN or infinity in {bad} of {outputs.numel()} outputs"
        problems.append(Problem("model", what, "check the weights, the normalisation and the scale of the inputs"))
    if outputs.dim() == 2 and outputs.shape[1] > 1:
        beyond = target_problems(batch.targets, outputs.shape[1])
        what = f"has {outputs.shape[1]} outputs, too few for the targets"
        remedy = "give the model as many outputs as there are classes"
        problems += [Problem("model", f"{what}, which {p.what.removeprefix('holds ')}", remedy) for p in beyond]
    return problems


def _derivative_problems(model: nn.Module, batch: Batch, loss: Loss, trace: Trace) -> list[Problem]:
    inputs = batch.inputs.detach().clone().requires_grad_(batch.inputs.dtype.is_floating_point)
    params = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not params:
        return []
    try:
        value = loss(model(inputs), batch.targets)
    except FOREIGN as error:
        remedy = "give a loss (outputs, targets) -> scalar or [B] that fits the outputs and the targets"
        return [Problem("loss", f"fails: {_text(error)}", remedy)]
    problems = _loss_problems(value, len(inputs))
    if problems:
        return problems
    try:
        slopes = torch.autograd.grad(value.mean(), list(params.values()), create_graph=True, allow_unused=True)
    except FOREIGN as error:
        return [_derivative_problem("the gradient", error, trace)]
    unused = [name for name, slope in zip(params, slopes, strict=True) if slope is None]
    what, remedy = "gets no gradient: the loss does not depend on it", "remove it, or use it in the forward pass"
    problems = [Problem(name, what, remedy, "warning") for name in unused]
    used = [slope for slope in slopes if slope is not None]
    if not all(slope.isfinite().all() for slope in used):
        what, remedy = "the gradient holds NaN or infinity", "check the loss at these inputs (log 0? division by 0?)"
        return [*problems, Problem("model", what, remedy)]
    if not any(slope.any() for slope in used):
        remedy = "check for dead activations and for detach(); one output, for data of a single class, learns nothing"
        return [*problems, Problem("model", "the gradient is zero: the update reveals nothing", remedy)]
    # Token numbers have no derivative; attacks on them need none.
    return problems + (_second_problems(_normalised_square(used), inputs, trace) if inputs.requires_grad else [])


def _loss_problems(value: Tensor, examples: int) -> list[Problem]:
    if not isinstance(value, Tensor):
        what = f"returns {type(value).__name__}, not a tensor"
        return [Problem("loss", what, "return a scalar tensor, without .item() or float()")]
    if value.dim() > 0 and tuple(value.shape) != (examples,):
        what = f"returns shape {tuple(value.shape)}"
        return [Problem("loss", what, f"return a scalar, or one loss per example: [{examples}]")]
    if not value.isfinite().all():
        return [Problem("loss", "is NaN or infinite", "check the outputs, the targets and the loss")]
    if not value.requires_grad:
        what = "does not depend on the parameters by differentiable operations"
        return [Problem("loss", what, "remove detach(), torch.no_grad() and argmax from model and loss")]
    return []


def _second_problems(square: Tensor, inputs: Tensor, trace: Trace) -> list[Problem]:
    what = "the gradient does not change with the inputs: its derivative is zero, so nothing can be inverted"
    remedy = "remove detach(), rounding and argmax before the first trained layer"
    constant = [Problem("model", what, remedy)]
    if not square.requires_grad:
        return constant
    try:
        # autograd.grad ignores functions that can be differentiated only once; backward() raises for them.
        square.backward()
    except FOREIGN as error:
        return [_derivative_problem("the second derivative", error, trace)]
    slope = inputs.grad
    if slope is None or not slope.any():
        return constant
    if not slope.isfinite().all():
        remedy = "avoid functions with an infinite slope at these inputs, such as sqrt or norm at 0"
        return [Problem("model", "the second derivative holds NaN or infinity", remedy)]
    return []


def _derivative_problem(which: str, error: Exception, trace: Trace) -> Problem:
    if "inplace" in str(error).replace("-", ""):
        where = ", ".join(trace.overwriting) or "model"
        calls = ", ".join(sorted({name for names in trace.overwriting.values() for name in names}))
        what = f"{which} fails, because an in-place operation ({calls or 'unknown'}) overwrote a value it needs"
        return Problem(where, what, "write it out of place: x = x + 1, not x += 1; F.relu(x), not F.relu_(x)")
    what, remedy = f"{which} fails: {_text(error)}", "replace the operation that has no (second) derivative in torch"
    return Problem("model", what, remedy)


def _batching_problems(model: nn.Module, batch: Batch, loss: Loss, trace: Trace) -> list[Problem]:
    """Compare the derivative of the gradient's norms for two batched target clients with that of each one alone."""
    params = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    if not params or batch.inputs.dtype not in (torch.float32, torch.float64):
        return []
    fixed = {name: value.detach() for name, value in model.named_parameters() if not value.requires_grad}
    fixed |= dict(model.named_buffers())
    inputs, targets = batch.inputs.detach()[:2], batch.targets[:2]

    def square(x: Tensor, labels: Tensor) -> Tensor:
        def scalar(trained: dict[str, Tensor]) -> Tensor:
            return loss(call_on(model, {**trained, **fixed}, x, strict=True), labels).mean()

        return _normalised_square(grad(scalar)(params).values())

    # Two that differ: of equal ones a mixture would show nothing.
    target_clients = torch.stack([inputs, 0.5 * inputs]).requires_grad_()
    labels = torch.stack([targets, targets])
    try:
        (batched,) = torch.autograd.grad(vmap(square)(target_clients, labels).sum(), target_clients)
    except FOREIGN as error:
        if "inplace" in str(error).replace("-", ""):
            return [_derivative_problem("the batched gradient", error, trace)]
        if of_loss := _loss_batching_problems(model, target_clients.detach(), labels, loss):
            return of_loss
        what = f"cannot be batched over target clients by torch.func.vmap: {_text(error)}"
        return [Problem("model", what, "avoid .item(), data-dependent branches and layers without a batching rule")]
    looped = torch.stack([_alone(model, loss, x, targets) for x in target_clients.detach()])
    error = (batched - looped).norm() / looped.norm().clamp_min(1e-30)
    if error < TOLERANCE:
        return []
    what = f"the derivative of the gradient in batched form is off by {100 * error.item():.0f}%"
    remedy = (
        "F.layer_norm, F.batch_norm and F.instance_norm do this in torch: use the modules in gradveil.nn.normalisation"
    )
    norms = [path or "model" for path, module in model.named_modules() if _normalises(module)]
    return [Problem(path, what, remedy) for path in norms or ["model"]]


def _normalises(module: nn.Module) -> bool:
    """Return whether torch may batch a layer's derivatives wrongly; in prepared models only subclasses remain."""
    if by_formula(module):
        return False
    return isinstance(module, nn.LayerNorm | InstanceNorms) or (isinstance(module, BatchNorm) and uses_batch(module))


def _probability_problems(outputs: Tensor, targets: Tensor, loss: Loss) -> list[Problem]:
    """Warn about a double softmax: a loss that ignores a shift of the outputs contains a softmax."""
    sums = outputs.sum(-1)
    if (
        outputs.dim() != 2
        or outputs.shape[1] < 2
        or outputs.min() < 0
        or not torch.allclose(sums, torch.ones_like(sums))
    ):
        return []
    try:
        shifted, plain = (loss(outputs + shift, targets).mean() for shift in (1.0, 0.0))
    except FOREIGN:  # a loss of probabilities may reject the shifted outputs
        return []
    if not torch.allclose(shifted, plain, rtol=1e-4):
        return []
    what = "returns probabilities, and the loss applies a second softmax: gradients are small and reveal less"
    remedy = "return the logits, without softmax, unless your clients really train like this"
    return [Problem("model", what, remedy, "warning")]


def _loss_batching_problems(model: nn.Module, target_clients: Tensor, labels: Tensor, loss: Loss) -> list[Problem]:
    """Return the problem if it is the loss that cannot be batched over target clients."""
    outputs = torch.stack([model(x).detach() for x in target_clients])
    try:  # The gradient is needed: F.one_hot with num_classes works under vmap, but not under a derivative.
        vmap(grad(lambda output, target: loss(output, target).mean()))(outputs, labels)
    except FOREIGN as error:
        what = f"cannot be batched over target clients by torch.func.vmap: {_text(error)}"
        remedy = "use gradveil.client.cross_entropy, or a loss without .item(), data-dependent branches and shapes"
        return [Problem("loss", what, f"{remedy} (torch.eye(K)[targets], not F.one_hot(targets, K))")]
    return []


def _alone(model: nn.Module, loss: Loss, x: Tensor, targets: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    params = [value for value in model.parameters() if value.requires_grad]
    slopes = torch.autograd.grad(loss(model(x), targets).mean(), params, create_graph=True, allow_unused=True)
    return torch.autograd.grad(_normalised_square(slope for slope in slopes if slope is not None), x)[0]


def _normalised_square(slopes: Iterable[Tensor]) -> Tensor:
    """Sum ||g_l||^2 / c_l with constants c_l = ||g_l||^2, so that large tensors do not hide small ones.

    Tensors whose gradient is pure rounding (a bias before a normalisation) get a small weight.
    """
    squares = torch.stack([slope.square().sum() for slope in slopes])
    scale = squares.detach()
    return (squares / scale.clamp_min(1e-30).maximum(1e-8 * scale.sum())).sum()


def _text(error: Exception) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
