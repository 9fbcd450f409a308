"""Runs the plain model in one process, one sequence at a time, by its own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_hydra.pipe.dropout import AttentionDropout, sequence_key
from ds_hydra.pipe.loss import IGNORED, TokenLoss
from ds_hydra.pipe.models.draws import DROPOUTS, FROM_UNIFORM, Draws, Keys, Place, dropout_of, of_attention
from ds_hydra.pipe.models.experts import Balancing
from ds_hydra.pipe.rows import Pack
from ds_hydra.self_check.runs import Data, Outcome, doubled
from ds_hydra.self_check.shrink import POSITIONS


class Plain:
    """A model that runs one sequence at a time and draws its random numbers by place, as its stages do."""

    def __init__(
        self,
        model: Any,
        draws: Mapping[Place, int] | None = None,
        layers_path: str = "",
        balancing: Balancing | None = None,
        token_loss: TokenLoss | None = None,
    ):
        """`draws` are what a trace saw the model draw: it is changed to draw them by place, so copy it before.

        `balancing`: its routers have a loss in training, and its own forward returns their logits. `token_loss` takes
        the place of the cross entropy.
        """
        self.model, self.layers_path, self._balancing, self._token_loss = model, layers_path, balancing, token_loss
        self._draws = _PlainDraws(draws or {})
        for module in model.modules():  # layers that are recomputed would not know for which tokens they draw
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        if draws:
            self._draws.install(model, layers_path)

    def outcome(self, data: Data, order: Sequence[int] | None = None, *, coin: float = 0.5) -> Outcome:
        """A training step and an evaluation, sequences in this order.

        `coin` in (0, 1) is what every draw of a single number gives: by such a one a model skips whole layers.
        """
        self._draws.coin = coin
        with doubled() as mode:
            loss, gradients = self._train(data, order or range(len(data.sequences)))
            return Outcome(loss, self._evaluate(data), gradients, mode.exact)

    @property
    def balances(self) -> bool:
        """Whether its routers have a loss."""
        return self._balancing is not None

    def evaluate(self, data: Data) -> float:
        """The summed loss of each sequence, in evaluation."""
        with doubled():
            return self._evaluate(data)

    def run(self, data: Data, sequence: int) -> Any:
        """What the model returns for a sequence, in the mode that it is in."""
        tokens = torch.from_numpy(data.sequences[sequence]).to(next(self.model.parameters()).device)
        with self._draws.of(self._keys(len(tokens), sequence)):
            return self.model(input_ids=tokens[None], use_cache=False)

    def own_loss(self, data: Data) -> str:
        """How the loss that the model itself makes of labels differs from their cross entropy and, where it has one,
        the loss of its routers; empty if it does not.

        Labels may be shifted within the model, as almost all do, or be taken as they are.
        """
        sequence = max((i for i, n in enumerate(data.lengths) if n <= POSITIONS), key=data.lengths.__getitem__)
        return self._own_loss(data, sequence, training=False) or self._own_loss(data, sequence, training=True)

    def _own_loss(self, data: Data, sequence: int, *, training: bool) -> str:
        tokens = torch.from_numpy(data.sequences[sequence])[None]
        self.model.train(training)
        with doubled() as mode, torch.no_grad(), self._draws.of(self._keys(tokens.shape[1], sequence)):
            try:
                out = self.model(input_ids=tokens, labels=tokens, use_cache=False)
            except TypeError:  # it takes no labels
                return ""
        loss, logits = getattr(out, "loss", None), getattr(out, "logits", None)
        if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or loss.numel() != 1:
            return ""
        logits = logits[0].double()
        shifted, plain = F.cross_entropy(logits[:-1], tokens[0, 1:]), F.cross_entropy(logits, tokens[0])
        if self._balancing is not None:
            loss = loss - self._balancing.loss_of_all_together(out.router_logits)
        near = 1e-9 if mode.exact and self._balancing is None else 1e-4
        if min(abs(loss - shifted), abs(loss - plain)) <= near * abs(shifted):
            return ""
        return f"{float(loss):.9g} for labels whose cross entropy is {float(shifted):.9g}"

    def _train(self, data: Data, order: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        return self._train_by(lambda sequence: self._loss(data, sequence, backward=True), order)

    def _train_by(self, run: Callable[[int], float], order: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        model = self.model
        model.zero_grad(set_to_none=True)
        model.train()
        with _Coins(self._draws):
            loss = sum(run(sequence) for sequence in order)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        model.zero_grad(set_to_none=True)
        return loss, gradients

    def gradients_of(
        self, data: Data, factor: float, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Each token's loss, (tokens of all sequences,), and the gradients of the sum of `factor` * loss, by name, in
        the dtype that the model has. `loss_of` maps logits (T, V) and labels (T,) to the losses (T,)."""
        found = []

        def of_sequence(sequence: int) -> float:
            targets = torch.from_numpy(data.load(sequence)[1])
            out = self.run(data, sequence)
            targets = targets.to(out.logits.device)
            losses = loss_of(out.logits[0], targets)
            whole = losses.sum()
            if self._balancing is not None:
                whole = whole + int((targets != IGNORED).sum()) * self._balancing.loss(out.router_logits)
            (factor * whole).backward()
            found.append(losses.detach())
            return 0.0

        _, gradients = self._train_by(of_sequence, range(len(data.sequences)))
        return torch.cat(found), gradients

    def _evaluate(self, data: Data) -> float:
        self.model.eval()
        with torch.no_grad():
            return sum(self._loss(data, sequence, backward=False) for sequence in range(len(data.sequences)))

    def _loss(self, data: Data, sequence: int, *, backward: bool) -> float:
        targets = torch.from_numpy(data.load(sequence)[1])
        out = self.run(data, sequence)
        if self._token_loss is not None:
            known = targets != IGNORED
            loss = self._token_loss(out.logits[0, known], targets[known]).sum()
        else:
            loss = F.cross_entropy(out.logits[0], targets, ignore_index=IGNORED, reduction="sum")
        if backward:
            if self._balancing is not None:  # a token's loss counts 1 here
                loss = loss + int((targets != IGNORED).sum()) * self._balancing.loss(out.router_logits)
            loss.backward()
        return float(loss.detach())

    def _keys(self, tokens: int, sequence: int) -> Keys | None:
        if not self._draws.widths or not self.model.training:
            return None
        return Keys.of(Pack((tokens,), keys=(sequence_key(0, sequence),)), next(self.model.parameters()).device)


