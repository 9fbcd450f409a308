"""Steps in parts and losses of log-probabilities; routers and experts on ranks."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed  # noqa: F401  (before forking: the ranks share it)
import pytest
import torch
import torch.distributed as dist
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ds_hydra.engine.engine  # noqa: F401
from ds_hydra.losses import GSPO, dapo
from ds_hydra.pipe import expert_parallel
from ds_hydra.pipe.expert_parallel import RowsComputed, _own_experts
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.experts import find_routing
from ds_hydra.testing import rank_environment, run_ranks
from ds_hydra.zero_hetero.errors import ConfigError
from tests.gloo.test_scores import Live
from tests.support import post_training, routes
from tests.support.case import Case
from tests.support.equivalence import make_engine, samples_of, traced_once
from tests.support.families import build_model, kept_in_fp32
from tests.support.post_training import LAYOUTS, LOSSES, Layout, rollouts, share
from tests.support.small_job import (
    refused_calls,
    same,
    shared_source,
    small_config,
    small_engine,
    small_model,
    told,
    whole_state,
)
from tests.support.strict import Rules
from tools import aims

# --- Steps in parts, fields, and losses of log-probabilities on ranks: what a public loop of GRPO asks of an
# engine.
ROOT = Path(__file__).resolve().parents[2]
STEPS, LONG = 3, pytest.mark.long


SOME, FEW = ("GRPO", "GSPO", "DPO", "distillation", "own, mixing"), ("PPO", "GSPO", "distillation")


def most_apart(rows: Sequence[post_training.Row]) -> float:
    return max(max(row.of_loss, row.of_gradients) for row in rows)


@pytest.mark.parametrize(
    ("family", "layouts", "losses", "each"),
    [
        ("llama", (LAYOUTS[5], LAYOUTS[7]), SOME, 2),
        ("lora", LAYOUTS[4:5], ("PPO", "DPO"), 1),
        *(pytest.param(family, LAYOUTS, tuple(LOSSES), 1, marks=LONG) for family in ("llama", "lora")),
        *(pytest.param(family, LAYOUTS, FEW, 1, marks=LONG) for family in ("llama_tied", "gemma2", "qwen3")),
    ],
)
def test_losses_are_those_of_one_process(
    family: str, layouts: Sequence[Layout], losses: Sequence[str], each: int
) -> None:
    rows, slices = post_training.compare(family, list(product(layouts, losses))[::each])
    assert {row.loss for row in rows} == set(losses)
    assert slices > 0 or family == "lora"
    assert most_apart(rows) <= aims.POST_TRAINING, rows


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=LONG) for rule in ("blocking", "connect")])
def test_losses_are_the_same_under_a_transport_with_nccls_rules(rule: str) -> None:
    rows, _ = post_training.compare("llama", list(product(LAYOUTS, ("GRPO", "DPO"))), strict=Rules(**{rule: True}))
    assert most_apart(rows) <= aims.POST_TRAINING, rows


@pytest.mark.parametrize("layouts", [LAYOUTS[6:7], pytest.param(LAYOUTS, marks=LONG)])
def test_log_probabilities_and_entropies_are_those_of_one_process(layouts: Sequence[Layout]) -> None:
    found = post_training.scores(layouts)
    assert max(max(one, other) for _, one, other in found) <= aims.POST_TRAINING, found


SWITCHED = [
    ("lora", LAYOUTS[4:6], None),
    ("lora of stacks", LAYOUTS[5:6], None),
    ("lora", LAYOUTS[4:6], Rules(blocking=True)),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "layouts", "strict"), SWITCHED, ids=["lora", "stacks", "strict"])
def test_switched_off_adapters_leave_the_model_without_them(
    family: str, layouts: Sequence[Layout], strict: Rules | None
) -> None:
    found = post_training.scores(layouts, family, adapted=False, strict=strict)
    assert max(max(one, other) for _, one, other in found) <= aims.POST_TRAINING, found


def switched_otherwise(rank: int, family: str, how: str) -> str:
    """What is said of adapters that are switched on one rank, in one layer, or to others."""
    engine = small_engine(rank, model=build_model(family, torch.float32), data=None, strategies=["2*tp1"])
    layers = [module for module in engine.module.modules() if hasattr(module, "_disable_adapters")]
    switched = {"one rank": layers[: None if rank == 0 else 0], "one layer": layers[:1], "all": layers}
    for layer in switched.get(how, ()):
        layer.enable_adapters(False)
    if how == "another":
        engine.module.set_adapter("other")
    return told(lambda: engine.log_probs([[5, 6, 7]]))


OTHERWISE = [
    ("lora", "one rank", r"rank 0 calls log_probs\(\) without adapters, rank 1 calls log_probs\(\): every rank"),
    ("lora", "one layer", r"the adapters of .*q_proj that run are \[\], and those of .*k_proj \['default'\]"),
    ("lora and whole modules", "all", r"embed_tokens is trained as a whole \(modules_to_save\).*precompute_ref"),
    ("lora beside another", "another", r"the adapters \['other'\] of the model are active, but .* \['default'\]"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "how", "words"), OTHERWISE, ids=[how for _, how, _ in OTHERWISE])
def test_adapters_that_are_switched_otherwise_are_refused(family: str, how: str, words: str) -> None:
    for text in run_ranks(switched_otherwise, 2, family, how, timeout=100):
        assert re.search(words, text), text


@pytest.mark.parametrize("layouts", [LAYOUTS[1:2], pytest.param(LAYOUTS, marks=LONG)])
def test_a_step_may_be_split_into_any_calls_with_evaluations_between_them(layouts: Sequence[Layout]) -> None:
    rows = post_training.splits(layouts)
    assert max(max(by_one, against) for _, _, by_one, against in rows) <= aims.POST_TRAINING, rows


def whole_and_in_parts(rank: int) -> list[Any]:
    """A job by `train_batch` and the same by its parts, with the schedule moved by hand; at last a dropped gradient."""

    def sequences(step: int) -> list[Any]:
        return [{"input_ids": item["input_ids"], "labels": item["labels"]} for item in share(rank, rollouts(step))]

    states, records = [], []
    for in_parts in (False, True):
        engine = small_engine(rank, data=None)
        for step in range(STEPS):
            if not in_parts:
                engine.train_batch(sequences(step))
            else:
                engine.forward_backward([[5, 6, 7]] * 2)
                (engine.zero_grad if step % 2 else engine.optimizer.zero_grad)()
                loss = engine.forward_backward(sequences(step))
                norm = engine.optimizer_step()
                engine.lr_scheduler.step()
                record = engine.last_step
                assert (float(loss), norm) == (pytest.approx(record.loss, rel=1e-6), record.grad_norm)
        states.append(whole_state(engine))
        names = ("step", "loss", "grad_norm", "learning_rate", "num_targets", "plan", "counts")
        records.append([getattr(engine.last_step, name) for name in names])
        engine.destroy()
    return [same(*states), *records]


def test_the_parts_of_a_step_make_the_step_to_the_bit() -> None:
    for equal, whole, parts in run_ranks(whole_and_in_parts, 4, timeout=200):
        assert equal
        assert whole == parts
        assert whole[-1] == "token"


def example(rank: int) -> list[float]:
    """The script of examples/ on this rank: rewards of its updates."""
    rank_environment(rank)
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.CONFIG["hydra"] |= {"self_check": "off", "planner": {"ahead": 0}}
    with mock.patch("sys.argv", ["grpo.py", "--updates", "6"]):
        found: list[float] = script.main()
    return found


def test_the_example_learns() -> None:
    first, *_, last = run_ranks(example, 2, timeout=200)[0]
    assert first < 0.7
    assert last > 0.85


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_full_parameters_are_what_a_folder_of_the_model_holds(family: str, tmp_path: Path) -> None:
    def given(rank: int) -> tuple[list[str], dict[str, torch.Tensor], int]:
        engine = small_engine(rank, model=build_model(family, torch.float32), data=None, strategies=["tp2", "2*tp1"])
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.save_16bit_model(tmp_path)
        masters = engine.crew.masters
        largest = 4 * max(sum(param.numel for param in bucket.params) for bucket in masters.buckets)
        with Live() as live:
            held = max(tensor.nbytes for _, tensor in engine.full_parameters())
        # A caller's loop holds its last tensor, which is a copy, while the next bucket comes, and on a busy machine
        # gloo's thread holds a little longer what it has sent.
        assert live.most - masters.trained.flat.nbytes < 2 * largest + 3 * held, "a bucket at a time"
        found = dict(engine.full_parameters())
        return list(found), found if rank else {}, len(list(engine.full_parameters(ranks=[1])))

    (names, _, none), (others, found, count) = run_ranks(given, 2, timeout=120)
    assert names == others
    assert (none, count) == (0, len(names))
    folder = load_file(tmp_path / "model.safetensors")
    assert folder.keys() == found.keys()
    assert all(torch.equal(folder[name], found[name]) for name in folder)
    assert family != "qwen3_moe" or any("experts.3." in name for name in names)


def test_what_a_model_keeps_in_fp32_leaves_it_so(tmp_path: Path) -> None:
    """As transformers saves and loads it; plain DeepSpeed's BF16 rounds it."""

    def given(rank: int) -> tuple[dict[str, Tensor], ...]:
        config = small_config(2, strategies=["tp2", "2*tp1"], context_length=64) | {"bf16": {"enabled": True}}
        engine = small_engine(rank, kept_in_fp32()[0], config, data=None)
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.save_16bit_model(tmp_path)
        return engine.fp32_state_dict(), engine.module.state_dict(), dict(engine.full_parameters())

    (masters, read, found), _ = run_ranks(given, 2, timeout=120)
    folder, kept = load_file(tmp_path / "model.safetensors"), kept_in_fp32()[1]
    assert same(folder, found)
    assert len(kept) == sum(value.dtype == torch.float32 for value in folder.values()) < len(folder)
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").named_parameters():
        assert value.dtype == read[name].dtype == (torch.float32 if name in kept else torch.bfloat16), name
        assert torch.equal(value, masters[name].to(value.dtype)), name
        assert torch.equal(value, read[name]), name


