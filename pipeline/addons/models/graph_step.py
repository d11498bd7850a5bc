"""An update as one CUDA graph, for models so small that the GPU waits for Python.

The host then starts one graph in place of hundreds of kernels. What differs from step to step lies
in tensors that the graph reads: the batch, the learning rates, the flag of a bad loss. Dropout
stays addressed, because a replay begins at the seed that the host has set. The moving average is
not in the graph. What a model's Python decides for each step is recorded with one decision.
A replay counts as forward and backward in the times of a run.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.addons.models.memory import is_out_of_memory
from pipeline.config.schema import Config
from pipeline.data.batch import Batch
from pipeline.errors import RequestError, one_line
from pipeline.guards.nonfinite import DeviceLossGuard
from pipeline.plan import Plan
from pipeline.timing import StepTimer
from pipeline.train.state import TrainState
from pipeline.train.step import Step

_READ = ("images", "labels", "mix")


class GraphStep(Step):
    """Makes the first update of a start as `Step` does, records the second, and replays it."""

    def __init__(self, config: Config, plan: Plan, state: TrainState, timer: StepTimer) -> None:
        super().__init__(config, plan, state, timer)
        assert isinstance(state.loss_guard, DeviceLossGuard), "a run on a GPU has it"
        self._guard = state.loss_guard
        self._is_ready = False  # the first update chooses kernels and makes what the optimizer keeps
        self._is_updated = False  # a replay has made this step's update
        self._graph: Any = None
        self._batch: Any = None  # which the graph reads
        self._loss = torch.zeros(())  # which it writes
        self._rates = [torch.zeros((), device=state.totals.device) for _ in state.optimizer.param_groups]
        for group in state.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True

    def _run_pass(self, micro: int, batch: Batch) -> Tensor:
        self._is_updated = False
        if self._is_ready and self._graph is None:
            self._graph = self._record(batch)
        if self._graph is None:
            return super()._run_pass(micro, batch)
        for name in _READ:
            getattr(self._batch, name).copy_(getattr(batch, name))
        self._set_rates()
        self._graph.replay()
        self._is_updated = True
        return self._loss.clone()  # the next replay writes another one

    def _set_rates(self) -> None:
        if not self._is_updated:
            super()._set_rates()
            for group, rate in zip(self._state.optimizer.param_groups, self._rates, strict=True):
                rate.fill_(group["lr"])
                group["lr"] = rate

    def _update(self) -> None:
        if not self._is_updated:
            super()._update()
            self._is_ready = True

    def _record(self, batch: Batch) -> Any:
        """Return the graph of an update. Raises RequestError if it cannot be recorded."""
        state, timer = self._state, self._timer
        self._batch = batch._replace(**{name: getattr(batch, name).clone() for name in _READ})
        buffers = list(state.model.buffers())
        graph = torch.cuda.CUDAGraph()
        self._timer = StepTimer()  # a GPU's timer could not read the events that a graph records
        torch.cuda.synchronize()  # an error of an earlier kernel is no fault of the recording
        try:
            # a thread pins the next batches meanwhile, which the default mode would not allow
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._loss = super()._run_pass(0, self._batch)
                self._guard.check(self._loss)  # `agree` does so again: four small kernels
                super()._update()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # torch's last error only says that there was one before
            raise self._refusal(one_line(error.__context__ or error)) from error
        if any(now is not before for now, before in zip(state.model.buffers(), buffers, strict=True)):
            raise self._refusal("the model makes new tensors of its running statistics")
        self._timer = timer
        return graph

    def _refusal(self, reason: str) -> RequestError:
        problem = f"an update of {self._config.model.arch} cannot be recorded as a CUDA graph ({reason})"
        return RequestError(problem, "set train.compile=on").collective()
