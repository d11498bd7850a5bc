"""A run that is ready to train: its parts, complete when they are put together."""

from pipeline.guards.divergence import DivergenceWatch
from pipeline.lazy import part
from pipeline.train.evaluate import Evaluator
from pipeline.train.job import Job, Process
from pipeline.train.metrics import Metrics
from pipeline.train.records import Records
from pipeline.train.state import TrainState
from pipeline.train.step import Step


class Trainer:
    """The parts with which a process trains. The state changes, the parts stay."""

    def __init__(self, job: Job, process: Process, state: TrainState, records: Records) -> None:
        self.job, self.process, self.state, self.records = job, process, state, records
        config, plan, strategy = job.config, job.plan, state.strategy
        self.step = Step(config, plan, state, process.timer)
        self.stragglers = part("straggler watch")(strategy, process.terminal.log)
        self.metrics = Metrics(config, plan, process, self.stragglers)
        self.divergence = DivergenceWatch(strategy, plan)
        predict = strategy.make_predictor(state.eval_model)
        self.evaluator = Evaluator(state.eval_model, job.source.val, config, plan, process.group, predict)
