"""A job's config, validated: a DeepSpeed config with a strict block "hydra", as frozen dataclasses. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_hydra.config.checks import AUTO, block, choice, flag, integer, number, parse_block, setting, text, whole_numbers
from ds_hydra.config.deepspeed_settings import KNOWN_SETTINGS, is_on, screen_deepspeed_settings, states_offload
from ds_hydra.config.hosts import filled_in
from ds_hydra.costs.memory import EXPERT_IMBALANCE
from ds_hydra.pipe.schedules.registry import NAME
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.pipe.stage_options import RECOMPUTE_MLP, StageOptions
from ds_hydra.plan.step_plan import THEN
from ds_hydra.plan.validate import check_shape
from ds_hydra.zero_hetero.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from ds_hydra.planner.options import PlannerOptions


_MAX_DEGREE_DIGITS = 6


def strategies_of(value: Any, place: str) -> tuple[str, ...]:
    """ "auto" as (); else each string in its canonical form. A string alone is a list of one. All must use the same
    number of ranks."""
    if value in ("auto", ["auto"], ("auto",)):
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(
            f'config: {place} must be "auto" or a non-empty list of strings such as "tp4 + 2*tp1pp2 + sp2", '
            f"but is {value!r}"
        )
    shapes = [_shape(item, f"{place}[{index}]") for index, item in enumerate(value)]
    ranks = [shape.num_ranks for shape in shapes]
    for index, used in enumerate(ranks):
        if used != ranks[0]:
            raise ConfigError(
                f"config: {place}[0] {value[0]!r} uses {ranks[0]} ranks but {place}[{index}] "
                f"{value[index]!r} uses {used}: all strategies of a job share the same ranks"
            )
    return tuple(str(shape) for shape in shapes)


def strategies_by_ranks(value: Any, place: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Lists of strategies by the number of ranks that each of them uses."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'config: {place} must be a block such as {{"3": ["3*tp1"]}}, but is {value!r}')
    found: dict[int, tuple[str, ...]] = {}
    for key, listed in value.items():
        if not (isinstance(key, str) and key.isdecimal() and int(key) > 0):
            raise ConfigError(f"config: {place} has the key {key!r}, which is no number of ranks")
        found[int(key)] = strategies = strategies_of(listed, f"{place}.{key}")
        used = StrategyShape.parse(strategies[0]).num_ranks if strategies else int(key)
        if used != int(key):
            raise ConfigError(f"config: {place}.{key} lists {strategies[0]!r}, which uses {used} ranks and not {key}")
    return tuple(sorted(found.items()))


def _shape(value: Any, place: str) -> StrategyShape:
    if not isinstance(value, str):
        raise ConfigError(f'config: {place} must be a string such as "tp4 + 2*tp1pp2", but is {value!r}')
    if any(len(digits) > _MAX_DEGREE_DIGITS for digits in re.findall(r"\d+", value)):
        raise ConfigError(f"config: {place} {value[:80]!r} holds a number of more than {_MAX_DEGREE_DIGITS} digits")
    if THEN in value:
        raise ConfigError(
            f"config: {place} {value!r} names several phases, which only a replayed plan can have: list each phase's "
            "strategy on its own, and name the file of plans in hydra.replay"
        )
    try:
        shape = StrategyShape.parse(value)
        check_shape(shape)
        return shape
    except PlanError as error:
        raise ConfigError(f"config: {place}: {error}") from None


_EXAMPLE = '"cluster": [{"nodes": 2, "ranks": 8, "device": "h800"}, {"ranks": 7, "device": "h20"}]'


def _device(value: Any, place: str) -> str | None:
    name = text(optional=True)(value, place)
    if name is not None and not re.fullmatch(NAME, name):
        raise ConfigError(
            f"config: {place} is {name!r}: use lower-case letters, digits, '_', '.' and '-', as strategies name it"
        )
    return name


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """A block of the list "hydra.cluster", which holds the nodes in the order of their ranks, those alike in one block.
    null: what the launcher, the hosts and the drivers say."""

    ranks: int = setting(integer(1))
    """Ranks of each of these nodes."""
    nodes: int = setting(integer(1), 1)
    """How many such nodes follow each other."""
    device: str | None = setting(_device, None)
    """The class of their devices, words of the name by which the driver calls them, such as "h800". Devices of one
    class count as equal. None: the driver's own name."""


