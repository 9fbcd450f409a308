"""Time and size of a save, beside DeepSpeed's ZeRO stage 1 of the same model in the same run, turn by turn.

    python -m tools.bench_checkpoint                # 171 million parameters on 2 ranks, 14 GB of memory
    python -m tools.bench_checkpoint --hidden 640   # 32 million
    python -m tools.bench_checkpoint --quick

Both save FP32 masters, both Adam moments and what training needs to go on. Ours is durable when it returns (every file
and folder synchronized); DeepSpeed's is not, so it is also timed with a sync of its files; the aim holds against both.
No durable save is faster than the disk: as many plain bytes, written and synchronized by as many processes, show it.
In the quick form, which has few bytes, these are the aim where they take longer than DeepSpeed's usual save.
Also timed: how long a save in the background holds up training, loading, and steps with heartbeats and checks against
without.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ds_hydra.commands.figures import figures_parser, finish, print_table
from tools import aims

NUM_RANKS = 2
COMPARE_EVERY = 50  # steps


def model(hidden: int) -> Any:
    """A Llama of four layers, random weights in FP32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=128, pad_token_id=None,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def optimizer_block() -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def ours(rank: int, hidden: int, **hydra: Any) -> Any:
    """Our engine after one step, so that there is optimizer state."""
    import torch

    import ds_hydra
    from ds_hydra.testing import rank_environment

    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.WARNING)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(3, 8000, (16,), generator=generator) for _ in range(64)]
    block = {"tokens_per_step": 64, "strategies": ["2*tp1", "pp2"], "choose": "cycle", "steps_file": None,
             "planner": {"ahead": 0}, "faults": {"frozen_seconds": 0}, **hydra}  # fmt: skip
    config = {"optimizer": optimizer_block(), "gradient_clipping": 1.0, "hydra": block}
    engine = ds_hydra.initialize(model=model(hidden), training_data=data, config=config)[0]
    engine.train_batch()
    return engine


def theirs(rank: int, hidden: int) -> Any:
    """DeepSpeed's engine, ZeRO stage 1, after one step."""
    import deepspeed
    import torch

    from ds_hydra.testing import rank_environment

    rank_environment(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer_block(),
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
    }
    engine = deepspeed.initialize(model=model(hidden), config=config)[0]
    tokens = torch.arange(3, 19)[None]
    loss = torch.nn.functional.cross_entropy(engine(input_ids=tokens, use_cache=False).logits[0, :-1], tokens[0, 1:])
    engine.backward(loss)
    engine.step()
    return engine


