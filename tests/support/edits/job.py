"""The job that is edited: model, data and loss in; one process's losses and parameters, or two ranks', out.

The plain side knows nothing of the engine: it runs the model as its user has it, one sequence at a time, and divides by
the step's targets.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 3
EDITED = 1  # the step before which an edit after `initialize` is made
VOCABULARY = 97
# One step's sequences: some longer than all that a check of small data would hold, one of a single token.
LENGTHS = (3, 150, 17, 60, 41, 9, 33, 85, 1, 26)
IGNORED = -100
OPTIMIZER: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
         "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 6, "head_dim": 8, "pad_token_id": 0,
            "router_aux_loss_coef": 0.0}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 80, "num_key_value_heads": 6, "pad_token_id": 0},
    "gpt2": {"n_inner": 80, "pad_token_id": 0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "roberta": {"intermediate_size": 80, "pad_token_id": 5, "is_decoder": True, "type_vocab_size": 2,
                "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "qwen3_moe": _EXPERTS | {"moe_intermediate_size": 24, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": _EXPERTS | _WINDOWS | {"intermediate_size": 24, "num_local_experts": 4},
    "gemma3_text": _WINDOWS | {"intermediate_size": 80, "num_key_value_heads": 6, "head_dim": 8, "pad_token_id": 0},
    "qwen3_next": _EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4,
                              "linear_num_value_heads": 6, "linear_num_key_heads": 6, "linear_key_head_dim": 8,
                              "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"intermediate_size": 80, "num_key_value_heads": 6, "pad_token_id": 0,
             "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"intermediate_size": 80, "shared_intermediate_size": 80, "num_key_value_heads": 6,
                         "num_local_experts": 0, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8,
                         "mamba_n_groups": 1, "pad_token_id": 0, "layer_types": ["mamba", "attention"] * 2},
}  # fmt: skip

Item = dict[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Job:
    """What a script has in its hands. `each_step` is what it calls before every step."""

    model: Any
    data: list[Item]
    loss_fn: TokenLoss | None = None
    each_step: list[Callable[[int], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What a side did: "ran", or "refused" in the `words` of its error. `steps` holds each step's items by number;
    `parameters` are by name, as they are in the end."""

    state: str
    losses: tuple[float, ...] = ()
    steps: tuple[tuple[int, ...], ...] = ()
    parameters: dict[str, Tensor] = field(default_factory=dict)
    words: str = ""


Edit = Callable[[Job], Any]


def fresh_job(family: str = "llama") -> Job:
    """The job before anything was done to it, the same in every process; in FP64, no norm or bias at its constant."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    # Transformers' own products of groups have no FP64.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    draw = torch.Generator().manual_seed(5)
    data = []
    for length in LENGTHS * STEPS:
        ids = torch.randint(0, VOCABULARY, (length,), generator=draw)
        if family == "roberta":
            ids[ids == FAMILIES[family]["pad_token_id"]] = 7
        data.append({"input_ids": ids, "labels": ids.clone()})
    return Job(model.double().train(), data)


def one_process(_rank: int, family: str, edit: Edit | None, late: bool, steps: Sequence[Sequence[int]]) -> Outcome:
    """Plain torch and transformers on these items in each step. `late`: the edit is made before step `EDITED`, not
    before all of them."""
    job = fresh_job(family)
    if edit is not None and not late:
        edit(job)
    optimizer = torch.optim.SGD((p for p in job.model.parameters() if p.requires_grad), **OPTIMIZER)
    losses = []
    for step in range(STEPS):
        if edit is not None and late and step == EDITED:
            edit(job)
            known = {p for group in optimizer.param_groups for p in group["params"]}
            optimizer.param_groups[0]["params"] += [
                p for p in job.model.parameters() if p.requires_grad and p not in known
            ]
        for call in job.each_step:
            call(step)
        losses.append(_plain_step(job, optimizer, [job.data[i] for i in steps[step]]))
    named = job.model.named_parameters(remove_duplicate=False)
    return Outcome("ran", tuple(losses), (), {name: p.detach().clone() for name, p in named})


def _plain_step(job: Job, optimizer: torch.optim.Optimizer, items: Sequence[Item]) -> float:
    """One update by the mean over all targets of the items."""
    optimizer.zero_grad()
    targets = max(1, sum(int((item["labels"][1:] != IGNORED).sum()) for item in items))
    total = 0.0
    for item in items:
        if len(item["labels"]) < 2:
            continue
        given = {name: value[None] for name, value in item.items() if name != "labels"}
        logits, labels = job.model(**given, use_cache=False).logits[0, :-1], item["labels"][1:]
        known = labels != IGNORED
        each = job.loss_fn or (lambda a, b: F.cross_entropy(a, b, reduction="none"))
        loss = each(logits[known], labels[known]).sum() / targets
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total


def on_ranks(
    rank: int, family: str, edit: Edit | None, late: bool, strategies: Sequence[str], slices: bool, check: str
) -> Outcome:
    """One rank of the engine under strategies in turn; `check` is hydra.self_check."""
    import ds_hydra
    from ds_hydra.plan.step_plan import StepPlan
    from ds_hydra.testing import rank_environment

    rank_environment(rank)
    logging.getLogger("ds_hydra").setLevel(logging.ERROR)
    job = fresh_job(family)
    config = {
        "optimizer": {"type": "SGD", "params": dict(OPTIMIZER)},
        "gradient_clipping": 0.0,
        "hydra": {"tokens_per_step": sum(LENGTHS), "strategies": list(strategies), "choose": "cycle",
                  "self_check": check, "steps_file": None, "timeout_seconds": 60, "planner": {"ahead": 0},
                  "faults": {"frozen_seconds": 60}},  # a busy machine is no fault of an edit
    }  # fmt: skip
    losses: list[float] = []
    steps: list[tuple[int, ...]] = []
    try:
        if edit is not None and not late:
            edit(job)
        loss = {} if job.loss_fn is None else {"loss_fn": job.loss_fn}
        engine, *_ = ds_hydra.initialize(model=job.model, training_data=job.data, config=config, **loss)
        if slices:
            replay_in_slices(engine, STEPS)
        for step in range(STEPS):
            if edit is not None and late and step == EDITED:
                edit(job)
            for call in job.each_step:
                call(step)
            losses.append(float(engine.train_batch()))
            steps.append(StepPlan.from_json(engine.last_step.plan, "the step's plan").sequence_ids)
        parameters = engine.fp32_state_dict()
        return Outcome("ran", tuple(losses), tuple(steps), parameters if rank == 0 else {})
    except (ds_hydra.ConfigError, ds_hydra.PlanError) as error:
        return Outcome("refused", tuple(losses), words=str(error))


def replay_in_slices(engine: Any, steps: int) -> None:
    """Plan the next steps of an engine, cut most long sequences of them, as the planner would from measured costs, and
    let it replay these plans."""
    from ds_hydra.planner import save_plans
    from tests.support.planner_cases import in_slices, num_slices, replaying

    plans = engine.crew.plans
    made = [in_slices(plans.next(step).plan, plans.table) for step in range(steps)]
    assert any(map(num_slices, made)), "some sequences are long"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "plans.jsonl"))
        save_plans(made, file)
        engine.crew.plans = replaying(engine, file)
