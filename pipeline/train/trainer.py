"""A run that is ready to train: its parts, complete when they are put together."""

from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.data.sources import Source
from pipeline.guards.divergence import make_divergence_watch
from pipeline.guards.signals import StopRequest
from pipeline.guards.stragglers import make_straggler_watch
from pipeline.guards.watchdog import Watchdog
from pipeline.model.architectures import Normalise
from pipeline.plan import Plan
from pipeline.record.terminal import Terminal
from pipeline.telemetry.mfu import make_mfu_meter
from pipeline.telemetry.profiler import Profiler
from pipeline.telemetry.timing import StepTimer
from pipeline.train.evaluate import Evaluator
from pipeline.train.metrics import Metrics
from pipeline.train.records import Records
from pipeline.train.state import TrainState


class Trainer:
    """The parts with which a process trains. The state changes, the parts stay."""

    def __init__(
        self, config: Config, plan: Plan, state: TrainState, source: Source, records: Records, terminal: Terminal, *,
        timer: StepTimer, watchdog: Watchdog, stop: StopRequest, profiler: Profiler,
    ) -> None:  # fmt: skip
        self.strategy, self.group = state.strategy, state.strategy.group
        self.config, self.plan, self.state = config, plan, state
        self.records, self.terminal = records, terminal
        self.timer, self.watchdog, self.stop, self.profiler = timer, watchdog, stop, profiler
        self.stragglers = make_straggler_watch(self.strategy, terminal.log)
        mfu = make_mfu_meter(config, plan.num_classes, plan.world, self.group.device)
        predict = self.strategy.make_predictor(state.eval_model)
        self.normalise = Normalise(self.group.device, channels_last=config.model.channels_last)
        self.train_images = source.train
        self.evaluator = Evaluator(state.eval_model, source.val, config, plan, self.group, terminal, predict)
        self.divergence = make_divergence_watch(self.strategy, plan)
        self.metrics = Metrics(plan, self.group, timer, self.stragglers, mfu, records, terminal)
        self.current_batches: list[Batch] = []
        """Those of the current step, which an error names."""

    def asked_to_stop(self) -> bool:
        """Report progress to the watchdog. Return True if a signal asked to stop."""
        self.watchdog.beat()
        return self.stop.is_set()
