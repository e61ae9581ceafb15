"""Figures as SVG: text stays text, the same figure gives the same bytes, and what is black takes the page's colour."""

import io
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

_STYLE: Any = {
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element. `name` makes its inner addresses its own, so that several stand on one page."""
    buffer = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.patch.set_alpha(0.0)
        for ax in figure.axes:
            ax.patch.set_alpha(0.0)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
