"""HTML report: matplotlib figures as theme-aware SVG, and sections as one self-contained page.

`to_svg` gives the same bytes for the same figure. Text stays text; black follows the text color of the page, white its
background (`--paper`) and light grey its rules (`--grid`). `render_html` fills the template `report.html.j2`; the page
loads nothing from elsewhere and works without JavaScript.
"""

import io
import json
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from neuboots.report.section import OUTCOMES, Section, count_outcomes
from neuboots.report.tables import PAPER_COLUMN

_SVG_NAMESPACE = "http://www.w3.org/2000/svg"
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff"
_DIRECTION = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[{_CONTROL}{_DIRECTION}]")
_ESCAPED = re.compile(r"\\([\\`*<>|\[\]$~#_])")  # by `escape_markdown`
_PRIVATE = 0x10FF00  # characters for private use that stand for escaped ones
_HREF = "{http://www.w3.org/1999/xlink}href"
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_COORDINATES = ("d", "points", "x", "y", "width", "height")
_MARKS = dict(zip(OUTCOMES, ("yes", "no", "open"), strict=True))  # CSS classes
_RESERVED_IDS = ("top", "content", "what-held", "viewer", *(f"mark-{mark}" for mark in _MARKS.values()))
_MIN_SCALE = 0.55  # a plot shrinks to this fraction of its size, then scrolls within its box
_WIDE = 450  # pt; a wider plot spans the page


def to_svg(figure: Figure, name: str) -> str:
    """Render a matplotlib figure as an SVG element.

    Args:
        figure: The figure; it is not changed.
        name: Prefix of all ids, so that several figures can be on one page.

    Returns:
        The `<svg>` element as text.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs that the font does not have are drawn by the browser
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(_escape_unsafe(buffer.getvalue()))
    size = {key: root.attrib[key] for key in ("width", "height", "viewBox")}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG_NAMESPACE}}}metadata", f"{{{_SVG_NAMESPACE}}}style"):  # of the whole page
                parent.remove(child)
    for element in root.iter():
        _simplify(element)
    if root.find(".//image") is not None:
        _keep_black(root)
    root.attrib = {
        "xmlns": _SVG_NAMESPACE,
        **size,
        "role": "img",
        "aria-label": describe_figure(figure) or name,
        "fill": "currentColor",  # matplotlib omits the fill of black shapes
        "font-family": "'DejaVu Sans', Verdana, sans-serif",
        "stroke-linejoin": "round",  # attributes: a <style> element would apply to the whole page
        "stroke-linecap": "butt",
    }
    return prefix_ids(ElementTree.tostring(root, encoding="unicode"), name)


def prefix_ids(svg: str, name: str) -> str:
    """Prefix every id of an SVG element, and every reference to one, with `name`.

    Args:
        svg: SVG text.
        name: The prefix.

    Returns:
        The new SVG text.
    """
    prefix = slug(name)
    pattern = re.compile(r'( id="|url\(#| href="#)')
    return re.sub(r"<[^>]*>", lambda tag: pattern.sub(rf"\g<1>{prefix}-", tag[0]), svg)


def _escape_unsafe(page: str) -> str:
    """Write characters that XML does not allow, and those that reverse the direction of text, as escapes."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), page)


