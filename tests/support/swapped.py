"""Losses of the scripts of examples/swap after the swap on 2 ranks, and those of one process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ds_hydra.testing import rank_environment, run_ranks

SWAP = Path(__file__).resolve().parents[2] / "examples" / "swap"


def script(name: str, *, swapped: bool = True) -> ModuleType:
    """A script of examples/swap, after its diff or before it."""
    if str(SWAP) not in sys.path:
        sys.path.insert(0, str(SWAP))  # they import their task from there
    text = (SWAP / f"{name}.py").read_text()
    for before, after in _hunks((SWAP / f"{name}.diff").read_text()) if swapped else ():
        assert text.count(before) == 1, f"the diff of {name}.py does not apply: {before}"
        text = text.replace(before, after)
    module = ModuleType(name)
    exec(compile(text, str(SWAP / f"{name}.py"), "exec"), module.__dict__)
    return module


def _hunks(diff: str) -> Iterator[tuple[str, str]]:
    """What a diff takes out of a text, with the lines around it, and what stands there afterwards."""
    for hunk in diff.split("\n@@ ")[1:]:
        lines = hunk.splitlines()[1:]
        before, after = ("".join(line[1:] + "\n" for line in lines if line[:1] != other) for other in "+-")
        yield before, after


def one_process(model: Any, updates: Iterable[Sequence[Any]], schedule_steps: int = 0) -> list[float]:
    """The losses of DeepSpeed's own loop over a model in one process: the mean of the means of an update's batches.

    `schedule_steps` is how often a linear warm-up over the whole run steps in each update.
    """
    updates = list(updates)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    total = len(updates) * schedule_steps
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=total) if total else None
    losses = []
    for batches in updates:
        optimizer.zero_grad()
        found = [model(**batch).loss / len(batches) for batch in batches]
        torch.autograd.backward(found)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _ in range(schedule_steps):
            assert schedule is not None, "there is one where it steps"
            schedule.step()
        losses.append(sum(float(loss.detach()) for loss in found))
    return losses


def three_calls(steps: int) -> tuple[list[float], list[float], float]:
    """Losses of the swapped script on 2 ranks, the last of an evaluation, and of one process; and how far the weights
    in the file that it saves are from that process's, relative to the norm of all."""
    with tempfile.TemporaryDirectory() as folder:
        found, expected, model = _by_three_calls("three_calls", steps, f"{folder}/saved")
        saved = torch.load(f"{folder}/saved")
    model.eval()
    batches = [batch for rank in range(2) for batch in list(script("three_calls").make_loader(rank, 2))[:3]]
    with torch.no_grad():
        expected.append(sum(model(**batch).loss.item() for batch in batches) / len(batches))
    right = model.state_dict()
    apart = torch.cat([(saved[name] - value).flatten() for name, value in right.items()])
    return found, expected, float(apart.norm() / torch.cat([value.flatten() for value in right.values()]).norm())


def lora(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the swapped script on 2 ranks, and of PEFT in one process."""
    with tempfile.TemporaryDirectory() as folder:
        return _by_three_calls("lora", steps, f"{folder}/saved")[:2]


def _by_three_calls(name: str, steps: int, saved: str) -> tuple[list[float], list[float], Any]:
    """Losses of the swapped script on 2 ranks, and of one process; and the model that this one has trained."""
    swapped = script(name)

    def job(rank: int) -> list[float]:
        rank_environment(rank)
        arguments = ["--steps", str(steps), "--deepspeed_config", str(SWAP / "ds_three_calls.json"), "--save", saved]
        return swapped.main(arguments)  # type: ignore[no-any-return]

    loaders = [iter(swapped.make_loader(rank, 2)) for rank in range(2)]
    updates = [[next(loader) for _ in range(2) for loader in loaders] for _ in range(steps)]
    model = swapped.make_model()
    expected = one_process(model, updates)
    return run_ranks(job, 2, timeout=300)[0], expected, model


def accelerated(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the swapped script on 2 ranks, and of one process."""
    swapped = script("accelerated")

    def job(rank: int) -> list[float]:
        rank_environment(rank)
        return swapped.main(["--steps", str(steps), "--config", str(SWAP / "ds_accelerated.json")])  # type: ignore[no-any-return]

    data = swapped.make_data()
    batches = [swapped.collate(data[at : at + 4]) for at in range(0, len(data), 4)]
    updates = [batches[4 * number : 4 * number + 4] for number in range(steps)]
    return run_ranks(job, 2, timeout=300)[0], one_process(swapped.make_model(), updates, schedule_steps=2)


def grpo(steps: int) -> tuple[list[float], list[float]]:
    """Losses and norms of the gradient of the swapped script on 2 ranks, and of the script as it is on DeepSpeed."""

    def job(rank: int, swapped: bool) -> list[float]:
        rank_environment(rank)
        # Without this switch DeepSpeed compiles an operator that training does not use, for half a minute.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
        arguments = ["--iterations", str(steps // 2), "--deepspeed_config", str(SWAP / "ds_grpo.json")]
        return [number for update in script("grpo", swapped=swapped).main(arguments) for number in update]

    found, expected = (run_ranks(job, 2, swapped, timeout=300)[0] for swapped in (True, False))
    return found, expected


def trainer(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the swapped script on 2 ranks, evaluations among them, and of a plain Trainer in one process."""
    return _by_trainer("trainer", f"--max_steps {steps} --eval_strategy steps --eval_steps 2 --eval_on_start true")


def sft(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the swapped script on 2 ranks, and of TRL's own trainer in one process."""
    return _by_trainer("sft", f"--max_steps {steps} --bf16 false --gradient_checkpointing false --packing false")


def _by_trainer(name: str, own: str) -> tuple[list[float], list[float]]:
    def job(rank: int, folder: str, num_ranks: int) -> list[float]:
        rank_environment(rank)
        arguments = (
            f"{own} --gradient_accumulation_steps 2 --per_device_train_batch_size {8 // num_ranks} "
            f"--per_device_eval_batch_size {8 // num_ranks} --learning_rate 2e-3 --weight_decay 0.1 --warmup_steps 2 "
            "--logging_steps 1 --save_strategy no --report_to none --disable_tqdm true "
            f"--use_cpu {not torch.cuda.is_available()} --output_dir {folder}/{num_ranks}"
        ).split()
        if num_ranks > 1:
            arguments += ["--deepspeed", str(SWAP / "ds_trainer.json")]
        else:
            del os.environ["LOCAL_RANK"]  # by which Accelerate tells a job of several processes
        logged = script(name, swapped=num_ranks > 1).main(arguments)
        return [entry[key] for entry in logged for key in ("loss", "eval_loss") if key in entry]

    with tempfile.TemporaryDirectory() as folder:
        found, expected = (run_ranks(job, num_ranks, folder, num_ranks, timeout=300)[0] for num_ranks in (2, 1))
    return found, expected