def read_cluster(value: Any, place: str) -> tuple[NodesConfig, ...]:
    """The list, () for null; ConfigError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"config: {place} must be a list of nodes, such as {_EXAMPLE}, but is {value!r}")
    return tuple(parse_block(NodesConfig, one, f"{place}[{index}]") for index, one in enumerate(value))


def read_tables(value: Any, place: str) -> str | Mapping[str, str] | None:
    """A cost table's file; or one of each class of devices."""
    if not isinstance(value, Mapping):
        return text(optional=True)(value, place)  # type: ignore[no-any-return]
    if not value:
        raise ConfigError(f"config: {place} must be a file, or name one of each class of devices, but is {value!r}")
    return {str(name): text()(path, f"{place}.{name}") for name, path in value.items()}


_RENAMED = {
    "fast": 'is called "search" now, the default',
    "exact": 'is called "highs" now',
    "paper": 'is a rival to compare with, which no job trains by any more: use "search", the default',
}
_SEARCHED = "is no setting any more: remove it. A search is limited by counts, so that equal inputs give equal plans"
PLANNER_GONE = {
    "seconds": _SEARCHED,
    "node_limit": _SEARCHED,
    "tolerance": _SEARCHED,
    "seed": "is hydra.seed now, which the order of sequences and dropout follow too",
    "replay_file": "is called hydra.replay now, and hydra.choose is left out",
}


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The block "hydra.planner": how, how far ahead and for how long steps are planned."""

    method: str = setting(choice("search", "highs", renamed=_RENAMED), "search")
    """How sequences are assigned to pipelines. "search": bounds, priced placement, local search; "highs": then the
    solver HiGHS assigns them too, by Eq. 3 of Hydraulis (arXiv 2412.07894)."""
    highs: bool = setting(flag, True)
    """In each step HiGHS composes strategies of the candidates' pipelines that suit its lengths. One that is clearly
    faster than all candidates is run where `strategies` is "auto", and else told in the step's record; false: none."""
    ahead: int = setting(integer(0, 1024), 2)
    """Steps planned ahead in a process of its own, the next one read and packed in a thread; 0 does all in the step."""
    effort: int = setting(integer(0, 1000), 2)
    """Restarts of the search for each strategy that is tried."""
    simplest: float = setting(number(0.0), 0.01)
    """A plan of fewer different shapes is taken that is predicted to take no more than this share longer than the best
    one: wrong costs hurt it less, and fewer ranks connect. 0: the best one is taken."""


BLOCK = "hydra"
WEIGHTS = "weights"
FLASH_3 = "flash_3"
_FROZEN_S = 9.0
_ELASTIC_TIMEOUT_S = 30.0
_GONE = {
    "objective": 'is no setting any more: remove it. Plans are made and compared as with "flow_shop"; "paper" (Eq. 1 '
    "of Hydraulis) is a rival to compare with",
    "schedules": "is no setting any more: list strategies under a schedule, as in 'tp2pp4/1f1b', in hydra.strategies; "
    'hydra.chunks "off" keeps sequences whole',
    "token_sharding": 'is a name of hydra.fast_paths now: instead of "off" list the paths there without it',
    "sp_overlap": 'is a name of hydra.fast_paths now: instead of "off" list the paths there without it',
    "functions": 'is a name of hydra.fast_paths now: instead of "off" list the paths there without it; "recompute" is '
    'called "recompute_mlp"',
    "attention": 'is the name "flash_3" of hydra.fast_paths now: instead of "flash_2" list the paths there without it',
}
_CHOOSE_RENAMED = {"replay": "is the setting hydra.replay now: name the file of plans there"}
_FAULTS_GONE = {
    "heartbeat_seconds": "is no setting any more: a rank tells a ninth of faults.frozen_seconds apart that it lives; "
    "frozen_seconds 0 turns heartbeats off"
}


