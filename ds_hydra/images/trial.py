"""Stages with images of a small copy, beside its own forward: how far they are apart, by kind of pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ds_hydra.costs.loads import Load
from ds_hydra.data.tokens import TokenSequence
from ds_hydra.images.content import Images, Unit, is_clip
from ds_hydra.images.find import NEAR, Sample, Subject
from ds_hydra.images.seam import numbered
from ds_hydra.images.shared import SHARED
from ds_hydra.images.source import ImageText
from ds_hydra.pipe.attention.interface import let_attend_alone
from ds_hydra.pipe.models.refusals import failing
from ds_hydra.pipe.shape import PipelineShape
from ds_hydra.pipe.stage_options import StageOptions
from ds_hydra.plan.step_plan import MicroBatchPlan
from ds_hydra.self_check.precision import doubled
from ds_hydra.self_check.runs import Data, Outcome, run_pipeline
from ds_hydra.self_check.schemes import uneven_pipeline
from ds_hydra.zero_hetero.errors import ConfigError

SLICES = "slices"
KINDS = ("tp1", "tp2", "sp2", "pp2", SLICES)
_FLOOR = 1e-3  # of the largest gradient: one that is zero but for rounding, as a key's bias has, is as far off


@dataclass(frozen=True)
class WithImages(Data):
    """Sequences with images."""

    images: tuple[Images, ...] = ()

    def load(self, sequence: int) -> TokenSequence:
        """Tokens, next tokens and images."""
        return super().load(sequence)._replace(images=self.images[sequence])


class _Still(ImageText):
    """Whose stages drop nothing out: what is drawn is found, and tried of the text alone, elsewhere."""

    def skeleton(self, device: torch.device, dtype: torch.dtype) -> Any:
        return super().skeleton(device, dtype).eval()


class Trial:
    """The stages of a subject's small model. ConfigError where there are none."""

    def __init__(self, subject: Subject):
        self._subject = subject
        with doubled():
            self.source = _Still(subject.model, subject.seam, StageOptions())
        self._data = self._made()

    def attend_by(self, name: str) -> None:
        """Let the encoder attend by what has this name, from now on: none but shared images can be tried by one that
        needs a device."""
        for root in self.source.attends:
            let_attend_alone(self.source.template.get_submodule(root), name)

    def _made(self, *, shared: bool = False) -> WithImages:
        samples = self._subject.samples
        tokens = tuple(sample.tokens.numpy() for sample in samples)
        lengths = [len(one) for one in tokens]
        packs = tuple(MicroBatchPlan.of_whole(pack, lengths) for pack in ([0, 2], [1, *range(3, len(samples))]))
        return WithImages(tokens, packs, tuple(self._images(one, shared) for one in samples))

    def _images(self, sample: Sample, shared: bool) -> Images:
        subject, seam = self._subject, self._subject.seam
        if not sample.units:
            return seam.images()
        pixels = subject.pixels(sample)
        starts = accumulate(sample.rows, initial=0)
        units = tuple(Unit(*one) for one in zip(sample.units, starts, sample.rows, strict=False))
        if seam.layout == "whole":
            units = (Unit(pixels, 0, sum(sample.rows)),)
        # Shared ones cost nothing to share, and each takes more than all before it together.
        first = self._number(sample)
        units = tuple(
            unit._replace(
                load=Load(10.0 ** (first + i), 0.0) if shared and not is_clip(unit.columns) else Load.whole(unit.rows)
            )
            for i, unit in enumerate(units)
        )
        return seam.images(units, numbered(subject.model, seam, sample.tokens, pixels))

    def _number(self, sample: Sample) -> int:
        """Images before those of a sample."""
        samples = self._subject.samples
        return sum(len(one.units) for one in samples[: next(i for i, one in enumerate(samples) if one is sample)])

    def refused(self, kind: str) -> str:
        """Why there are no pipelines of a kind; empty: there are."""
        plan = self.source.plan
        return {"tp2": plan.no_tp, "pp2": plan.no_pp, SLICES: plan.no_slices}.get(kind, "")

    def difference(self, kind: str) -> str:
        """How a kind of pipeline is off the model's own forward, in a clause; empty: it is equal."""
        shape = PipelineShape.parse({SLICES: "tp1", SHARED: "sp2"}.get(kind, kind))
        data = self._data.in_slices() if kind == SLICES else self._made(shared=True) if kind == SHARED else self._data
        try:
            return self._compared(run_pipeline(self.source, uneven_pipeline(shape, self.source.plan.num_layers), data))
        except Exception as error:
            return f"its run ends with {failing(error)[:200]}"

    def _compared(self, found: Outcome) -> str:
        loss, right = self._subject.loss, self._subject.gradients
        if not abs(found.loss - loss) <= NEAR * abs(loss):
            return f"the loss is {abs(found.loss - loss) / abs(loss):.0e} off"
        floor = _FLOOR * max(float(gradient.abs().max()) for gradient in right.values())
        for name, gradient in found.gradients.items():
            expected = right.get(name, torch.zeros_like(gradient))
            off = float((gradient - expected).abs().max()) / max(floor, float(expected.abs().max()))
            if not off <= NEAR:
                return f"the gradient of {name} is {off:.0e} of the largest off"
        missing = sorted(right.keys() - found.gradients.keys())
        return f"{missing[0]} has no gradient" if missing else ""


def verdicts(subject: Subject, kinds: Sequence[str] = KINDS, attends: str = "") -> dict[str, str]:
    """For each kind of pipeline, why it is not trained with images, or how it is off; empty: it is equal. `attends`: by
    what an encoder does that runs on devices alone."""
    try:
        trial = Trial(subject)
    except ConfigError as error:
        return dict.fromkeys(kinds, str(error))
    found = {kind: trial.refused(kind) or trial.difference(kind) for kind in kinds if kind != SHARED}
    if SHARED in kinds:
        if attends:
            trial.attend_by(attends)
        found[SHARED] = trial.difference(SHARED)
    return found
