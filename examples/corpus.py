"""Text files in, a cached dataset of token sequences out: one file is one sequence.

By default the files are the Python sources that every machine has: standard library and the installed torch
package. Tokens come from a byte-level BPE that is trained once on a sample of them, or from a tokenizer.json.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import logging
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_hydra import ConfigError

logger = logging.getLogger("ds_hydra.examples")

VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
TRAINING_FILES = 200  # sample that the tokenizer is trained on
WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class TokenFiles:
    """A map-style dataset: item i is the token ids of file i, memory-mapped."""

    tokens: npt.NDArray[np.int32]  # all files, one after the other
    starts: npt.NDArray[np.int64]  # (num_files + 1,)
    manifest: str  # hash of the files' contents, their order and the tokenizer

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.tokens[self.starts[index] : self.starts[index + 1]].astype(np.int64)


def load_corpus(
    data: str | None,
    *,
    tokenizer_file: Path | None = None,
    max_files: int = 0,
    seed: int = 0,
    prepare: bool = True,
    cache: Path | None = None,
) -> TokenFiles:
    """Tokenize the files that `data` (a folder, a glob, None for the default) names, or read the cached result.

    `max_files` limits them to a seeded sample (0: all), which the tokenizer does not depend on. A process with
    `prepare` false waits for the cache that another process on the machine writes. Raises ConfigError when
    there are no files.
    """
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ds_hydra"
    files = _find_files(data)
    if tokenizer_file is None:
        sample = _read(random.Random(0).sample(files, min(TRAINING_FILES, len(files))))
        tokenizer_file = cache / f"bpe-{VOCAB_SIZE}-{_hash(sample)}.json"
        _once(tokenizer_file, lambda part: _train_tokenizer(sample, part), prepare)
    if max_files and len(files) > max_files:
        files = sorted(random.Random(seed).sample(files, max_files))
    contents = _read(files)
    manifest = _hash([tokenizer_file.read_bytes(), *contents])
    starts_file, tokens_file = (cache / f"{kind}-{manifest}.npy" for kind in ("starts", "tokens"))
    ids: list[npt.NDArray[np.int32]] = []
    if prepare and not (starts_file.exists() and tokens_file.exists()):
        ids = _tokenize(contents, tokenizer_file)
    _once(tokens_file, lambda part: np.save(part, np.concatenate(ids)), prepare)
    _once(starts_file, lambda part: np.save(part, np.cumsum([0, *map(len, ids)])), prepare)
    return TokenFiles(np.load(tokens_file, mmap_mode="r"), np.load(starts_file), manifest)


def _find_files(data: str | None) -> list[Path]:
    if data is None:
        return sorted(_default_files())
    folder = Path(data)
    found = folder.rglob("*") if folder.is_dir() else map(Path, glob.glob(data, recursive=True))
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise ConfigError(f"--data {data!r} names no file: give a folder with text files, or a quoted glob")
    return files


def _default_files() -> Iterator[Path]:
    """Python sources of the standard library and of torch, which is found without importing it."""
    library = Path(sysconfig.get_path("stdlib"))
    yield from (path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield from Path(torch.origin).parent.rglob("*.py")


def _read(files: Sequence[Path]) -> list[bytes]:
    return [path.read_bytes() for path in files]


def _hash(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


def _once(path: Path, write: Callable[[Path], object], prepare: bool) -> None:
    """Have `path` written, whole or not at all, by the process that prepares; the others wait for it."""
    if path.exists():
        return
    if prepare:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            write(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not written within {WAIT_SECONDS:.0f} s: did local rank 0 fail?")
        time.sleep(0.1)


def _train_tokenizer(sample: Sequence[bytes], path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    logger.info("training a byte-level BPE of %d tokens on %d files", VOCAB_SIZE, len(sample))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in sample), trainer)
    tokenizer.save(str(path))


def _tokenize(contents: Sequence[bytes], tokenizer_file: Path) -> list[npt.NDArray[np.int32]]:
    """Token ids of every file, each closed by the end-of-text token where the tokenizer has one."""
    from tokenizers import Tokenizer

    logger.info("tokenizing %d files, %.1f MB", len(contents), sum(map(len, contents)) / 1e6)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(END_OF_TEXT)
    closing = [] if end is None else [end]
    texts = [text.decode(errors="replace") for text in contents]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array([*encoding.ids, *closing], dtype=np.int32) for encoding in encoded]