@pytest.mark.parametrize("family", ["lora and whole modules", "lora of the ends", "lora beside another", "dora"])
def test_full_parameters_of_a_peft_model(family: str, tmp_path: Path) -> None:
    def given(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        model = build_model(family, torch.float32)
        engine = small_engine(rank, model=model, data=None, strategies=["2*tp1", "pp2"])
        engine.train_batch([[5, 6, 7, 8]] * 3)
        engine.save_16bit_model(tmp_path)
        found = [dict(engine.full_parameters(adapters=how)) for how in ("merged", "alone")]
        none = [list(engine.full_parameters(adapters=how, ranks=[1])) for how in ("merged", "alone")]
        return (found[0], found[1], 0) if rank else ({}, {}, len(none[0]) + len(none[1]))

    (_, _, none), (merged, alone, _) = run_ranks(given, 2, timeout=120)
    assert none == 0
    folder = load_file(tmp_path / "adapter_model.safetensors")
    assert folder.keys() == alone.keys()
    assert all(torch.equal(folder[name], alone[name]) for name in folder)
    again = build_model(family, torch.float32)
    set_peft_model_state_dict(again, folder)
    right = again.merge_and_unload().state_dict()
    assert right.keys() == merged.keys()
    assert all(torch.allclose(right[name], merged[name], rtol=1e-6, atol=1e-7) for name in right)


def test_what_cannot_be_merged_is_refused() -> None:
    def refused(rank: int) -> list[str]:
        def given(engine: Any, how: str) -> list[Any]:
            return list(engine.full_parameters(adapters=how))

        found = []
        for family in ("lora with biases of its own", "lora and tokens", "llama"):
            engine = small_engine(rank, model=build_model(family, torch.float32), data=None)
            found += [told(partial(given, engine, how)) for how in ("merged", "alone", "both")]
        return found

    biases, alone, both, tokens, _, _, whole, none, _ = run_ranks(refused, 1, timeout=100)[0]
    assert "rows that are trained by themselves are not merged here" in tokens
    assert 'has a bias and the layer none, so it cannot be merged: take adapters "alone"' in biases
    assert alone == whole == "no error"
    assert '"merged" or "alone", and not \'both\'' in both
    assert "of a PEFT model, and this one is none" in none


def test_engines_of_one_process_group_train_as_if_each_were_alone() -> None:
    """Actor, critic and reference of a loop: models of their own, whose calls alternate. The reference is frozen."""

    def started(rank: int, which: int, trains: bool = True) -> Any:
        strategies = [["2*tp1", "pp2"], ["tp2", "2*tp1"], ["pp2"]][which]
        model, config = small_model(hidden=32 + 16 * which), small_config(2, strategies=strategies)
        if not trains:
            model.requires_grad_(False)
            del config["optimizer"], config["scheduler"]
        return small_engine(rank, data=None, model=model, config=config)

    def stepped(engine: Any, rank: int, which: int, step: int, reference: list[Tensor]) -> None:
        items = share(rank, rollouts(10 * which + step))
        assert len(reference) in (0, len(items))
        engine.forward_backward(items, GSPO())
        engine.optimizer_step()
        assert engine.last_step.counts == "script"

    def job(rank: int) -> list[bool]:
        alone = []
        for which in range(3):
            engine = started(rank, which)
            for step in range(2 if which < 2 else 0):
                stepped(engine, rank, which, step, [])
            alone.append(whole_state(engine))
            right = engine.log_probs(share(rank, rollouts(1))).log_probs
            engine.destroy()
        engines = [started(rank, which, trains=which < 2) for which in range(3)]
        with pytest.raises(ConfigError, match="every parameter of the model is frozen: the engine evaluates"):
            engines[2].forward_backward(share(rank, rollouts(1)), GSPO())
        for step in range(2):
            engines[2].to("cpu")
            found = engines[2].log_probs(share(rank, rollouts(step))).log_probs
            for which in range(2):
                stepped(engines[which], rank, which, step, found)
        agrees = [same(one, whole_state(other)) for one, other in zip(alone[:2], engines[:2], strict=True)]
        for engine in engines:
            engine.destroy()
        agrees.append(all(torch.allclose(a, b, atol=2e-6) for a, b in zip(found, right, strict=True)))
        return agrees

    assert run_ranks(job, 2, timeout=200) == [[True] * 3] * 2


# --- Choices of experts that are given to routers on ranks, and those that routers make by themselves.
MIXTRAL = "mixtral"


def worst(rows: list[routes.Row]) -> float:
    return max(max(row.of_loss, row.of_gradients, row.of_log_probs) for row in rows)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        (MIXTRAL, (LAYOUTS[5], LAYOUTS[7])),
        (MIXTRAL, routes.SPREAD[:1]),
        ("norms of queries and keys (GLM-4.5)", LAYOUTS[1:2]),
        pytest.param("granite, experts", LAYOUTS[4:5], marks=pytest.mark.long),  # a hybrid
        *(pytest.param(family, LAYOUTS, marks=pytest.mark.long) for family in (MIXTRAL, "qwen3_moe")),
        pytest.param(MIXTRAL, routes.SPREAD, marks=pytest.mark.long),
    ],
)
def test_experts_that_are_given_are_those_of_one_process(family: str, layouts: tuple[Any, ...]) -> None:
    rows = routes.compare(family, layouts)
    assert worst(rows) <= aims.POST_TRAINING, rows
    assert not any(row.choices_off for row in rows), rows


