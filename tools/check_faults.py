"""Set off faults and count what survived: every figure that "nothing lost" promises, n of N.

python -m tools.check_faults            # all of it: about 40 minutes on two cores
python -m tools.check_faults --quick    # a sample, within a minute
python -m tools.check_faults --only faults,kills
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, print_table

NUM_RANKS, STEPS = 4, 5
DEAD_LIMIT_S, FROZEN_LIMIT_S = 3.0, 12.0
_NOBODY = 65534  # the user without rights, on any Linux


@dataclass
class Tally:
    """One figure: how many of how many held, and what did not."""

    name: str
    passed: int = 0
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def count(self, good: bool, what: str) -> None:
        self.tried += 1
        self.passed += good
        if not good:
            self.failures.append(what)
            print(f"  {self.name}: {what}", flush=True)


def check_faults(quick: bool, sample: int | None = None) -> Tally:
    """Fault × phase × rank: every rank ends in time, nothing lives on, and the restarted job ends the same."""
    from tests.support.fault_job import FAULTS, PHASES, Fault, run_job

    tally = Tally("faults")
    cases = list(itertools.product(FAULTS, PHASES, (0, 1, NUM_RANKS - 1)))
    if sample is not None:
        cases = random.Random(0).sample(cases, min(sample, len(cases)))
    elif quick:
        cases = [("SIGKILL", "forward", 1), ("SIGSTOP", "push", 0), ("exception", "saving", 3)]
    with tempfile.TemporaryDirectory() as scratch:
        expected = run_job(Path(scratch), NUM_RANKS, STEPS).digests
    ends: dict[str, list[float]] = {"dead": [], "frozen": []}
    for kind, phase, rank in cases:
        what = f"{kind} in {phase} of rank {rank}"
        with tempfile.TemporaryDirectory() as scratch:
            fault = Fault(kind, phase, rank, step=2)
            first = run_job(Path(scratch), NUM_RANKS, STEPS, fault=fault)
            frozen = kind == "SIGSTOP"
            limit = FROZEN_LIMIT_S if frozen else DEAD_LIMIT_S
            if kind != "SIGTERM":
                ends["frozen" if frozen else "dead"].append(first.end_s)
            wrong = []
            if not first.fired:
                wrong.append("the fault was not reached")
            if kind != "SIGTERM" and first.end_s > limit:
                wrong.append(f"the last rank ended after {first.end_s:.1f} s")
            if first.orphans:
                wrong.append(f"{len(first.orphans)} processes lived on")
            if kind == "SIGTERM" and first.codes != [0] * NUM_RANKS:
                wrong.append(f"exit codes {first.codes}")
            if kind != "SIGTERM" and not (f"rank {rank}" in first.errors and "step 3" in first.errors):
                wrong.append("no error names the rank and the step")
            second = run_job(Path(scratch), NUM_RANKS, STEPS)
            if second.digests != expected:
                wrong.append(f"after a restart the parameters differ: exit codes {second.codes}")
            tally.count(not wrong, f"{what}: {'; '.join(wrong)}")
        if tally.tried % 21 == 0:
            print(f"  {tally.passed} of {tally.tried} held, of {len(cases)} to try", flush=True)
    tally.figures = {f"{name}_s_worst": max(times, default=0.0) for name, times in ends.items()}
    return tally


def check_resume(quick: bool) -> Tally:
    """Stop at every step of 12, twice, with another strategy on both sides: difference 0."""
    from tests.support.fault_job import run_job

    tally = Tally("exact resume")
    steps = 4 if quick else 12
    with tempfile.TemporaryDirectory() as scratch:
        expected = run_job(Path(scratch), NUM_RANKS, steps, limit_s=120).digests
    for stop in range(1, 2 if quick else steps - 1):
        with tempfile.TemporaryDirectory() as scratch:
            for end in (stop, stop + 1, steps):
                last = run_job(Path(scratch), NUM_RANKS, end, limit_s=120)
            tally.count(last.digests == expected, f"stopped after steps {stop} and {stop + 1}: parameters differ")
    return tally


def check_resharding(quick: bool) -> Tally:
    """8 -> 4 -> 6 -> 8 ranks: masters and moments after each load, and the order of the data."""
    from tests.gloo.test_resume import leg
    from tests.support.ranks import run_ranks
    from tests.support.small_job import same, small_engine

    tally = Tally("resharding")
    with tempfile.TemporaryDirectory() as scratch:
        saved: dict[str, Any] = {}
        order: list[tuple[int, ...]] = []
        worlds = (4, 2, 1) if quick else (8, 4, 6, 8)
        for num_ranks in worlds:
            loaded, after, drawn = run_ranks(leg, num_ranks, Path(scratch), 2, timeout=300)[0]
            tally.count(not saved or same(loaded, saved), f"loaded by {num_ranks} ranks: masters or moments differ")
            saved, order = after, order + drawn
        steps = 2 * len(worlds)
        straight = run_ranks(lambda rank: [small_engine(rank).sampler.batch(step) for step in range(steps)], 1)[0]
        tally.count(order == straight, "the order of the sequences differs")
    return tally


def check_kills(quick: bool) -> Tally:
    """SIGKILL at random instants of saves over the same tags: the previous or the new one always loads whole."""
    from ds_hydra.checkpoint.folder import complete_tags
    from ds_hydra.ranks.channel import Channel
    from tests.support.saver import Saver

    tally, pause = Tally("kills while saving"), random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder, last = Path(scratch), 0
        for index in range(10 if quick else 100):
            pid = os.fork()
            if pid == 0:
                Saver(folder, Channel(None, 0, 1), first=last + 1).run()
            while not complete_tags(folder):
                time.sleep(0.002)
            time.sleep(pause.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            try:
                step = Saver.verify(folder)
                tally.count(step >= last, f"kill {index}: step {step} after step {last}")
                last = step
            except Exception as error:
                tally.count(False, f"kill {index}: {error}")
    return tally


def check_damage(quick: bool) -> Tally:
    """Every kind of damage is refused with a message that names the file and the remedy."""
    import shutil

    from ds_hydra.zero_hetero.errors import CheckpointError
    from tests.gloo.test_checkpoint import DAMAGES, saved
    from tests.support.ranks import run_ranks
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


def _unwritable(scratch: Path) -> list[tuple[str, str]]:
    """A full disk and a folder that is no folder: (case, what went wrong)."""
    from ds_hydra.checkpoint import shard_file
    from ds_hydra.ranks.channel import Channel
    from ds_hydra.zero_hetero.errors import CheckpointError
    from tests.support.saver import Saver

    def full(handle: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device", "rank_00000.safetensors")

    folder = scratch / "space"
    saver = Saver(folder, Channel(None, 0, 1))
    saver.save(1, "old")
    results = []
    original, shard_file._write_all = shard_file._write_all, full
    results.append(("disk full", _refused(lambda: saver.save(2, "new"), ("free space", "rank_00000"), CheckpointError)))
    shard_file._write_all = original
    (scratch / "file").write_text("")
    other = Saver(scratch / "file", Channel(None, 0, 1))
    results.append(
        ("folder is a file", _refused(lambda: other.save(1, "a"), (str(scratch / "file"),), CheckpointError))
    )
    scratch.chmod(0o755)
    folder.chmod(0o555)
    wrong = _without_root(lambda: _refused(lambda: saver.save(3, "b"), ("permissions", str(folder)), CheckpointError))
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


def _refused(action: Callable[[], object], words: Sequence[str], kind: type[Exception]) -> str:
    try:
        action()
    except kind as error:
        return "" if all(word in str(error) for word in words) else f"the message is not clear: {error}"
    return "was not refused"


def check_security(quick: bool) -> Tally:
    """Payloads, tags that are paths, foreign clients on the heartbeat port: none accepted."""
    from ds_hydra.checkpoint.format import check_tag, parse_json
    from ds_hydra.checkpoint.universal import from_universal
    from ds_hydra.watchdog import Watchdog
    from ds_hydra.zero_hetero.errors import CheckpointError
    from tests.support.ranks import run_ranks

    tally = Tally("security")
    for tag in ("../x", "/etc/passwd", "a/b", "..", ".x", "a\0b", "x" * 200, "latest"):
        tally.count(not _refused(lambda tag=tag: check_tag(tag), (), CheckpointError), f"tag {tag!r}")
    for text in ("[" * 10**6, "[" * 70 + "]" * 70, '{"a":1,"a":2}', "NaN", "[1e999999]"):
        tally.count(not _refused(lambda text=text: parse_json(text, "x"), (), CheckpointError), f"JSON {text[:20]!r}")
    with tempfile.TemporaryDirectory() as scratch:
        import torch

        mark, place = Path(scratch) / "executed", Path(scratch) / "uni/zero/w"
        place.mkdir(parents=True)

        class Payload:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(mark),)

        torch.save({"param": Payload()}, place / "fp32.pt")
        refused = _refused(
            lambda: from_universal(place.parents[1], Path(scratch) / "out", "a", step=1), (), CheckpointError
        )
        tally.count(not refused and not mark.exists(), "a pickle's payload ran")

    def visited(rank: int) -> list[str]:
        from ds_hydra.ranks.channel import Channel

        ended: list[str] = []
        meeting = Channel(None, rank, 2)
        dog = Watchdog(meeting, lambda: (1, "forward"), heartbeat_s=0.2, frozen_s=5.0, end=ended.append)
        if rank == 1:
            assert dog.address is not None
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 16 + (2**31).to_bytes(4, "big")):
                with socket.create_connection(dog.address, timeout=5) as client:
                    client.sendall(data)
                    client.settimeout(0.5)
                    try:
                        while client.recv(4096):
                            pass
                    except OSError:
                        pass
        time.sleep(1.0)
        meeting.texts("")
        dog.close()
        return [*ended, *([] if dog.address and dog.address[0] == "127.0.0.1" else [f"listens on {dog.address}"])]

    for rank, ended in enumerate(run_ranks(visited, 2)):
        tally.count(not ended, f"foreign clients: rank {rank} {ended}")
    return tally


def check_false_alarms(quick: bool) -> Tally:
    """Ranks slowed five times, by pulses of SIGSTOP in turn: none counts as dead or frozen, and training ends."""
    from tests.support.fault_job import run_job

    tally = Tally("false alarms")
    seconds = 8.0 if quick else 180.0
    stop = threading.Event()

    def slow(pids: Sequence[int]) -> None:
        def pulse() -> None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not stop.is_set():
                for on, pause in ((signal.SIGSTOP, 0.8), (signal.SIGCONT, 0.2)):
                    for pid in pids:
                        try:
                            os.kill(pid, on)
                        except ProcessLookupError:
                            stop.set()
                    time.sleep(pause)

        threading.Thread(target=pulse, daemon=True).start()

    with tempfile.TemporaryDirectory() as scratch:
        steps = 40 if quick else 600
        outcome = run_job(Path(scratch), NUM_RANKS, steps, every=50, during=slow, limit_s=seconds * 4 + 120)
        stop.set()
    alarms = outcome.errors.count("is frozen") + outcome.errors.count(" died")
    tally.figures = {"alarms": alarms, "seconds": outcome.end_s}
    tally.count(alarms == 0 and outcome.codes == [0] * NUM_RANKS, f"{alarms} alarms, exit codes {outcome.codes}")
    return tally


def check_soak(quick: bool) -> Tally:
    """Many steps, another strategy in each, saved in the background: memory, descriptors and threads stay flat."""
    from tests.support.ranks import run_ranks
    from tests.support.small_job import small_engine

    tally = Tally("soak")
    steps = 60 if quick else 2000

    def run(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = scratch if rank == 0 else ""
            from ds_hydra.ranks.channel import Channel

            folder = Channel(None, rank, NUM_RANKS).tell(folder)
            block = {"dir": folder, "every": 10, "keep_last": 2, "asynchronous": True}
            engine = small_engine(rank, checkpoint=block, faults={"heartbeat_seconds": 1.0})
            while engine.global_steps < steps // 2:
                engine.train_batch()
            before = _resources()
            while engine.global_steps < steps:
                engine.train_batch()
            engine.wait_for_checkpoint()
            after = _resources()
            engine.destroy()
        return before, after

    for rank, (before, after) in enumerate(run_ranks(run, NUM_RANKS, timeout=3600)):
        tally.figures[f"rank{rank}"] = {"before": before, "after": after}
        for key, room in (("descriptors", 0), ("threads", 1), ("memory_mb", max(10, before["memory_mb"] // 20))):
            grown = after[key] - before[key]
            tally.count(grown <= room, f"rank {rank}: {key} grew from {before[key]} to {after[key]}")
    return tally


def _resources() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


CHECKS: dict[str, Callable[[bool], Tally]] = {
    "security": check_security,
    "damage": check_damage,
    "kills": check_kills,
    "resume": check_resume,
    "resharding": check_resharding,
    "faults": check_faults,
    "alarms": check_false_alarms,
    "soak": check_soak,
}
_QUICK = ("security", "damage", "kills", "faults")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when everything held."""
    parser = figures_parser(__doc__)
    parser.add_argument("--cases", type=int, metavar="N", help="try a sample of N of the faults, not all")
    parser.add_argument("--only", help=f"some of: {', '.join(CHECKS)}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = options.only.split(",") if options.only else list(_QUICK if options.quick else CHECKS)
    tallies, times = [], []
    for name in names:
        began = time.perf_counter()
        try:
            check = CHECKS[name]
            tally = check_faults(options.quick, options.cases) if check is check_faults else check(options.quick)
        except Exception as error:
            tally = Tally(name)
            tally.count(False, f"{type(error).__name__}: {error}")
        times.append(time.perf_counter() - began)
        tallies.append(tally)
        print(f"{tally.name}: {tally.passed} of {tally.tried} in {times[-1]:.0f} s {tally.figures or ''}", flush=True)
    print_table(
        ("check", "held", "of", "seconds"),
        [(t.name, t.passed, t.tried, float(s)) for t, s in zip(tallies, times, strict=True)],
    )
    missed = [f"{tally.name}: {failure}" for tally in tallies for failure in tally.failures]
    passed, tried = sum(t.passed for t in tallies), sum(t.tried for t in tallies)
    figures = {t.name: {"held": t.passed, "of": t.tried, **t.figures} for t in tallies}
    return finish("check_faults", f"{passed} of {tried}", figures, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
