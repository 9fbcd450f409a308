"""All parts that train a job on one set of ranks: assembled in order, and let go of together.

[Note: order of assembly]
Every part needs some of those before it, and what can be refused is refused before it costs anything:

  guard         first, before the engine reads model and data: from then on a rank that fails, dies or freezes ends the
                others too
  prepare       reads the cost table and checks data, strategies and memory: no memory is allocated before it passes
  stages        of all candidates are built once without memory, so that a step which uses one first does not fail
  masters       the parameters that this rank owns, with the model's values; with these the longest and the shortest
                sequence are tried, while there is memory
  optimizer     over views of the masters; the LR scheduler is made on it
  loss scale    knows its type and its config from the engine
  update        masters, optimizer and loss scale
  copy          of another rank's masters, where training goes on without it [Note: copies]
  stepper       update and the placed strategies; allocates the arena, once the masters have shown that they fit, and
                then connects what steps use
  tracing       keeps the stepper's laps in the steps that the config names
  plans         by a producer on rank 0, which was started before all else and compiles its kernels meanwhile
  next step     plans and stepper; makes the next step ready while one runs
  learned       corrects the costs of plans, and adds composed strategies to the candidates
  checkpoints   saves and loads masters, loss scale and what was learnt

What one rank cannot do there is told by all ranks, where a part sends no messages (`together`); of all else the
watchdog tells.

A second crew in the same process, over another world, equals a restart with those ranks: of the first crew only what
a checkpoint carries over is left.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ds_hydra.checkpoint.checkpointer import Checkpointer
from ds_hydra.checkpoint.optimizer_state import install_optimizer, state_of_whole
from ds_hydra.checkpoint.write import Writer
from ds_hydra.engine.away import GRAD, MODEL, Away
from ds_hydra.engine.guard import Guard
from ds_hydra.engine.job import Job, give_masters
from ds_hydra.engine.next_step import NextStep
from ds_hydra.engine.plans import Learned, PlanSource, start_producer
from ds_hydra.engine.plugs import plugged
from ds_hydra.engine.prepare import PreparedJob, exposed_of, planner_options, prepare, simulated_job
from ds_hydra.engine.real_sequences import RealSequences
from ds_hydra.engine.record import Tracing
from ds_hydra.host.devices import out_of_modes
from ds_hydra.host.host_engine import HostEngine
from ds_hydra.pipe.placement import Strategy
from ds_hydra.pipe.shape import StrategyShape
from ds_hydra.plan.step_plan import StepPlan
from ds_hydra.planner import PlanRecipe
from ds_hydra.planner.composing import budget_of, typical_batch
from ds_hydra.planner.service import ProducerProcess
from ds_hydra.ranks.channel import together
from ds_hydra.ranks.world import World
from ds_hydra.report.record import StepWatch
from ds_hydra.simulate.job import job_record
from ds_hydra.step import host_states
from ds_hydra.step.model_masters import ModelMasters
from ds_hydra.step.stepper import Stepper
from ds_hydra.step.strategy_runtime import build_stages
from ds_hydra.step.update import Copied, Exchanged, LossScale, NeedsWholes, Update
from ds_hydra.watchdog.host import end_process
from ds_hydra.watchdog.watchdog import FINISH_S
from ds_hydra.zero_hetero.errors import OWN_FAULT, ConfigError

logger = logging.getLogger(__name__)

_NEXT_STEP_S = 2.0  # in which a step that is made ready ends, where its plan comes


class Crew:
    """All parts that train a job on one world. All ranks of the world make it together, and close it together."""

    def __init__(
        self,
        job: Job,
        world: World,
        host: HostEngine,
        request: Callable[[], int],
        guard: Guard,
        *,
        initial: bool,
        shift: int = 1,
    ):
        """Assemble everything, in the order of [Note: order of assembly]. `host` is given the optimizer; `request`
        gives what this rank tells the others with its figures of a step.

        `shift` says who keeps whose copy [Note: buddies]. With `initial` the masters take their first values; otherwise
        they must be given some. Raises ConfigError or PlanError when the job does not fit the world.
        """
        self.job, self.world, self.shift = job, world, shift
        self.activity, self.watchdog, self.together = guard.activity, guard.watchdog, guard.together
        world.channel.calling = guard.activity.calling
        try:
            with guard.assembling():
                self._assemble(host, request, initial=initial)
        except BaseException:
            if not initial:
                self.drop()  # others may go on, and assemble once more
            raise
        writer: weakref.ref[Writer] = weakref.ref(self.writer)  # the watchdog's thread must not hold this crew
        self.watchdog.finishes = lambda: (of := writer()) is not None and of.busy
        self.help: Callable[[], None] = lambda: None  # what this rank does for others once its script has ended
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _assemble(self, host: HostEngine, request: Callable[[], int], *, initial: bool) -> None:
        job, world = self.job, self.world
        with together(world.channel, "starting the planner's process"):
            producer = start_producer(job.config, world.rank, own=job.pre_step is not None)
            if producer is not None:
                # Also where something below is refused; not at exit, which forks of this process may come to first.
                weakref.finalize(self, producer.stop).atexit = False
        self.prepared: PreparedJob = prepare(job, world)
        self.job = job = replace(job, source=self.prepared.source, checked=self.prepared.checked)
        plan = job.source.plan
        with together(world.channel, "building the stages of all strategies"):
            build_stages(job.source, self.prepared.strategies.values(), world.rank, job.types.compute)
            self.watch = StepWatch(
                job.config.correction_on(world.device.type),
                self.prepared.found,
                plan.num_layers,
                self.prepared.num_elements,
                measured=job.config.cost_table is not None,
                cluster=world.cluster,
                expert_imbalance=job.config.expert_imbalance,
            )
        with together(world.channel, "allocating the master shards"):
            self._masters = ModelMasters(
                job.source, world.rank, world.num_ranks, world.device, job.types.masters, job.types.compute,
                run=host_states.RUN if job.states_on_host else 0,
            )  # fmt: skip
        self._real_sequences = RealSequences(job, world, self._masters, self.prepared.hidden)
        if initial:
            give_masters(self._masters, job, world)
            self._real_sequences.before_training()
        self._make_update(host)
        with together(world.channel, "allocating parameters and gradients"):
            self._stepper = Stepper(
                job.source,
                self._masters,
                world,
                strategies={str(shape): placed for shape, placed in self.prepared.strategies.items()},
                compute_dtype=job.types.compute,
                grad_dtype=job.types.grads,
                wire_dtype=job.types.wire,
                # What a batch counts that was handed in is in the weights of its sequences.
                loss_norm="token" if job.config.loss_norm == "batch" else job.config.loss_norm,
                seed=job.config.seed,
                loss_scale=self.loss_scale,
                update=self.update,
                activity=self.activity,
                request=request,
                least_arena=self.prepared.room.arena[world.rank],
            )
        self._stepper.runtimes.connect(self.copy.pairs if self.copy is not None else ())
        if self._exchange is not None:
            self._exchange.connect()
        self.away = Away(self._masters, self._stepper, self.update.optimizer)
        with together(world.channel, "starting the planner"):
            self._start_planner(producer)
        self.next_step = NextStep(self.plans, self._stepper, world, self.activity)
        self.learned = Learned(self.watch, self.plans)
        self._checkpoints = Checkpointer(
            host, self._masters, job.source.aliases, world.background, self.loss_scale, self.learned
        )

    def _make_update(self, host: HostEngine) -> None:
        """The optimizer, what updates the masters by it, and in an elastic job the copy of another rank's."""
        job, world = self.job, self.world
        names = [{"names": group.names} for group in job.recipe.groups]
        with together(world.channel, "making the optimizer"):
            # Its parameters are views of the masters: its step changes what the next pull sends, with no copy.
            groups = self._masters.trained.param_groups(names)
            optimizer = host.install_optimizer([group["params"] for group in groups])
            if self._masters.states is not None:
                if isinstance(optimizer, NeedsWholes):
                    raise ConfigError(
                        f"the callable given as optimizer made {type(optimizer).__name__}, which needs whole "
                        'parameters at once, but hydra.offload has "optimizer", which updates them piece by piece: '
                        "leave one out"
                    )
                self._masters.states.bring_home(optimizer)
            keeps = self.shift if job.config.elastic is not None else 0
            if (states := job.recipe.states) and job.config.elastic is not None:
                raise ConfigError("the optimizer has made steps, and in an elastic job its state is not kept: give a "
                                  "fresh one, or save a checkpoint and load it")  # fmt: skip
            if states:
                rules = {param.name: param.rule for bucket in self._masters.buckets for param in bucket.params}
                named = [group.names for group in job.recipe.groups]
                install_optimizer(optimizer, state_of_whole(self._masters.trained, optimizer, states, named, rules))
                states.clear()
            if isinstance(optimizer, NeedsWholes):
                optimizer.attach(names, self._masters.trained, job.source.plan, world.links, world.group, keeps)
            self.loss_scale = LossScale(host)
            unread = job.source.plan.unread
            self.update = Update(
                self._masters.trained, optimizer, job.clipping, self.loss_scale, world, job.config.faults, unread,
                states=self._masters.states,
            )  # fmt: skip
        self.copy: Copied | None = None
        if job.config.elastic is not None and self.shift:
            with together(world.channel, "allocating the copy of another rank's masters"):
                kind = plugged("keeper of copies", "hydra.elastic")(job.config.elastic.redundancy)
                self.copy = self.update.copy = kind(job.source, names, self._masters, optimizer, world, self.shift)
                if self._exchange is not None:
                    self._exchange.follow(self.copy.masters.trained)

    @property
    def _exchange(self) -> Exchanged | None:
        optimizer = self.update.optimizer
        return optimizer.exchange if isinstance(optimizer, NeedsWholes) else None

    def _start_planner(self, producer: ProducerProcess | None) -> None:
        job, world = self.job, self.world
        config, strategies, room = job.config, tuple(self.prepared.strategies), self.prepared.room
        exposed, found = self._exposed(), self.prepared.found  # links are read wherever there are some, so refused too
        cluster = simulated_job(job, world, found) if found.links or config.trace.steps else None
        self.tracing = Tracing(config.trace, Path(config.steps_file or "").parent, world, self._stepper, cluster)
        options = replace(
            planner_options(job, world), no_slices=self.prepared.no_slices, layers=job.source.plan.num_layers
        )
        lengths = () if job.data is None else job.data.lengths
        typical = typical_batch(lengths, config.tokens_per_step)
        recipe = PlanRecipe(
            self.prepared.table,
            strategies,
            options,
            tuple(map(exposed, strategies)) if exposed and len(strategies) > 1 else (),
            job_record(cluster) if exposed and cluster else None,
            room.to_record() if world.rank == 0 and options.highs == "composes" else None,
            budget_of(self.prepared.table, strategies, options.effort, typical),
        )
        self.plans = PlanSource(
            recipe, config, job.sampler, world.channel, self.activity, producer,
            room=room, own=job.pre_step, exposed=exposed,
        )  # fmt: skip

    def _exposed(self) -> Callable[[StrategyShape], float] | None:
        """What the messages of a strategy add to a step, on the rank that chooses among them; None: nothing does."""
        job, few = self.job, len(self.prepared.strategies) == 1 and planner_options(self.job, self.world).highs == "off"
        if self.world.rank or job.config.choose != "best" or job.config.replay or few or job.pre_step is not None:
            return None
        return exposed_of(job, self.world, self.prepared.found)

    # Parts that read states of the job, which are brought back where they are on the host [Note: states on the host].

    @property
    def masters(self) -> ModelMasters:
        self.away.bring_back((MODEL, GRAD))
        return self._masters

    @property
    def stepper(self) -> Stepper:
        """For an update bring the optimizer's states back, too."""
        self.away.bring_back((MODEL, GRAD))
        return self._stepper

    @property
    def real_sequences(self) -> RealSequences:
        self.away.bring_back((MODEL,))
        return self._real_sequences

    @property
    def checkpoints(self) -> Checkpointer:
        self.away.bring_back()
        return self._checkpoints

    # What may be asked wherever the states are.

    @property
    def writer(self) -> Writer:
        """Of checkpoints."""
        return self._checkpoints.writer

    @property
    def waiting(self) -> tuple[StepPlan, ...]:
        """Plans of the parts of a step whose gradients wait for an update."""
        return self._stepper.plans

    def strategies_of(self, plan: StepPlan) -> list[Strategy]:
        """Of a plan's phases, placed on the ranks."""
        return [self._stepper.runtimes.strategy_of(phase) for phase in plan.phases]

    def put_away(self, kinds: Collection[str]) -> None:
        """Move states of these kinds to the host. ConfigError in an elastic job."""
        if self.copy is not None:
            raise ConfigError(
                "engine.to(): hydra.elastic keeps what other ranks may ask for at any time: leave one of the two out"
            )
        self.next_step.forget()
        self.away.put(kinds)

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """A call of all ranks, which is out of the modes that the script has around it."""
        with out_of_modes(name), self.activity.calling(name):
            yield

    def close(self) -> None:
        """Wait for a save that is under way; end threads and the planning process. The world stays open."""
        # The save is waited for while heartbeats still go: a rank that dies during the wait must end it on the others.
        self.writer.close()
        self.next_step.forget()
        atexit.unregister(self._at_exit)
        self.watchdog.close()
        self.plans.close()

    def drop(self) -> None:
        """Let go of all parts and of the world, in whatever state an error has left them.

        A save that is under way is dropped, too. Nothing waits for another rank, if the sockets of the world's groups
        are shut [Note: freeing a thread].
        """
        parts = vars(self)
        if "_checkpoints" in parts:
            self.writer.drop()
        if "next_step" in parts:
            self.next_step.forget()
        if "_at_exit" in parts:
            atexit.unregister(self._at_exit)
        self.watchdog.close()
        for name in ("plans", "_stepper", "world"):  # those that an assembly came to
            if name in parts:
                parts[name].close()
        parts.clear()


def _close_at_exit(of: weakref.ref[Crew]) -> None:
    """A script that ends while a save is under way ends with it, and with its error if it fails."""
    crew = of()
    if crew is None:
        return
    if crew.watchdog.reported:
        # It has told the error by which it ends, and the others stay until the save is whole [Note: who ends when].
        # A thread that Python ends within gloo aborts the process, so none may be left there.
        waits = crew.writer.ended(within=FINISH_S)
        if not (waits and crew.next_step.ended(within=_NEXT_STEP_S)):
            end_process(crew.watchdog.code)
        return
    try:
        crew.help()
        crew.close()
    except Exception as error:
        code = OWN_FAULT
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as leave:
            code = int(leave.code or OWN_FAULT)
        end_process(code)  # Python itself takes none from a function that is called at its exit