@pytest.mark.drawn
def test_one_expert_of_one_token_is_felt() -> None:
    def off(items: list[dict[str, Any]]) -> None:
        if len(items) == routes.PER_RANK[2]:
            choices = items[3]["routed_experts"]
            items[3]["routed_experts"] = choices.clone()
            items[3]["routed_experts"][5, 2, 0] = next(e for e in range(4) if e not in choices[5, 2].tolist())

    rows = routes.compare(MIXTRAL, LAYOUTS[3:4], ["PPO"], off)
    assert rows[0].of_gradients > 1e-5, rows
    assert not rows[0].choices_off, "what is given is what is used"


def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changes(item: dict[str, Any]) -> dict[str, Any]:
        choices = item["routed_experts"].clone()
        found = change(choices)
        return item | {"routed_experts": choices if found is None else found}

    return changes


def put(expert: int) -> Callable[[torch.Tensor], None]:
    return lambda choices: choices.__setitem__((2, 1, 0), expert)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a router missing": (changed(lambda choices: choices[:, :3]), "4 routers and 2 experts of a token"),
    "too many experts": (changed(lambda choices: torch.cat((choices, choices), dim=2)), "2 experts of a token"),
    "a token missing": (changed(lambda choices: choices[1:]), "it is to have whole numbers of the shape"),
    "numbers": (changed(lambda choices: choices.double()), "and the type float64"),
    "an expert too high": (changed(put(4)), "at token 2 routed_experts names the expert 4 of model.layers.1.mlp.gate"),
    "a negative one": (changed(put(-1)), "names the expert -1 of model.layers.1.mlp.gate (0 to 3), which there is not"),
    "one twice": (changed(lambda choices: choices.__setitem__((2, 1, 0), choices[2, 1, 1])), "(0 to 3), twice"),
    "none": (lambda item: {name: item[name] for name in item if name != "routed_experts"}, "the same fields"),
}


