"""The example: its corpus and cache, its config, and the script itself under the launcher and on plain DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import hjson
import numpy as np
import pytest

from ds_hydra.config.hydra_block import check_num_ranks, parse_config
from ds_hydra.costs.shape_costs import used_schemes
from ds_hydra.host.environment import launched_node_size, launched_number
from ds_hydra.report.record import is_heterogeneous
from ds_hydra.testing import free_port, rank_environment, run_ranks

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


corpus = load_module("corpus")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of text files of very different lengths, one of them empty."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]
    rng = np.random.default_rng(0)
    for index, length in enumerate([0, 3, 10, 10, 40, 40, 80, 200, 800]):
        (folder / f"{index}.txt").write_text(" ".join(rng.choice(words, length)))
    return folder


def test_corpus_is_cached_and_independent_of_who_prepares(texts: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = corpus.load_corpus(str(texts), cache=cache)
    assert len(first) == 9
    assert first.lengths.tolist() == [len(first[i]) for i in range(9)]
    assert first.lengths[0] == 1, "an empty file is its end-of-text token"
    made = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    again = corpus.load_corpus(str(texts / "*.txt"), cache=cache, prepare=False)
    assert again.manifest == first.manifest
    assert all((again[i] == first[i]).all() for i in range(9))
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == made
    assert not [name for name in made if name.startswith(".")], "unfinished files left behind"


def test_corpus_decodes_to_the_file(texts: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    data = corpus.load_corpus(str(texts), cache=tmp_path)
    tokenizer = Tokenizer.from_file(str(next(tmp_path.glob("bpe-*.json"))))
    assert tokenizer.decode(data[8].tolist()) == (texts / "8.txt").read_text()
    own = corpus.load_corpus(str(texts), cache=tmp_path / "own", tokenizer_file=next(tmp_path.glob("bpe-*.json")))
    assert (own[8] == data[8]).all()


def test_other_content_is_another_corpus_but_a_sample_shares_the_tokenizer(texts: Path, tmp_path: Path) -> None:
    whole = corpus.load_corpus(str(texts), cache=tmp_path)
    sample = corpus.load_corpus(str(texts), cache=tmp_path, max_files=4, seed=1)
    assert (len(sample), len(list(tmp_path.glob("bpe-*")))) == (4, 1)
    (texts / "8.txt").write_text("something else")
    assert len({whole.manifest, sample.manifest, corpus.load_corpus(str(texts), cache=tmp_path).manifest}) == 3


def test_who_does_not_prepare_waits(texts: Path, tmp_path: Path) -> None:
    waited: list[Any] = []

    def wait() -> None:
        waited.append(corpus.load_corpus(str(texts), cache=tmp_path, prepare=False))

    waiter = threading.Thread(target=wait)
    waiter.start()
    prepared = corpus.load_corpus(str(texts), cache=tmp_path)
    waiter.join(timeout=30)
    assert waited[0].manifest == prepared.manifest


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\*.*names no file"):
        corpus.load_corpus(str(tmp_path / "nothing*"), cache=tmp_path)


def test_default_data_are_there() -> None:
    files = corpus._find_files(None)
    assert len(files) > 1000
    assert {path.suffix for path in files} == {".py"}
    assert any("torch" in path.parts for path in files)


def test_example_config_shows_what_it_should() -> None:
    parsed = parse_config(hjson.loads((EXAMPLES / "ds_hydra.json").read_text()))
    assert parsed is not None
    assert parsed.notes == (), "the example has a setting without effect"
    check_num_ranks(parsed.hydra, 8)
    strategies = parsed.hydra.strategies
    assert len(strategies) >= 3
    assert sum(map(is_heterogeneous, strategies)) >= 2
    schemes = used_schemes(parsed.hydra.shapes)
    assert min(max(s.tp for s in schemes), max(s.pp for s in schemes), max(s.sp for s in schemes)) > 1


def test_the_pages_name_files_that_exist() -> None:
    """Every path in backquotes on a page, the pages that it links to, and the data that README's command names."""
    missing = []
    pages = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
    for page in (*pages, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))):
        named = re.findall(r"`(?!hydra/|out/)([a-z_0-9]+/[\w/.-]*)`", (ROOT / page).read_text())  # not of logs and jobs
        missing += [f"{page}: {path}" for path in named if not (ROOT / path).exists()]
        linked = re.findall(r"\]\(([\w./-]+\.md)", (ROOT / page).read_text())
        missing += [f"{page}: {path}" for path in linked if not (ROOT / page).parent.joinpath(path).exists()]
    assert not missing
    (pattern,) = re.findall(r"--data '([^']+)'", (ROOT / "README.md").read_text())
    assert len(list(ROOT.glob(pattern))) > 10


