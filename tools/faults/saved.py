"""Faults of what is saved: kills in the middle of saves, and damaged files and folders."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.faults.tally import Tally, refused

DAMAGES, FORGERIES = 400, 300
_NOBODY = 65534  # the user without rights, on any Linux


def check_kills(quick: bool) -> Tally:
    """SIGKILL at random instants of saves over the same tags: the previous or the new one always loads whole."""
    from tests.support.folder_trials import Saver

    tally, pause = Tally("kills while saving"), random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder, last = Path(scratch), 0
        for index in range(4 if quick else 100):
            Saver.killed(folder, first=last + 1, seconds=pause.uniform(0.0, 0.15))
            try:
                step = Saver.verify(folder)
                tally.count(step >= last, f"kill {index}: step {step} after step {last}")
                last = step
            except Exception as error:
                tally.count(False, f"kill {index}: {error}")
    return tally


def check_folders(quick: bool) -> Tally:
    """Saves that are interrupted at each call, two jobs in one folder in each order, what others have put there."""
    from tests.support import folder_trials as trials

    tally = Tally("folders")
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        place = Path(scratch) / "run"
        for which, how in itertools.product(trials.SAVES, trials.HOW):
            for nth in itertools.count(1, 20 if quick else 1):
                wrong = trials.interrupted(place, which, nth, how)
                if wrong is None:
                    break
                tally.count(not wrong, f"{which} save, {how} call {nth}: {wrong}")
        for frozen in range(1, trials.MOVES + 2):
            for order in trials.ORDERS[:: 400 if quick else 1]:
                wrong = trials.in_order(place, order, frozen)
                tally.count(not wrong, f"two jobs in the order {order}, one frozen from move {frozen}: {wrong}")
        for what, name in itertools.product(trials.PLANTS, trials.NAMES):
            wrong = trials.planted(place, what, name)
            tally.count(not wrong, f"{what} in the place of {name}: {wrong}")
    return tally


def check_damage(quick: bool) -> Tally:
    """Every kind of damage is refused with a message that names the file and the remedy."""
    import shutil

    from ds_hydra.testing import run_ranks
    from ds_hydra.zero_hetero.errors import CheckpointError
    from tests.gloo.test_checkpoint import DAMAGES, saved
    from tests.support.small_job import small_engine

    tally = Tally("damage")
    with tempfile.TemporaryDirectory() as scratch:
        template, folder = Path(scratch) / "template", Path(scratch) / "run"
        saved(template)

        def run(rank: int) -> list[tuple[str, str]]:
            engine, results = small_engine(rank), []
            for name, (damage, named) in DAMAGES.items():
                engine.crew.world.channel.texts("")
                if rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(template, folder)
                    damage(folder / "new")
                engine.crew.world.channel.texts("")
                try:
                    engine.load_checkpoint(folder)
                    results.append((name, "was loaded"))
                except CheckpointError as error:
                    text = str(error)
                    clear = named in text and "tag" in text
                    results.append((name, "" if clear else f"the message is not clear: {text}"))
            return results

        for name, wrong in run_ranks(run, 2, timeout=120)[0]:
            tally.count(not wrong, f"{name}: {wrong}")
        for name, wrong in _unwritable(Path(scratch)):
            tally.count(not wrong, f"{name}: {wrong}")
    return tally


def check_drawn_damages(quick: bool) -> Tally:
    """Damages of files, folders and names, drawn at random: refused on all ranks, or loaded as what was saved."""
    from tests.support.damages import damaged

    return _drawn("drawn damages", damaged, 10 if quick else DAMAGES, slice(0, None, 1 + quick))


def check_forgeries(quick: bool) -> Tally:
    """One value changed and all digests made to match: what all ranks refuse, or load as what it says, and go on."""
    from tests.support.damages import forged

    return _drawn("forgeries", forged, 10 if quick else FORGERIES, slice(quick, None, 1 + quick))


def _drawn(name: str, tried: Callable[..., dict[str, list[str]]], count: int, which: slice) -> Tally:
    """So many cases, over these of the jobs of several kinds, saved by as many ranks as load them and by more."""
    from tests.support.damages import JOBS, save

    tally, accepted = Tally(name), 0
    templates = [(kind, saved_by) for saved_by in (2, 3) for kind in JOBS][which]
    for index, (kind, saved_by) in enumerate(templates):
        seeds = range(index * count // len(templates), (index + 1) * count // len(templates))
        with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
            save(kind, Path(scratch) / "saved", saved_by)
            found = tried(kind, Path(scratch) / "saved", Path(scratch) / "run", seeds)
        for what, wrong in found.items():
            tally.count(not wrong, f"{kind}, saved by {saved_by} ranks, {what}: {'; '.join(wrong)}")
            accepted += "(loaded" in what
    tally.figures = {"loaded": accepted, "refused": tally.tried - accepted}
    return tally


def _unwritable(scratch: Path) -> list[tuple[str, str]]:
    """A full disk and a folder that is no folder: (case, what went wrong)."""
    from ds_hydra.checkpoint import shard_file
    from ds_hydra.ranks.channel import Channel
    from ds_hydra.zero_hetero.errors import CheckpointError
    from tests.support.folder_trials import Saver

    def full(handle: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device", "rank_00000.safetensors")

    folder = scratch / "space"
    saver = Saver(folder, Channel(None, 0, 1))
    saver.save(1, "old")
    results = []
    original, shard_file._write_all = shard_file._write_all, full
    results.append(("disk full", refused(lambda: saver.save(2, "new"), ("free space", "rank_00000"), CheckpointError)))
    shard_file._write_all = original
    (scratch / "file").write_text("")
    other = Saver(scratch / "file", Channel(None, 0, 1))
    results.append(("folder is a file", refused(lambda: other.save(1, "a"), (str(scratch / "file"),), CheckpointError)))
    scratch.chmod(0o755)
    folder.chmod(0o555)
    wrong = _without_root(lambda: refused(lambda: saver.save(3, "b"), ("permissions", str(folder)), CheckpointError))
    results.append(("read-only folder", wrong))
    folder.chmod(0o700)
    kept = "" if Saver.verify(folder) == 1 else "the checkpoint before is lost"
    return [*results, ("what was saved before", kept)]


def _without_root(action: Callable[[], str]) -> str:
    """What `action` returns in a child process that may not write wherever it likes."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "the child failed"
        try:
            if os.geteuid() == 0:
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            text = action()
        finally:
            os.write(sender, text.encode()[:4096])
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as told:
        text = told.read()
    os.waitpid(pid, 0)
    return text