def test_choices_that_cannot_be_used_are_refused_on_all_ranks_and_nothing_changes() -> None:
    def on_rank(rank: int) -> tuple[list[str], bool]:
        model = build_model(MIXTRAL, torch.float32)
        engine = small_engine(rank, model=model, data=None, strategies=["tp2", "2*tp1"])
        own = [{name: item[name] for name in ("input_ids", "labels", "advantages", "routed_experts")}
               for item in share(rank, routes.routed(rollouts(count=4), 4), (2, 2))]  # fmt: skip
        calls: list[Callable[[], Any]] = []
        for change, _ in REFUSED.values():
            given = [own[0], change(own[1]) if rank == 1 else own[1]]
            calls += [partial(engine.forward_backward, given, dapo()), partial(engine.log_probs, given)]
        return refused_calls(engine, calls, lambda: engine.forward_backward(own, dapo()))

    with shared_source(build_model(MIXTRAL, torch.float32)):
        (found, right), (others, also) = run_ranks(on_rank, 2, timeout=120)
    assert right
    assert also
    assert found == others
    for number, (name, (_, words)) in enumerate(REFUSED.items()):
        for text in found[2 * number : 2 * number + 2]:
            assert words in text, (name, text)
            assert "rank 1" in text, (name, text)


class Sorting(nn.Module):
    """A router that finds its experts by sorting, and asks for the largest in vain."""

    def __init__(self, router: Any, *, asks: bool) -> None:
        super().__init__()
        self.weight, self.asks = router.weight, asks

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        if self.asks:
            torch.topk(logits, 2, dim=-1)
        chosen = logits.argsort(dim=-1, descending=True)[:, :2]
        return logits, logits.gather(-1, chosen).softmax(-1), chosen


