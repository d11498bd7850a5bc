"""The listener of a run that starts the sender, and waits for it at the end."""

import shlex
from collections.abc import Callable

from pipeline.errors import RunError
from pipeline.record import sender
from pipeline.record.sender import Sender
from pipeline.train.job import Job
from pipeline.train.listener import End, Listener, Start


class ToMLflow(Listener):
    """Starts the process that sends the journal's rows to MLflow, and waits for it at the end."""

    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        self._config, self._folder, self._log = job.config, job.folder, log
        self._sender: Sender | None = None

    def started(self, start: Start) -> None:
        if ignored := sender.ignored_variables():
            self._log(f"MLflow{ignored}")
        try:
            self._sender = sender.start(self._config, self._folder)
        except OSError as error:
            self._log(
                f"MLflow's sender could not be started: {error.strerror}; 'pipeline sync' sends the journal later"
            )

    def error(self) -> RunError | None:
        """Return None once MLflow is reached, or the error if it is not at the first attempt."""
        try:
            if self._sender:
                self._sender.wait_until_ready()
        except RunError as error:
            return error
        return None

    def closed(self, end: End) -> None:
        if self._sender and not self._sender.close(self._log, end.seconds_left):
            command = f"pipeline sync {shlex.quote(str(self._folder.path))}"
            reason = f" ({last})" if (last := sender.last_failure(self._folder)) else ""
            self._log(f"MLflow did not take everything{reason}: the journal keeps it, '{command}' sends it")
