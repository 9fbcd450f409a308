"""Costs from a model's sizes and rough speeds, for when nothing has been measured: times and activations. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_hydra.costs.cost_table import CAUSAL_FLOPS, CostTable, SchemeCost, known_devices, peak_tflops
from ds_hydra.costs.memory import Activations
from ds_hydra.pipe.head_sharing import Boxes, from_other_nodes, head_parts, near_ranks, state_bytes
from ds_hydra.pipe.model_plan import ModelPlan, ParamSpec
from ds_hydra.pipe.shape import ParallelScheme
from ds_hydra.zero_hetero.errors import ConfigError
from ds_hydra.zero_hetero.nodes import NodeSize


@dataclass(frozen=True, slots=True)
class AssumedDevice:
    """What an estimate takes a device to do; `name` for a reader."""

    name: str
    flops: float  # in a second
    inside: float  # bytes/s to ranks of its node
    between: float  # bytes/s to other nodes

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.flops / 1e12:.0f} TFLOP/s, {self.inside / 1e9:.0f} GB/s within a node and "
            f"{self.between / 1e9:.0f} between nodes"
        )


_SHARE = 0.48  # of the data sheet's peak, as of an A100
ASSUMED = {
    "cuda": AssumedDevice(f"an A100 at {_SHARE} of its peak", 1.5e14, 1.5e11, 2.5e10),
    "cpu": AssumedDevice("a CPU core", 2e10, 1e9, 1e9),
}
"""Rough speeds, by which a job without a measured table is planned."""


def assumed_device(name: str) -> AssumedDevice:
    """A GPU that is called so. ConfigError where its data sheet is not known."""
    peak = peak_tflops(name)
    if peak is None:
        raise ConfigError(f"the peak of a {name!r} is not known here: name one of {', '.join(known_devices())}, or "
                          "measure it by ds-hydra profile")  # fmt: skip
    return replace(ASSUMED["cuda"], name=f"{name} at {_SHARE} of its peak", flops=_SHARE * peak * 1e12)


_TP_EFFICIENCY = (1.0, 0.97, 0.93, 0.87, 0.80)  # share of the peak left at tp = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Transformer that its cost depends on; `params` counts all parameters, `active` those that a token
    is computed with and `width` the features of all query heads (0: all of them, and `hidden`)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    params: int
    boxes: Boxes = ()  # of each layer, modules that run once for each sequence
    active: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        for key in (key for key in self.__slots__ if key not in ("boxes", "active", "width")):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model shape: {key} must be a whole number of at least 1 but is {value!r}")

    @property
    def attending(self) -> int:
        """Layers whose time grows with the square of the length."""
        return self.layers - sum(bool(of) and all(box.recurrent for box in of) for of in self.boxes)

    def computed_again(self, tp: int, sp: int) -> float:
        """Elements of matrices in boxes that the ranks of a stage multiply beyond once for each token, together."""
        return sum(box.weights * (tp * sp * box.share(tp, sp) - 1.0) for of in self.boxes for box in of)


def analytic_cost_table(
    shape: ModelShape,
    schemes: Iterable[ParallelScheme],
    context_length: int,
    *,
    device_flops: float = 1.5e14,
    link_bytes_per_second: float = 1.5e11,
    between_bytes_per_second: float | None = None,
    node_size: int | None = None,
    layer_overhead_ms: float = 0.5,
) -> CostTable:
    """Costs from the model's FLOPs, for when nothing has been measured.

    6 FLOPs per active parameter and token, 7 * width * length^2 per layer for causal attention (forward and
    backward), the TP all-gathers and reduce-scatters, the Ulysses all-to-alls and what whole experts of all ranks of a
    stage are given and give back in every layer at `link_bytes_per_second`, and a launch overhead per layer. Modules
    that run once for each sequence are computed by each rank that does not share their heads, recurrent ones in a time
    that grows with the length alone. What of an all-to-all leaves a node of `node_size` ranks (None: nothing does) goes
    at `between_bytes_per_second`. Memory is no limit: a micro-batch holds up to `context_length` tokens.
    """
    if context_length < 1:
        raise ConfigError(f"context_length must be at least 1 token but is {context_length}")
    costs = []
    for scheme in dict.fromkeys(schemes):
        # tp = 1, 2, 4, 8, 16 have bit lengths 1 to 5; beyond 16 the last figure stands.
        efficiency = _TP_EFFICIENCY[min(scheme.tp.bit_length() - 1, len(_TP_EFFICIENCY) - 1)]
        speed = device_flops * efficiency * scheme.num_ranks / 1e3  # FLOPs per ms, all ranks of the pipeline
        moved = 0.0  # seconds per token, layer and rank, over tp and sp
        if scheme.tp > 1:
            moved += 16.0 * shape.hidden * (scheme.tp - 1) / scheme.tp / link_bytes_per_second
        if scheme.sp > 1:
            width = scheme.tp * scheme.sp
            crosses = node_size is not None and width > node_size and between_bytes_per_second is not None
            sent, leaves = _sent_over_tokens(shape, scheme, node_size if crosses else None)
            moved += (sent - leaves) / link_bytes_per_second
            moved += leaves / (between_bytes_per_second or link_bytes_per_second)
        if scheme.ep > scheme.tp:  # tokens of all ranks gathered and results scattered, there and back
            moved += 8.0 * shape.hidden * (scheme.sp - 1) / link_bytes_per_second
        stage_layers = shape.layers / scheme.pp
        comm = 1e3 * stage_layers * moved / scheme.sp
        costs.append(
            SchemeCost(
                scheme,
                a=CAUSAL_FLOPS * (shape.width or shape.hidden) * shape.attending / speed,
                b=6.0 * ((shape.active or shape.params) + shape.computed_again(scheme.tp, scheme.sp)) / speed + comm,
                c=layer_overhead_ms * stage_layers,
                max_length=context_length,
                util_length=min(context_length, 256 * scheme.tp * scheme.sp),
            )
        )
    return CostTable(tuple(costs), source="analytic")


def _sent_over_tokens(shape: ModelShape, scheme: ParallelScheme, node_size: int | None) -> tuple[float, float]:
    """Bytes that a sequence parallel rank is sent for each of its tokens, in the mean of layers, and those of them that
    come from other nodes, if there are any: heads and what becomes of them, or all tokens into a box, and out of it the
    sum of what ranks make of its heads where they share them."""
    tp, sp = scheme.tp, scheme.sp
    outside, near = 1.0 - (node_size or tp * sp) / (tp * sp), near_ranks(sp, tp, node_size)
    boxed = [any(box.heads.shared_by(tp, sp)[1] > 1 for box in of) for of in shape.boxes if of]
    of_boxes = 4.0 * shape.hidden * (sp - 1) * sum(1 + shares for shares in boxed)
    parts = head_parts(sp, shape.heads, shape.kv_heads, tp, near=near, sliced=scheme.pp > 1)
    # Queries and outputs go to the ranks that share the heads, keys and values to all that share the queries besides.
    sent = 8.0 * (parts - 1) / parts + 8.0 * (sp // parts - 1.0 / parts)
    leaves = outside * (16.0 if parts == sp else sent)
    if parts == near:  # [Note: heads inside a node]
        leaves = 8.0 * sum(from_other_nodes(sp // near))
    if near and parts in (near, sp):  # [Note: heads over nodes]
        sent = 16.0 * (near - 1) / near + leaves
    of_heads = (shape.width or shape.hidden) / tp * (shape.layers - len(boxed))
    return (sent * of_heads + of_boxes) / shape.layers, (leaves * of_heads + outside * of_boxes) / shape.layers


class LayerSizes(NamedTuple):
    """What a token is computed with in a layer."""

    width: int  # features of all query heads
    inner: int  # of its MLP, or of the experts that it runs through together
    chosen: float = 1.0  # share of the stacked experts that it runs through
    num_experts: int = 0  # of a stack


def layer_sizes(plan: ModelPlan, hidden: int, config: object) -> LayerSizes:
    """The sizes that the config of a Hugging Face model says, or else usual ones; of its last layer where layers
    differ."""
    known = dict(getattr(config, "__dict__", {}))  # some configs refuse to be asked where layers differ

    def number(*keys: str) -> int:
        return next((n for key in keys if isinstance(n := known.get(key), int) and n > 0), 0)

    inner = known.get("intermediate_size") or known.get("n_inner") or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else inner  # of each layer
    head = number("head_dim")
    if latent := number("qk_nope_head_dim"):
        head = (latent + number("qk_rope_head_dim") + number("v_head_dim")) // 2  # keys and values differ
    width = head * plan.num_heads or hidden
    experts, chosen = number(*_EXPERTS), number(*_CHOSEN)
    stacks = [p.numel for p in _params(plan) if _is_stack(p, experts) and p.name in plan.layers[-1]]
    if not (stacks and chosen):
        return LayerSizes(width, inner)
    share = min(1.0, chosen / experts)
    shared = number("shared_expert_intermediate_size") or number("n_shared_experts") * number("moe_intermediate_size")
    # Gate, up and down of an expert are three matrices of its width.
    return LayerSizes(width, round(share * sum(stacks) / (3 * hidden)) + shared, share, experts)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")


def _params(plan: ModelPlan) -> list[ParamSpec]:
    return [param for bucket in plan.buckets for param in bucket.params]


def _is_stack(param: ParamSpec, experts: int) -> bool:
    return len(param.shape) == 3 and param.shape[0] == experts > 1


def model_shape(plan: ModelPlan, hidden: int, vocab: int | None, config: object = None) -> ModelShape:
    """Sizes that the analytic cost depends on, read off the parameters, and off the model's config if there is one."""
    params, layer = _params(plan), layer_sizes(plan, hidden, config)
    largest = max((max(param.shape, default=1) for param in params if param.name in plan.layers[-1]), default=hidden)
    # A row of the embeddings is looked up, which computes nothing; as weights of the head they are a matrix again.
    multiplied = plan.last.union(*plan.layers)
    active = sum(
        param.numel * (layer.chosen if _is_stack(param, layer.num_experts) else 1.0)
        for param in params if param.name in multiplied
    )  # fmt: skip
    return ModelShape(
        hidden=hidden,
        layers=plan.num_layers,
        heads=max(1, plan.num_heads),
        kv_heads=max(1, plan.num_kv_heads),
        intermediate=largest,
        vocab=vocab or 1,
        params=sum(param.numel for param in params),
        boxes=plan.boxes,
        active=round(active),
        width=layer.width,
    )


