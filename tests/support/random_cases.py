"""A seed in, a training case out that nobody thought of: any family, strategies and options beside each other."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.case import BFLOAT16, FLOAT32, FLOAT64, NO_GRADIENT, Case
from tests.support.families import FAMILIES, LAYER_LIST, LAYERS, OTHER_SIZES

_ROUTED = ("mixtral", "qwen3_moe", "gpt_oss")
DROPOUT = "dropout (Phi)"
_PLAIN = tuple(name for name in FAMILIES if name not in OTHER_SIZES)


def random_case(seed: int) -> Case:
    """Two or three strategies in turn on 2 to 8 ranks, and each option with a chance of its own."""
    rng = random.Random(seed)
    num_ranks = rng.choice((2, 3, 4, 4, 4, 5, 6, 8))
    family = rng.choice((*_PLAIN, LAYER_LIST, DROPOUT))
    sliced = family not in (LAYER_LIST, DROPOUT) and rng.random() < 0.4
    recompute = family != LAYER_LIST and rng.random() < 0.2
    strategies = tuple(_strategy(rng, num_ranks, plain=family == LAYER_LIST) for _ in range(rng.randint(2, 3)))
    phases = rng.random() < 0.2
    if phases:
        strategies = (*strategies[1:], f"{_strategy(rng, num_ranks, plain=True)} then {strategies[0]}")
    case = Case(
        f"random {seed}", family, strategies, steps=3, slices=sliced, recompute=recompute,
        lengths=tuple(min(260, 2 + int(rng.lognormvariate(3, 1.2))) for _ in range(60)),
        tokens_per_step=400 if phases else rng.choice((40, 200, 400)),
        clip=rng.choice((0.0, 0.1)),
        loss_norm=rng.choice(("token", "token", "sequence", "micro_batch")),
        masked_labels=rng.random() < 0.3,
        activation_checkpointing=family != LAYER_LIST and rng.random() < 0.25,
        token_sharding=rng.random() < 0.6,
        node_size=rng.choice((None, None, 2, 3)),
    )  # fmt: skip
    case = replace(case, functions=rng.choice(("auto", "recompute", "off")))
    if family == DROPOUT:
        case = replace(case, draws=True, frozen=NO_GRADIENT)
    elif family != LAYER_LIST and rng.random() < 0.2:
        case = replace(case, frozen=rng.choice((("embed_tokens", "layers.0."), ("q_proj", "norm"), ("mlp",))))
    # In BF16 rounding sends a token to other experts, and gradients of routers differ by a fifth.
    kind = rng.choice((FLOAT64, FLOAT64, FLOAT32, FLOAT32 if family in _ROUTED else BFLOAT16))
    if kind == FLOAT32:
        return replace(case, dtype=FLOAT32, optimizer="SGD")
    if kind == BFLOAT16:
        return replace(case, dtype=BFLOAT16, wire=rng.choice((None, "fp32")), grad_accum=rng.choice((None, "bf16")))
    return case


def _strategy(rng: random.Random, num_ranks: int, *, plain: bool) -> str:
    """Pipelines that share the ranks out; `plain` ones run whole sequences under 1F1B."""
    left, pipelines = num_ranks, []
    while left:
        tp, sp, pp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 2, 3, 4))
        if tp * sp * pp > left or tp * sp > 4:
            continue
        left -= tp * sp * pp
        schedules = ["", ""] if plain else ["", "/list", *(["/zb-h1"] if pp > 1 else []), *["/v"] * (2 * pp <= LAYERS)]
        pipelines.append(f"tp{tp}pp{pp}sp{sp}" + rng.choice(schedules))
    return " + ".join(pipelines)
