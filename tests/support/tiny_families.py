"""Every causal language model class of transformers, tiny; and what training one in stages comes to."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ds_hydra.pipe.models import meta_copy
from ds_hydra.pipe.models.adapted import base_of
from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.models.positions import special_tokens
from ds_hydra.pipe.placement import Strategy, place_pipeline
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.runs import Data, Outcome, compare, doubled, finite, run_pipeline
from ds_hydra.self_check.shrink import shrunk_config
from ds_hydra.self_check.trial import tried_data
from ds_hydra.zero_hetero.errors import ConfigError, PlanError
from tests.support.case import UNUSUAL
from tests.support.changed_models import CHANGED, CHANGED_LINEARS
from tests.support.families import ADAPTED, ADAPTED_WITHOUT_TP, build_model

# --- Every causal language model class of the installed transformers, tiny: a class name in, a model out. Six
# attention heads and three key/value heads of eight features, four layers: what three ranks can share and four
# stages can cut. Sizes go by the rules of the self-check's small copies; a few kinds need settings of their
# own.
HEADS, KV_HEADS, LAYERS, HEAD_DIM = 6, 3, 4, 8
_DECODER: dict[str, Any] = {"is_decoder": True}
# What a token sees of those before it is limited, and every limit is to be smaller than the sequences that are tried,
# or nobody would notice what it does: indexers that keep a few tokens, chunks of recurrences, windows.
_INDEXER: dict[str, Any] = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}
_SSM: dict[str, Any] = {"mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_heads": 12, "mamba_d_head": 8}
# Model type -> what its tiny config needs beside the sizes.
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": _DECODER | {"attention_type": "original_full"},
    "camembert": _DECODER,
    "data2vec-text": _DECODER,
    "electra": _DECODER,
    "ernie": _DECODER,
    "megatron-bert": _DECODER,
    "rembert": _DECODER,
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": _DECODER,
    "roformer": _DECODER,
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": _DECODER | {"default_language": "en_XX"},
    "reformer": _DECODER,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffllama": {"num_key_value_heads": 6},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "full_attn_idxs": [1, 3]},
    "axk2": _INDEXER,
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "hy_v4": _INDEXER,
    "deepseek_v4": {
        "head_dim": 8,
        "index_topk": 4,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "doge": {"keep_window_size": 4},
    "minimax": {"block_size": 4},
    "llama4_text": {"floor_scale": 4},
    "bamba": _SSM | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _SSM | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": _SSM | {"mamba_d_ssm": 96},
    "jamba": {"mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
    "nemotron_h": {"chunk_size": 8, "ssm_state_size": 8, "mamba_num_heads": 16, "mamba_head_dim": 8},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 96,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 96,
        "attention_head_dim": 16,
        "n_mamba_heads": 12,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "mamba_d_state": 8,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "codegen": {"n_head": 4, "num_attention_heads": 4, "n_embd": 48, "rotary_dim": 4},
    "nemotron": {"num_key_value_heads": 3},
    "xlm": {"emb_dim": 48},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
}
_STATE = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": LAYERS, "state_size": 8}
# Model type -> all sizes of its tiny config, where it has no attention heads by which widths go.
_SIZES: Mapping[str, dict[str, Any]] = {
    "mamba": _STATE,
    "falcon_mamba": _STATE,
    "mamba2": _STATE | {"num_heads": 6, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": LAYERS, "context_length": 64},
    "xlstm": {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": LAYERS, "num_heads": 6,
              "chunk_size": 8},
    "dbrx": {
        "vocab_size": 96, "d_model": 48, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 72, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48},
    },
}  # fmt: skip
_HEADS = re.compile(r"^(n_heads?|num_heads)$|attention_heads$")
_KV_HEADS = re.compile(r"(num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups|kv_n_heads|n_kv_heads?)$")
_RATES = re.compile(r"drop(out)?|jitter")


def class_names() -> dict[str, str]:
    """Model class -> model type of its config, for every causal language model class there is; by class name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        kept = found.get(name)
        # Of several configs of one class its own, or that of its text model.
        if kept is None or _rank(name, model_type) > _rank(name, kept):
            found[name] = model_type
    return dict(sorted(found.items()))


def _rank(name: str, model_type: str) -> tuple[bool, bool]:
    return model_type.endswith("_text"), name.lower().startswith(model_type.replace("-", "").replace("_", ""))


def tiny_model(name: str, model_type: str) -> Any:
    """A model of the class in FP64 with values whose errors show; errors of its config or constructor pass through."""
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **_SIZES.get(model_type, {}))
    kind = getattr(transformers, name)
    if kind.config_class is not type(config):
        config = next(part for part in _parts(config) if type(part) is kind.config_class)
    for part in _parts(config):
        _set_heads(part)
    if model_type not in _SIZES:
        config = shrunk_config(config, LAYERS, 1)
    for key, value in _SETTINGS.get(model_type, {}).items():
        vars(config)[key] = value
    torch.manual_seed(0)
    extra = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float64, **extra).double()
    return _spread(model)


def _parts(config: Any) -> Iterator[Any]:
    """A config and those within it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _set_heads(config: Any) -> None:
    values = vars(config)
    for key, value in list(values.items()):
        if isinstance(value, float) and _RATES.search(key):
            values[key] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            if _KV_HEADS.search(key) and value > 1:
                values[key] = KV_HEADS
            elif _HEADS.search(key) and value > 1:
                values[key] = HEADS


def _spread(model: Any) -> Any:
    """Norm weights and biases off their constants, matrices large enough that attention looks somewhere."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.1 if parameter.dim() < 2 else 0.7 * parameter.shape[-1] ** -0.5)
    return model