@pytest.mark.parametrize(
    ("asks", "words"),
    [(False, r"model\.layers\.2\.mlp of Mixtral.* chooses its experts otherwise: .*by torch\.topk"),
     (True, r"model\.layers\.2\.mlp\.gate \(Sorting\) does not choose its experts by the torch\.topk")],
)  # fmt: skip
def test_routers_that_choose_otherwise_are_refused_by_name(asks: bool, words: str) -> None:
    model = build_model(MIXTRAL, torch.float32)
    model.model.layers[2].mlp.gate = Sorting(model.model.layers[2].mlp.gate, asks=asks)
    with pytest.raises(ConfigError, match=words):
        find_routing(CausalLM(model, by_one_rank=True))


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no routers: .*by torch\.topk"):
        find_routing(CausalLM(build_model("llama", torch.float32), by_one_rank=True))


# --- The record of a step tells how uneven the routing to spread experts was, as one process counts it.
EXPERTS = 4
TOKENS = torch.randint(3, 90, (24,), generator=torch.Generator().manual_seed(2))


def trained(rank: int, folder: Path, strategies: list[str], one_gets_all: bool) -> None:
    def to_first(
        forward: Any, first: int, count: int, hidden: Tensor, chosen: Tensor, *rest: Any, **more: Any
    ) -> Tensor:
        return _own_experts(forward, first, count, hidden, torch.zeros_like(chosen), *rest, **more)

    rank_environment(rank)
    with mock.patch.object(expert_parallel, "_own_experts", to_first if one_gets_all else _own_experts):
        steps_file = str(folder / "steps.jsonl")
        config = small_config(dist.get_world_size(), strategies=strategies, tokens_per_step=96, steps_file=steps_file)
        config["scheduler"]["params"]["warmup_max_lr"] = 0.0  # so that all steps route alike
        engine = small_engine(rank, build_model("qwen3_moe", torch.float32), config, data=[TOKENS] * 32)
        for _ in strategies:
            engine.train_batch()


