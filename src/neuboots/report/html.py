"""Figures as SVG: small, the same bytes for the same figure, and at home on light and on dark pages.

Text stays text. What is black takes the colour of the page's text, white that of its background (--paper) and pale grey
that of its rules (--grid), if the page names them; in a file of its own the figure looks as it was drawn.

One self-contained HTML page of chapters: it works offline, on paper, on a phone, and without JavaScript.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib import rc_context
from matplotlib.figure import Figure

from neuboots.report.checks import Check
from neuboots.report.section import OUTCOMES, Section, count_outcomes
from neuboots.report.tables import Table

_SPACE = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_FONTS = "'DejaVu Sans', Verdana, sans-serif"  # the page has its own
_ADDRESS = re.compile(r"url\(#([^)]+)\)|^#(.+)$")
_LONG = re.compile(r"-?\d+\.\d{3,}")  # a number with more digits than anyone can see
_PLACES = ("d", "points", "x", "y", "width", "height")


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element. `name` makes its inner addresses its own, so that several stand on one page."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    size = {key: root.attrib[key] for key in ("width", "height", "viewBox")}
    _strip(root)
    for element in root.iter():
        _tidy(element)
    if root.find(".//image") is not None:
        _keep_black(root)
    _flatten(root)
    root.attrib = {
        "xmlns": _SPACE,
        **size,
        "role": "img",
        "aria-label": describe_figure(figure) or name,
        "fill": "currentColor",  # matplotlib leaves out the fill of what is black
        "font-family": _FONTS,
        "stroke-linejoin": "round",  # as attributes: a style element would speak to the whole page
        "stroke-linecap": "butt",
    }
    return prefix_ids(ElementTree.tostring(root, encoding="unicode"), name)


def prefix_ids(svg: str, name: str) -> str:
    """The SVG with `name` before each of its inner addresses."""
    prefix = slug(name)
    return re.sub(r'( id="|url\(#| href="#)', rf"\g<1>{prefix}-", svg)


def slug(name: str) -> str:
    """A name as part of an address.

    >>> slug("reliability-uci/energy (B = 5)")
    'reliability-uci-energy-B-5'
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def describe_figure(figure: Figure) -> str:
    """What the figure shows, for those who cannot see it: titles, axes and legends."""
    panels = []
    for ax in figure.axes:
        axes = " against ".join(label for label in (ax.get_ylabel(), ax.get_xlabel()) if label)
        legend = ax.get_legend()
        names = ", ".join(text.get_text() for text in legend.get_texts()) if legend is not None else ""
        panels.append(": ".join(part for part in (ax.get_title(), axes, names) if part))
    said = [figure.get_suptitle(), *dict.fromkeys(panels)]
    return " ".join(re.sub(r"[$\\{}]", "", "; ".join(part for part in said if part)).split())


def _strip(root: Element) -> None:
    """Nothing but what is drawn: no metadata, no style for the whole page, no address that nothing refers to."""
    used = {found for element in root.iter() for value in element.attrib.values() for found in _addresses(value)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SPACE}}}metadata", f"{{{_SPACE}}}style"):
                parent.remove(child)
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)


def _addresses(value: str) -> Iterator[str]:
    for match in _ADDRESS.finditer(value):
        yield match[1] or match[2]


def _tidy(element: Element) -> None:
    """One element as the page has it: plain names, short numbers, its colours."""
    element.tag = element.tag.removeprefix(f"{{{_SPACE}}}")
    text = element.tag in ("text", "tspan")
    if not text or (len(element) and not (element.text or "").strip()):
        element.text = None
    element.tail = None  # nothing but line breaks: each piece of text says where it stands
    if _LINK in element.attrib:
        element.attrib["href"] = element.attrib.pop(_LINK)
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for key in _PLACES:
        if key in element.attrib:
            short = _LONG.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), element.attrib[key])
            element.attrib[key] = " ".join(short.split())
    if "style" in element.attrib:
        pairs = [entry.split(":", 1) for entry in element.attrib.pop("style").split(";") if ":" in entry]
        themed = [_themed(key.strip(), value.strip(), text=text) for key, value in pairs]
        element.attrib["style"] = "; ".join(entry for entry in themed if entry)