class _PlainDraws(Draws):
    """Answers a plain model that runs one sequence: its attention drops its whole matrix of probabilities at once."""

    def __init__(self, widths: Mapping[Place, int]):
        super().__init__(widths)
        self.coin = 0.5  # what every draw of a single number gives

    def answer(self, module: str, func: Any, args: Any, kwargs: Any) -> Any:
        if func in DROPOUTS:
            x, rate, _ = dropout_of(args, kwargs)
            row = self._current(module).row
            if of_attention(x, len(row)):
                drop = AttentionDropout(rate, row, self._count(module).key)
                with torch._C.DisableTorchFunction():
                    return drop(x, first_token=0, first_query=0, first_key=0)
        return self.tossed(super().answer(module, func, args, kwargs), func, args, kwargs)

    def tossed(self, drawn: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function returned, with the coin in place of a single random number."""
        name = getattr(func, "__name__", "")
        if name in FROM_UNIFORM and isinstance(drawn, Tensor) and drawn.dim() == 0:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return drawn.copy_(FROM_UNIFORM[name](torch.full_like(drawn, self.coin), args, kwargs))
        return drawn


class _Coins(TorchFunctionMode):
    """Within it, single random numbers are what `draws` say, in modules that draw nothing else too."""

    def __init__(self, draws: _PlainDraws):
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._draws.tossed(func(*args, **(kwargs or {})), func, args, kwargs or {})
