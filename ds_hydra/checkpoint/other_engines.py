"""A folder in; which other engine saved it, as its files show, and what to do with it, out. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class OtherCheckpoint(NamedTuple):
    """A checkpoint that is none of ours."""

    what: str  # in words
    remedy: str  # commands or calls, as they are typed
    weights: Path | None = None  # a torch file with the whole weights under "module"

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


def other_checkpoint(place: Path) -> OtherCheckpoint | None:
    """What another engine has saved as the folder `place`; None where there is nothing of the kinds that are known."""
    if not place.is_dir():
        return None
    converted = f"{place} {place.parent} --tag {place.name}_hydra"
    then = f"and load {place.parent} again, whose `latest` names the new tag then"
    if any(place.glob("zero/**/fp32.pt")):
        return OtherCheckpoint(
            "a universal checkpoint of DeepSpeed",
            f"Convert it, `ds-hydra convert from-universal {converted}`, {then}",
        )
    whole = sorted(place.glob("mp_rank_*_model_states.pt"))
    weights = whole[0] if len(whole) == 1 and not any(place.glob("layer_*model_states.pt")) else None
    alone = "its weights alone are loaded by load_checkpoint(load_module_only=True)" if weights else ""
    if any(place.glob("*zero_pp_rank_*_optim_states.pt")):
        stage = "stage 1 or 2" if whole else "stage 3"
        return OtherCheckpoint(
            f"a checkpoint of DeepSpeed's ZeRO {stage}",
            f"Convert it, `ds-hydra convert from-deepspeed {converted}`, {then}{f'; {alone}' if alone else ''}",
            weights,
        )
    if whole or any(place.glob("layer_*model_states.pt")):
        return OtherCheckpoint(
            "a checkpoint of DeepSpeed without ZeRO, whose optimizer state has no names of parameters",
            f"I{alone[1:]}" if alone else "Save it once more under ZeRO stage 1 by plain DeepSpeed",
            weights,
        )
    if any(place.glob("*.distcp")) or (place / ".metadata").is_file():
        return OtherCheckpoint(
            "a distributed checkpoint of torch (DCP)",
            f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {place} {place}.pt` makes one file of "
            "it; load its weights into the model before ds_hydra.initialize()",
        )
    return _of_transformers(place)


def _of_transformers(place: Path) -> OtherCheckpoint | None:
    """A folder of weights, with the state of a Trainer beside them or not."""
    trainer = (place / "trainer_state.json").is_file() or any((place / f"optimizer.{end}").is_file() for end in _ENDS)
    what = "a checkpoint of transformers' Trainer without DeepSpeed" if trainer else "a folder of weights"
    if any(place.glob("model*.safetensors")):
        remedy = (
            f"Load its weights, from_pretrained({str(place)!r}) before ds_hydra.initialize(), or "
            "engine.load_16bit_model() of this folder; the optimizer begins anew"
        )
    elif any(place.glob("adapter_model.*")):
        remedy = f"Load its adapters, PeftModel.from_pretrained(model, {str(place)!r}), before ds_hydra.initialize()"
    elif any(place.glob("pytorch_model*.bin")):
        remedy = f"Load its weights, from_pretrained({str(place)!r}), before ds_hydra.initialize()"
    else:
        return None
    return OtherCheckpoint(what, remedy)


_ENDS = ("pt", "bin")
