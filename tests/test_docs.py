"""The documentation: it builds without a warning, and its page of settings is what the code reads."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from sphinx.cmd.build import main as sphinx

from ds_hydra.commands.__main__ import main
from ds_hydra.config.describe import page, schema, settings
from ds_hydra.config.hydra_block import HydraConfig
from ds_hydra.config.read import read_config

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.drawn
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    assert sphinx(["-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path)]) == 0
    assert "post-training" in (tmp_path / "losses.html").read_text().lower()
    listed = (tmp_path / "llms.txt").read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert {line.split("](_sources/")[1].split(".md")[0] for line in listed.splitlines()[4:]} == pages
    assert all((tmp_path / "_sources" / f"{page}.md.txt").is_file() for page in pages)
    assert "HydraEngine" in (tmp_path / "api.html").read_text()
    drawn = {path.name for path in (ROOT / "docs" / "pictures").glob("*.png")}
    assert {path.name for path in (tmp_path / "_images").glob("*.png")} == drawn, "each picture is on a page"
    assert len(drawn) == len(list((ROOT / "docs").glob("how*.md"))) + 1


def test_a_newcomer_reads_no_more_than_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 9 * 1024


def test_the_page_of_settings_is_what_the_code_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "make docs writes it"
    assert main(["settings", "--schema"]) == 0
    assert capsys.readouterr().out == schema()


def test_every_setting_has_a_sentence_and_a_place_in_the_schema() -> None:
    def places(block: type, place: str) -> list[str]:
        found = []
        for one in fields(block):  # type: ignore[arg-type]
            kind = get_type_hints(block)[one.name]
            inner = [each for each in (get_args(kind) or (kind,)) if is_dataclass(each) and isinstance(each, type)]
            each = f"{place}.{one.name}" + ("[]" if inner and Ellipsis in get_args(kind) else "")
            found += places(inner[0], each) if inner else [each]
        return found

    described = list(settings())
    assert sorted(one.place for one in described) == sorted(places(HydraConfig, "hydra"))
    assert [one.place for one in described if not one.sentence] == []
    root: Any = json.loads(schema())
    for one in described:
        node = root
        for name in one.place.split("."):
            node = node["properties"][name.removesuffix("[]")]
            node = node["items"] if name.endswith("[]") else node
        assert node["description"] == one.sentence
    block = root["properties"]["hydra"]
    assert "required" not in block
    assert block["properties"]["cluster"]["items"]["required"] == ["ranks"]
    assert block["properties"]["too_long"]["enum"] == ["error", "truncate", "skip"]
    assert block["properties"]["planner"]["properties"]["ahead"]["default"] == 2
    example = read_config(config=str(ROOT / "examples" / "ds_hydra.json"))["hydra"]
    assert set(example) <= set(block["properties"])
