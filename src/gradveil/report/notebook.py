"""Results as a notebook shows them: the verdict, its table and pictures, in HTML without a page around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from torch import Tensor

from gradveil.audit.api import Result
from gradveil.audit.findings import Findings, Gap, headline, remarks_on, strongest
from gradveil.audit.recorded.inverted_update import Inverted
from gradveil.audit.result_rows import short_names
from gradveil.audit.verdict import LEVELS
from gradveil.core.formatting import DASH, percent, size
from gradveil.metrics import match_batch
from gradveil.report.marked_sentences import marked_sentences
from gradveil.report.pictures import data_uri, png

SHOWN = 8
"""Pictures in a row at most."""
_SIDE = 64
"""Least height of a picture in pixels of the screen."""
_PICTURED = 5
"""Dimensions of pictures of clients: [V, B, C, H, W]."""
_TITLES = ("defence", "verdict", "identifiable", "95% CI", "baseline", "strongest attack", "bytes")


def result_html(result: Result) -> str:
    """Show an audit: verdict, a row per defence, the truths of the first setting above its reconstructions, remarks."""
    found = result.findings
    remarks = "".join(f"<div>{escape(line)}</div>" for line in remarks_on(found, result.config, result.warnings))
    pictures = _pictures([*_strips(found)])
    advice = f"<p>{escape(found.recommendation.text)}</p>" if found.recommendation else ""
    head = f"<p><b>{escape(found.sentence)}</b></p>{advice}"
    return f"<div>{head}{_verdicts(found)}{pictures}{_sentences(found)}<small>{remarks}</small></div>"


def inverted_html(found: Inverted) -> str:
    """Show an inverted update: the outcome, and the truth, where it is known, above the reconstruction."""
    outcome, *more = str(found).splitlines()[:-1]
    if found.lines:
        return f"<div><p><b>{escape(outcome)}</b></p><p>{'<br>'.join(map(escape, found.lines[:SHOWN]))}</p></div>"
    strips = [] if found.truth is None else [("private image", found.truth)]
    pictures = _pictures([*strips, ("reconstruction", _in_order(found))])
    return f"<div><p><b>{escape(outcome)}</b></p>{pictures}<small>{escape(' '.join(more))}</small></div>"


def _in_order(found: Inverted) -> Tensor:
    """Put reconstructions next to the truths that they fit best."""
    if found.truth is None:
        return found.images
    return match_batch(found.images.cpu().unsqueeze(0), found.truth.unsqueeze(0))[1][0]


def _verdicts(found: Findings) -> str:
    names = short_names(row.attack for row in found.rows)
    rows = list[Sequence[str]]()
    for each in found.entries:
        label = LEVELS[each.level][0].upper()
        if isinstance(each, Gap):
            rows.append((each.defence, label, *[DASH] * 5))
            continue
        rate, ends, guess, *_ = headline(each)
        rows.append((each.defence, label, rate, ends, guess, strongest(each, names), size(each.price.sent)))
    head = "".join(f"<th>{title}</th>" for title in _TITLES)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _strips(found: Findings) -> Iterator[tuple[str, Tensor]]:
    """Yield the truths of the first setting, then the reconstructions of its verdicts that are of the same images."""
    truth: Tensor | None = None
    for verdict in found.verdicts:
        if verdict.setting != found.verdicts[0].setting:
            continue
        images = verdict.best.trial.images() or {}
        if "truth" not in images or "reconstruction" not in images or images["truth"].dim() != _PICTURED:
            continue
        if truth is None:
            truth = images["truth"]
            yield "private image", truth.flatten(0, 1)
        if images["truth"].shape == truth.shape and bool((images["truth"] == truth).all()):
            count = f"{verdict.identifiable} of {verdict.images}, {percent(verdict.rate)}"
            yield f"{verdict.defence} ({count})", images["reconstruction"].flatten(0, 1)


def _sentences(found: Findings) -> str:
    """Show private sentences next to their reconstructions by the strongest attack on each defence."""
    rows = [
        (verdict.defence, *("".join(f"<mark>{escape(t.words)}</mark> " if t.differs else f"{escape(t.words)} "
                                    for t in text) for text in pair))
        for verdict in found.verdicts
        for pair in marked_sentences(verdict.best.info)
    ]  # fmt: skip
    head = "".join(f"<th>{title}</th>" for title in ("defence", "private sentence", "reconstruction"))
    body = "".join(f"<tr><td>{escape(d)}</td><td>{truth}</td><td>{other}</td></tr>" for d, truth, other in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""


def _pictures(strips: Sequence[tuple[str, Tensor]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(title)}</td>{''.join(f'<td>{_picture(image)}</td>' for image in images[:SHOWN])}</tr>"
        for title, images in strips
    )
    return f"<table>{rows}</table>" if rows else ""


def _picture(image: Tensor) -> str:
    image = image.detach().float()
    shown = image if image.shape[0] in (1, 3) else image[:1]
    height = max(_SIDE, int(shown.shape[1]))
    return f'<img src="{data_uri(png(shown))}" height="{height}" style="image-rendering: pixelated" alt="">'
