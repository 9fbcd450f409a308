"""Prints which classes of transformers train with images or audio, and why others do not.

    python -m tools.image_classes [--kinds tp1,tp2] [CLASS ...]

A class is tried as a job tries it before step 0: its default config on the meta device, and a small copy with
made-up images or clips. A line is `NAME equal: KINDS` with what differs elsewhere, or `NAME refused: REASON`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_hydra.images.find import subject_of
from ds_hydra.images.job import KINDS, verdicts
from ds_hydra.zero_hetero.errors import ConfigError


def classes() -> dict[str, str]:
    """Model types and the classes that transformers has for images or audio, and text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as NAMES

    return {**{kind: name if isinstance(name, str) else name[0] for kind, name in NAMES.items()}, **AUDIO}


# Of audio and text, which that mapping of transformers has not.
AUDIO = {
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "musicflamingo": "MusicFlamingoForConditionalGeneration",
    "vibevoice": "VibeVoiceForConditionalGeneration",
}


# Of released models, where the default config makes no model or one whose widths do not fit each other.
_M_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
RELEASED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "voxtral": {"": {"audio_token_id": 24}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"sliding_attention": {**_M_ROPE, "mrope_section": [24, 20, 20]}, "full_attention": None}
        }
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_M_ROPE, "mrope_section": [22, 22, 20]}}},
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 12,
            "mlp_layer_types": ["dense"] + 11 * ["sparse"],
            "num_experts_per_tok": 6,
            "n_routed_experts": 64,
        }
    },
    "granite4_vision": {
        "": {
            "deepstack_layer_map": [(-2, 0), (-1, 2)],
            "spatial_target_layers": [1, 3],
            "downsample_rate": "1/2",
            "image_grid_pinpoints": [[224, 448], [448, 224]],
        }
    },
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": {**_M_ROPE, "mrope_section": 4 * [16]}}},
    **{
        name: {"": {"image_token_id": 120}} for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni")
    },
    **{
        name: {"": {"vision_start_token_id": 118, "audio_start_token_id": 119}}
        for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
    "inkling_mm_model": {"vision_config": {"num_hidden_layers": 4}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
}


def default_model(kind: str) -> Any:
    """A model of the class's default config, with an encoder of images, on the meta device."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of = CONFIG_MAPPING[kind]
    config = of()
    parts = {name: part() for name, part in getattr(of, "sub_configs", {}).items()
             if ("vision" in name or "audio" in name) and getattr(config, name, None) is None}  # fmt: skip
    if parts:
        config = of(**parts)
    for name, values in RELEASED.get(kind, {}).items():
        for key, value in values.items():
            setattr(getattr(config, name) if name else config, key, value)
    with torch.device("meta"):
        return getattr(transformers, classes()[kind])(config)


def verdict_of(kind: str, kinds: Sequence[str] = KINDS) -> str:
    """What is said of a class."""
    try:
        model = default_model(kind)
    except Exception as error:
        return f"not tried: its default config makes no model ({type(error).__name__}: {str(error)[:120]})"
    try:
        subject = subject_of(model)
        found = verdicts(subject, kinds)
    except ConfigError as error:
        text = str(error).removeprefix("hydra.images: ").partition(": ")[2] or str(error)
        return f"refused: {text.rpartition('; ')[0] or text}"
    off = "; ".join(f"{one}: {why}" for one, why in found.items() if why)
    equal = ", ".join(one for one, why in found.items() if not why)
    if found.get("tp1"):
        return f"refused: {off}"
    seam = subject.seam
    more = ("; videos too" if subject.video else "") + ("; audio" if seam.audio else "")
    return (
        f"equal: {equal}" + (f" (not {off})" if off else "") + more + (seam.unheard and f"; audio not: {seam.unheard}")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of pipelines, such as tp1,pp2")
    given = parser.parse_args(arguments)
    kinds = given.kinds.split(",")
    said = []
    for kind in given.classes or classes():
        said.append(verdict_of(kind, kinds))
        print(f"{kind:24} {said[-1]}".replace("\n", " "), flush=True)
    print(f"{sum(one.startswith('equal') for one in said)} of {len(said)} classes train with images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
