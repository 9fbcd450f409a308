"""How pages read: words a sentence, the longest sentence and paragraph, code blocks in 1,000 words.

python -m tools.count_pages [PAGE ...] prints a row a page and ends with 1 where a limit of a page is passed. Pages of
`docs/notes/` and those that code writes are counted and have no limits.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEAN_SENTENCE, LONGEST_SENTENCE, LONGEST_PARAGRAPH, CODE_BLOCKS = 15.0, 35, 90, 8.0  # words; blocks in 1,000 words
README_BYTES = 9 * 1024
HOW_TO = frozenset(
    f"docs/{name}.md"
    for name in (
        *("quickstart", "trl", "accelerate", "deepspeed-loop", "losses", "reinforcement-learning", "migrate", "lora"),
        *("memory", "faster", "reading", "checkpoints", "elastic", "cluster", "troubleshooting"),
    )
)
"""Pages that tell how to do something: code first."""
_NO_LIMITS = frozenset({"docs/settings.md"})
_FENCED = re.compile(r"^( *)(```+)(.*?)\n.*?^\1\2 *$", re.M | re.S)


@dataclass(frozen=True)
class Count:
    """What was counted on one page."""

    page: str
    words: int  # outside of code blocks
    sentences: tuple[str, ...]  # of paragraphs and items of lists
    cells: tuple[str, ...]  # sentences in tables
    paragraphs: tuple[int, ...]  # words
    code_blocks: int
    missed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def mean_sentence(self) -> float:
        return sum(map(words, self.sentences)) / max(1, len(self.sentences))

    @property
    def longest_sentence(self) -> str:
        return max((*self.sentences, *self.cells), key=words, default="")

    @property
    def blocks_in_1000(self) -> float:
        return 1000 * self.code_blocks / max(1, self.words)


def words(text: str) -> int:
    """Words of a text; what stands in backquotes is one."""
    return len(re.findall(r"\w[\w'’.,/+*-]*", text))


def sentences_of(text: str) -> list[str]:
    """Sentences: a point, colon, question mark or exclamation mark with a capital, digit or code behind it ends one."""
    parts = re.split(r"(?<=[.?!:])[)\"*]*\s+(?=[\"(*]*[A-Z0-9§])", text)
    return [part for part in parts if words(part) > 1]


def plain(text: str) -> str:
    """Markdown without marks: links by their words, code in backquotes as one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "§", text).replace("§", "Xcode")
    return re.sub(r"\*\*|\*(?=\w)|(?<=\w)\*", "", text)


def count(page: str, text: str) -> Count:
    """Counts of one page's Markdown."""
    blocks = sum(not found[3].startswith("{") for found in _FENCED.finditer(text))
    prose = re.sub(r"<!--.*?-->|<[^>\n]+>", "", _FENCED.sub("\n\n", text), flags=re.S)
    paragraphs, cells = [""], []
    for line in (*prose.splitlines(), ""):
        stripped = line.strip()
        if stripped.startswith("|"):
            cells += [plain(cell) for cell in re.split(r"(?<!\\)\|", stripped) if words(cell)]
        elif not stripped or stripped.startswith("#"):
            paragraphs.append("")
        elif re.match(r"([-*>:]|\d+\.) ", stripped):
            paragraphs.append(re.sub(r"^([-*>:]|\d+\.) ", "", stripped))
        else:
            paragraphs[-1] += " " + stripped
    paragraphs = [plain(one).strip() for one in paragraphs if words(one)]
    return Count(
        page,
        sum(map(words, (*paragraphs, *cells))),
        tuple(one for paragraph in paragraphs for one in sentences_of(paragraph)),
        tuple(one for cell in cells for one in sentences_of(cell)),
        tuple(map(words, paragraphs)),
        blocks,
    )


def missed(one: Count) -> list[str]:
    """The limits that a page passes, with what is too long."""
    found = []
    if one.mean_sentence > MEAN_SENTENCE:
        found.append(f"{one.page}: {one.mean_sentence:.1f} words a sentence, {MEAN_SENTENCE:g} at most")
    for sentence in (*one.sentences, *one.cells):
        if words(sentence) > LONGEST_SENTENCE:
            found.append(f"{one.page}: {words(sentence)} words in one sentence: {sentence[:90]}")
    if max(one.paragraphs, default=0) > LONGEST_PARAGRAPH:
        found.append(f"{one.page}: {max(one.paragraphs)} words in one paragraph, {LONGEST_PARAGRAPH} at most")
    if one.page in HOW_TO and one.blocks_in_1000 < CODE_BLOCKS:
        found.append(f"{one.page}: {one.blocks_in_1000:.1f} code blocks in 1,000 words, {CODE_BLOCKS:g} at least")
    if one.page == "README.md" and (size := len((ROOT / one.page).read_bytes())) > README_BYTES:
        found.append(f"{one.page}: {size} bytes, {README_BYTES} at most")
    return found


def pages() -> list[str]:
    """All pages: README and those of docs/, notes behind them."""
    return ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]


def limited(page: str) -> bool:
    """Whether the limits hold for a page; one that includes another file is counted where that stands."""
    text = (ROOT / page).read_text("utf-8")
    return page.count("/") < 2 and page not in _NO_LIMITS and "```{include}" not in text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="of these pages only, such as docs/trl.md")
    named = parser.parse_args().pages
    failed: list[str] = []
    print(f"{'page':36} words  a sentence  longest  longest paragraph  code blocks in 1,000 words")
    for page in named or pages():
        one = count(page, (ROOT / page).read_text("utf-8"))
        figures = f"{one.words:5}  {one.mean_sentence:10.1f}  {words(one.longest_sentence):7}"
        rest = f"{max(one.paragraphs, default=0):17}  {one.blocks_in_1000:5.1f}{'  how-to' * (page in HOW_TO)}"
        print(f"{page:36} {figures}  {rest}")
        failed += missed(one) if limited(page) else []
    print("\n".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
