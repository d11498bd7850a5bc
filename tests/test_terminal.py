"""Terminal output: a live line on a terminal, plain lines elsewhere, no colour if unwanted."""

import contextlib
import fcntl
import os
import pty
import shutil
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness import SMALL, Job, MakeJob, before_each, quick

from pipeline.record.journal import final_status


def test_training_shows_its_progress_in_one_line_of_a_terminal(tmp_path: Path, digits: Path) -> None:
    words = [f"data.root={digits}", *SMALL, "batch.global=96", "train.epochs=2"]
    command = [sys.executable, "-m", "pipeline", "train", "digits", *words]
    screen = bytearray()
    main, end = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with subprocess.Popen(command, cwd=tmp_path, stderr=end, stdout=subprocess.PIPE) as process:
        os.close(end)
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(main, 65536):
                screen += part
        assert process.wait() == 0
    os.close(main)
    lines = screen.decode().replace("\n", "\r").replace("\x1b[K", "").split("\r")
    assert [line for line in lines if line.startswith("validation 100%")]
    shown = [line for line in lines if " left  " in line]
    assert "epoch 1/2" in shown[0]
    assert "step 28/28" in shown[-1]
    assert max(map(len, shown)) < 120


def test_a_quiet_run_prints_nothing_and_copies_no_model_in_vain(job: MakeJob) -> None:
    no_copy = "from pipeline.train import session; session.copy_to_host = 0"
    run = job("train.max_steps=1", "run.resume=never", "--quiet", prelude=no_copy)
    for _ in range(2):  # the second sets the first aside
        result = run.run()
        assert (result.code, result.err, result.done["step"]) == (0, "", "1")


# What may happen to an output: statements that a process executes first.
BROKEN_PIPE = "import os; r, w = os.pipe(); os.dup2(w, {0}); os.close(r); os.close(w)"
FULL_DISK = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), {0})"
DEAD_TERMINAL = "import os; m, s = os.openpty(); os.dup2(s, {0}); os.close(m); os.close(s)"
CLOSED = "import os; os.close({0})"
NOT_READ = (
    "import os; r, w = os.pipe(); os.set_blocking(w, False); os.write(w, bytes(1 << 20));"
    " os.set_blocking(w, True); os.dup2(w, {0})"
)


@pytest.fixture(scope="module")
def undisturbed(job: MakeJob) -> Job:
    return job("train.max_steps=4", "evaluate.every=2 steps").finished()


@pytest.mark.parametrize(
    ("happening", "nproc"),
    [(BROKEN_PIPE, 2), (FULL_DISK, 2), (DEAD_TERMINAL, 1), (CLOSED, 1), (NOT_READ, 1)],
    ids=["pipe", "disk", "terminal", "closed", "not read"],
)
def test_nothing_that_happens_to_standard_error_ends_or_changes_a_run(
    tmp_path: Path, undisturbed: Job, happening: str, nproc: int
) -> None:
    run = Job(tmp_path / "run", undisturbed.arguments, nproc, prelude=happening.format(2))
    assert run.run().done["step"] == "4"
    assert final_status(run.folder / "journal.jsonl") == "FINISHED"
    assert nproc == 2 or run.output() == undisturbed.output()


@pytest.mark.parametrize("fault", [BROKEN_PIPE, FULL_DISK, CLOSED], ids=["pipe", "disk", "closed"])
def test_an_exit_code_survives_lost_output(
    tmp_path: Path, undisturbed: Job, digits: Path, fault: str
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(digits / "val", damaged / "train")
    shutil.copytree(digits / "val", damaged / "val")
    next((damaged / "val/3").iterdir()).write_bytes(b"no image")
    code = 4 if fault == FULL_DISK else 0
    for words, expected in (
        (["data", "check", str(damaged)], 4), (["doctor", "nosuch", "--json"], 2), (["recipes"], code),
        (["plan", "digits"], code), (undisturbed.train_words(), code),
    ):  # fmt: skip
        result = quick(*words, cwd=tmp_path, timeout=60, prelude=fault.format(1), code=expected)
        assert "Traceback" not in result.err
        if words[0] not in ("data", "doctor"):
            assert ("pipeline: standard output cannot be written" in result.err) == (code == 4)


def test_an_output_that_is_closed_gets_nothing_and_no_file_takes_its_place(tmp_path: Path) -> None:
    code = "from pipeline.cli.main import main; main(['recipes'])"
    text = f"log = open('log', 'w'); {code}; print(open('file', 'w').fileno() > 2, file=log)"
    subprocess.run(["sh", "-c", '"$0" -c "$1" >&- 2>&- <&-', sys.executable, text], cwd=tmp_path, check=True)
    assert (tmp_path / "log").read_text() == "True\n"


def test_a_second_cuda_error_of_a_gpu_names_it_and_exits_75(tmp_path: Path, undisturbed: Job) -> None:
    run = Job(tmp_path / "run", undisturbed.arguments, 2)
    error = "torch.AcceleratorError('CUDA error: uncorrectable ECC error encountered')"
    gpu = "torch.cuda.get_device_properties = lambda device: type('Gpu', (), {'uuid': '4f3a'})"
    fault = f"if os.environ['RANK'] == '1': {gpu}; raise {error}"
    run.prelude = before_each("pipeline.train.loop.save", "import torch", fault)
    assert "uncorrectable ECC" in run.run(code=1).err
    second = run.run(code=75)
    assert f"the GPU 4f3a of {socket.gethostname()}, of rank 1, had a CUDA error again" in second.err
    run.prelude = run.prelude.replace("uncorrectable ECC", "device-side assert")
    run.run(code=1)  # the program's fault


def test_a_crash_is_recorded_before_it_is_printed_with_its_cause(tmp_path: Path, undisturbed: Job) -> None:
    cause = "CUDA error: device-side assert triggered\\nCompile with `TORCH_USE_CUDA_DSA`"
    prelude = before_each("pipeline.train.session.train", f"raise RuntimeError('{cause}')")
    result = Job(tmp_path / "run", undisturbed.arguments, 2, prelude=prelude).run(code=1)
    for line in (line for line in result.err.splitlines() if line.startswith("pipeline: ")):
        assert "CUDA error: device-side assert triggered Compile with" in line
    assert "other ranks were stopped" in result.err.splitlines()[-1]

    prelude += """
import io, sys
class Terminal(io.StringIO):
    def write(self, text):
        if 'Traceback' in text: os._exit(9)
sys.stderr = Terminal()
"""
    run = Job(tmp_path / "printing", undisturbed.arguments, prelude=prelude)
    assert run.run().code == 9
    assert final_status(run.folder / "journal.jsonl") == "FAILED"
