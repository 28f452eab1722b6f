"""A table as papers print it, as Markdown or LaTeX: with its caption, and with what its marks mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradveil.core.words import DASH


class Text(NamedTuple):
    """What one place of a table says."""

    text: str
    rest: str = ""
    """What follows, never bold."""
    bold: bool = False
    code: bool = False
    """Whether it is what one writes in a run file or on the command line."""


@dataclass(frozen=True)
class Sheet:
    """A table: the first column names the rows."""

    caption: str
    columns: Sequence[Text]
    rows: Sequence[Sequence[Text]]
    notes: Sequence[tuple[str, str]] = ()
    """Marks, and what each means."""


def as_markdown(sheets: Sequence[Sheet]) -> str:
    """Write tables as Markdown, the notes below each."""
    return "\n".join(_markdown(sheet) for sheet in sheets)


def _markdown(sheet: Sheet) -> str:
    def line(texts: Sequence[Text]) -> str:
        return "| " + " | ".join(written(one).replace("|", "\\|") for one in texts) + " |"

    def written(one: Text) -> str:
        shown = f"`{one.text}`" if one.code else one.text
        return (f"**{shown}**" if one.bold else shown) + one.rest

    ruler = "|---" * len(sheet.columns) + "|"
    lines = [f"{sheet.caption}\n", line(sheet.columns), ruler, *map(line, sheet.rows)]
    notes = [f"{mark} {meaning}" for mark, meaning in sheet.notes]
    return "\n".join(lines) + "\n" + (f"\n{'; '.join(notes)}.\n" if notes else "")


def as_latex(sheets: Sequence[Sheet]) -> str:
    """Write tables as LaTeX."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex(sheet) for sheet in sheets)


def _latex(sheet: Sheet) -> str:
    def line(texts: Sequence[Text]) -> str:
        return " & ".join(map(written, texts)) + " \\\\"

    def written(one: Text) -> str:
        text, rest = _escaped(one.text), _escaped(one.rest)
        return (f"\\textbf{{{text}}}" if one.bold else text) + rest

    notes = [f"{_escaped(mark)} {_escaped(meaning)}." for mark, meaning in sheet.notes]
    top = ["\\begin{table}", f"\\caption{{{' '.join([_escaped(sheet.caption), *notes])}}}"]
    top += [f"\\begin{{tabular}}{{{'l' * len(sheet.columns)}}}", "\\toprule", line(sheet.columns), "\\midrule"]
    return "\n".join([*top, *map(line, sheet.rows), "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$"},
    "|": "\\textbar{}",
    **{"†": "$^\\dagger$", "‡": "$^\\ddagger$", "§": "$^\\S$", DASH: "--", '"': "''", "±": "$\\pm$", "−": "$-$"},
}


def _escaped(text: str) -> str:
    r"""Write what LaTeX would read as a command as the character that it is.

    >>> print(_escaped("dp(sigma=1e-4)_{x} 5–10%"))
    dp(sigma=1e-4)\_\{x\} 5--10\%
    """
    return "".join(_LATEX.get(character, character) for character in text)
