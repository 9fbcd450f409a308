"""Something small that saves again and again, to be killed in between."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from ds_hydra.checkpoint import folder as folders
from ds_hydra.checkpoint.format import COUNTERS, Manifest, SavedBucket, SavedParam
from ds_hydra.checkpoint.optimizer_state import collect_groups
from ds_hydra.checkpoint.shard_file import ShardReader, Source
from ds_hydra.checkpoint.write import Saving, Writer
from ds_hydra.ranks.channel import Channel


class Saver:
    """Saves one parameter, filled with the number of the save, under a few tags in turn."""

    def __init__(self, folder: Path, meeting: Channel, numel: int = 1 << 18, first: int = 1):
        self.folder, self.numel, self.first = folder, numel, first
        self.writer = Writer(meeting)
        bucket = SavedBucket("all", True, (SavedParam("w", (numel * meeting.num_ranks,)),))
        self.manifest = Manifest(
            tag="",
            save_id="",
            step=0,
            num_ranks=meeting.num_ranks,
            buckets=(bucket,),
            files=(),
            optimizer="SGD",
            counters=dict.fromkeys(COUNTERS, 0),
            unnamed=True,
        )
        found = folders.complete_manifests(folder)
        self.writer.last[os.path.realpath(folder)] = found[0].number if found else 0  # as after loading it
        self.groups = collect_groups(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))

    def save(self, step: int, tag: str) -> None:
        """Save `step` in every element."""
        value = Source.of(torch.full((self.numel,), float(step)))
        manifest = replace(self.manifest, tag=tag, step=step)
        self.writer.save(Saving(self.folder, manifest, {"all/master": value}, self.groups, (), keep_last=2))

    def run(self) -> NoReturn:
        """Until killed. Tags come again, so that saves over a tag are killed too."""
        for step in itertools.count(self.first):
            self.save(step, f"tag{step % 3}")
        raise AssertionError("killed before")

    @classmethod
    def killed(cls, folder: Path, first: int, seconds: float) -> None:
        """Save in a process that is killed `seconds` after a complete tag is there."""
        saver = cls(folder, Channel(None, 0, 1), first=first)  # before, for torch imports much with its first optimizer
        pid = os.fork()
        if pid == 0:
            saver.run()
        while not folders.complete_tags(folder):
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    @staticmethod
    def verify(folder: Path) -> int:
        """The newest step in a folder; every complete tag, and the one that latest names, must hold what it says."""
        folders.tidy(folder)
        found = folders.complete_tags(folder)
        named = folders.find_tag(folder) if (folder / folders.LATEST).exists() else None
        for tag in {*(tag for _, tag in found), *([named] if named else [])}:
            manifest = folders.open_manifest(folder, tag)
            for entry in manifest.files:
                reader = ShardReader(folder / tag / entry.name, entry, manifest.block_bytes, manifest.save_id)
                values = reader.read_all("all/master")
                reader.close()
                assert bool((values == manifest.step).all()), f"{tag} holds another step than {manifest.step}"
        return found[0][0]
