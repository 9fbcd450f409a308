"""Pages read as the field writes: limits on sentences, paragraphs and code, page by page."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator

import pytest

from tools.count_pages import HOW_TO, LONGEST_SENTENCE, ROOT, count, limited, missed, pages, words

LATER: frozenset[str] = frozenset()
"""Pages that are not written by these rules yet."""


@pytest.mark.parametrize("page", [page for page in pages() if limited(page) and page not in LATER])
def test_a_page_is_within_the_limits(page: str) -> None:
    assert missed(count(page, (ROOT / page).read_text("utf-8"))) == []


def test_pages_that_tell_how_to_do_something_are_there() -> None:
    assert {page for page in HOW_TO if not (ROOT / page).is_file()} <= LATER
    assert {page for page in LATER if not (ROOT / page).is_file()} <= HOW_TO


def test_what_is_too_long_is_told_with_its_words() -> None:
    long = " ".join(["word"] * 36)
    one = count(
        "docs/trl.md", f"# A heading of some words\n\n{long}. Short one.\n\n| {long} | x |\n\n```\n{long}\n```\n"
    )
    told = missed(one)
    assert [words(sentence) for sentence in (*one.sentences, *one.cells)] == [36, 2, 36]
    assert len([line for line in told if "36 words in one sentence" in line]) == 2
    assert any("19.0 words a sentence" in line for line in told)
    assert one.code_blocks == 1
    assert not missed(count("docs/trl.md", f"One line. {'One line. ' * 40}\n\n```\ncode\n```\n"))[1:]


def test_a_how_to_page_without_code_and_a_long_paragraph_are_told() -> None:
    told = missed(count("docs/trl.md", "Some few words. " * 40))
    assert [line.split(": ")[1] for line in told] == [
        "120 words in one paragraph, 90 at most",
        "0.0 code blocks in 1,000 words, 8 at least",
    ]


def test_the_reference_has_all_that_pages_tell_users_to_call() -> None:
    reference = (ROOT / "docs" / "api.md").read_text("utf-8")
    texts = [(ROOT / page).read_text("utf-8") for page in pages() if page != "docs/api.md" and page.count("/") < 2]
    (methods,) = re.findall(r"HydraEngine\(\)\n   :members: (.+)", reference)
    called = set(re.findall(r"\b(?:engine|critic)\.(\w+)\(", "\n".join(texts))) - {"engine"}
    assert called - set(methods.split(", ")) <= {"state_dict"}, "HydraEngine in docs/api.md lacks methods"
    classes = set(re.findall(r"\bHydra\w*(?:Trainer|Accelerator)\b", "\n".join(texts)))
    assert not {name for name in classes if not re.search(rf"\.{name}\b", reference)}


PRIVATE = r"hand(s|ed)? in|masters?|pull(s|ed)?|push(es|ed)?|slices?|strateg(y|ies)|crew|computed? again"
"""What the glossary explains, or nobody: a reader of the reference has the field's words."""


def of_reference() -> Iterator[tuple[str, str]]:
    """(name, docstring) of all that docs/api.md names, without pointers to notes, and without formulas."""
    reference = (ROOT / "docs" / "api.md").read_text("utf-8")
    for found in re.finditer(r"^\.\. auto\w+:: ([\w.]+).*\n((?:   :.*\n)*)", reference, re.M):
        named = pydoc.locate(found[1])
        if inspect.ismodule(named):
            members = [getattr(named, name) for name in named.__all__]
        else:
            of_class = re.findall(r":members: (.+)", found[2])
            some = [inspect.getattr_static(named, name, None) for name in ", ".join(of_class).split(", ")]
            members = [named, *(one for one in some if one is not None)]
        for member in members:
            text = inspect.getdoc(member) or ""
            yield f"{found[1]}: {member!r}", re.sub(r"\s*\[Note: [^\]]*\]|^ {4}.*$", "", text, flags=re.M)


def test_the_reference_reads_as_pages_do() -> None:
    told = list(of_reference())
    assert len(told) > 50
    long = {
        name: [one for one in count("docs/api.md", text).sentences if words(one) > LONGEST_SENTENCE]
        for name, text in told
    }
    assert not {name: some for name, some in long.items() if some}
    assert not {name: found[0] for name, text in told if (found := re.search(rf"\b({PRIVATE})\b(?!`)", text))}
