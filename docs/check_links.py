"""Every relative link in README.md and docs/**/*.md points at an existing file.

Addresses (`https:`, `mailto:`) and anchors are not followed: the check needs no network.
"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote

CODE = re.compile(r"^(`{3,}|~{3,}).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"""\]\(\s*<?([^)\s>]+)"""  # [text](target "title") and ![image](target)
    r"""|^\s*\[[^\]]+\]:\s*(\S+)"""  # [name]: target
    r"""|\b(?:href|src)="([^"]+)\"""",  # the little HTML that a README holds
    re.MULTILINE,
)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)


def relative_links(text: str) -> list[str]:
    """The targets of all links in `text` that name a file, without their anchors.

    >>> relative_links("[a](b.md#c) ![i](<d%20e.png>) [web](https://x.org) `[no](code)`")
    ['b.md', 'd e.png']
    """
    targets = ("".join(groups) for groups in LINK.findall(CODE.sub("", text)))
    return [unquote(t.split("#")[0]) for t in targets if not ELSEWHERE.match(t)]


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    broken = [
        f"{page.relative_to(root)}: the link '{link}' points at no file; correct or remove it"
        for page in pages
        for link in relative_links(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    print("\n".join(broken) or f"{len(pages)} pages, every relative link holds")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