def slug(name: str) -> str:
    """Return the name in characters that an HTML id may have.

    Args:
        name: Any text.

    Returns:
        The id.

    Example:
        >>> slug("reliability-uci/energy (B = 5)")
        'reliability-uci-energy-B-5'
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def describe_figure(figure: Figure) -> str:
    """Return titles, axis labels and legends of a figure as alternative text.

    Args:
        figure: The figure.

    Returns:
        The text.
    """
    panels = []
    for ax in figure.axes:
        axes = " against ".join(label for label in (ax.get_ylabel(), ax.get_xlabel()) if label)
        legend = ax.get_legend()
        names = ", ".join(text.get_text() for text in legend.get_texts()) if legend is not None else ""
        panels.append(": ".join(part for part in (ax.get_title(), axes, names) if part))
    parts = [figure.get_suptitle(), *dict.fromkeys(panels)]
    return " ".join(re.sub(r"[$\\{}]", "", "; ".join(part for part in parts if part)).split())


def _simplify(element: Element) -> None:
    """Remove namespaces and needless digits, and theme the colors of one element."""
    element.tag = element.tag.removeprefix(f"{{{_SVG_NAMESPACE}}}")
    is_text = element.tag in ("text", "tspan")
    if not is_text or (len(element) and not (element.text or "").strip()):
        element.text = None
    element.tail = None
    if _HREF in element.attrib:
        element.attrib["href"] = element.attrib.pop(_HREF)
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for key in _COORDINATES:
        if key in element.attrib:
            short = _LONG_NUMBER.sub(lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), element.attrib[key])
            element.attrib[key] = " ".join(short.split())
    if "style" in element.attrib:
        pairs = [entry.split(":", 1) for entry in element.attrib.pop("style").split(";") if ":" in entry]
        themed = [_theme(key.strip(), value.strip(), is_text=is_text) for key, value in pairs]
        element.attrib["style"] = "; ".join(entry for entry in themed if entry)


def _theme(key: str, value: str, *, is_text: bool) -> str:
    """Return a style declaration whose color follows the page, after a fallback for older programs."""
    if key == "font-family" and value.startswith("'DejaVu Sans', 'Bitstream"):  # matplotlib's default
        return ""
    fixed = f"{key}: {value}"
    if key not in ("fill", "stroke") or not re.fullmatch(r"#[0-9a-f]{6}", value):
        return fixed
    if value == "#000000":
        return f"{key}: currentColor"
    red, green, blue = value[1:3], value[3:5], value[5:]
    grey = red == green == blue
    if is_text:  # mixed with the text color, to be legible on either background
        return fixed if grey and red > "cc" else f"{fixed}; {key}: color-mix(in srgb, {value} 55%, currentColor)"
    if value == "#ffffff":
        return f"{fixed}; {key}: var(--paper, {value})"
    return f"{fixed}; {key}: var(--grid, {value})" if grey and red >= "cc" else fixed


def _keep_black(root: Element) -> None:
    """Keep black shapes black in a figure with an image, whose colors do not follow the page either."""
    patterns = {element for defs in root.iter("defs") for element in defs.iter()}  # colored by what uses them
    for element in root.iter():
        style = element.get("style", "")
        if element.tag in ("path", "use") and element not in patterns and "fill:" not in style:
            element.attrib["style"] = f"fill: #000000; {style}".rstrip("; ")


# -- page ----------------------------------------------------------------------------------------------


def _view_section(section: Section, anchor: str) -> dict[str, Any]:
    """Return what the template shows of a section; plots that a table row links to are shown on demand."""
    captions, about = _row_captions(section), section.about
    ids = {plot: f"{anchor}--{name}" for plot, name in zip(section.plots, _unique_ids(section.plots), strict=True)}
    plots = {}
    for name, svg in section.plots.items():
        if anchor != section.name:  # another section of this name is on the page
            svg = prefix_ids(svg, anchor)
        match = re.search(r'^<svg[^>]* width="([\d.]+)pt"', svg)
        width = float(match[1]) if match else 0.0
        svg = svg.replace("<svg", f'<svg style="min-width: {_MIN_SCALE * width:.0f}pt"', 1)
        caption = captions.get(name, _to_title(name))
        plots[name] = {"id": ids[name], "caption": caption, "svg": Markup(svg), "wide": width > _WIDE}
    versions = ", ".join(f"{name} {about[name]}" for name in ("neuboots", "torch", "python") if name in about)
    cores = f", {about['cores']} cores" if about.get("cores") else ""
    cost = f"{section.cost}; {section.seeds}. " if "core_seconds" in about else ""
    return {
        "section": section,
        "anchor": anchor,
        "ids": ids,
        "counts": count_outcomes(section.checks),
        "shown": [plot for name, plot in plots.items() if name not in captions],
        "linked": [plot for name, plot in plots.items() if name in captions],
        "provenance": f"{cost}{versions}{cores}.",
    }


def _row_captions(section: Section) -> dict[str, str]:
    """For each plot that a table row links to, the keys of the row: "Reliability: B = 5, neuboots"."""
    captions: dict[str, str] = {}
    for table in section.tables:
        for row, link in zip(table.rows, table.links, strict=False):
            if link is None or link not in section.plots or link in captions:
                continue
            keys = list(zip(table.columns, row, strict=True))[: table.num_keys]
            words = [cell.text if cell.value is None else f"{column} = {cell.text}" for column, cell in keys]
            captions[link] = f"{_to_title(link.split('-')[0])}: {', '.join(words)}" if words else _to_title(link)
    return captions


def render_html(sections: Sequence[Section], *, title: str, introduction: str, is_paper: bool = True) -> str:
    """Render sections as one self-contained HTML page.

    Args:
        sections: The sections in order; names may repeat.
        title: Title of the page.
        introduction: First paragraph; `*emphasis*` and `` `code` `` as in Markdown.
        is_paper: Whether the checks are claims of the paper, or checks of an evaluation.

    Returns:
        The page.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"prose": _format_prose, "data_value": _data_value, "setting": _format_setting}
    assets = files("neuboots.report")
    template = environment.from_string(assets.joinpath("report.html.j2").read_text(encoding="utf-8"))
    anchors = _unique_ids(section.name for section in sections)
    page = template.render(
        views=[_view_section(section, anchor) for section, anchor in zip(sections, anchors, strict=True)],
        counts=count_outcomes([check for section in sections for check in section.checks]),
        title=title,
        introduction=introduction,
        is_paper=is_paper,
        marks=_MARKS,
        paper_column=PAPER_COLUMN,
        css=Markup(assets.joinpath("report.css").read_text(encoding="utf-8")),
        js=Markup(assets.joinpath("report.js").read_text(encoding="utf-8")),
    )
    return _escape_unsafe(page)