def _resume(value: Any, place: str) -> bool | str:
    if isinstance(value, str) and value == WEIGHTS:
        return value
    if not isinstance(value, bool):
        raise ConfigError(f'config: {place} must be true, false or "{WEIGHTS}", but is {value!r}')
    return value


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The block "hydra.checkpoint": the folder of the checkpoints, and when one is saved."""

    dir: str = setting(text())
    """Folder of the checkpoints, on a file system that all ranks share; one job at a time saves there."""
    every: int = setting(integer(0), 0)
    """Save every N steps; 0: only at a signal, or when the script calls save_checkpoint()."""
    keep_last: int | None = setting(integer(1, optional=True), None)
    """Checkpoints to keep, the newest of those that were saved without a tag by this job and those that it has gone on
    from; None keeps all. What was saved with a tag stays."""
    asynchronous: bool = setting(flag, False)
    """Train on while a copy in host memory is written; that memory, 12 bytes per parameter over all ranks with Adam, is
    kept for the next save."""
    resume: bool | str = setting(_resume, True)
    """Begin with the newest complete checkpoint in `dir`, if there is one. "weights": begin a second stage, on other
    data say, with its parameters alone, at step 0; a restart of that stage goes on with the stage's own checkpoints."""


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """The block "hydra.faults": when a job that cannot go on is ended, on all ranks."""

    frozen_seconds: float = setting(number(maximum=86400.0), _FROZEN_S)
    """Seconds without a heartbeat after which a rank counts as frozen and the job ends; it gives nine of them in that
    time. The process that plans, which tells the same, is started again. 0: no heartbeats of ranks."""
    address: str | None = setting(text(optional=True), None)
    """Where rank 0 listens for heartbeats; None takes the interface over which ranks reach each other."""
    skipped_steps: int = setting(integer(1), 20)
    """The job ends after N skipped steps in a row. A step is skipped when its loss or gradient is not finite."""
    compare_every: int = setting(integer(0), 0)
    """Every N steps, check that the parameters each rank used equal the owners' masters; 0: never."""

    @property
    def silent_seconds(self) -> float:
        """After which the process that plans is frozen: it tells that it is alive where ranks do not, too."""
        return self.frozen_seconds or _FROZEN_S


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The block "hydra.trace": steps whose traces are written beside `steps_file`, for https://ui.perfetto.dev."""

    steps: tuple[int, ...] = setting(whole_numbers(1), ())
    """Steps to trace, counted from 1; each becomes trace_stepN.json, what was measured beside what was predicted."""
    profiler: bool = setting(flag, False)
    """In these steps run torch's profiler too; each rank writes profile_stepN_rankR.json."""


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """The block "hydra.elastic": training goes on in the other processes when a rank is lost, and processes may join.
    Whoever starts them must let survivors live, as `ds-hydra launch` does; else the job is refused before step 0."""

    redundancy: str = setting(choice("device", "host", "off"), "device")
    """In which memory a rank keeps a copy of another one's masters and optimizer state; "off": a loss ends the job."""
    strategies: tuple[tuple[int, tuple[str, ...]], ...] = setting(strategies_by_ranks, ())
    """Candidate strategies by the number of ranks that are left, such as {"3": ["3*tp1"]}; "auto" proposes them, as it
    does for a number that is not listed."""
    compare_every: int = setting(integer(0), 100)
    """Every N steps, check that the copies equal their owners' masters and optimizer states; 0: never."""
    stuck_seconds: float = setting(number(exclusive=True, maximum=86400.0), 10.0)
    """A rank that has not come out of its step, or of what the script does between steps, so long after another one was
    lost ends itself, and is lost too."""


def _lengths(value: Any, place: str) -> str | None:
    if isinstance(value, (list, tuple)):
        raise ConfigError(
            f"config: {place} must name a file, but is a list of {len(value)}: write the numbers into one, a line each"
        )
    return text(optional=True)(value, place)  # type: ignore[no-any-return]


def _correction(value: Any, place: str) -> str:
    if isinstance(value, str) and value.endswith(".jsonl"):
        return value
    return choice(AUTO, "off", "report", "apply")(value, f"{place} (or a steps file, *.jsonl)")


def _recomputation(value: Any, place: str) -> bool | str:
    if value in ("all", KEEP_ATTENTION):
        return str(value)
    try:
        return flag(value, place)
    except ConfigError as error:
        raise ConfigError(f'{error}, or "all", or "{KEEP_ATTENTION}"') from None


