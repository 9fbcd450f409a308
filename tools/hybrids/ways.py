"""How the tokens of a model's layers meet, as found by trying."""

from __future__ import annotations

import time
from typing import Any

import torch

from ds_hydra.pipe.models.causal_lm import CausalLM
from tests.support.families import BOXED, build_model


def ways(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each model: layers by the interface, boxes of the others, CPU seconds to find them."""
    rows = []
    for family in ("llama", *(("bloom", "lfm2") if quick else BOXED)):
        began = time.process_time()
        boxes = CausalLM(build_model(family, torch.float32), by_one_rank=True).boxes
        took = time.process_time() - began
        paths = sorted({box.path or "the layer" for of in boxes.of for box in of})
        by_interface = sum(not of for of in boxes.of) if boxes else 4
        rows.append({"model": family, "layers by the interface": by_interface, "boxes": ", ".join(paths) or "none",
                     "several sequences a call": all(box.batched for of in boxes.of for box in of),
                     "CPU s": round(took, 2)})  # fmt: skip
        if bool(boxes) is (family == "llama"):
            missed.append(f"{family} has boxes {paths}")
    return rows
