"""What every part of the GPU benchmark is given, how it times a call, what it returns, the page of all parts; and the
job that parts train: a Llama, sequences of very different lengths, the real engine on one rank, and FLOPs.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hydra.testing import free_port

T = TypeVar("T")


class Table(NamedTuple):
    """Columns for a reader; cells are text or numbers."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True)
class Findings:
    """What one part has found; `figures` is plain JSON, `missed` holds a sentence for every aim that was missed."""

    summary: str
    tables: tuple[Table, ...]
    figures: dict[str, Any]
    missed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """What a part is given.

    With `full` it measures shapes of real models on a GPU. Otherwise its shapes are tiny: then it shows that it runs,
    on any device, and its times mean nothing, so that no aim of speed is missed by them.
    """

    device: torch.device
    full: bool
    seconds: float  # that the part may take
    folder: Path  # of this run; a part finds in it what earlier parts have left
    began: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the part began."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds that the part still has."""
        return self.seconds - self.spent

    def pick(self, full: T, tiny: T) -> T:
        """One of two values: for real shapes, and for tiny ones."""
        return full if self.full else tiny

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Begin to look for the memory's peak anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Most bytes of tensors at one time since `forget_peak`, by torch's allocator; None on a CPU without one."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def median_ms(self, call: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
        """Median milliseconds of a call: on a GPU between two events of its stream, on a CPU of wall time."""
        for _ in range(warm_up):
            call()
        self.synchronize()
        if self.device.type != "cuda":
            return statistics.median(_wall_ms(call) for _ in range(repeats))
        # No wait between the calls: the host queues them ahead, as training does. A call that is bound by its launches
        # keeps the stream waiting for the host, and the events show that too.
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for before, after in events:
            before.record()
            call()
            after.record()
        self.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in events)


def _wall_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The device's model for a reader."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def median_and_p90(values: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def gib(num_bytes: float | None) -> str:
    """GiB for a table; a dash where it is not known."""
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f}"


OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIPPING = 1.0
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHARED, RANKS_A_DEVICE = "NCCL_MULTI_RANK_GPU_ENABLE", 4  # NCCL lets ranks share a device from 2.30 on, if this is 1


def ranks_a_device() -> int:
    """Ranks of tiny models that NCCL can connect on one GPU: one, or several that take turns on it."""
    return RANKS_A_DEVICE if os.environ.get(SHARED) == "1" else 1


def ranks_at_hand() -> int:
    """Ranks that NCCL can connect here; 0 without a device."""
    return torch.cuda.device_count() * ranks_a_device()


def take_device() -> torch.device:
    """This rank's, of which there may be fewer than ranks; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(index)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def llama(bench: Bench, layers: int | None = None) -> LlamaConfig:
    """The shape of Llama 3.2 1B (1.24e9 parameters), or a tiny one; `layers` in place of its own number of layers."""
    sizes: dict[str, Any]
    if bench.full:
        sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "max_position_embeddings": 16384}  # fmt: skip
    else:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip
    return LlamaConfig(
        **sizes,
        num_hidden_layers=layers or bench.pick(16, 4),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def new_model(config: LlamaConfig, bench: Bench) -> Any:
    """A model of this config in FP32 on the host, with the same values each time."""
    torch.manual_seed(0)
    with bench.device:  # a GPU draws a billion numbers in no time, a core takes a minute
        model = LlamaForCausalLM(config)
    return model.float().cpu()


def save_config(config: LlamaConfig, folder: Path) -> Path:
    """A folder with the model's config alone, as the commands read it."""
    place = folder / f"model_{config.num_hidden_layers}_layers"
    config.save_pretrained(place)
    return place


def sequences(bench: Bench, longest: int, count: int = 2000, seed: int = 1) -> list[Tensor]:
    """Random tokens of log-normal lengths, as web pages have them, cut at `longest`."""
    generator = torch.Generator().manual_seed(seed)
    center = bench.pick(6.4, 3.5)
    lengths = torch.empty(count).log_normal_(center, 1.2, generator=generator).clamp(8, longest)
    vocab = llama(bench).vocab_size
    return [torch.randint(vocab, (int(length),), generator=generator) for length in lengths]


def num_matmul_parameters(model: Any) -> int:
    """Parameters that every token is multiplied with: weights, the head's among them, but no norms and no look-up."""
    looked_up = model.get_input_embeddings().weight
    tied = looked_up is model.get_output_embeddings().weight
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and (p is not looked_up or tied))


