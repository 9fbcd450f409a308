"""Chats about pictures in files, a tiny Qwen3-VL, and its own processor, which reads both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pictures
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.support.image_models import MODELS, image_model

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>")  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>{% endif %}\n{% endfor %}"
)
_PICTURES = (1, 2, 1, 0, 1, 3)  # of a chat


class _WithoutVideos(Qwen3VLProcessor):  # type: ignore[misc]  # transformers has no types here
    """Its processor of videos needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


def processor() -> Any:
    """Qwen3-VL's own, with a letter for a token."""
    letters = [*map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate((*_SPECIAL, *letters))}, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_SPECIAL[0], eos_token=_SPECIAL[2], extra_special_tokens=_SPECIAL[1:]
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 2048}
    )
    return _WithoutVideos(images, fast, None, chat_template=_TEMPLATE)


def chat_model(dtype: torch.dtype = torch.float64) -> Any:
    """A Qwen3-VL of the processor's tokens."""
    ids = {
        f"{name}_token_id": _SPECIAL.index(f"<|{token}|>")
        for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
                            ("vision_end", "vision_end"))
    }  # fmt: skip
    text = {**MODELS["qwen3_vl"][2]["text_config"], "max_position_embeddings": 4096}
    return image_model("qwen3_vl", dtype, **ids, text_config=text)


def chats(folder: Path, count: int = 24) -> list[dict[str, Any]]:
    """Chats about no, one and several pictures of different sizes; `images` are their files, in a folder."""
    draw, rows = np.random.default_rng(3), list[dict[str, Any]]()
    for number in range(count):
        paths = [str(folder / f"{number}_{which}.png") for which in range(_PICTURES[number % len(_PICTURES)])]
        for path in paths:
            width, height = draw.integers(12, 40, 2)
            Pictures.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path)
        answer = "It is a " + "cat " * (number % 5 + 1)
        rows.append({"images": paths, "messages": [{"role": "user", "content": f"What is on these {len(paths)}?"},
                                                   {"role": "assistant", "content": answer}]})  # fmt: skip
    return rows