def records(folder: Path, strategies: list[str], *, ranks: int, one_gets_all: bool = False) -> list[dict[str, Any]]:
    run_ranks(partial(trained, folder=folder, strategies=strategies, one_gets_all=one_gets_all), ranks)
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def plain_shares(groups: int) -> list[float]:
    """For each layer of the plain model, the routes to the largest of so many equal groups of experts over the mean."""
    model = build_model("qwen3_moe", torch.float32)
    counts: dict[int, Tensor] = defaultdict(lambda: torch.zeros(EXPERTS))

    def note(layer: int, module: Any, given: tuple[Tensor, ...]) -> None:
        counts[layer] += torch.bincount(given[1].flatten(), minlength=EXPERTS)

    for layer, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(partial(note, layer))
    model(TOKENS[None])
    found = [each.view(groups, -1).sum(1) for _, each in sorted(counts.items())]
    return [float(each.max() / each.mean()) for each in found]


@pytest.mark.drawn
def test_a_record_has_the_largest_ranks_share_of_each_layer(tmp_path: Path) -> None:
    """By stages of two and of four ranks; a step whose experts nobody shares has none."""
    strategies = ["tp4ep4", "2*tp2ep2", "tp2sp2ep4", "tp2ep2pp2", "4*tp1"]
    *spread, alone = records(tmp_path, strategies, ranks=4)
    for record, groups in zip(spread, (4, 2, 4, 2), strict=True):
        right = plain_shares(groups)
        assert record["expert_imbalance"] == pytest.approx(sum(right) / len(right), abs=1e-6)
        assert record["worst_expert_imbalance"] == pytest.approx(max(right), abs=1e-6)
        assert record["worst_expert_imbalance"] > record["expert_imbalance"] > 1.0
    assert alone["expert_imbalance"] == alone["worst_expert_imbalance"] == 0.0


def test_all_tokens_to_one_expert(tmp_path: Path) -> None:
    (record, other) = records(tmp_path, ["tp2ep2", "sp2ep2"], ranks=2, one_gets_all=True)
    assert record["expert_imbalance"] == record["worst_expert_imbalance"] == 2.0
    assert other["expert_imbalance"] == 2.0


def test_rows_are_counted_since_they_were_taken() -> None:
    routed = RowsComputed(4)
    assert routed.take() == 0.0
    routed.add(30, 80)
    assert routed.take() == 1.5
    routed.add(0, 80)
    routed.add(20, 80)
    assert (routed.take(), routed.take()) == (0.5, 0.0)


# --- Whole experts on ranks: a checkpoint is neither of jobs that spread them nor of jobs that cut them by
# width.
SPREAD = Case("", "qwen3_moe", ("tp2ep2", "sp2ep2"), steps=4).shortened()


def _saved(rank: int, case: Case, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, a checkpoint, and the losses of two more; what is trained when it was saved."""
    engine = make_engine(case, samples_of(case))
    for _ in range(2):
        engine.train_batch()
    engine.save_checkpoint(folder)
    values = engine.fp32_state_dict()
    return [float(engine.train_batch()) for _ in range(2)], values if rank == 0 else {}


def _resumed(rank: int, case: Case, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(case, samples_of(case))
    engine.load_checkpoint(folder)
    values = engine.fp32_state_dict()
    return [float(engine.train_batch()) for _ in range(2)], values if rank == 0 else {}


@pytest.mark.drawn
def test_jobs_of_both_kinds_and_another_ep_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    with traced_once(SPREAD):
        losses, values = run_ranks(_saved, 2, SPREAD, str(tmp_path), timeout=120)[0]
        again, same = run_ranks(_resumed, 2, SPREAD, str(tmp_path), timeout=120)[0]
    by_width = replace(SPREAD, strategies=("tp2", "2*tp1"))
    with traced_once(by_width):
        found, turned = run_ranks(_resumed, 2, by_width, str(tmp_path), timeout=120)[0]
    four = replace(SPREAD, strategies=("tp2sp2ep4", "sp4ep4"))
    with traced_once(four):
        on_four, moved = run_ranks(_resumed, 4, four, str(tmp_path), timeout=120)[0]
    for other in (same, turned, moved):
        assert values.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in values.items()), "to the bit"
    assert again == losses
    for others in (found, on_four):
        assert all(abs(one - other) <= 1e-9 * abs(one) for one, other in zip(losses, others, strict=True))
