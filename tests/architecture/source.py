"""A parsed source file, with names resolved through its imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Source:
    """One Python file: its dotted module name, its text and its syntax tree."""

    module: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, nearest to its root first."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Every imported module or name, absolute and dotted, with its line; `import_module("...")` counts too."""
        found: list[tuple[int, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.lineno, f"{self.base(node)}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Call) and self.name(node.func) in {"importlib.import_module", "__import__"}:
                found += [(node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        return found

    def base(self, node: ast.ImportFrom) -> str:
        """The absolute module that a `from ... import` takes its names from."""
        if node.level == 0:
            return node.module or ""
        parts = self.module.split(".")
        parents = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parents, node.module] if node.module else parents)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> dotted name, for everything that is imported anywhere in the file."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name: f"{self.base(node)}.{alias.name}" for alias in node.names}
        return names

    def name(self, node: ast.expr) -> str:
        """The dotted name of an expression such as `nn.init.uniform_`; what is not a name becomes `?`."""
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        return self.aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with the dotted name of what is called."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node, self.name(node.func)


@cache
def read(folder: Path, pattern: str = "*.py") -> list[Source]:
    """Every Python file below a folder, in order."""
    sources = []
    for path in sorted(folder.rglob(pattern)):
        parts = path.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        sources.append(Source(module, path.read_text(encoding="utf-8"), is_package))
    return sources
