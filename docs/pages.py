"""MkDocs hook: writes one reference page a package from its docstrings, without importing anything."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SRC = Path(__file__).resolve().parents[1] / "src"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Public = Function | ast.ClassDef


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages out of the navigation that are not written, and add the reference to it."""
    pages = [each for each in (written(entry, Path(config.docs_dir)) for entry in config.nav or []) if each]
    config.nav = [*pages, {"Code": [{name: f"reference/api/{name}.md"} for name in reference()]}]
    return config


def written(entry: dict[str, Any], docs: Path) -> dict[str, Any]:
    """Return an entry of the navigation without the pages that do not exist."""
    ((title, target),) = entry.items()
    if isinstance(target, str):
        return entry if (docs / target).exists() else {}
    pages = [each for each in (written(below, docs) for below in target) if each]
    return {title: pages} if pages else {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages."""
    for name, text in reference().items():
        files.append(File.generated(config, f"reference/api/{name}.md", content=text))
    return files


def reference() -> dict[str, str]:
    """Write a page for each package below `gradveil`, and one for the modules beside them."""
    pages: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py"), key=lambda p: (p.parent, p.name != "__init__.py", p.name)):
        parts = path.relative_to(SRC).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        package = parts[1] if len(parts) > 2 else "gradveil"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            heading = "#" if not pages[package] else "##"
            pages[package] += [f"{heading} {module}", prose(tree), *definitions(tree)]
    listed = json.loads((SRC / "gradveil/cli/index.json").read_text(encoding="utf-8"))["listed"]
    for kind in ("attacks", "defences"):
        pages[kind] += ["## Settings", *(part for row in listed[kind] for part in settings(row))]
    return {package: "\n\n".join(text) + "\n" for package, text in pages.items()}


def settings(row: dict[str, Any]) -> list[str]:
    """Describe a named attack or defence, with a table of what it takes."""
    lines = ["| setting | value | default | |", "|---|---|---|---|"] if row["arguments"] else []
    for each in row["arguments"]:
        default = "required" if each["required"] else f"`{json.dumps(each['default'], ensure_ascii=False)}`"
        lines.append(f"| `{each['name']}` | {each['allowed']} | {default} | {each['help']} |")
    return [f"### {row['name']}", f"{row['description']}. {row['citation']}.", "\n".join(lines)]


def definitions(scope: ast.Module | ast.ClassDef) -> list[str]:
    """Describe the public names of a module, or the methods of a class."""
    text: list[str] = []
    for node in scope.body:
        if isinstance(scope, ast.Module) and isinstance(node, ast.Assign | ast.AnnAssign):
            text += constant(scope, node)
        if isinstance(node, Public) and not node.name.startswith("_"):
            name = f"{scope.name}.{node.name}" if isinstance(scope, ast.ClassDef) else node.name
            level = "####" if isinstance(scope, ast.ClassDef) else "###"
            text += [f"{level} {name}", f"```python\n{signature(node)}\n```", prose(node)]
            text += definitions(node) if isinstance(node, ast.ClassDef) else []
    return text


def constant(scope: ast.Module, node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Describe a constant by its docstring and its value, of which a long one is cut."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
    told = scope.body[scope.body.index(node) + 1 :][:1]
    match names[0][0], told:
        case first, [ast.Expr(ast.Constant(str(text)))] if first != "_":
            value = ast.unparse(node)
            shown = f"{value[:100]}{'...' if len(value) > 100 else ''}"
            return [f"### {', '.join(names)}", f"```python\n{shown}\n```", text]
    return []


def signature(node: Public) -> str:
    """Show how a function is called, or a class with its annotated fields."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [f"    {ast.unparse(item)}" for item in node.body if isinstance(item, ast.AnnAssign)]
        return "\n".join([f"class {node.name}{f'({bases})' if bases else ''}", *fields])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= 100:
        return line
    arguments = re.split(r", (?![^\[(]*[\])])", ast.unparse(node.args))
    return f"{node.name}(\n    " + ",\n    ".join(arguments) + f",\n){returns}"


def prose(node: ast.Module | Public) -> str:
    """Return a docstring as Markdown, its examples as code blocks."""
    text = ast.get_docstring(node) or ""
    return re.sub(r"(?m)^>>> (?:.+\n?)+", lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", text)