def _themed(key: str, value: str, *, text: bool) -> str:
    """A declaration of style; what older programs do not understand stands after what they do."""
    if key == "font-family" and value.startswith("'DejaVu Sans', 'Bitstream"):  # no font was asked for
        return ""
    plain = f"{key}: {value}"
    if key not in ("fill", "stroke") or not re.fullmatch(r"#[0-9a-f]{6}", value):
        return plain
    if value == "#000000":
        return f"{key}: currentColor"
    red, green, blue = value[1:3], value[3:5], value[5:]
    grey = red == green == blue
    if text:  # coloured letters are nearer to the page's, to be read on either ground
        return plain if grey and red > "cc" else f"{plain}; {key}: color-mix(in srgb, {value} 55%, currentColor)"
    if value == "#ffffff":
        return f"{plain}; {key}: var(--paper, {value})"
    return f"{plain}; {key}: var(--grid, {value})" if grey and red >= "cc" else plain


def _keep_black(root: Element) -> None:
    """Black shapes stay black beside a picture, which has no other colours on a dark page: a legend may speak of it."""
    patterns = {element for defs in root.iter("defs") for element in defs.iter()}  # coloured by what uses them
    for element in root.iter():
        style = element.get("style", "")
        if element.tag in ("path", "use") and element not in patterns and "fill:" not in style:
            element.attrib["style"] = f"fill: #000000; {style}".rstrip("; ")


def _flatten(parent: Element) -> None:
    """Groups that say nothing give way to what they hold."""
    children: list[Element] = []
    for child in parent:
        _flatten(child)
        if (child.tag in ("g", "defs") and len(child) == 0) or child.get("style") == "fill: none":
            continue  # a background that nobody sees
        children += list(child) if child.tag == "g" and not child.attrib else [child]
    parent[:] = children


# Nothing is fetched, whatever may stand in a result: the browser itself sees to it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"

_MARKS = dict(zip(OUTCOMES, ("yes", "no", "open"), strict=True))
_SHAPES = {  # told apart by their shape, not by colour alone
    "yes": '<circle cx="8" cy="8" r="8"/><path d="M4.4 8.3 7 10.9l4.8-5.4"/>',
    "no": '<rect width="16" height="16" rx="3"/><path d="m4.8 4.8 6.4 6.4m0-6.4-6.4 6.4"/>',
    "open": '<path class="ring" d="M8 1a7 7 0 1 1 0 14A7 7 0 0 1 8 1z"/><path d="M4.8 8h6.4"/>',
}
_OWN = ("top", "content", "what-held", "viewer", *(f"mark-{mark}" for mark in _SHAPES))
_LEGIBLE = 0.55  # a figure shrinks to this share of its size, and then scrolls within its box
_WIDE = 450  # pt; a wider figure has a line of the page to itself


