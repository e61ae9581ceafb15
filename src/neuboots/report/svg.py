"""Figures as SVG: small, the same bytes for the same figure, and at home on light and on dark pages.

Text stays text. What is black takes the colour of the page's text, white that of its background (--paper) and pale grey
that of its rules (--grid), if the page names them; in a file of its own the figure looks as it was drawn.
"""

import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib import rc_context
from matplotlib.figure import Figure

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
        "aria-label": describe(figure) or name,
        "fill": "currentColor",  # matplotlib leaves out the fill of what is black
        "font-family": _FONTS,
        "stroke-linejoin": "round",  # as attributes: a style element would speak to the whole page
        "stroke-linecap": "butt",
    }
    return owned(ElementTree.tostring(root, encoding="unicode"), name)


def owned(svg: str, name: str) -> str:
    """The SVG with `name` before each of its inner addresses."""
    prefix = slug(name)
    return re.sub(r'( id="|url\(#| href="#)', rf"\g<1>{prefix}-", svg)


def slug(name: str) -> str:
    """A name as part of an address.

    >>> slug("reliability-uci/energy (B = 5)")
    'reliability-uci-energy-B-5'
    """
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def describe(figure: Figure) -> str:
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