def training_flops(config: Any, matmul_parameters: int, lengths: Sequence[int]) -> float:
    """FLOPs that training on these sequences needs: what is computed again does not count.

    6 per parameter and token, and 6 * heads * head_dim * length^2 in each layer's causal attention: of the 4 * length^2
    of the forward's two products half is masked, and the backward takes twice the forward.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6.0 * config.num_hidden_layers * config.num_attention_heads * head
    return 6.0 * matmul_parameters * sum(lengths) + attention * sum(length * length for length in lengths)


@contextmanager
def engine_alone(bench: Bench, model: Any, data: Sequence[Tensor], tokens_per_step: int, **hydra: Any) -> Iterator[Any]:
    """The real engine in BF16 on this process as the only rank; `hydra` adds to the block."""
    import ds_hydra

    values = ("0", "0", "1", "1", "127.0.0.1", str(free_port()))
    os.environ.update(zip(LAUNCHER, values, strict=True))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("ds_hydra").setLevel(logging.WARNING)
    planner = {} if bench.full else {"planner": {"ahead": 0}}  # a process for plans takes longer than tiny steps
    config = engine_config(tokens_per_step, strategies=["tp1"], **planner, **hydra)
    try:
        engine = ds_hydra.initialize(model=model, training_data=data, config=config)[0]
        try:
            yield engine
        finally:
            engine.destroy()
    finally:  # also when the engine was refused: the next part starts a group of its own, or none
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in LAUNCHER:
            del os.environ[name]


def engine_config(tokens_per_step: int, **hydra: Any) -> dict[str, Any]:
    """A job's config: BF16, torch's AdamW, clipping. What is no part of a step's time is off: checks, records."""
    return {
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "hydra": {"tokens_per_step": tokens_per_step, "self_check": "off", "steps_file": None, **hydra},
    }


def finish(record: dict[str, Any], json_file: Path | None) -> int:
    """Print the missed aims and the summary, write record and page; the exit code."""
    for aim in record["missed"]:
        print(f"missed: {aim}")
    where = record["device"] if record["full"] else f"{record['device']}, tiny shapes, nothing measured"
    ended = f"{len(record['missed'])} aims missed" if record["missed"] else _verdict(record).rstrip(".")
    print(f"bench_gpu: {len(record['parts'])} parts in {record['seconds']:.0f} s on {where}; {ended}")
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
        json_file.with_suffix(".md").write_text(page(record))
        print(f"written: {json_file} and {json_file.with_suffix('.md').name}")
    return 1 if record["missed"] else 0


def page(record: Mapping[str, Any]) -> str:
    """What a record's page holds, such as `benchmarks/gpu.md`."""
    lines = ["# Measured on a GPU" if record["gpu"] else "# No GPU was measured", ""]
    if not record["gpu"]:
        lines += ["These figures come from a CPU and tiny shapes. They show that the parts run, and nothing else.", ""]
    elif not record["full"]:
        lines += [
            "The shapes were tiny (`--quick`): this shows that the parts run on the device, and nothing else.",
            "",
        ]
    lines += [
        f"{record['device']}; {', '.join(f'{name} {version}' for name, version in record['versions'].items())}. "
        f"Written by `python -m tools.bench_gpu` in {record['seconds']:.0f} s; {_verdict(record)}",
        "",
    ]
    for name, part in record["parts"].items():
        lines += [f"## {name}", f"{part['what']}.", ""]
        if part["status"] != "measured":
            lines += [f"Not measured: {part['status']}.", "", *_fenced(part.get("error", "")), ""]
            continue
        lines += [f"{part['summary']}.", ""]
        for table in part["tables"]:
            lines += [f"{table['title']}:", "", *_table(table["headers"], table["rows"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(record: Mapping[str, Any]) -> str:
    if record["missed"]:
        return "missed: " + "; ".join(record["missed"]) + "."
    return "all aims met." if record["gpu"] and record["full"] else "all parts ran."


def _fenced(text: str) -> list[str]:
    return ["```", *text.rstrip().splitlines()[-12:], "```"] if text else []


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    def line(cells: Sequence[object]) -> str:
        # A bar in a cell would begin another cell; a kernel's name may hold one.
        shown = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
        return "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in shown) + " |"

    return [line(headers), "|" + " --- |" * len(headers), *(line(row) for row in rows)]