def _emptied(folder: str, rank: int) -> str:
    """The folder, which rank 0 removes, while all ranks wait."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()
    return folder


def _sync(folder: Path) -> None:
    """Wait until all that is in a folder is on the disk."""
    for path in folder.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _write_plainly(place: Path, size: int) -> None:
    """Write so many random bytes as our files are written, but for what is in them."""
    from ds_hydra.checkpoint.shard_file import begin_writing

    place.parent.mkdir(exist_ok=True)
    chunk = memoryview(os.urandom(2**23))
    with place.open("wb", buffering=0) as file:
        while size:
            count = file.write(chunk[:size])
            begin_writing(file.fileno(), file.tell() - count, count)
            size -= count
        os.fsync(file.fileno())


def compare(rank: int, folder: str, hidden: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way to save, turn by turn, and bytes."""
    import torch.distributed as dist

    from ds_hydra.checkpoint.format import rank_file

    mine, other = ours(rank, hidden, checkpoint={"dir": folder, "resume": False}), theirs(rank, hidden)
    in_turn = mine.saving.config
    background = replace(in_turn, asynchronous=True)
    figures: dict[str, list[float]] = {}

    def timed(name: str, action: Any) -> None:
        dist.barrier()
        began = time.perf_counter()
        action()
        dist.barrier()
        figures.setdefault(name, []).append(time.perf_counter() - began)

    def fresh(name: str) -> str:
        return _emptied(f"{folder}/{name}", rank)

    def save_and_sync(place: str) -> None:
        other.save_checkpoint(place, tag="t")
        dist.barrier()
        if rank == 0:
            _sync(Path(place))

    def save_in_background(place: str) -> None:
        mine.saving.config = background
        mine.save_checkpoint(place, "t")
        mine.saving.config = in_turn

    # The two that are compared take turns with nothing between them: what else fills and empties the system's memory
    # moves both by more than they differ.
    saves = {"ours": mine.save_checkpoint, "DeepSpeed": other.save_checkpoint}
    for index in range(rounds):
        for name in ("ours", "DeepSpeed") if index % 2 else ("DeepSpeed", "ours"):
            place = fresh(name)
            timed(name, lambda place=place, name=name: saves[name](place, tag="t"))
    for _ in range(max(3, rounds // 3)):
        place = fresh("ours")
        mine.save_checkpoint(place, "t")
        timed("ours, load", lambda place=place: mine.load_checkpoint(place))
        place = fresh("DeepSpeed")
        timed("DeepSpeed, synchronized", lambda place=place: save_and_sync(place))
        timed("DeepSpeed, load", lambda place=place: other.load_checkpoint(place, tag="t"))
        place = fresh("background")
        timed("ours, held up in the background", lambda place=place: save_in_background(place))
        mine.wait_for_checkpoint()
        size = Path(folder, "ours", "t", rank_file(rank)).stat().st_size
        place = fresh("plain")
        timed("as many plain bytes", lambda place=place, size=size: _write_plainly(Path(place, str(rank)), size))
    figures["bytes"] = [_size(f"{folder}/ours"), _size(f"{folder}/DeepSpeed")]
    figures["parameters"] = [float(sum(bucket.numel for bucket in mine.crew.masters.buckets))]
    mine.destroy()
    return figures


def step_times(rank: int, hidden: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of steps with heartbeats and checks and without, in pairs."""
    on = ours(rank, hidden, faults={"frozen_seconds": 9.0, "compare_every": COMPARE_EVERY})
    off = ours(rank, hidden)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(steps):
        for which in ((0, 1), (1, 0))[index % 2]:
            began = time.perf_counter()
            (on, off)[which].train_batch()
            times[which].append(time.perf_counter() - began)
    on.destroy()
    off.destroy()
    return times


def _size(folder: str) -> float:
    return float(sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()))


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 when the aims are met."""
    parser = figures_parser(__doc__)
    parser.add_argument("--hidden", type=int, help="hidden size of the model, a multiple of 8 (default: 1664)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ds_hydra.testing import run_ranks

    hidden, rounds, steps = (256, 6, 300) if options.quick else (1664, 16, 300)
    hidden = options.hidden or hidden
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        figures = run_ranks(compare, NUM_RANKS, folder, hidden, rounds, timeout=900)[0]
    on, off = run_ranks(step_times, NUM_RANKS, 64, steps, timeout=900)[0]
    bytes_ours, bytes_theirs = figures.pop("bytes")
    (parameters,) = figures.pop("parameters")
    rows = [(name, min(times), median(times), max(times)) for name, times in figures.items()]
    print_table(("seconds", "least", "median", "most"), rows)
    time_ratio = median(figures["ours"]) / median(figures["DeepSpeed, synchronized"])
    raw_ratio = median(figures["ours"]) / median(figures["DeepSpeed"])
    disk_ratio = median(figures["ours"]) / median(figures["as many plain bytes"])
    held_ratio = median(figures["ours, held up in the background"]) / median(figures["DeepSpeed"])
    size_ratio = bytes_ours / bytes_theirs
    # Pairs run next to each other, so their ratios do not suffer from what else the machine does. The few steps that
    # compare parameters are counted apart: a median over single steps would not see them.
    pairs = list(zip(on, off, strict=True))
    plain = median(a / b for i, (a, b) in enumerate(pairs) if (i + 2) % COMPARE_EVERY)  # one step came before
    extra = [a - b for i, (a, b) in enumerate(pairs) if (i + 2) % COMPARE_EVERY == 0]
    step_ratio = plain + median(extra) / median(off) / COMPARE_EVERY
    missed = []
    # Of few bytes the disk alone may take longer than who leaves them in memory.
    by_the_disk = options.quick and raw_ratio > disk_ratio
    if raw_ratio > aims.SAVE and (not by_the_disk or disk_ratio > aims.SAVE_BY_DISK):
        missed.append(f"a durable save takes {raw_ratio:.2f} of the time of DeepSpeed's, which is not durable")
    if held_ratio > aims.SAVE:
        missed.append(f"a save in the background holds training up for {held_ratio:.2f} of the time of DeepSpeed's")
    if time_ratio > aims.SAVE:
        missed.append(f"a save takes {time_ratio:.2f} of DeepSpeed's time, both durable")
    if size_ratio > aims.SAVE:
        missed.append(f"a checkpoint has {size_ratio:.2f} of DeepSpeed's bytes")
    if step_ratio > aims.WATCHED_STEP:
        missed.append(f"a step with heartbeats and checks takes {step_ratio:.3f} of one without")
    summary = (
        f"{parameters / 1e6:.1f} M parameters, {NUM_RANKS} ranks: a durable save takes {time_ratio:.2f} of the time of "
        f"a durable one of DeepSpeed's, {raw_ratio:.2f} of its usual one, which is not durable, and "
        f"{disk_ratio:.2f} of that of as many plain bytes; in the background it holds training up for {held_ratio:.2f} "
        f"of DeepSpeed's usual one; {bytes_ours / 1e6:.0f} against "
        f"{bytes_theirs / 1e6:.0f} MB ({size_ratio:.2f}); step with heartbeats and checks {step_ratio:.3f}"
    )
    record = {
        "hidden": hidden,
        "parameters": parameters,
        "seconds": figures,
        "bytes": [bytes_ours, bytes_theirs],
        "time_ratio": time_ratio,
        "time_ratio_unsynchronized": raw_ratio,
        "time_ratio_plain_bytes": disk_ratio,
        "held_up_ratio": held_ratio,
        "step_ratio": step_ratio,
    }
    return finish("bench_checkpoint", summary, record, missed, options.json)


if __name__ == "__main__":
    sys.exit(main())
