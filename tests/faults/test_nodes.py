"""Faults of nodes: killed, cut off, frozen, suspended, late, lost at the end, evicted before it.

The nodes are torchrun agents in network namespaces, see `faults.nodes`.
"""

import random
import signal
import time
from pathlib import Path

import pytest
from harness import SHARING, SLOW, Job, assert_same, command_line, contents_of, kill, wait_until

from faults.ledger import Notes
from faults.nodes import BIN, Nodes, missing
from pipeline.record.checkpoint_files import step_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

STEPS = 60
EVERY = 7
ROWS = {"a rank killed": "A1", "node 0 killed": "G3", "node 1 killed": "G3", "a cut of 5 s": "G1",
        "node 0 frozen": "L1", "all suspended": "L2"}  # fmt: skip


def job(folder: Path, digits: Path, *more: str, steps: int = STEPS) -> Nodes:
    words = (f"data.root={digits}", *SLOW, "train.epochs=100", f"train.max_steps={steps}",
             "evaluate.every=1000 epochs", f"checkpoint.every={EVERY} steps")  # fmt: skip
    return Nodes(folder / "job", *words, *more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, digits: Path, full: bool) -> Job:
    with job(tmp_path_factory.mktemp("undisturbed"), digits, steps=STEPS if full else 24) as nodes:
        nodes.start_all().wait()
    return nodes.run


@pytest.mark.fault("A1", "G1", "G3", "L1", "L2", ci=1, long=20)
def test_lost_nodes_are_replaced_and_end_with_the_same_bits(
    tmp_path: Path, digits: Path, undisturbed: Job, seed: int, full: bool, notes: Notes
) -> None:
    draw = random.Random(seed)
    kinds = [*ROWS] if full else ["node 0 killed"]
    with job(tmp_path, digits, steps=STEPS if full else 24) as nodes:
        nodes.start_all()
        for number, kind in enumerate(draw.sample(kinds, len(kinds))):
            nodes.wait_for_step(7 * number + draw.randint(1, 7))
            time.sleep(draw.uniform(0, 0.3))
            notes.note(ROWS[kind], seconds=_inject(nodes, kind, draw))
            if seed % 2:
                nodes.thaw_all()
        nodes.wait()
        assert_same(nodes.run, undisturbed)
        before = contents_of(nodes.run.folder)
        nodes.thaw_all()
        assert contents_of(nodes.run.folder) == before


def _inject(nodes: Nodes, kind: str, draw: random.Random) -> float:
    """Inject a fault and wait for the next step; return the seconds that its row limits."""
    run, began, seconds = nodes.run, time.monotonic(), 0.0
    before, starts = run.step(), len(run.starts())
    node = nodes[1 if kind == "node 1 killed" else 0]
    if kind == "a cut of 5 s":
        node.set_network("down")
        time.sleep(5)
        node.set_network("up")
        nodes.wait_for_step(run.step() + 2)
        assert len(run.starts()) == starts, "a short cut must not cause a restart"
        return time.monotonic() - began
    if kind == "all suspended":
        nodes.ends(signal.SIGTERM)
        seconds = time.monotonic() - began
        assert step_of(run.checkpoints()[-1]) == run.step(), "the last step is saved"
        nodes.start_all()
    elif kind == "node 0 frozen":
        peer, survivors = nodes[1], nodes[1].ranks()
        node.freeze()
        seconds = nodes.wait_for(lambda: not survivors & peer.ranks(), "end of the other's rank", 150)
        nodes.start(0)  # as the recovery has the Job do
    elif kind == "a rank killed":
        kill(min(nodes[draw.randrange(2)].ranks()), signal.SIGKILL)  # the others are its loader workers
    else:
        node.kill()
    nodes.wait_for(lambda: len(run.starts()) > starts, f"start after {kind}")
    resumed = run.starts()[-1]["step"]
    # one interval, and the steps made while the last checkpoint was written, or before the kill
    assert before - resumed <= 2 * EVERY, f"{kind}: from step {before} back to {resumed}"
    nodes.wait_for_step(resumed + 1)
    return seconds or time.monotonic() - began