def test_slurm_tells_a_task_how_many_its_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^ +(export RANK=.*)$", (EXAMPLES / "cluster" / "train.slurm").read_text(), re.M)
    slurm = {"SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}
    told = subprocess.run(
        ["bash", "-c", f"{line}; env"], env={**os.environ, **slurm}, stdout=subprocess.PIPE, text=True
    )
    for name, value in (line.split("=", 1) for line in told.stdout.splitlines() if "=" in line):
        if name.startswith("LOCAL_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.setenv(name, value)
    assert (launched_number("RANK"), launched_number("WORLD_SIZE"), launched_node_size()) == (11, 16, 8)


def environment(cache: Path) -> dict[str, str]:
    """For a script started from here: on CPU, one thread a rank, with a cache of its own."""
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **settings, "PATH": path}


def config_file(folder: Path, **settings: Any) -> Path:
    optimizer = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
    file = folder / "config.json"
    file.write_text(json.dumps({"optimizer": optimizer, **settings}))
    return file


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def job_of(folder: Path) -> dict[str, Any]:
    """A block of two ranks, whose files are in the folder."""
    return {
        "tokens_per_step": 300,
        "context_length": 128,
        "too_long": "truncate",
        "strategies": ["tp2", "pp2", "sp2", "2*tp1"],
        "choose": "cycle",
        "steps_file": str(folder / "steps.jsonl"),
        "plans_file": str(folder / "plans.jsonl"),
    }


def check_files(folder: Path, steps: int) -> None:
    """What a run of so many steps has written."""
    records = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [record["strategy"] for record in records] == (["tp2", "pp2", "sp2", "2*tp1"] * 2)[:steps]
    assert records[-1]["loss"] < records[0]["loss"]
    assert len((folder / "plans.jsonl").read_text().splitlines()) == steps


def test_script_on_two_ranks(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, which have all that it imports."""
    config = config_file(tmp_path, hydra=job_of(tmp_path) | {"self_check": "off"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = ["--deepspeed_config", str(config), "--data", str(texts), "--steps", "4"]
    before = shared_memory()

    def script(rank: int) -> None:
        rank_environment(rank)
        sys.argv = ["train.py", *options]
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")

    run_ranks(script, 2, timeout=120)
    check_files(tmp_path, 4)
    assert shared_memory() <= before, "shared memory was left behind"


@pytest.mark.long  # processes that begin as programs import for seconds what they need
def test_script_under_the_launcher(texts: Path, tmp_path: Path) -> None:
    before = shared_memory()
    command = [
        *("deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(EXAMPLES / "train.py")),
        *(
            "--deepspeed_config",
            str(config_file(tmp_path, hydra=job_of(tmp_path))),
            "--data",
            str(texts),
            "--steps",
            "8",
        ),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(tmp_path / "cache"), cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"\] step \d+(?:/\d+)? \| loss", done.stdout)) == 8, done.stdout
    assert "8 steps" in done.stdout
    assert "4 strategies" in done.stdout
    assert "manifest" in done.stdout
    check_files(tmp_path, 8)
    assert shared_memory() <= before, "shared memory was left behind"


@pytest.mark.long
def test_script_on_plain_deepspeed(texts: Path, tmp_path: Path) -> None:
    plain = config_file(tmp_path, train_micro_batch_size_per_gpu=2)
    # Without this switch DeepSpeed compiles an operator that training does not use, for half a minute.
    run = (
        "import runpy, sys; from importlib import import_module; "
        "import_module('deepspeed.comm.torch').build_shm_op = lambda: None; "
        f"sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path({str(EXAMPLES / 'train.py')!r}, run_name='__main__')"
    )
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
    }
    command = [*(sys.executable, "-c", run, "--deepspeed_config", str(plain)), "--data", str(texts), "--steps", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(tmp_path / "cache") | ranks, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout, done.stdout
