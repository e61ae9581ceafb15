"""One self-contained HTML page of chapters."""

import html
from collections.abc import Sequence

from neuboots.report.chapters import Chapter


def page(chapters: Sequence[Chapter], *, title: str, opening: str) -> str:
    """The page; it needs no other file and no network."""
    sections = [
        f"<section><h2>{html.escape(chapter.name)}</h2><p>{html.escape(chapter.claim)}</p>"
        + "".join(table.html for table in chapter.tables)
        + "".join(chapter.figures.values())
        + "</section>"
        for chapter in chapters
    ]
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
    return f"{head}<h1>{html.escape(title)}</h1><p>{html.escape(opening)}</p>{''.join(sections)}"
