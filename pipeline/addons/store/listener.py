"""The mirror of a run: opened before the checks of a request, told of each checkpoint."""

from collections.abc import Callable
from pathlib import Path

from pipeline.addons.store.bucket import Store
from pipeline.addons.store.check import check_mirror
from pipeline.addons.store.mirror import Mirror
from pipeline.config.schema import Config
from pipeline.errors import RunError
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import make_terminal
from pipeline.train.listener import End, Listener, Start


class ToMirror(Listener):
    """Has the mirror upload what is new."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def started(self, start: Start) -> None:
        self._mirror.start()

    def saved(self, checkpoint: Path) -> None:
        self._mirror.upload()

    def ended(self, end: End) -> None:
        if (
            end.is_finished
        ):  # complete before the others leave: if this node is lost later, nobody must start again
            self._mirror.close(end.seconds_left)
        else:
            self._mirror.upload()  # while other listeners deliver

    def closed(self, end: End) -> None:
        self._mirror.close(end.seconds_left)


def open_mirror(config: Config, folder: RunFolder, is_restart: Callable[[Path], bool]) -> Mirror:
    """Take the run's folder and the lease of its mirror, and restore from the mirror what is newer.

    Comes before the checks, because they look at the run that is resumed.

    is_restart: see `Mirror.open`.
    """
    assert config.checkpoint.mirror
    folder.check_writable()
    store = Store(config.checkpoint.mirror)
    check_mirror(store)
    folder.hold()
    try:
        mirror = Mirror(store, folder, make_terminal(is_main=True).log)
        mirror.open(config.run.resume, is_restart)
    except OSError as error:
        folder.release()
        raise folder.write_error(error) from None
    except RunError:
        folder.release()
        raise
    return mirror