def flops_of(plan: ModelPlan, hidden: int, lengths: Iterable[int]) -> float | None:
    """Floating point operations that a model needs to train on sequences of these lengths; None where it is not known.

    6 for each token and weight of a matrix, and 6 * hidden * length^2 in each layer for causal attention, as model
    FLOPs are usually counted: what is computed again is not in it. Nothing is said of models with experts, of which a
    token uses some, nor of those with frozen parameters.
    """
    params = _params(plan)
    if any(len(p.shape) > 2 or ".experts." in p.name or not p.trainable for p in params) or not plan.num_heads:
        return None
    # A row of the embeddings is looked up, which computes nothing; as weights of the head they are a matrix again.
    multiplied = plan.last.union(*plan.layers)
    weights = sum(param.numel for param in params if len(param.shape) == 2 and param.name in multiplied)
    return sum(6.0 * length * (weights + hidden * plan.num_layers * length) for length in lengths)


def estimate_activations(
    hidden: int, intermediate: int, heads: int, kv_heads: int, param_bytes: int, tp: int, sp: int, *,
    checkpointing: bool = False, token_sharding: bool = False, short_norms: bool = False, of_gates: int = 4,
    node_size: NodeSize | None = None, width: int = 0, boxes: Boxes = (), tile_rows: int = 0, fetched: bool = False,
    summed: bool = False, keep_attention: bool = False,
) -> Activations:  # fmt: skip
    """Activations of a Llama-like layer with fused attention, for when none were measured.

    Per token a layer keeps: its two normalised inputs with their FP32 copies and statistics, q, k, v and the attention
    output, gate, up and their product, residuals; TP divides what lies between its two collectives, and with token
    sharding all of it, SP all of it. What enters a block has all tokens while it is used, sharded or not. With
    `short_norms` a norm keeps its input and its output alone; `of_gates`: tensors that an MLP keeps between its linear
    layers, gate and up, and their product, and what the activation made. `width`: features of all query heads, if they
    are others than `hidden`.
    With checkpointing a layer keeps its input only, and what one layer keeps becomes the transient. A weight's gradient
    needs the input and the gradient of the output of its layer. Slices keep FP32 gradients of their keys and values,
    and with checkpointing the keys and values themselves, which no other backward needs. Without it a layer may still
    be computed again for one micro-batch or another: it keeps its input then, and keys and values for later slices.
    Ranks of several nodes of `node_size` may need more keys [Note: heads inside a node].
    With `tile_rows` an MLP of a layer that is computed again is there for so many rows at a time, and so are rows that
    tensor parallel ranks gather; with the sums of its weights' gradients, unless these are `summed` where they stay.
    What is `fetched` is on the device twice: one layer's input that is used, and one that comes; and so are keys and
    values of earlier slices. With `keep_attention` attention's output stays, and a log-sum-exp for each head.

    A layer with boxes has them in place of q, k, v and the attention output: by kernels that keep no more than the
    inputs of matrices and what comes out of them, each before and after what follows it element by element, for all
    tokens of the row. It has no keys and values, but states. What is said of a layer is the mean of them all.
    """
    width, count = width or hidden, max(1, len(boxes))
    attends = sum(not of for of in boxes) / count if boxes else 1.0  # of the layers
    boxed = [sum(2.0 * box.weights / hidden * box.share(tp, sp) for box in of) * param_bytes for of in boxes]
    gathered = (1.0 - attends) * hidden * (1.0 - 1.0 / sp) * param_bytes
    parts = 1 if sp == 1 else head_parts(sp, heads, kv_heads, tp, near=near_ranks(sp, tp, node_size), sliced=True)
    # Of all ranks: a key head has copies where ranks share it, and all have where they share the queries.
    key_value = 2.0 * max(kv_heads, tp * parts) / heads * width * (sp // parts)
    shards = tp if token_sharding else 1
    whole = 4 * hidden * param_bytes + (0 if short_norms else 2 * hidden * 4)
    # Where ranks share a row's queries, the first ones compute more than they hold [Note: shared queries].
    attention, mlp = (2 * width * math.sqrt(sp // parts) + key_value) * param_bytes, 4 * intermediate * param_bytes
    kept = attends * attention + of_gates * intermediate * param_bytes
    of_boxes = sum(boxed) / count + gathered
    layer = (whole / shards + kept / tp) / sp + of_boxes
    stream = hidden * param_bytes / (sp * shards)
    # Of the layer that needs the most.
    transient = (mlp / tp + whole) / sp + max(attention / (tp * sp) if attends else 0.0, *boxed, 0.0)
    key_value *= attends / (tp * sp)
    state = state_bytes(boxes, tp, sp) / count if boxes else 0.0
    if checkpointing:
        tile = _tile_bytes(tile_rows, hidden, intermediate / tp, param_bytes, summed) if not boxes else 0.0
        again = 4 * stream + 2 * attention / (tp * sp) if tile else transient + layer
        kept = keep_attention * attends * (width * param_bytes + 4 * heads) / (tp * math.sqrt(sp * parts))
        found = _computed_again(stream, again, tile, key_value * (param_bytes + 4), state, fetched, kept)
        return replace(found, tile_tokens=float(tile_rows * sp))
    # Inputs: normalised ones, of the attention's and the MLP's outputs. Gradients: of q, k, v, gate, up, both outputs.
    needed = (2 * hidden + attends * width + hidden) * param_bytes / (sp * shards)
    needed += ((attends * width + hidden + 3 * intermediate) / (tp * sp) + key_value) * param_bytes + of_boxes / 2
    return Activations(
        layer, stream, 4 * stream, transient, until_weight=min(1.0, needed / layer), context=4 * key_value / layer,
        recomputed=(stream + key_value * param_bytes) / layer, state=state,
    )  # fmt: skip


def twin_bytes(plan: ModelPlan, sizes: LayerSizes, hidden: int, tokens: int, vocab: int, param_bytes: int) -> int:
    """Bytes of a model that runs forward and backward on so many tokens by its own code [Note: the twin]: what its
    layers keep, and either logits with what becomes of them in FP32, or logits, their gradient and a weight's, of which
    autograd may make another before it hands it out."""
    heads = max(1, plan.num_heads)
    layer = estimate_activations(
        hidden, sizes.inner, heads, plan.num_kv_heads or heads, param_bytes, 1, 1, width=sizes.width, boxes=plan.boxes
    ).layer
    largest = max(param.numel for param in _params(plan))
    ends = max(tokens * vocab * (param_bytes + 16), 2 * (tokens * vocab + largest) * param_bytes)
    return round(tokens * plan.num_layers * layer) + ends


def _computed_again(
    stream: float, again: float, tile: float, slices: float, state: float, fetched: bool, kept: float
) -> Activations:
    """Of layers that keep their input, `stream`, on the device or the host, and there what is `kept` of attention;
    `slices` keep so much besides."""
    if not fetched:
        layer = stream + kept
        return Activations(layer, stream, 4 * stream, again - kept, 0.0, slices / layer, 1.0, state, tile=tile)
    again += 2 * stream  # one that is used, and one that comes
    return Activations(0.0, stream, 4 * stream, again, 0.0, 2 * slices / again, 1.0, state, tile=tile, host=stream)


def _tile_bytes(rows: int, hidden: int, intermediate: float, param_bytes: int, summed: bool) -> float:
    """Of a gated MLP that runs on so many rows, forward and backward, with the sums of its weights' gradients, if they
    are not `summed` elsewhere."""
    sums = 0.0 if summed or not rows else 3 * hidden * intermediate * (4 + param_bytes)
    return rows * (2 * hidden + 7 * intermediate) * param_bytes + sums
