"""A run that is ready to train: its parts, complete when they are put together."""

from dataclasses import dataclass, field

from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.sources import Images, Source
from pipeline.group import Group
from pipeline.guards.divergence import DivergenceWatch, make_divergence_watch
from pipeline.guards.signals import StopRequest
from pipeline.guards.stragglers import StragglerWatch, make_straggler_watch
from pipeline.guards.watchdog import Watchdog
from pipeline.model.architectures import Normalise
from pipeline.parallel import Strategy
from pipeline.plan import Plan
from pipeline.record.terminal import Terminal
from pipeline.telemetry.mfu import make_mfu_meter
from pipeline.telemetry.profiler import Profiler
from pipeline.telemetry.timing import StepTimer
from pipeline.train.evaluate import Evaluator
from pipeline.train.metrics import Metrics
from pipeline.train.records import Records
from pipeline.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The parts with which a process trains. The state changes, the parts stay."""

    config: Config
    plan: Plan
    state: TrainState
    normalise: Normalise
    train_images: Images
    evaluator: Evaluator
    divergence: DivergenceWatch
    stragglers: StragglerWatch
    watchdog: Watchdog
    stop: StopRequest
    timer: StepTimer
    profiler: Profiler
    metrics: Metrics
    records: Records
    """The files that rank 0 writes; a null object in the other processes."""
    terminal: Terminal
    current_batches: list[Batch] = field(default_factory=list)
    """Those of the current step, which an error names."""

    @classmethod
    def build(
        cls,
        config: Config,
        plan: Plan,
        state: TrainState,
        source: Source,
        records: Records,
        terminal: Terminal,
        *,
        timer: StepTimer,
        watchdog: Watchdog,
        stop: StopRequest,
        profiler: Profiler,
    ) -> "Trainer":
        """Return a trainer with the parts that follow from these."""
        strategy, group = state.strategy, state.strategy.group
        stragglers = make_straggler_watch(strategy, terminal.log)
        mfu = make_mfu_meter(config, plan.num_classes, plan.world, group.device)
        predict = strategy.make_predictor(state.eval_model)
        return cls(
            config=config,
            plan=plan,
            state=state,
            normalise=Normalise(group.device, channels_last=config.model.channels_last),
            train_images=source.train,
            evaluator=Evaluator(state.eval_model, source.val, config, plan, group, terminal, predict),
            divergence=make_divergence_watch(strategy, plan),
            stragglers=stragglers,
            watchdog=watchdog,
            stop=stop,
            timer=timer,
            profiler=profiler,
            metrics=Metrics(plan, group, timer, stragglers, mfu, records, terminal),
            records=records,
            terminal=terminal,
        )

    @property
    def strategy(self) -> Strategy:
        return self.state.strategy

    @property
    def group(self) -> Group:
        return self.state.strategy.group

    def asked_to_stop(self) -> bool:
        """Report progress to the watchdog. Return True if a signal asked to stop."""
        self.watchdog.beat()
        return self.stop.is_set()
