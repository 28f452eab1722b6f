"""The rules of this code base. Each takes a source file and says, line by line, where it breaks the rule."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from tests.architecture.source import Source

Rule = Callable[[Source], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

LAYERS = (
    {"core"},
    {"runs", "wire"},
    {"nn"},
    {"gradients"},
    {"client"},
    {"theory"},
    {"metrics"},
    {"spaces"},
    {"defences", "attacks", "data"},
    {"federated"},
    {"audit", "integrations"},
    {"assurance"},
    {"tune", "report"},
    {"papers"},
    {""},  # the package itself, which offers what the layers below it do
    {"cli"},
    {"__main__"},
)
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}


def layer_of(dotted: str) -> str:
    """The layer that a dotted name below `gradveil` belongs to; the package's own names are layer ''.

    >>> layer_of("gradveil.core.noise"), layer_of("gradveil.__version__"), layer_of("gradveil")
    ('core', '', '')
    """
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else ""


def imports_point_left(source: Source) -> list[str]:
    """A module imports its own layer and those left of it; never a sibling, never one to the right."""
    own = source.module.split(".")[1] if "." in source.module else ""
    if own not in RANK:
        return [f"the layer '{own}' is not in the table of layers"]
    wrong = []
    for line, dotted in source.imports:
        layer = layer_of(dotted)
        if dotted.split(".")[0] == "gradveil" and layer != own and RANK[layer] >= RANK[own]:
            wrong.append(f"{line}: '{own}' imports '{dotted}'")
    return wrong


OPTIONAL = {
    *("datasets", "pyarrow", "lpips", "torchvision", "flwr", "flwr_datasets", "cryptography", "ray"),
    *("optuna", "opacus", "cma", "sklearn", "skimage", "dp_accounting", "torchmetrics", "PIL", "matplotlib"),
}


def optional_imports_are_lazy(source: Source) -> list[str]:
    """What only an extra installs is imported inside the function that needs it (integrations excepted)."""
    if source.module.startswith("gradveil.integrations"):
        return []
    wrong = []
    for node in source.tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        wrong += [f"{node.lineno}: imports '{name}'" for name in names if name.split(".")[0] in OPTIONAL]
    return wrong


def files_are_short(source: Source) -> list[str]:
    """A file is one subject, and has at most 700 lines."""
    lines = len(source.text.splitlines())
    return [f"{lines} lines, at most 700 are allowed"] if lines > 700 else []


DRAWS = {
    *("rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "binomial"),
    *("rand_like", "randn_like", "randint_like"),
}
DRAWING_METHODS = {
    *("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("bernoulli", "multinomial", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
    *("trunc_normal_", "orthogonal_", "sparse_"),
}
HIDDEN = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "gumbel_softmax"),
    "rrelu",
}
GLOBAL_STATE = {
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "default_generator",
    "set_rng_state",
    "initial_seed",
}


def draws_name_their_generator(source: Source) -> list[str]:
    """Whatever torch draws, it draws from a generator that is handed to it."""
    wrong = []
    for call, name in source.calls():
        head, _, last = name.rpartition(".")
        keywords = {keyword.arg for keyword in call.keywords}
        drawn = (head == "torch" and last in DRAWS) or (head != "" and last in DRAWING_METHODS)
        if (drawn and "generator" not in keywords) or (head == "torch.nn.functional" and last in HIDDEN):
            wrong.append(f"{call.lineno}: {name}(...) draws from the global generator")
    return wrong


def no_global_random_state(source: Source) -> list[str]:
    """No seeding of global generators, no `random`, no NumPy generator but an explicitly seeded one."""
    wrong = [
        f"{line}: imports '{name}'"
        for line, name in source.imports
        if name.split(".")[0] == "random" or name.startswith("torch.distributions")
    ]
    for node in source.nodes:
        if isinstance(node, ast.Attribute | ast.Name) and (name := source.name(node)):
            head, _, last = name.rpartition(".")
            if head in {"torch", "torch.random", "torch.cuda", "torch.cuda.random"} and last in GLOBAL_STATE:
                wrong.append(f"{node.lineno}: {name} is global")
            elif head == "numpy.random" and last[:1].islower() and last != "default_rng":
                wrong.append(f"{node.lineno}: {name} uses NumPy's global generator")
    unseeded = (call for call, name in source.calls() if name == "numpy.random.default_rng")
    return wrong + [f"{c.lineno}: default_rng without a seed" for c in unseeded if not c.args and not c.keywords]


PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def no_pickle(source: Source) -> list[str]:
    """Nothing is pickled or read from a pickle: such a file runs code when it is opened."""
    wrong = [f"{line}: imports '{name}'" for line, name in source.imports if name.split(".")[0] in PICKLES]
    for call, name in source.calls():
        allowed = any(k.arg == "allow_pickle" and getattr(k.value, "value", True) for k in call.keywords)
        if name in {"torch.load", "torch.save"} or name.endswith(".read_pickle") or allowed:
            wrong.append(f"{call.lineno}: {name}(...) pickles")
    return wrong


CALLERS_OF_FOREIGN_CODE = {
    *("gradveil.nn.models", "gradveil.nn.check.running", "gradveil.nn.surgery", "gradveil.runs.task"),
    *(
        "gradveil.metrics",
        "gradveil.nn.copyable",
        "gradveil.nn.formulas",
        "gradveil.nn.insertion_places",
        "gradveil.nn.model_outputs",
        "gradveil.nn.models.libraries",
        "gradveil.nn.models.unlisted_text",
        "gradveil.nn.models.watched_layout",
        "gradveil.nn.models.text_library",
    ),
    *(
        "gradveil.audit.argument_checks",
        "gradveil.audit.score",
        "gradveil.client.defended_gradient",
        "gradveil.core.user_code",
        "gradveil.data.given_tokenizer",
        "gradveil.defences.user_defence",
        "gradveil.integrations.flower.own_update",
        "gradveil.integrations.flower.protect",
        "gradveil.integrations.flower.recording",
    ),
}


def no_broad_except(source: Source) -> list[str]:
    """An `except` names what it expects; only around the code of others it may be anything, `core.errors.FOREIGN`."""
    wrong = []
    broad = {"Exception", "BaseException", *(set() if source.module in CALLERS_OF_FOREIGN_CODE else {"FOREIGN"})}
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or source.name(kind).split(".")[-1] in broad for kind in kinds):
                wrong.append(f"{node.lineno}: catches everything")
    return wrong


def kinds_are_told_apart_in_spaces(source: Source) -> list[str]:
    """Only spaces compare kinds of examples; others ask a space or its words what differs."""
    if source.module == "gradveil.core.space" or source.module.startswith("gradveil.spaces."):
        return []
    wrong = []
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                made = isinstance(side, ast.Call) and source.name(side.func).endswith("ExampleWords")
                kind = isinstance(side, ast.Attribute) and side.attr == "kind"
                owner = ast.unparse(side.value) if kind and isinstance(side, ast.Attribute) else ""
                if made or owner.endswith(("words", "ExampleWords")):
                    wrong.append(f"{node.lineno}: compares kinds of examples")
    return wrong


def public_names_are_documented(source: Source) -> list[str]:
    """Every public module, class, function and method has a docstring."""
    wrong = [] if ast.get_docstring(source.tree) else ["the module has no docstring"]
    return wrong + [
        f"{node.lineno}: {node.name} has no docstring"
        for node in public_definitions(source.tree)
        if not ast.get_docstring(node) and not any(exempt(source.name(d)) for d in node.decorator_list)
    ]


SETTLED = {"core", "nn", "gradients", "client", "attacks", "metrics", "data"}


def public_constants_are_documented(source: Source) -> list[str]:
    """Every public constant, table and type of the layers that users build on has a docstring below it."""
    if layer_of(source.module) not in SETTLED:
        return []
    wrong = []
    for node, after in zip(source.tree.body, [*source.tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            public = [part.id for part in ast.walk(target) if isinstance(part, ast.Name) and part.id[0] != "_"]
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            told = told or (node.value is not None and says_its_help(node.value))
            wrong += [f"{node.lineno}: {', '.join(public)} has no docstring"] if public and not told else []
    return wrong


def says_its_help(value: ast.expr) -> bool:
    """Whether a type is that of a setting, `Annotated`, with a line of help.

    >>> says_its_help(ast.parse('Annotated[int, "Rounds."]', mode="eval").body)
    True
    """
    if not (isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Annotated"):
        return False
    held = value.slice.elts if isinstance(value.slice, ast.Tuple) else []
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in held)


def exempt(decorator: str) -> bool:
    """Whether a decorator says that the docstring stands elsewhere.

    >>> exempt("typing.overload"), exempt("width.setter"), exempt("property")
    (True, True, False)
    """
    return decorator.rpartition(".")[2] in {"overload", "override", "setter"}


def public_definitions(scope: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """Public functions and classes of a module, and public methods of public classes; nothing inside functions."""
    for node in scope.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node)


def tests_can_fail(source: Source) -> list[str]:
    """Every test asserts something that is not a constant, itself or through a helper of its own file."""
    functions = {node.name: node for node in source.nodes if isinstance(node, Function)}

    def asserts(function: Function, seen: frozenset[str]) -> bool:
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
                return True
            if isinstance(node, ast.Call):
                last = source.name(node.func).rpartition(".")[2]
                if last.startswith(("assert_", "expect_")) or last in {"raises", "warns", "fail"}:
                    return True
                if last in functions and last not in seen and asserts(functions[last], seen | {last}):
                    return True
        return False

    tests = [node for name, node in functions.items() if name.startswith("test_")]
    return [
        f"{node.lineno}: {node.name} asserts nothing" for node in tests if not asserts(node, frozenset({node.name}))
    ]


SOURCE_RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        imports_point_left,
        optional_imports_are_lazy,
        files_are_short,
        draws_name_their_generator,
        no_global_random_state,
        no_pickle,
        no_broad_except,
        kinds_are_told_apart_in_spaces,
        public_names_are_documented,
        public_constants_are_documented,
    )
}
TEST_RULES: dict[str, Rule] = {"tests_can_fail": tests_can_fail}