def _unique_ids(names: Iterable[str]) -> list[str]:
    """Return an id for each name; a repeated one gets a number."""
    ids: list[str] = []
    for name in names:
        first = slug(name) or "part"
        new, count = first, 1
        while new in ids or new in _RESERVED_IDS:
            count += 1
            new = f"{first}-{count}"
        ids.append(new)
    return ids


def _data_value(value: float | None) -> Any:
    """Return the attribute that JavaScript sorts by; empty for a missing value."""
    if value is None or math.isnan(value):
        return ""
    number = repr(float(value)) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    return Markup(f' data-value="{number}"')


def _format_setting(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        return ", ".join(map(_format_setting, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _to_title(name: str) -> str:
    """Return a name such as "coverage-by-width" as a title: "Coverage by width"."""
    words = re.sub(r"[-_]+", " ", name)
    return words[:1].upper() + words[1:]


def _format_prose(text: str) -> Any:
    r"""Escape text and render Markdown's *emphasis*, `code` and escapes.

    >>> str(_format_prose(r"*a* < `b*c*d`, 2 * 3 * 4, \*\<b\>\*"))
    '<em>a</em> &lt; <code>b*c*d</code>, 2 * 3 * 4, *&lt;b&gt;*'
    """
    text = _ESCAPED.sub(lambda match: chr(_PRIVATE + ord(match[1])), text)
    parts = re.split(r"`([^`]+)`", str(escape(text)))  # every second one is code
    emphasis = re.compile(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])")
    parts[::2] = [emphasis.sub(r"<em>\1</em>", part) for part in parts[::2]]
    parts[1::2] = [f"<code>{part}</code>" for part in parts[1::2]]
    html = "".join(parts)
    return Markup(re.sub("[\U0010ff21-\U0010ff7e]", lambda match: escape(chr(ord(match[0]) - _PRIVATE)), html))
