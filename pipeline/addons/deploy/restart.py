"""Restarts: `run.resume` applies once in a job, however often its ranks are started again.

run.resume=never or a path would discard at each restart what the run has saved since. torchrun's
count of restarts leaves out nodes that come and go, and a node that replaces a lost one counts from
0. So the journal of a run says which job applied which value. Nothing here imports torch.
"""

from pathlib import Path

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.record.checkpoint_files import list_checkpoints, step_of
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event
from pipeline.record.terminal import make_terminal
from pipeline.supervision import launch_id

_NO_LAUNCH_ID = "none"  # torchrun's id of every job on several nodes that is started without --rdzv-id


def has_applied_resume(config: Config, journal: Path) -> bool:
    """Return True if this job has applied its run.resume, by the last start in a run's journal.

    Raises RequestError if a restart of this job could not be told from a later job.
    """
    job, resume = launch_id(), config.run.resume
    if job is None or resume == "auto" or Path(resume).absolute() == config.run_dir.absolute():
        return False
    if job == _NO_LAUNCH_ID:
        problem = f"run.resume={resume} would apply again at each restart of a job without an id"
        raise RequestError(problem, "name this job with torchrun's --rdzv-id NAME, or leave run.resume out")
    start = last_event(journal, "started")
    return (start.get("launch"), start.get("resume")) == (job, resume)


def config_after_restart(config: Config) -> Config:
    """Return the configuration, with run.resume changed if it was applied earlier in this job.

    A restart resumes from what the run has saved since (auto), or from the same checkpoint.
    """
    folder = RunFolder(config.run_dir)
    if not has_applied_resume(config, folder.journal):
        return config
    named, resume = config.run.resume, "auto"
    used, own = last_event(folder.journal, "started")["checkpoint"], list_checkpoints(folder.checkpoints)
    is_copied = own and used and step_of(own[0]) >= step_of(Path(used))
    if named != "never" and used and not is_copied:  # the same file, and no newer one of its folder
        places = (Path(named) / used, Path(named) / "checkpoints" / used)
        resume = next((str(path) for path in places if path.exists()), named)
    applied = f"an earlier start of job {launch_id()} applied run.resume={named}"
    make_terminal(is_main=True).log(f"{applied}: continuing with run.resume={resume}")
    return config.replacing("run", resume=resume)
