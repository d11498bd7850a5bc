"""A few steps under torch's profiler, for a trace viewer (Perfetto, chrome://tracing).

torch.profiler records rank 0 between two steps, and the trace is written to the run's `report/`,
compressed. Recorded steps are slower, and their metrics are not marked: choose a window between two
reports, and after the first steps, in which kernels are chosen and compiled.
"""

from collections.abc import Callable

from torch.profiler import profile

from pipeline.train.job import Job
from pipeline.train.listener import Listener, Start, Update


class ToProfile(Listener):
    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        assert job.config.profile.steps
        self._first, self._last = job.config.profile.steps
        self._file, self._log = job.folder.report / f"profile-steps-{self._first}-{self._last}.json.gz", log
        self._profile: profile | None = None  # a run that resumes in the window records nothing

    def started(self, start: Start) -> None:
        self._start_if_due(start.step)

    def stepped(self, update: Update) -> None:
        self._start_if_due(update.step)
        if update.step == self._last and self._profile:
            self._profile.stop()
            try:
                self._file.parent.mkdir(exist_ok=True)
                self._profile.export_chrome_trace(str(self._file))
                self._log(f"profile of steps {self._first} to {self._last}: {self._file}")
            except (OSError, RuntimeError) as error:
                self._log(f"the profile could not be written: {error}")

    def _start_if_due(self, step: int) -> None:
        if step == self._first - 1:
            self._profile = profile()  # of CPU, and GPU if there is one
            self._profile.start()
