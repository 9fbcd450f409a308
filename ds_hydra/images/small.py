"""A small copy of a model with encoders of images or audio, and images and clips made up for it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hydra.images.content import CLIP, Columns
from ds_hydra.images.seam import COUNT
from ds_hydra.pipe.models.meta_copy import run_experts_one_by_one
from ds_hydra.self_check.runs import doubled
from ds_hydra.self_check.shrink import rotary_sections, shrunk_config, usual
from ds_hydra.zero_hetero.errors import ConfigError

_SMALL = 2_000_000  # parameters of a model that is copied as it is
LAYERS = 6
_POSITIONS, _VOCABULARY = 256, 512
_WINDOW = 3  # shorter than an image, so that it shows whether that has all of it
_LARGE = 100  # features that no small copy has
_HIDDEN, _HEADS, _PATCHES = 32, 4, 4  # of the encoder: features, heads, patches of an image along a side
_WIDTHS = re.compile(r"^(hidden_size|hidden_dim|embed_dim|d_model|dim)$")
_OUT = re.compile(r"^(out_hidden_size|output_dim|projection_dim|text_hidden_size)$")
_INNER = re.compile(r"(intermediate|ffn|mlp)_?(hidden_)?(size|dim)$")
_WIDTH = re.compile(r"(size|dim|width)$")
_HEAD = re.compile(r"(num_heads|attention_heads|num_key_value_heads)$")
_COUNT = re.compile(r"(size|dim|width|embeddings|channels)$")
_FEWER = {"encoder_layers": 3, "max_source_positions": 32, "downsample_hidden_size": _HIDDEN}  # of encoders of audio
_CLIP = re.compile(r"^(audio_)?input_(features|values)$|^audio_input_ids$")  # what arguments for clips are called
_MASK = re.compile(r"^((input_)?(feature|audio|values).*|padding)_mask$")
GRIDS = ("image_grid_thw", "image_grid_hw")  # columns of the numbers of patches along the sides of each image


def small_model(model: Any, *, long: bool = False) -> Any:
    """A model of the same class in FP64, of small widths, with values at which every part matters; `long`: for clips as
    long as the model's, with one layer for them. ConfigError where none can be made."""
    try:
        config = copy.deepcopy(model.config)
        if sum(parameter.numel() for parameter in model.parameters()) > _SMALL:
            config = _small_config(model, model.config)
        text = config.get_text_config()
        for key in _audio_parts(config) if long else ():
            _lengthen(getattr(config, key), getattr(model.config, key))
        if isinstance(getattr(text, "sliding_window", None), int):
            text.sliding_window = min(text.sliding_window, _WINDOW)
        with doubled(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with torch.device("cpu"):
                made = type(model)(config).double().eval()
            run_experts_one_by_one(made)
            _draw(made)
    except Exception as error:
        raise ConfigError(
            f"hydra.images: no small copy of {type(model).__name__} can be made to try images on "
            f"({type(error).__name__}: {error}): leave hydra.images out to train its text alone"
        ) from error
    return made


def _lengthen(part: Any, of: Any) -> None:
    """An encoder of audio of one layer, for clips as long as the other's."""
    settings = vars(part)
    settings.update({key: value for key, value in vars(of).items() if key == "max_source_positions"})
    settings.update({key: 1 for key in ("encoder_layers", "num_hidden_layers") if isinstance(settings.get(key), int)})


def _draw(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif float(parameter.abs().max()) == 0 or float(parameter.std()) < 0.01:
                parameter.normal_(0, 0.05)
            elif float(parameter.std()) < 0.05:
                parameter.mul_(3.0)


def _small_config(model: Any, config: Any) -> Any:
    text = config.get_text_config()
    heads = usual(text, "num_attention_heads")
    kv_heads = usual(text, "num_key_value_heads") or heads
    common = math.gcd(heads, kv_heads)
    divisors = [n for n in range(max(1, heads // 4), 0, -1) if common % n == 0]
    divisor = next((n for n in divisors if heads // n % 2 == 0), divisors[0])  # heads that two ranks can share
    small = shrunk_config(config, LAYERS, divisor, _POSITIONS, _VOCABULARY)
    hidden = small.get_text_config().hidden_size
    rotary = getattr(small.get_text_config(), "rope_parameters", None)
    if isinstance(rotary, dict) and any(hasattr(type(module), COUNT) for module in model.modules()):
        part = rotary.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
        rotary.setdefault("mrope_section", rotary_sections(part))
    vars(small).update({key: value for key, value in vars(config).items() if key == "window_size"})
    vars(small).update({key: _PATCHES for key in vars(small) if key == "mm_tokens_per_image"})
    for key, value in vars(config).items():  # so many rows of so many patches
        if isinstance(value, dict) and value and all(isinstance(one, int) for one in (*value, *value.values())):
            setattr(small, key, {_PATCHES**2: _PATCHES})
    seen = 200
    for key, value in vars(config).items():
        if re.search(r"(image|video|audio|vision|img).*token_(id|index)$", key) and isinstance(value, int):
            setattr(small, key, seen)
            seen += 1
    old, new = vision_config(config), vision_config(small)
    encoders = [(old, new)] + [(getattr(config, key), getattr(small, key)) for key in _audio_parts(config)]
    for of, to in encoders:
        # What has another name for a width is told by its number.
        own, words = usual(of, "hidden_size") or 0, usual(text, "hidden_size")
        widths = {4 * own: 4 * _HIDDEN, 4 * words: 4 * hidden, own: _HIDDEN, words: hidden}  # 4: put together
        for key, value in vars(config).items() if of is old else ():
            if isinstance(value, int) and _WIDTH.search(key) and vars(small)[key] == value:
                vars(small)[key] = widths.get(value, value)
        for key, value in vars(of).items():
            if key.startswith("_") or isinstance(value, bool) or not isinstance(value, int | list | tuple):
                continue
            if of is not config or key == "image_size":
                vars(to)[key] = _of_encoder(key, value, widths, of, hidden)
    for of, to in ((config, small), (old, new)):
        for key, part in vars(to).items():
            known = any(part is one for _, one in encoders)
            if hasattr(part, "to_dict") and not known and part is not small.get_text_config():
                _shrink_other(part, getattr(of, key), hidden, usual(old, "hidden_size"))
    if pinpoints := getattr(small, "image_grid_pinpoints", None):
        one, two = _size(old), _size(new)
        small.image_grid_pinpoints = [[side * two // one for side in each] for each in pinpoints]
    return small


def _shrink_other(part: Any, old: Any, hidden: int, of_encoder: int) -> None:
    """A second encoder, or one of other inputs, or what makes images: what the rules of texts have left large."""

    def small(value: Any) -> Any:
        if isinstance(value, list):
            return [small(one) for one in value]
        large = isinstance(value, int) and value > _LARGE
        return (_HIDDEN if value == of_encoder else hidden) if large else value

    for key, value in vars(part).items():
        if key == "num_hidden_layers":  # fewer than a text's stay: each may have its own width
            vars(part)[key] = min(value, vars(old)[key])
        elif key == "image_size":
            vars(part)[key] = _PATCHES * number_of(part, ("patch_size",), 16)
        elif _HEAD.search(key) and isinstance(value, int):
            vars(part)[key] = _HEADS
        elif _COUNT.search(key):
            vars(part)[key] = small(value)


def _size(config: Any) -> int:
    return number_of(config, ("image_size",), 1)


def _of_encoder(key: str, value: Any, widths: Mapping[int, int], old: Any, hidden: int) -> Any:
    """The size of a small encoder, which was `value`; its depth and its patches stay."""
    one = value[0] if isinstance(value, list | tuple) and value else value
    if key == "image_size" and isinstance(one, int):
        patch = getattr(old, "patch_size", 14)
        size = _PATCHES * (patch[0] if isinstance(patch, list | tuple) else patch)
        return type(value)([size] * len(value)) if isinstance(value, list | tuple) else size
    if not isinstance(value, int):
        return value
    if key in _FEWER:
        return min(value, _FEWER[key])
    if key in ("head_dim", "dim_head"):
        return _HIDDEN // _HEADS
    if _OUT.search(key):
        return hidden
    if _WIDTHS.search(key):
        # Qwen2-VL calls so what leaves its encoder, whose own features are embed_dim.
        return hidden if key == "hidden_size" and hasattr(old, "embed_dim") else _HIDDEN
    if _INNER.search(key):  # of some a number of whole rows, which are put together
        times, rest = divmod(value, getattr(old, "hidden_size", None) or 1)
        return (times if not rest and 1 < times < 9 else 2) * _HIDDEN
    if _HEAD.search(key):
        return _HEADS
    return widths.get(value, value) if _WIDTH.search(key) else value


def vision_config(config: Any) -> Any:
    """The part of a config that is of the encoder of images, of Omni models one level further down; itself where there
    is none."""
    named = [key for key, value in vars(config).items() if hasattr(value, "to_dict") and re.search("vis|vit", key)]
    if not named and hasattr(config, "thinker_config"):
        return vision_config(config.thinker_config)
    return getattr(config, named[0]) if named else config


def audio_config(config: Any) -> Any:
    """The part of a config that is of the encoder of audio; itself where there is none."""
    return getattr(config, next(iter(_audio_parts(config)), ""), config)


def _audio_parts(config: Any) -> list[str]:
    """Which parts of a config are of encoders of audio."""
    return [key for key, part in vars(config).items() if hasattr(part, "to_dict")
            and re.search("audio|encoder_config|speech", key)]  # fmt: skip


def number_of(config: Any, keys: tuple[str, ...], default: int = 0) -> int:
    """The first of these settings; of one that names several, the first."""
    for key in keys:
        value = getattr(config, key, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            return value
    return default


def placeholder(config: Any, kind: str = "images") -> int | None:
    """The id of the tokens that stand for rows of images, or of audio, as configs call it."""
    keys: tuple[str, ...] = ("audio_token_id", "audio_token_index")
    if kind == "images":
        keys = ("image_token_id", "image_token_index", "img_token_id", "image_patch_id", "image_placeholder_token_id")
    found = (getattr(part, key, None) for part in (config, config.get_text_config()) for key in keys)
    return next((each for each in found if isinstance(each, int)), None)


class Maker(NamedTuple):
    """Makes an image of one of the sizes 0, 1, as an encoder may take it."""

    layout: str  # [Note: which rows are whose]
    make: Callable[[int], Columns]


def makers(config: Any, taken: Mapping[str, Any] | tuple[str, ...]) -> Iterator[Maker]:
    """Ways to make an image for an encoder that takes these arguments, the likeliest first."""
    part = vision_config(config)
    patch = number_of(part, ("patch_size", "spatial_patch_size"), 7)
    size = number_of(part, ("image_size",), 28)
    channels = number_of(part, ("in_channels", "num_channels", "in_chans"), 3)
    merge = number_of(part, ("spatial_merge_size", "merge_size"), number_of(config, ("spatial_merge_size",), 1))
    frames = number_of(part, ("temporal_patch_size", "patch_temporal"), 1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def pictures(**beside: Tensor) -> Callable[[int], Columns]:
        return lambda _: {"pixel_values": noise(1, channels, size, size), **beside}

    if grid := next((key for key in GRIDS if key in taken), ""):
        flat = [(channels * count * patch * patch,) for count in dict.fromkeys((frames, 2, 1))]
        for of in (*flat, (channels, patch, patch), (merge * patch, merge * patch, channels)):
            yield Maker("grid", _patches(of, merge, grid, beside="image_merge_sizes" in taken))
    if "image_position_ids" in taken:
        pooled = number_of(part, ("pooling_kernel_size",), 1)
        yield from (_padded(patch, pooled, channels), _padded(patch * pooled, 1, channels))
    if "spatial_shapes" in taken:
        yield Maker("padded", _shaped(patch, channels, number_of(config, ("downsample_factor",), merge)))
    elif "pixel_attention_mask" in taken:
        for each in ((size, size), ()):  # a mask of pixels, or of images
            yield Maker("beside", _masked((1, 1, channels, size, size), (1, 1, *each)))
    if "target_sizes" in taken:
        yield Maker("strip", lambda which: {
            "pixel_values": noise(1, channels, patch, 16 * (1 + which) * patch),
            "target_sizes": torch.tensor([[4, 4 * (1 + which)]])})  # fmt: skip
    if "image_sizes" in taken:
        yield Maker("whole", lambda which: {
            "pixel_values": noise(1, channels, 2 * merge * patch, (2 + 2 * which) * merge * patch),
            "image_sizes": torch.tensor([[2 * merge * patch, (2 + 2 * which) * merge * patch]])})  # fmt: skip
        yield Maker("whole", lambda _: {"pixel_values": noise(1, 3, channels, size, size),
                                        "image_sizes": torch.tensor([[size, size]])})  # fmt: skip
    if "pixel_values_local" in taken:  # crops of an image, beside all of it
        yield Maker("whole", lambda which: {
            "pixel_values": noise(1, channels, size, size), "num_local_patches": torch.tensor([1 + which]),
            "pixel_values_local": noise(1 + which, channels, size, size)})  # fmt: skip
    if "high_res_pixel_values" in taken:
        high = number_of(getattr(config, "high_res_vision_config", part), ("image_size",), size)
        yield Maker("each", pictures(high_res_pixel_values=noise(1, channels, high, high)))
    if "pixel_mask" in taken:
        yield Maker("each", pictures(pixel_mask=torch.ones(1, size, size, dtype=torch.bool)))
    yield Maker("each", pictures())
    yield Maker("each", lambda _: {"pixel_values": noise(4, frames, patch, patch, channels)})  # each a row
    if part is config:  # whose pictures are no more than patches
        yield Maker("each", lambda _: {"pixel_values": noise(1, _PATCHES**2, channels * patch * patch)})


def _patches(of: tuple[int, ...], merge: int, grid: str, *, beside: bool) -> Callable[[int], Columns]:
    """Images whose patches stand one after the other, with the numbers of patches along their sides."""

    def make(which: int) -> Columns:
        each = 2 if beside else merge
        h, w = 2 * each, (2 + 2 * which) * each
        sizes = torch.tensor([[1, h, w] if grid.endswith("thw") else [h, w]])
        more = {"image_merge_sizes": torch.tensor([each])} if beside else {}
        return {"pixel_values": torch.randn(h * w, *of, dtype=torch.float64), grid: sizes, **more}

    return make


def _masked(pixels: tuple[int, ...], mask: tuple[int, ...]) -> Callable[[int], Columns]:
    return lambda _: {"pixel_values": torch.randn(*pixels, dtype=torch.float64),
                      "pixel_attention_mask": torch.ones(*mask, dtype=torch.bool)}  # fmt: skip


def _shaped(patch: int, channels: int, merge: int) -> Callable[[int], Columns]:
    """Images padded to one number of patches, with a mask of them and the numbers along their sides."""

    def make(which: int) -> Columns:
        h, w = 2 * merge, (2 + 2 * which) * merge
        mask = (torch.arange(8 * merge**2) < h * w).long()[None]
        pixels = torch.randn(1, 8 * merge**2, channels * patch * patch, dtype=torch.float64)
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[h, w]])}

    return make


def _padded(patch: int, pooled: int, channels: int) -> Maker:
    """Images of 8 times `pooled`^2 patches at most, of which as many are put together."""
    most = 8 * pooled**2
    return Maker("padded", lambda which: {
        "pixel_values": torch.rand(1, most, channels * patch**2, dtype=torch.float64),
        "image_position_ids": _places(2 * pooled, (2 + 2 * which) * pooled, most)})  # fmt: skip


def _places(h: int, w: int, most: int) -> Tensor:
    """Where the patches of an image stand, (1, most, 2): column and row, -1 behind the last."""
    found = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(-1)
    return torch.nn.functional.pad(found, (0, 0, 0, most - h * w), value=-1)[None]


def clip_columns(taken: tuple[str, ...]) -> tuple[str, ...]:
    """Of the arguments of a model's forward those of clips: what was recorded first, then masks of it."""
    return (*(name for name in taken if _CLIP.search(name)), *(name for name in taken if _MASK.search(name)))


def clips(config: Any, taken: tuple[str, ...]) -> Iterator[Maker]:
    """Ways to make a clip for a forward that takes these `clip_columns`, the likeliest first. Clips of the sizes 0 and
    1 are as long as each other with padding; without it, where there is a mask, the first is half as long."""
    values, masks = taken[0], taken[1:]
    part = audio_config(config)
    bins = [
        value
        for key, value in vars(part).items()
        if re.search(r"mel_bins|feat_size|input_(size|dim)$|audio_embed_dim", key)
    ] or [128, 80]  # what most have
    bins = [value * count for count in (1, number_of(part, ("num_stacked_frames",), 1)) for value in bins]
    whole = [2 * part.max_source_positions] if isinstance(getattr(part, "max_source_positions", None), int) else []

    def maker(count: int, *of: int, behind: bool) -> Maker:
        def make(which: int) -> Columns:
            frames = count if count in whole else count * max(1, (which + 1) // 2)
            held = count // 2 if which == 0 else frames
            shape = (1, frames, *of) if behind else (1, *of, frames)
            mask = (torch.arange(frames) < held)[None]
            return {values: torch.randn(shape, dtype=torch.float64), **dict.fromkeys(masks, mask)}

        return Maker(CLIP, make)

    for frames in (*whole, 4 * number_of(part, ("n_window",), 16), 400):
        for each in bins:
            yield maker(frames, each, behind=False)
            yield maker(frames, each, behind=True)
    for samples in (19200, 12800):
        yield maker(samples, behind=True)
        yield maker(samples, 1, behind=False)
    if masks:
        yield from clips(config, taken[:1])
