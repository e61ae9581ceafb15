"""Names as a stranger could write them into a file, and what the library makes of them."""

from neuboots._validation import escape_text

MARKUP = (
    *("$\\foo{$", "$x^", "{", "{0}", "%s", "\\", "<script>alert(1)</script>", "</script>", "]]>", '" onload="x', "'"),
    *("a|b", "*x*", "`x`", "_x_", "&lt;", "[red]x[/red]", "[link=http://a]x[/link]", ":smile:", "=1+1", "@a", "-o"),
    *("../../x", "url(#a)", ' id="a', "row", "prediction", "🐈", "é"),
)
CONTROLS = (
    *("\x1b[31m", "\x1b]0;x\x07", "\x9b31m", "\x7f", "a\rb", "a\nb", "a\tb", "\x00", "\u202eabc", "\u2066", "\u200b"),
    *("\u2028", "\ufeff", "\uffff"),
)
LONG = "N" * 100_000
NAMES = (*MARKUP, *CONTROLS, LONG)


def is_escaped(text: str) -> bool:
    """Whether a terminal shows all of a text as it is."""
    return all(line == escape_text(line) for line in text.split("\n"))
