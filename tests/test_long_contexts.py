"""Memory of long contexts on few devices: what is counted of stages with tiles and fetched layers, and the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hydra.costs.memory import JobMemory
from ds_hydra.engine.costs import may_keep_attention
from ds_hydra.pipe import recomputed
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.profiling.stage_memory import kept_bytes, measure_activations, step_peak
from ds_hydra.profiling.stage_timer import StageTimer
from tests.support.families import build_model

CPU, TOKENS, LAYERS, VOCABULARY = torch.device("cpu"), 256, 4, 128
DEGREES, QUICK = (
    ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)),
    ((2, 2, "host_activations"), (2, 2, "keep_attention")),
)


def test_ranks_that_share_tokens_gather_a_tile_of_rows() -> None:
    """Of eight ranks each would hold the rows of all twice beside its layer, 16 times its own: they take 25 times as
    much as enters, and in tiles no more than attention does."""
    config = LlamaConfig(hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=8,
                         num_key_value_heads=8, vocab_size=VOCABULARY)  # fmt: skip
    model, times = LlamaForCausalLM(config).bfloat16(), {}
    for tiled in (False, True):
        asked = StageOptions(activation_checkpointing=True, functions="auto", token_sharding=True, tiles=tiled)
        timer = StageTimer(CausalLM(model, asked), ParallelScheme(8, 4), 1, CPU, torch.bfloat16)
        with recomputed.of_rows(256):
            small, large = (step_peak(timer, (tokens,)) - kept_bytes(timer, (tokens,)) for tokens in (2048, 6144))
        times[tiled] = (large - small) / 4096 / (128 * 2 / 8)
    assert times[True] <= 18.0 < 24.0 <= times[False], times


def source_of(**options: bool) -> CausalLM:
    config = LlamaConfig(hidden_size=128, intermediate_size=448, num_hidden_layers=LAYERS, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=VOCABULARY, tie_word_embeddings=False)  # fmt: skip
    asked = StageOptions(activation_checkpointing=True, functions="auto", token_sharding=True, **options)
    return CausalLM(LlamaForCausalLM(config), asked)


@pytest.mark.parametrize(
    ("tp", "sp", "option"),
    [
        pytest.param(*degrees, option, marks=[] if (*degrees, option) in QUICK else pytest.mark.long)
        for degrees in DEGREES for option in ("tiles", "host_activations", "keep_attention")
    ],
)  # fmt: skip
def test_predicted_memory_is_what_stages_are_counted_to_hold(tp: int, sp: int, option: str) -> None:
    source = source_of(**{"tiles": True, option: True})
    with recomputed.of_rows(16):
        kept = measure_activations(source, tp, sp, CPU, torch.float32, TOKENS)
        timer = StageTimer(source, ParallelScheme(tp, 1, sp), 0, CPU, torch.float32)
        counted = step_peak(timer, (2 * TOKENS,))
    memory = JobMemory(source.plan, tp * sp, {(tp, sp): kept}, 4, vocab=VOCABULARY)
    needs = memory.needs(ParallelScheme(tp, 1, sp), 0)
    predicted = needs.total(2 * TOKENS) - needs.states
    assert predicted == pytest.approx(counted, rel=0.05)
    if option == "keep_attention":  # its input, what attention makes of 128 features, and a number for each head
        assert kept.layer == pytest.approx((128 + 128 + 4) * 4 / (tp * sp), rel=0.01)


class _Attending(TorchDispatchMode):
    """Counts forwards of attention's kernel, and of products."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [False, True])
def test_attention_that_is_kept_runs_once_forward(kept: bool) -> None:
    timer = StageTimer(source_of(keep_attention=kept), ParallelScheme(), 0, CPU, torch.float32)
    with _Attending() as found:
        timer.run(timer.batch((TOKENS, TOKENS // 2)))
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert found.counted[kernel] == 2 * LAYERS * (1 if kept else 2), "of two sequences"
    assert found.counted[f"{kernel}_backward"] == 2 * LAYERS


@pytest.mark.parametrize(("family", "may"), [("llama", True), ("gemma2", False), ("deepseek_v3", False)])
def test_attention_may_be_kept_where_its_kernel_tells_the_log_sum_exp(family: str, may: bool) -> None:
    """Not with a softcap, nor of values narrower than keys."""
    assert may_keep_attention(CausalLM(build_model(family, torch.float32)), CPU, torch.float32) == may