def _fast_paths(value: Any, place: str) -> tuple[str, ...]:
    """ "auto" as the usual ones, "off" as (); else each name once."""
    known = (*StageOptions.paths(), FLASH_3)
    if value in (AUTO, "off"):
        return tuple(name for name in known if name != RECOMPUTE_MLP) if value == AUTO else ()
    return _names(value, place, known, '"auto", "off" or ')


def _names(value: Any, place: str, known: Sequence[str], otherwise: str = "") -> tuple[str, ...]:
    """A list of known names, each once; `otherwise` is what else might stand there."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"config: {place} must be {otherwise}a list of {', '.join(known)}, but is {value!r}")
    check = choice(*known)
    return tuple(dict.fromkeys(check(name, f"{place}[{index}]") for index, name in enumerate(value)))


KEEP_ATTENTION = "keep_attention"
ACTIVATIONS, OPTIMIZER = OFFLOADED = ("activations", "optimizer")


def _offload(value: Any, place: str) -> tuple[str, ...]:
    return _names(value, place, OFFLOADED)


@dataclass(frozen=True, slots=True)
class HydraConfig:
    """The block "hydra"."""

    tokens_per_step: int = setting(integer(0), 0)
    """A step draws sequences of `training_data` until it holds at least this many tokens. More than the data have are
    refused. Steps that a script hands in are as large as they come: for these the number sizes the first plans, and 0
    estimates it by `context_length`."""
    reorder_steps: int = setting(integer(1, 2), 1)
    """2: the sequences of the first two steps, of the next two and so on are sorted by length and cut into two steps
    again, the long ones first. No sequence moves by more than one step, and small steps wait less for their longest
    one. It needs `training_data` that can be indexed. 1: steps are as they are drawn."""
    total_steps: int | None = setting(integer(1, optional=True), None)
    """The step that training ends with, counted from the first start and not from a restart; None leaves it to the
    script."""
    context_length: int | None = setting(integer(2, optional=True), None)
    """Longest sequence that is trained on, in tokens, at most the model's positions; None sets no limit."""
    too_long: str = setting(choice("error", "truncate", "skip"), "error")
    """What to do with a sequence longer than `context_length`; truncated and skipped ones are counted in the log."""
    strategies: tuple[str, ...] = setting(strategies_of, ())
    """Candidate strategies, such as ["tp4 + 2*pp2", "8*tp1"], each of all ranks; "auto": the planner proposes them. A
    string is a list of one."""
    lengths: str | None = setting(_lengths, None)
    """A file of your sequences' lengths in tokens, as `ds-hydra preview` reads it. Where steps are handed in or drawn
    from a stream, "auto" proposes strategies for these lengths and one of `context_length`; None: for web pages."""
    choose: str = setting(choice("best", "cycle", renamed=_CHOOSE_RENAMED), "best")
    """"best": the planner's choice in each step; "cycle": in turn."""
    replay: str | None = setting(text(optional=True), None)
    """Plans to run again, as a run with `plans_file` wrote them; None plans anew."""
    cost_table: str | Mapping[str, str] | None = setting(read_tables, None)
    """Measured coefficients (JSON); None estimates them from the model's FLOPs. Where devices are of several classes, a
    file of each, such as {"h800": "h800.json", "h20": "h20.json"}, or one whose rows name their class, as "tp4@h20"."""
    cost_correction: str = setting(_correction, AUTO)
    """Measured over predicted time: "report" writes it to `steps_file`; "apply" scales costs by it too, slow ranks' as
    well, and in a few early steps tries layouts that the first costs made dear. "auto": "apply" on devices; "report" on
    CPU ranks and with `deterministic` or `replay`, since measured times differ from run to run. A run's steps file,
    "*.jsonl": costs are scaled at the same steps as there."""
    planner: PlannerConfig = setting(block(PlannerConfig, gone=PLANNER_GONE), PlannerConfig())
    seed: int = setting(integer(), 0)
    """Seed of the order of sequences, of dropout, of `initial_weights`, and of the search for plans."""
    initial_weights: str | None = setting(text(optional=True), None)
    """For a model built on the meta device: a folder of safetensors, of which a rank reads what it owns, or "random",
    as the model initialises itself, by `seed`, equal for any number of ranks. None takes the model's own values."""
    loss_norm: str = setting(choice("token", "sequence", "micro_batch", "batch"), "token")
    """The loss is the mean over all target tokens of the step, over its sequences' means, its micro-batches', or those
    of the batches that a script hands in, as DeepSpeed's own loop computes it: over as many as are configured. Under
    Trainer the default is "batch" where that counts no targets, as of most image-text models."""
    losses: str = setting(choice("auto", "early", "step"), "auto")
    """When the loss of `engine(batch)` is computed: "step": with the step that its batch belongs to; "early": at that
    call; "auto": with the step, unless the script reads losses before, which the first step finds out."""
    activation_checkpointing: bool | str = setting(_recomputation, False)
    """Whether backwards may compute layers again, as `model.gradient_checkpointing_enable()` allows it too. True: they
    do where no layout holds the longest sequence otherwise, where that is clearly the faster way, or where the cost
    table was measured so; "all": each layer in every step; "keep_attention": each layer but its attention, whose output
    stays. Results are equal."""
    offload: tuple[str, ...] = setting(_offload, ())
    """What may lie in hosts' memory, for long sequences on few devices. "activations": what recomputed layers keep
    meanwhile, where no layout holds the longest sequence otherwise, or always where `activation_checkpointing` is
    "all". "optimizer": FP32 parameters and states of the optimizer, which devices update piece by piece, with equal
    results; `zero_optimization.offload_optimizer` with the device "cpu" asks for the same."""
    fast_paths: tuple[str, ...] = setting(_fast_paths, _fast_paths(AUTO, ""))
    """How stages compute faster, or keep less, than as the model's code is written, where the model is found to allow
    it: "auto", "off" for none, or a list of names; "auto" is all but "recompute_mlp".

    "tiles": in recomputed layers MLPs run on some thousand rows at a time, forward and backward.
    "token_sharding": tensor parallel ranks share the tokens between the blocks; then all that a layer keeps for the
    backward is divided by tp, and else each of them holds all tokens there.
    "sp_overlap": of long rows, sequence parallel ranks exchange the heads of attention in up to eight groups, and
    compute one while the next ones travel.
    "functions": norms, rotary embeddings, gates of MLPs and linear layers that read the same rows are computed in fewer
    operators, which keep less for the backward.
    "recompute_mlp": the same, and MLPs with a gate compute their product again in the backward, and keep gate and up
    alone.
    "flash_3": FlashAttention 3 on GPUs that it is written for (Hopper), where `flash_attn_interface` is installed."""
    images: bool = setting(flag, False)
    """Whether batches that a script hands in may have images or audio, for a model with encoders of them. Before step 0
    a small copy of it is tried with some, and a class that does not train there as by its own forward is refused.
    False: the text alone is trained."""
    deterministic: bool = setting(flag, False)
    """On GPUs, only kernels that add up in one order, which are slower: a run repeats itself to the bit."""
    self_check: str = setting(choice("on", "off", "full"), "on")
    """Before step 0 a small copy of the model is trained under the strategies' schemes and compared with one process:
    "on" with few layers and ranks, in at most a minute of CPU time; "full" with all stages and ranks of each scheme.
    "off": no such copy. Only a model that has code of a script is still tried on sequences of the job: whether those
    that are packed together train as each does alone."""
    chunks: str = setting(choice("auto", "off"), "auto")
    """"auto": sequences are cut into slices where that is faster, or nothing holds them whole, and the model allows it,
    which the self-check tells. It needs pipelines of the schedule "list" and a cost table with measured shares. "off":
    they stay whole, and a replayed plan with slices is refused."""
    node_size: int | None = setting(integer(1, optional=True), None)
    """Ranks per node; None takes what the launcher says, or else the names of the hosts."""
    expert_imbalance: float = setting(number(1.0, 1000.0), EXPERT_IMBALANCE)
    """Rows of the busiest rank of those that share whole experts, over even ones, for which memory is planned."""
    cluster: tuple[NodesConfig, ...] = setting(read_cluster, ())
    timeout_seconds: float = setting(number(exclusive=True, maximum=86400.0), 300.0)
    """How long a collective, or on GPUs a part of a step, may wait for a rank before the job is given up, in torch's
    default group too, whoever made it. In a job with `elastic` the default is 30, and more is refused: some waits for a
    lost rank end by this time-out alone."""
    checkpoint: CheckpointConfig | None = setting(block(CheckpointConfig, optional=True), None)
    faults: FaultsConfig = setting(block(FaultsConfig, gone=_FAULTS_GONE), FaultsConfig())
    elastic: ElasticConfig | None = setting(block(ElasticConfig, optional=True), None)
    steps_file: str | None = setting(text(optional=True), "steps.jsonl")
    """One JSON record per step is appended here by rank 0; None writes none."""
    plans_file: str | None = setting(text(optional=True), None)
    """Each step's plan is written here by rank 0, for `replay`; None writes none."""
    trace: TraceConfig = setting(block(TraceConfig), TraceConfig())

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other, or that would have no effect."""
        if self.trace.steps and self.steps_file is None:
            raise ConfigError(
                "config: hydra.trace writes to the folder of hydra.steps_file, which is null: name a file, or remove "
                "the block"
            )
        if self.trace.profiler and not self.trace.steps:
            raise ConfigError("config: hydra.trace.profiler has no effect without hydra.trace.steps: name the steps")
        if self.elastic is not None and self.timeout_seconds > _ELASTIC_TIMEOUT_S:
            raise ConfigError(
                f"config: hydra.timeout_seconds is {self.timeout_seconds:g}, and an elastic job may wait "
                f"{_ELASTIC_TIMEOUT_S:g} at most for ranks that are lost: lower it, or remove it"
            )
        if self.elastic is not None and self.replay is not None:
            raise ConfigError(
                "config: hydra.replay has plans for one number of ranks, which hydra.elastic changes: remove one"
            )
        if self.choose == "cycle" and not self.strategies:
            raise ConfigError('config: hydra.choose "cycle" needs a list in hydra.strategies, which is "auto"')
        if self.cluster and self.node_size is not None:
            raise ConfigError("config: hydra.cluster says how many ranks each node has: remove hydra.node_size")
        if self.activation_checkpointing == KEEP_ATTENTION and ACTIVATIONS in self.offload:
            raise ConfigError(
                f'config: hydra.activation_checkpointing "{KEEP_ATTENTION}" has what attention makes stay on the '
                f'devices, and hydra.offload "{ACTIVATIONS}" moves what stays to the host: use "all", or remove one'
            )
        if self.replay is not None and self.choose != "best":
            raise ConfigError(
                f'config: hydra.replay names plans to run again, but hydra.choose is "{self.choose}": remove one of '
                "the two"
            )

    @property
    def shapes(self) -> tuple[StrategyShape, ...]:
        """The candidate strategies, read."""
        return tuple(StrategyShape.parse(strategy) for strategy in self.strategies)

    def correction_on(self, device: str) -> str:
        """`cost_correction`, settled for ranks on this type of device."""
        if self.cost_correction != AUTO:
            return self.cost_correction
        return "report" if device == "cpu" or self.deterministic or self.replay is not None else "apply"

    @property
    def recomputes_all(self) -> bool:
        """Whether all layers are to be computed again, and not only may be."""
        return self.activation_checkpointing in ("all", KEEP_ATTENTION)

    @property
    def may_recompute(self) -> bool:
        """Whether all layers are computed again if that is what it takes."""
        return not self.recomputes_all and bool(self.activation_checkpointing or ACTIVATIONS in self.offload)

    @property
    def stage_options(self) -> StageOptions:
        """How stages are to compute, where all layers are computed again that may be."""
        asked = self.activation_checkpointing or ACTIVATIONS in self.offload
        kept = self.activation_checkpointing == KEEP_ATTENTION
        return StageOptions.of_settings(bool(asked), self.fast_paths, ACTIVATIONS in self.offload, kept)

    @property
    def _highs(self) -> str:
        """What HiGHS's composed strategies are for: listed candidates are all that is run."""
        if not self.planner.highs or self.choose != "best" or self.replay is not None:
            return "off"
        return "advises" if self.strategies else "composes"

    def planner_options(self) -> PlannerOptions:
        """The settings that the planner works by, from this block and the block "planner"."""
        from ds_hydra.planner.options import PlannerOptions

        planner = self.planner
        return PlannerOptions(
            method=planner.method,
            highs=self._highs,
            choose=self.choose if self.replay is None else "replay",
            replay_file=self.replay,
            seed=self.seed,
            effort=planner.effort,
            simplest=planner.simplest,
        )


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """Both halves of a job's config, and notes on it for the log."""

    hydra: HydraConfig
    deepspeed: dict[str, Any]  # a copy without the block "hydra", with DeepSpeed's batch keys filled in
    notes: tuple[str, ...]  # one line each, for the log: how settings map, which are ignored
    source: dict[str, Any]  # as the user gave it


