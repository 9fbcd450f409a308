"""Tiny models with encoders of images or audio, batches for them, and what they make and draw of these in one process.

What an encoder draws there follows the rule of images/stage.py, found by other means: all images of a sequence in one
run, whose parts of each tensor are drawn for one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from ds_hydra.pipe.dropout import keep_mask, place_key, sequence_key, step_key, token_keys
from ds_hydra.pipe.loss import IGNORED
from ds_hydra.testing.one_process import drawing

WIDTH, WORDS, IMAGE, VIDEO, AUDIO = 32, 128, 120, 121, 124
FILM = 10  # and more: a width of a video, with two frames of what remains
HEARD = 20  # and more: a width of a clip, of one step of frames and what remains
_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 512, "head_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_QWEN: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 122, "vision_end_token_id": 123}

_OMNI_EAR = {"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
             "num_mel_bins": 8, "n_window": 8, "max_source_positions": 32, "output_dim": WIDTH}  # fmt: skip

# Name -> (class, model type, settings).
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl", {
        **_TOKENS, "text_config": {**_TEXT, "rope_parameters": _MROPE, "model_type": "qwen2_vl_text"},
        "vision_config": {**_QWEN, "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2}}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {  # a window has 4 x 4 patches
        **_TOKENS, "text_config": {**_TEXT, "rope_parameters": _MROPE, "model_type": "qwen2_5_vl_text"},
        "vision_config": {**_QWEN, "hidden_size": WIDTH, "intermediate_size": 48, "out_hidden_size": WIDTH,
                          "window_size": 16, "fullatt_block_indexes": [1]}}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl", {
        **_TOKENS, "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {**_QWEN, "hidden_size": WIDTH, "intermediate_size": 48, "out_hidden_size": WIDTH,
                          "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5", {
        **_TOKENS, "text_config": {
            **_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}, "linear_num_key_heads": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "vision_config": {**_QWEN, "hidden_size": WIDTH, "intermediate_size": 48, "out_hidden_size": WIDTH,
                          "num_position_embeddings": 64}}),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4", {
        "image_token_id": IMAGE, "video_token_id": 121, "audio_token_id": 122, "boi_token_id": 123,
        "eoi_token_id": 124, "boa_token_id": 125, "eoa_token_index": 126, "text_config": {
            **_TEXT, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS, "num_kv_shared_layers": 0,
            "global_head_dim": 8, "use_bidirectional_attention": "vision"},
        "vision_config": {**_VIT, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
                          "position_embedding_size": 64}}),
    "llava": ("LlavaForConditionalGeneration", "llava", {
        "image_token_index": IMAGE, "image_seq_length": 16, "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VIT, "model_type": "clip_vision_model", "projection_dim": WIDTH}}),
    "internvl": ("InternVLForConditionalGeneration", "internvl", {
        "image_token_id": IMAGE, "image_seq_length": 4, "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VIT, "image_size": [28, 28], "patch_size": [7, 7], "hidden_dropout_prob": 0.0}}),
    "smolvlm": ("SmolVLMForConditionalGeneration", "smolvlm", {
        "image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0, "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VIT, "model_type": "smolvlm_vision"}}),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3", {
        "image_token_index": IMAGE, "image_token_id": IMAGE, "mm_tokens_per_image": 4,
        "text_config": {**_TEXT, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6,
                        "query_pre_attn_scalar": 8},
        "vision_config": {**_VIT, "model_type": "siglip_vision_model"}}),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "qwen2_audio", {
        "audio_token_index": AUDIO, "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
                         "num_mel_bins": 8, "max_source_positions": 16}}),
    "qwen3_asr": ("Qwen3ASRForConditionalGeneration", "qwen3_asr", {
        "audio_token_id": AUDIO, "text_config": {**_TEXT, "model_type": "qwen3"},
        "audio_config": {**_OMNI_EAR, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 8}}),
    "qwen_omni": ("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker", {
        "image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": AUDIO,
        "vision_start_token_id": 122, "vision_end_token_id": 123, "audio_start_token_id": 125,
        "audio_end_token_id": 126, "text_config": {**_TEXT, "rope_parameters": _MROPE, "rope_scaling": _MROPE},
        "audio_config": _OMNI_EAR,
        "vision_config": {**_QWEN, "hidden_size": WIDTH, "intermediate_size": 48, "out_hidden_size": WIDTH,
                          "fullatt_block_indexes": [1], "window_size": 16}}),
    "paligemma": ("PaliGemmaForConditionalGeneration", "paligemma", {
        "image_token_index": IMAGE, "image_token_id": IMAGE, "projection_dim": WIDTH,
        "text_config": {**_TEXT, "model_type": "gemma"},
        "vision_config": {**_VIT, "model_type": "siglip_vision_model", "projection_dim": WIDTH}}),
}  # fmt: skip


def image_model(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """A freshly made model, the same in every process, at values at which every part matters; `more` of its config."""
    of_class, kind, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, of_class)(AutoConfig.for_model(kind, **{**settings, **more})).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else parameter.double() + 0.1 * noise)
    return model.train()


class Picture(NamedTuple):
    """An image as a processor gives it, and its rows of features."""

    columns: Mapping[str, Tensor]
    rows: int


def picture(name: str, generator: torch.Generator, wide: int = 0) -> Picture:
    """An image for a model; where sizes may differ, one that is `wide` steps wider than the smallest."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name in ("qwen2_audio", "qwen3_asr") or wide >= HEARD:
        step, window = (40, 100) if name == "qwen3_asr" else (8, 32 if name == "qwen2_audio" else 1)
        held = step + step * (wide % HEARD)
        frames = -(-held // window) * window  # a processor pads to whole windows
        mask = "input_features_mask" if name == "qwen3_asr" else "feature_attention_mask"
        rows = sum(-(-min(100, held - at) // 8) for at in range(0, held, 100)) if name == "qwen3_asr" else held // 4
        return Picture({"input_features": noise(1, 8, frames), mask: (torch.arange(frames) < held).long()[None]}, rows)
    if name.startswith("qwen"):
        film, steps = divmod(wide, FILM)
        t, h, w = 1 + film, 4, 4 + 2 * steps
        columns = ("pixel_values_videos", "video_grid_thw") if film else ("pixel_values", "image_grid_thw")
        values = (noise(t * h * w, 3 * 2 * 16), torch.tensor([[t, h, w]]))
        return Picture(dict(zip(columns, values, strict=True)), t * h * w // 4)
    if name == "gemma4":  # padded to 32 patches, of which four make a row
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4 + 2 * wide)).flip(-1)
        behind = (0, 0, 0, 32 - len(places))
        return Picture({"pixel_values": noise(1, 32, 48).abs(),
                        "image_position_ids": functional.pad(places, behind, value=-1)[None]},
                       len(places) // 4)  # fmt: skip
    if name == "smolvlm":
        return Picture({"pixel_values": noise(1, 3, 28, 28),
                        "pixel_attention_mask": torch.ones(1, 28, 28, dtype=torch.bool)}, 4)  # fmt: skip
    return Picture({"pixel_values": noise(1, 3, 28, 28)}, 16 if name == "llava" else 4)


class ImageSample(NamedTuple):
    """A sequence with its images."""

    input_ids: Tensor
    labels: Tensor
    pictures: tuple[Picture, ...]


def sample(name: str, widths: Sequence[int], text: int, seed: int) -> ImageSample:
    """A sequence of so much text between images of these widths."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(5, 100, (count,), generator=generator).tolist()

    pictures = tuple(picture(name, generator, wide) for wide in widths)
    tokens = words(3)
    for one in pictures:
        own = [AUDIO if "input_features" in one.columns else IMAGE] * one.rows
        if "pixel_values_videos" in one.columns:  # of Qwen3-VL's and later ones each frame stands for itself
            frame = [VIDEO] * (one.rows // 2)
            own = [*frame, *([] if name == "qwen2_vl" else words(1)), *frame]
        start = [125] if own[0] == AUDIO else [122]
        tokens += [*(start if name.startswith("qwen") else []), *own, *words(2)]
    ids = torch.tensor(tokens + words(text))
    marks = torch.isin(ids, torch.tensor([IMAGE, VIDEO, AUDIO]))
    return ImageSample(ids, ids.masked_fill(marks, IGNORED), pictures)


def columns_of(name: str, samples: Sequence[ImageSample]) -> dict[str, Tensor]:
    """The columns of images of a batch, as its processor collates them."""
    if name == "smolvlm":
        most = max((len(one.pictures) for one in samples), default=0)
        if not most:
            return {}
        rows = []
        for one in samples:
            empty = picture(name, torch.Generator().manual_seed(0))
            blank = {key: torch.zeros_like(column) for key, column in empty.columns.items()}
            parts = [p.columns for p in one.pictures] + [blank] * (most - len(one.pictures))
            rows.append({key: torch.cat([part[key] for part in parts]) for key in blank})
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    pictures = [one.columns for each in samples for one in each.pictures]
    names = dict.fromkeys(name for columns in pictures for name in columns)
    found = {name: [columns[name] for columns in pictures if name in columns] for name in names}
    # Clips are padded to the longest of the batch.
    longest = max((c.shape[-1] for c in found.get("input_features", [])), default=0)
    return {name: torch.cat([functional.pad(c, (0, longest - c.shape[-1])) for c in columns]
                            if name.startswith(("input_", "feature_")) else columns)
            for name, columns in found.items()}  # fmt: skip


def batch_of(name: str, samples: Sequence[ImageSample]) -> dict[str, Tensor]:
    """A batch as a collator makes it, padded behind."""
    longest = max(len(one.input_ids) for one in samples)

    def padded(of: Callable[[ImageSample], Tensor], value: int) -> Tensor:
        return torch.stack([functional.pad(of(s), (0, longest - len(of(s))), value=value) for s in samples])

    batch = {
        "input_ids": padded(lambda s: s.input_ids, 0), "labels": padded(lambda s: s.labels, IGNORED),
        "attention_mask": padded(lambda s: torch.ones_like(s.input_ids), 0), **columns_of(name, samples),
    }  # fmt: skip
    if name.startswith(("qwen", "gemma4")) and name not in ("qwen2_audio", "qwen3_asr", "qwen_omni"):
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE) + 2 * (batch["input_ids"] == VIDEO)
    if name == "gemma3":  # whose tokens of an image see each other
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return batch


def plain_loss(
    model: Any, name: str, samples: Sequence[ImageSample], weight: float, within: Callable[[int], Any] = nullcontext
) -> float:
    """The summed losses of sequences times `weight`, by the model's own forward with pixels, one at a time, `within`
    what there is for its number; its gradients add up in the parameters."""
    total = 0.0
    for number, one in enumerate(samples):
        batch = batch_of(name, [one])
        labels = batch.pop("labels")
        with within(number):
            logits = model(**batch, use_cache=False).logits
        loss = functional.cross_entropy(logits[0, :-1].double(), labels[0, 1:], ignore_index=IGNORED, reduction="sum")
        if loss.requires_grad:  # not of text that is frozen as a whole
            (loss * weight).backward()
        total += float(loss.detach()) * weight
    return total


class _OfImages(TorchFunctionMode):
    def __init__(self, keys: list[int]):
        super().__init__()
        self.keys, self.count = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._dropout(*args, **(kwargs or {})) if func is F.dropout else func(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        self.count += 1
        return torch.cat([self._of_one(*one, p) for one in zip(x.chunk(len(self.keys)), self.keys, strict=True)])

    def _of_one(self, x: Tensor, key: int, p: float) -> Tensor:
        rows = token_keys((x.numel() // x.shape[-1],), (key,))
        return x * keep_mask(rows, place_key(None, "images", self.count), range(x.shape[-1]), p).view(x.shape) / (1 - p)


class _WideSoftmax(TorchFunctionMode):
    """Plain attention rounds probabilities to FP32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"dtype": torch.float64} if func is F.softmax else {})})


@contextlib.contextmanager
def drawing_images(
    model: nn.Module, encoder: tuple[str, ...], step: int, number: int, tokens: int, images: int, rows: int
) -> Iterator[None]:
    """Within it, a model draws for one sequence, the `number`-th of a step, of so many tokens and so many images of
    equal sizes with so many rows each; `encoder` are the modules that run one after the other for images."""
    key = sequence_key(step_key(0, step), number)
    of_images = _OfImages([sequence_key(key, rows * image) for image in range(images)])
    modules = [model.get_submodule(path) for path in encoder]
    handles = [module.register_forward_pre_hook(lambda *_: of_images.__enter__() and None) for module in modules]
    handles += [module.register_forward_hook(lambda *_: of_images.__exit__(None, None, None)) for module in modules]
    try:
        with _WideSoftmax(), drawing(model, token_keys((tokens,), (key,))):
            yield
    finally:
        for handle in handles:
            handle.remove()
