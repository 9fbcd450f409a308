"""The project's own words: a page that uses one says what it means, or links to where it is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
GLOSSARY = "docs/glossary.md"
TERMS = {
    "strategy": r"strateg(y|ies)", "scheme": r"schemes?", "masters": r"masters?|master shards?",
    "pull": r"pull(s|ed|ing)?", "push": r"push(es|ed|ing)?", "slice": r"slices?|spans?|in chunks", "phase": r"phases?",
    "maxlen": r"maxlen", "token-sharding": r"token sharding", "self-check": r"self-check",
    "computed-again": r"comput(e|es|ed) again|again \d+ ?%", "compose": r"compose[sd]?",
    "certified-gap": r"certified gap", "exposed": r"exposed",
    "elastic": r"elastic", "shares-of-a-micro-batch": r"shares of (forward|a micro-batch)",
}  # fmt: skip
"""The anchor of each word in the glossary, and the forms in which it stands on pages."""
NEVER = r"lnk|mutual slices?|twins?|crew|hollow|lone rank|arenas?|envelopes?|lanes?|rungs?|prospects?|stand-ins?"
"""Words of the code that no page for users needs; a reader of the measurements has links to the code beside them."""


def told(page: str) -> str:
    """A page's text without its code, files that it includes in it."""
    path = ROOT / page
    text = path.read_text("utf-8")
    for name in re.findall(r"^```\{include\} (\S+)$", text, re.M):
        text += path.parent.joinpath(name).read_text("utf-8")
    return re.sub(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if page != GLOSSARY])
def test_a_page_links_to_what_its_words_mean(page: str) -> None:
    text = told(page)
    links = set(re.findall(r"\[[^\]]+\]\((?:docs/|\.\./docs/|\.\./)?glossary\.md#([\w-]+)\)", text))
    prose = re.sub(r"\]\([^)]*\)", "]", text)
    used = {term for term, forms in TERMS.items() if re.search(rf"\b({forms})\b", prose, re.I)}
    assert used <= links, f"{page}: link the first of each of these words to {GLOSSARY}: {sorted(used - links)}"
    assert links <= set(TERMS), f"{page}: {GLOSSARY} has no such word: {sorted(links - set(TERMS))}"


def test_every_word_is_explained_once() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / GLOSSARY).read_text("utf-8"), re.M)
    assert [heading.lower().replace(" ", "-") for heading in headings] == list(TERMS)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/notes/measurements.md"])
def test_words_of_the_code_stay_in_the_code(page: str) -> None:
    assert not re.findall(rf"\b(?:{NEVER})\b", told(page), re.I)