def render_html(sections: Sequence[Section], *, title: str, introduction: str, is_paper: bool = True) -> str:
    """The page: what held and what did not, then a section for each chapter; the claims are the paper's, or checks."""
    anchors = _unlike(chapter.name for chapter in sections)
    named = list(zip(anchors, sections, strict=True))
    shapes = "".join(
        f'<symbol id="mark-{mark}" viewBox="0 0 16 16">{shape}</symbol>' for mark, shape in _SHAPES.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
<script>
{_asset("page.js")}</script>
</head>
<body>
<svg class="shapes" aria-hidden="true">{shapes}</svg>
<a class="skip" href="#content">To the content</a>
<nav aria-label="{"Experiments" if is_paper else "Chapters"}"><ol>
<li><a href="#top">Summary</a></li>
{"".join(_entry(anchor, chapter) for anchor, chapter in named)}</ol></nav>
<main id="content">
<header id="top">
<h1>{escape(title)}</h1>
<p class="opening">{_prose(introduction)}</p>
{_summary(named, is_paper)}
</header>
{"".join(_section(anchor, chapter, is_paper) for anchor, chapter in named)}</main>
<dialog id="viewer" aria-label="Diagram"></dialog>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("neuboots.report").joinpath(name).read_text(encoding="utf-8")


def _unlike(names: Iterable[str]) -> list[str]:
    """An address for each name, none of them the page's own; the second of a name has a number."""
    taken: list[str] = []
    for name in names:
        first = slug(name) or "part"
        address, count = first, 1
        while address in taken or address in _OWN:
            count += 1
            address = f"{first}-{count}"
        taken.append(address)
    return taken


def _entry(anchor: str, chapter: Section) -> str:
    """A line of the navigation: the experiment, and how many of its claims hold."""
    counts = " ".join(
        f'<span class="{_MARKS[word]}">{_icon(word)}{count}<span class="unseen"> {word}</span></span>'
        for word, count in count_outcomes(chapter.verdicts).items()
        if count
    )
    return f'<li><a href="#{anchor}">{escape(chapter.name)} <span class="counts">{counts}</span></a></li>\n'


def _summary(named: Sequence[tuple[str, Section]], of_paper: bool) -> str:
    """All claims with their marks, each a way to its chapter, and how many there are of each kind."""
    counts = count_outcomes([verdict for _, chapter in named for verdict in chapter.verdicts])
    total = sum(counts.values())
    claims = f"{'claim' if of_paper else 'check'}{'' if total == 1 else 's'}{' of the paper' if of_paper else ''}"
    key = """In the tables <strong>bold</strong> is the best of its group, and a <em class="tint">tinted column</em>
has the paper’s own figures.<span class="alive"> Click the head of a column to sort by it, and a row with an underlined
name to see its diagram.</span>"""
    if not of_paper:
        key = '<span class="alive">Click the head of a column to sort by it.</span>'
    tiles = "".join(
        f'<li class="{_MARKS[word]}"><b>{count}</b> <span>{_icon(word)}{word}</span></li>'
        for word, count in counts.items()
    )
    bar = "".join(
        f'<i class="{_MARKS[word]}" style="flex-grow: {count}"></i>' for word, count in counts.items() if count
    )
    groups = "".join(
        f'<li><p><a href="#{anchor}">{escape(chapter.name)}</a> <span>{escape(chapter.source)}</span></p><ul>'
        + "".join(
            f'<li class="{_MARKS[verdict.word]}"><a href="#{anchor}">{_icon(verdict.word)}'
            f'<span class="unseen">{verdict.word}: </span><span>{_prose(verdict.claim)}</span></a></li>'
            for verdict in chapter.verdicts
        )
        + "</ul></li>"
        for anchor, chapter in named
        if chapter.verdicts
    )
    return f"""<section class="summary" aria-labelledby="what-held">
<h2 id="what-held">What held: {total} {claims}</h2>
<ul class="tiles">{tiles}</ul>
<div class="bar" aria-hidden="true">{bar}</div>
<ol class="claims">{groups}</ol>
<p class="key">{key}</p>
</section>"""


def _section(anchor: str, chapter: Section, of_paper: bool) -> str:
    own = [f"{anchor}--{name}" for name in _unlike(chapter.figures)]  # no anchor has two hyphens
    addresses = dict(zip(chapter.figures, own, strict=True))
    captions = _captions(chapter)
    drawn = {
        name: _figure(addresses[name], captions.get(name, _spoken(name)), svg, anchor=anchor, chapter=chapter)
        for name, svg in chapter.figures.items()
    }
    shown = "".join(figure for name, figure in drawn.items() if name not in captions)
    linked = [figure for name, figure in drawn.items() if name in captions]
    tables = "".join(_linked(table, addresses).html for table in chapter.tables)
    note = f'<p class="note">{_prose(chapter.note)}</p>\n' if chapter.note else ""
    diagrams = (
        f'<details class="diagrams"><summary>{_count(linked, "diagram")}, one for each underlined name in the table'
        f'{"s" if len(chapter.tables) > 1 else ""}</summary><div class="figures">{"".join(linked)}</div></details>\n'
    )
    scale = f'\n<span class="scale">{escape(chapter.scale)}</span>' if chapter.scale else ""
    lead = "<span>The paper’s claim</span> " if of_paper else ""
    return f"""<section class="chapter" id="{anchor}" aria-labelledby="{anchor}---name">
<header>
<p class="source">{escape(chapter.source)}</p>
<h2 id="{anchor}---name"><a href="#{anchor}">{escape(chapter.name)}</a>{scale}</h2>
</header>
<p class="claim">{lead}{_prose(chapter.claim)}</p>
<ul class="verdicts">{"".join(map(_verdict, chapter.verdicts))}</ul>
{note}{tables}
{f'<div class="figures">{shown}</div>' if shown else ""}
{diagrams if linked else ""}{_footer(chapter) if chapter.about else ""}</section>
"""


def _footer(chapter: Section) -> str:
    """How the chapter came about."""
    about = chapter.about
    versions = ", ".join(f"{name} {about[name]}" for name in ("neuboots", "torch", "python") if name in about)
    cores = f", {about['cores']} cores" if about.get("cores") else ""
    cost = f"{chapter.cost}; {chapter.seeds}. " if "core_seconds" in about else ""
    return f"""<footer>
<p class="command"><code>{escape(str(about["command"]))}</code></p>
<p class="cost">{escape(f"{cost}{versions}{cores}.")}</p>
{_settings(chapter.settings)}
</footer>
"""


def _verdict(verdict: Check) -> str:
    return (
        f'<li class="{_MARKS[verdict.word]}"><strong>{_icon(verdict.word)}{verdict.word}</strong> '
        f'<p>{_prose(verdict.claim)}</p><p class="found">{escape(verdict.found)}</p></li>'
    )


def _figure(address: str, caption: str, svg: str, *, anchor: str, chapter: Section) -> str:
    """A figure with its caption; a chapter that is not the first of its name has inner addresses of its own."""
    if anchor != chapter.name:
        svg = prefix_ids(svg, anchor)
    found = re.search(r'^<svg[^>]* width="([\d.]+)pt"', svg)
    width = float(found[1]) if found else 0.0
    svg = svg.replace("<svg", f'<svg style="min-width: {_LEGIBLE * width:.0f}pt"', 1)
    return (
        f'<figure class="drawing{" wide" if width > _WIDE else ""}" id="{address}"><div class="scroll">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _captions(chapter: Section) -> dict[str, str]:
    """For each figure that a line of a table leads to, what the line is of: "Reliability: B = 5, neuboots"."""
    captions: dict[str, str] = {}
    for table in chapter.tables:
        for line, link in zip(table.lines, table.links, strict=False):
            if link is None or link not in chapter.figures or link in captions:
                continue
            keys = zip(table.heads, line, strict=True)
            words = [cell.text if cell.value is None else f"{head} = {cell.text}" for head, cell in keys][: table.keys]
            captions[link] = f"{_spoken(link.split('-')[0])}: {', '.join(words)}" if words else _spoken(link)
    return captions


def _linked(table: Table, addresses: Mapping[str, str]) -> Table:
    """The table with the addresses of its figures; a figure that is not there has none."""
    return replace(table, links=tuple(addresses.get(link) if link else None for link in table.links))


def _settings(settings: Mapping[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd>" for name, value in settings.items())
    return f'<details class="settings"><summary>Settings</summary><dl>{rows}</dl></details>'


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _icon(word: str) -> str:
    return f'<svg class="mark" aria-hidden="true"><use href="#mark-{_MARKS[word]}"/></svg>'


def _spoken(name: str) -> str:
    """A name as the start of a sentence.

    >>> _spoken("coverage-by-width")
    'Coverage by width'
    """
    words = re.sub(r"[-_]+", " ", name)
    return words[:1].upper() + words[1:]


def _prose(text: str) -> str:
    """Escaped, with Markdown's *stress* and `code`.

    >>> _prose("*a* < `b*c*d`, 2 * 3 * 4")
    '<em>a</em> &lt; <code>b*c*d</code>, 2 * 3 * 4'
    """
    parts = re.split(r"(`[^`]+`)", escape(text))
    return "".join(
        f"<code>{part[1:-1]}</code>" if part.startswith("`") and len(part) > 2 else _stressed(part) for part in parts
    )


def _stressed(text: str) -> str:
    return re.sub(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])", r"<em>\1</em>", text)


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