@pytest.mark.full
@pytest.mark.fault("G2", ci=1, long=20)
def test_a_network_cut_ends_both_sides(tmp_path: Path, digits: Path, undisturbed: Job, notes: Notes) -> None:
    with job(tmp_path, digits, "run.timeout=15") as nodes:
        nodes.start_all().wait_for_step(8)
        ranks = nodes[0].ranks() | nodes[1].ranks()
        nodes[1].set_network("down")
        cut = time.monotonic()
        wait_until(lambda: not ranks & (nodes[0].ranks() | nodes[1].ranks()), "end of both", 75)
        notes.note("G2", seconds=time.monotonic() - cut)
        step = nodes.run.step()
        time.sleep(3)
        assert nodes.run.step() == step, "neither side continues alone"
        nodes[1].set_network("up")
        nodes.wait()
    assert_same(nodes.run, undisturbed)


@pytest.mark.full
@pytest.mark.fault("G3", "I1", ci=1, long=10)
def test_late_nodes_join_and_the_next_preflight_finds_their_bad_loss(tmp_path: Path, digits: Path) -> None:
    with job(tmp_path, digits, "optimizer.lr=1e6", "schedule.warmup=0") as nodes:
        nodes.start(1)
        time.sleep(4)  # the name of node 0 does not resolve
        nodes.start(0)
        assert nodes.ends() == [1, 1], nodes.log()
        assert [row["tags"]["world"] for row in nodes.run.starts()] == [2], "it is not restarted"
        assert nodes.start(0, "pipeline", "doctor").process.wait(60 * SHARING) == 3, nodes.log()


@pytest.mark.full
@pytest.mark.fault("L3", ci=2, long=10)
def test_a_peer_lost_at_the_end_does_not_keep_the_job_from_completing(
    tmp_path: Path, digits: Path, undisturbed: Job, seed: int, notes: Notes
) -> None:
    """Odd seeds lose node 1 in the seconds before rank 0's end, even ones in that after it."""
    draw = random.Random(seed)
    with job(tmp_path, digits) as nodes:
        nodes.start_all()
        if seed % 2:
            nodes.wait_for_step(draw.randint(STEPS - 10, STEPS))
        else:
            nodes.wait_for_finish()
        time.sleep(draw.uniform(0, 1))
        lost = time.monotonic()
        if seed % 4 == 2:
            nodes[1].freeze()
        else:
            nodes[1].kill()
        nodes.wait()
        notes.note("L3", seconds=time.monotonic() - lost)
    assert_same(nodes.run, undisturbed)


@pytest.mark.full
@pytest.mark.fault("L3", ci=1, long=5)
def test_the_job_completes_if_node_0_is_lost_after_the_last_step(tmp_path: Path, digits: Path) -> None:
    """Node 1 may have ended for good: the preflight of the new node 0 finds the finished run."""
    with job(tmp_path, digits, "train.max_steps=6") as nodes:
        nodes.start_all().wait_for_finish()
        nodes[0].kill()
        assert nodes.start(0, "pipeline", "doctor").process.wait(60 * SHARING) == 0, nodes.log()
        nodes.start(0)
        nodes.wait()
        log = nodes.log()
    assert "the run is already finished" in log
    assert "\ndone step=6 " in log


@pytest.mark.fault("L4", ci=1, long=3)
@pytest.mark.parametrize(
    "phase",
    ["rendezvous", *(pytest.param(phase, marks=pytest.mark.full) for phase in ("preflight", "silent peer"))],
)
def test_an_evicted_node_ends_soon(tmp_path: Path, digits: Path, phase: str, seed: int, notes: Notes) -> None:
    """In the phase "rendezvous" node 0 waits for node 1, otherwise node 1 waits for node 0."""
    with job(tmp_path, digits) as nodes:
        if phase == "silent peer":
            nodes.start(0).freeze()
        command = ("pipeline", "doctor") if phase == "preflight" else ()
        node = nodes.start(int(phase != "rendezvous"), *command)
        nodes.wait_for(lambda: str(BIN) in command_line(node.process.pid), "command")
        time.sleep(random.Random(seed).uniform(0, 12 if phase == "preflight" else 6))
        assert node.process.poll() is None, nodes.log()
        began = time.monotonic()
        kill(node.process.pid, signal.SIGTERM)
        assert node.process.wait(60) != 0, "it must not count as a success"
        notes.note("L4", seconds=time.monotonic() - began)