# --- A class of language models in, what training a tiny model of it in stages comes to out: equal, refused, or
# wrong.
EXPECTED = Path(__file__).with_name("families_expected.json")
# What the list calls a pipeline -> its shape, for four layers.
SHAPES: Mapping[str, str] = {
    "tp3": "tp3",
    "pp3": "(tp1[0:1] > tp1[1:3] > tp1[3:4])",
    "sp3": "sp3",
    "mixed": "(tp3[0:2] > sp3[2:4])",
}
_EIGHT_HEADS = {"tp2": "tp2", "mixed": "(sp2[0:1] > tp2[1:3] > tp1[3:4])"}
_WITHOUT_TP = {"pp3": SHAPES["pp3"], "mixed": "(sp2[0:1] > tp1[1:3] > sp2[3:4])"}
# Unusual models, models that their users changed or adapted: all are to be equal.
ROWS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys((*UNUSUAL, *CHANGED, *ADAPTED), _EIGHT_HEADS),
    **dict.fromkeys((*CHANGED_LINEARS, *ADAPTED_WITHOUT_TP), _WITHOUT_TP),
}
EQUAL, DIFFERS, CRASHES = "equal", "differs", "crashes"
# What a refusal's sentence must hold -> the reason that the list gives.
REASONS = (
    ("no tiny model", "a tiny config of it is at odds with itself"),
    ("once for each sequence", "its layers cannot run once for each sequence of a pack"),
    ("is not causal", "its attention has a feature that packs lack"),
    ("draws random numbers|of type 'dynamic'", "plain training of it depends on chance or order"),
    ("with tp1 for this model", "tensor parallel ranks cannot share it"),
    ("with pp1 for this model", "its layers cannot be cut apart"),
    (
        "encoder-decoder|no language modelling head|cannot run one packed|module list|numbers the tokens"
        "|computes its logits in",
        "it is no language model of one stack of layers over tokens",
    ),
)


def drawn_names(one_in: int = 10, seed: int = 7) -> list[str]:
    """One in `one_in` of the classes, drawn by a fixed seed."""
    names = list(class_names())
    return sorted(random.Random(seed).sample(names, len(names) // one_in))


def expected() -> dict[str, Any]:
    """The committed list: class -> a word for all shapes, or a word for each."""
    found: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    return found


def judge(name: str, shapes: Mapping[str, str] | None = None) -> tuple[str, dict[str, str]]:
    """The name of a class or of one of ROWS, and by shape "equal", a reason, or what went wrong; "seconds" of all."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    verdicts = _verdicts(name, shapes or ROWS.get(name, SHAPES))
    return name, verdicts | {"seconds": f"{time.perf_counter() - began:.1f}"}


def short(verdict: str) -> str:
    """A verdict without its sentence."""
    return verdict.partition(": ")[0]


def entry(verdicts: Mapping[str, str]) -> str | dict[str, str]:
    """What the list says of a class."""
    each = {shape: short(verdict) for shape, verdict in verdicts.items() if shape != "seconds"}
    return next(iter(each.values())) if len(set(each.values())) == 1 else each


def _verdicts(name: str, shapes: Mapping[str, str]) -> dict[str, str]:
    try:
        model = base_of(build_model(name, torch.float64)) if name in ROWS else tiny_model(name, class_names()[name])
    except Exception as error:
        return dict.fromkeys(shapes, _reason(f"no tiny model ({type(error).__name__}: {error})"))
    try:
        with doubled():
            by_numbers = CausalLM(model, StageOptions(token_sharding=True)).facts
            with mock.patch.object(meta_copy, "FEW_PARAMETERS", 0):  # as large models are looked at
                source = CausalLM(model, StageOptions(token_sharding=True))
    except Exception as error:
        return dict.fromkeys(shapes, _told(error))
    # Numbers choose experts, by rounding alone where they tie, so layers may run unlike each other that are alike; then
    # more of them are examined.
    told, expected = (replace(one, flow=replace(one.flow, ran=())) for one in (by_numbers, source.facts))
    if told != expected:
        return dict.fromkeys(shapes, f"{DIFFERS}: runs with numbers tell something else than those without")
    data = tried_data(96, [(6, 33, 2), (12,)], special=special_tokens(model), left_out=source.uncounted)
    try:
        right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
        if not finite(right):
            raise ValueError("its loss is not finite")
    except Exception as error:
        return dict.fromkeys(shapes, _reason(f"no tiny model ({type(error).__name__}: {error})"))
    return {name: _run(source, right, data, shape) for name, shape in shapes.items()}


def _run(source: CausalLM, right: Outcome, data: Data, shape: str) -> str:
    try:
        pipeline = place_pipeline(PipelineShape.parse(shape), 0, source.plan.num_layers)
        source.plan.check(Strategy((pipeline,)))
        outcome = run_pipeline(source, pipeline, data)
    except Exception as error:
        return _told(error)
    found = compare(right, outcome)
    return EQUAL if found.what is None else f"{DIFFERS}: {found.what}"


def _told(error: Exception) -> str:
    if isinstance(error, ConfigError | PlanError):
        return _reason(str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{CRASHES}: {type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"


def _reason(text: str) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, text):
            return f"{reason}: {text}"
    return f"{CRASHES}: a refusal without a reason of the list: {text}"


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=20) as pool:
        found = {name: entry(verdicts) for name, verdicts in pool.imap(judge, class_names())}
    EXPECTED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