def parse_config(raw: Mapping[str, Any], host: str | None = None) -> ParsedConfig | None:
    """Validate a config that was read; None when it has no block "hydra" (a plain DeepSpeed job).

    With `host`, one of `hosts.HOSTS`, what that host fills in for "auto" is filled in, for the checks.
    Raises ConfigError, naming the key and the remedy, for anything in the block that is not understood, for a
    near miss of the block's own name, and for DeepSpeed settings that cannot hold for such a job.
    """
    _refuse_near_misses(raw)
    if BLOCK not in raw:
        return None
    given = raw[BLOCK]
    if isinstance(given, Mapping) and given.get("elastic") is not None:
        given = {"timeout_seconds": _ELASTIC_TIMEOUT_S, **given}
    hydra = parse_block(HydraConfig, given, BLOCK, gone=_GONE)
    settings = filled_in({key: value for key, value in raw.items() if key != BLOCK}, host)
    hydra = replace(hydra, offload=tuple(dict.fromkeys((*hydra.offload, *_offloaded(settings)))))
    deepspeed, notes = screen_deepspeed_settings(settings, hydra.total_steps, host)
    if hydra.lengths and hydra.strategies:
        notes = (*notes, "hydra.lengths has no effect: strategies are proposed for lengths where none are listed")
    return ParsedConfig(hydra, deepspeed, notes, dict(raw))


