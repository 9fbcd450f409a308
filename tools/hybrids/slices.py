"""Families of hybrids and recurrent models whose sequences run in slices: what they carry, and how near the whole."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch

from ds_hydra.pipe.models.causal_lm import CausalLM
from ds_hydra.pipe.placement import place_pipeline
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.self_check.compare import compare
from ds_hydra.self_check.plain import Plain
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import run_pipeline, uneven_data
from tests.support.tiny_families import class_names, tiny_model
from tools import aims

_QUICK = "Lfm2ForCausalLM"
# Short convolutions, Mamba-2, gated delta rules, and delta rules by channel.
_IN_SLICES = (_QUICK, "BambaForCausalLM", "Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM",
              "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Mamba2ForCausalLM",
              "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "OlmoHybridForCausalLM",
              "KimiLinearForCausalLM")  # fmt: skip
_WHOLE = ("JambaForCausalLM", "FalconH1ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "ZambaForCausalLM",
          "Zamba2ForCausalLM", "BailingHybridForCausalLM", "MiniMaxForCausalLM", "RecurrentGemmaForCausalLM",
          "RwkvForCausalLM", "Qwen4ExpForCausalLM", "InklingForCausalLM", "ZayaForCausalLM")  # fmt: skip
_SHAPES = {"tp1": "tp1", "V": "pp2/v", "mixed": "(tp3[0:2] > sp3[2:4])"}


def slices(quick: bool, missed: list[str]) -> list[dict[str, Any]]:
    """A row for each class: bytes that a slice hands on in the layers that carry something, and the worst deviation of
    loss and gradients from the whole under some shapes; or why its sequences stay whole."""
    if quick:
        rows = [_row(_QUICK)]
    else:
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=4) as pool:
            rows = list(pool.imap(_row, (*_IN_SLICES, *_WHOLE)))
    for row in rows:
        name, off = row["class"], [row[shape] for shape in _SHAPES if isinstance(row[shape], float)]
        if name in _IN_SLICES and (row["whole only"] or not max(off) <= aims.SLICES_OF_STATES):
            missed.append(f"{name}: {row['whole only'] or f'{max(off):.1e} off, not <= {aims.SLICES_OF_STATES}'}")
        if name in _WHOLE and not row["whole only"]:
            missed.append(f"{name} is listed as one that takes whole sequences only, and runs in slices")
    return [row | {shape: f"{v:.1e}" if isinstance(v := row[shape], float) else v for shape in _SHAPES} for row in rows]


def _row(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = tiny_model(name, class_names()[name])
    with doubled():
        source = CausalLM(model)
    plan = source.plan
    carried = [sum(box.carried for box in of) for of in plan.boxes]
    row: dict[str, Any] = {"class": name, "carried, bytes a layer": max(carried, default=0),
                           "layers that carry": sum(map(bool, carried))}  # fmt: skip
    row |= dict.fromkeys(_SHAPES, "-") | {"whole only": plan.no_slices[:80]}
    if plan.no_slices:
        return row
    data = uneven_data(source.vocab_size or 0, [(6, 130, 9), (30,)])
    right = Plain(model, source.flow.draws, source.layers_path).outcome(data)
    for shape, text in _SHAPES.items():
        pipeline = place_pipeline(PipelineShape.parse(text), 0, plan.num_layers)
        row[shape] = compare(right, run_pipeline(source, pipeline, data.in_slices())).worst
    return row