def _offloaded(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What DeepSpeed's own settings ask to have in the host's memory, by the names of `hydra.offload`."""
    checkpointing = settings.get("activation_checkpointing")
    asked = checkpointing.get("cpu_checkpointing") if isinstance(checkpointing, Mapping) else False
    states = states_offload(settings.get("zero_optimization"))
    return (*((ACTIVATIONS,) if is_on(asked) else ()), *((OPTIMIZER,) if states else ()))


def _refuse_near_misses(raw: Mapping[str, Any]) -> None:
    """Refuse "hydrra", "Hydra" or "ds_hydra", and the block inside another: DeepSpeed would ignore it in silence."""
    # The job would then train as a plain DeepSpeed job, and nothing but its speed would tell the user.
    for key in raw:
        if key == BLOCK or key in KNOWN_SETTINGS or not isinstance(key, str):
            continue
        bare = re.sub(r"^(ds|deepspeed)[_-]*", "", key.lower())
        alike = difflib.SequenceMatcher(None, bare, BLOCK).ratio()
        if bare.startswith(BLOCK) or alike >= 0.75:
            raise ConfigError(
                f'config: the top-level block {key!r} looks like "{BLOCK}" but is not, and DeepSpeed would '
                f'ignore it: rename it to "{BLOCK}" or remove it'
            )
    for key, value in raw.items():
        if key != BLOCK and isinstance(value, Mapping) and BLOCK in value:
            raise ConfigError(
                f'config: a block "{BLOCK}" stands inside {key!r}, where DeepSpeed would ignore it: move it to the top '
                "level"
            )


def check_num_ranks(config: HydraConfig, num_ranks: int) -> None:
    """Raise ConfigError unless each candidate strategy uses all `num_ranks` ranks of the job."""
    for index, (strategy, shape) in enumerate(zip(config.strategies, config.shapes, strict=True)):
        used = shape.num_ranks
        if used != num_ranks:
            sizes = " + ".join(str(pipeline.num_ranks) for pipeline in shape.pipelines)
            raise ConfigError(
                f"config: hydra.strategies[{index}] {strategy!r} uses {sizes} = {used} ranks but the job has "
                f"{num_ranks}: start it with {used} ranks or change the strategy"
            )
