"""Faults of nodes: killed, cut off, frozen, suspended, late, lost at the end, evicted before it.

The nodes are torchrun agents in network namespaces, see `faults.nodes`.
"""

import hashlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SHARING, SMALL, Job, assert_same, command_line, kill, read_rows, wait_until

from faults.ledger import Notes
from faults.nodes import BIN, Node, Nodes, missing
from pipeline.record.checkpoint_files import step_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

STEPS = 60
EVERY = 7
ROWS = {"one rank": "A1", "node 0": "G3", "another node": "G3", "cut": "G1"}
Make = Callable[..., Nodes]


@pytest.fixture
def make(tmp_path: Path, digits: Path) -> Make:
    """Return a function that makes a job of some nodes in a folder of its own."""

    def make_nodes(count: int = 2, *words: str, folder: Path = tmp_path) -> Nodes:
        length = ("train.epochs=100", f"train.max_steps={STEPS}", "evaluate.every=1000 epochs")
        every = f"checkpoint.every={EVERY} steps"
        return Nodes(folder / "job", count, f"data.root={digits}", *SMALL, *length, every, *words)

    return make_nodes


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory, make: Make) -> Callable[[int], Job]:
    """Return a function that makes a run without faults, once for each number of nodes."""

    def run_once(count: int) -> Job:
        if count not in _runs:
            with make(count, folder=tmp_path_factory.mktemp("undisturbed")) as nodes:
                nodes.start_all().wait()
                _runs[count] = nodes.run
        return _runs[count]

    return run_once


_runs: dict[int, Job] = {}
Undisturbed = Callable[[int], Job]


@pytest.mark.fault("A1", "G1", "G3", ci=1, long=20)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.full)])
def test_lost_nodes_are_replaced_and_end_with_the_same_bits(
    make: Make, undisturbed: Undisturbed, count: int, seed: int, full: bool, notes: Notes
) -> None:
    draw = random.Random(1000 * count + seed)
    kinds = (["one rank", "node 0"] if count == 2 else ["another node", "cut"]) if full else ["node 0"]
    expected = undisturbed(count)
    with make(count) as nodes:
        nodes.start_all()
        for number, kind in enumerate(draw.sample(kinds, len(kinds))):
            nodes.wait_for_step(20 * number + draw.randint(1, 20))
            time.sleep(draw.uniform(0, 0.3))
            _inject(nodes, kind, draw, notes)
        nodes.wait()
    assert_same(nodes.run, expected)


def _inject(nodes: Nodes, kind: str, draw: random.Random, notes: Notes) -> None:
    """Inject a fault and wait for the next step."""
    run, began = nodes.run, time.monotonic()
    before, starts = run.step(), len(run.starts())
    match kind:
        case "cut":
            node = nodes[draw.randrange(nodes.count)]
            node.set_network("down")
            time.sleep(5)
            node.set_network("up")
        case "one rank":
            (rank,) = nodes[draw.randrange(nodes.count)].ranks().values()
            kill(rank, signal.SIGKILL)
        case _:
            nodes[0 if kind == "node 0" else draw.randrange(1, nodes.count)].kill()
    if kind == "cut":
        nodes.wait_for_step(run.step() + 2)
        assert len(run.starts()) == starts, "a short cut must not cause a restart"
    else:
        nodes.wait_for(lambda: len(run.starts()) > starts, f"start after the loss of {kind}")
        resumed = run.starts()[-1]["step"]
        # one interval, and the steps made while the last checkpoint was written, or before the kill
        assert before - resumed <= 2 * EVERY, f"{kind}: from step {before} back to {resumed}"
        nodes.wait_for_step(resumed + 1)
    notes.note(ROWS[kind], seconds=time.monotonic() - began)


@pytest.mark.full
@pytest.mark.fault("G2", ci=1, long=20)
def test_a_permanent_network_cut_ends_both_sides(make: Make, undisturbed: Undisturbed, notes: Notes) -> None:
    limit, expected = 15, undisturbed(2)
    with make(2, f"run.timeout={limit}") as nodes:
        nodes.start_all().wait_for_step(8)
        ranks = [{*nodes[index].ranks().values()} for index in range(2)]
        nodes[1].set_network("down")
        cut = time.monotonic()
        wait_until(
            lambda: not any(ranks[index] & {*nodes[index].ranks().values()} for index in range(2)),
            "end of both ranks", limit + 60,
        )  # fmt: skip
        notes.note("G2", seconds=time.monotonic() - cut)
        step = nodes.run.step()
        time.sleep(3)
        assert nodes.run.step() == step, "neither side continues alone"
        nodes[1].set_network("up")
        nodes.wait()
    assert_same(nodes.run, expected)


@pytest.mark.full
@pytest.mark.fault("G3", ci=1, long=10)
def test_a_late_name_and_a_late_peer_end_no_node(make: Make) -> None:
    with make(2, "train.max_steps=4") as nodes:
        first = nodes.start(1)
        time.sleep(4)  # the name of node 0 does not resolve
        nodes.start(0)
        nodes.wait()
        assert nodes[1] is first


@pytest.mark.full
@pytest.mark.fault("L1", ci=1, long=5)
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_frozen_node_is_replaced_and_writes_nothing_when_it_thaws(
    make: Make, undisturbed: Undisturbed, index: int, seed: int, notes: Notes
) -> None:
    draw, expected = random.Random(100 * index + seed), undisturbed(2)
    with make() as nodes:
        nodes.start_all().wait_for_step(draw.randint(3, STEPS - 20))
        time.sleep(draw.uniform(0, 0.3))
        peer, old = nodes[1 - index], nodes[index]
        survivors = {*peer.ranks().values()}
        old.freeze()
        seconds = nodes.wait_for(
            lambda: not survivors & {*peer.ranks().values()}, "end of the other rank", 150
        )
        notes.note("L1", seconds=seconds)
        nodes.start(index)  # as the recovery has the Job do
        if thaws_early := seed % 2 == 1:
            nodes.wait_for(lambda: len(nodes.run.starts()) == 2, "start")
            _assert_ends_alone(nodes, old)
        nodes.wait()
        assert_same(nodes.run, expected)
        if not thaws_early:
            before = _contents(nodes.run.folder)
            _assert_ends_alone(nodes, old)
            assert _contents(nodes.run.folder) == before


def _assert_ends_alone(nodes: Nodes, old: Node) -> None:
    old.thaw()
    nodes.wait_for(lambda: not old.processes(), "end of the thawed node's processes", 60)


def _contents(folder: Path) -> dict[Path, tuple[str, int]]:
    """Return the hash and the time of each file."""
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


@pytest.mark.full
@pytest.mark.fault("L2", ci=1, long=10)
def test_a_suspended_job_resumes_with_the_same_bits(
    make: Make, undisturbed: Undisturbed, seed: int, notes: Notes
) -> None:
    draw, expected = random.Random(seed), undisturbed(2)
    with make() as nodes:
        for first, last in ((2, STEPS // 3), (STEPS // 2, STEPS - 15)):
            nodes.start_all().wait_for_step(draw.randint(first, last))
            began = time.monotonic()
            for index in range(2):
                kill(nodes[index].process.pid, signal.SIGTERM)
            for index in range(2):
                nodes[index].process.wait(60)
            notes.note("L2", seconds=time.monotonic() - began)
            assert step_of(nodes.run.checkpoints()[-1]) == nodes.run.step(), "the last step is saved"
        nodes.start_all().wait()
    assert_same(nodes.run, expected)


@pytest.mark.full
@pytest.mark.fault("L3", ci=2, long=10)
def test_a_peer_lost_at_the_end_does_not_keep_the_job_from_completing(
    make: Make, undisturbed: Undisturbed, seed: int, notes: Notes
) -> None:
    """Odd seeds lose node 1 in the seconds before rank 0's end, even ones in that after it."""
    draw, expected = random.Random(seed), undisturbed(2)
    with make() as nodes:
        nodes.start_all()
        if seed % 2:
            nodes.wait_for_step(draw.randint(STEPS - 10, STEPS))
        else:
            nodes.wait_for(lambda: _is_finished(nodes.run), "end of rank 0")
        time.sleep(draw.uniform(0, 1))
        lost = time.monotonic()
        if seed % 4 == 2:
            nodes[1].freeze()
        else:
            nodes[1].kill()
        nodes.wait()
        notes.note("L3", seconds=time.monotonic() - lost)
    assert_same(nodes.run, expected)


@pytest.mark.full
@pytest.mark.fault("L3", ci=1, long=5)
def test_node_0_lost_after_the_last_step_does_not_keep_the_job_from_completing(make: Make) -> None:
    """Node 1 may have ended for good: the preflight of the new node 0 finds the finished run."""
    with make(2, "train.max_steps=6") as nodes:
        nodes.start_all().wait_for(lambda: _is_finished(nodes.run), "end of rank 0")
        nodes[0].kill()
        assert nodes.start(0, "pipeline", "doctor").process.wait(60 * SHARING) == 0, nodes.log()
        nodes.start(0)
        nodes.wait()
        log = nodes.log()
    assert "the run is already finished" in log
    assert "\ndone step=6 " in log


def _is_finished(run: Job) -> bool:
    return any(row.get("status") == "FINISHED" for row in read_rows(run.folder / "journal.jsonl"))


@pytest.mark.full
@pytest.mark.fault("I1")
def test_the_next_preflight_finds_that_the_loss_was_not_finite(make: Make) -> None:
    with make(2, "optimizer.lr=1e6", "schedule.warmup=0") as nodes:
        nodes.start_all()
        assert [nodes[index].process.wait(120 * SHARING) for index in range(2)] == [1, 1], nodes.log()
        assert len(nodes.run.starts()) == 1, "it is not restarted"
        assert nodes.start(0, "pipeline", "doctor").process.wait(60 * SHARING) == 3, nodes.log()


@pytest.mark.fault("L4", ci=1, long=3)
@pytest.mark.parametrize(
    "phase",
    ["rendezvous", *(pytest.param(phase, marks=pytest.mark.full) for phase in ("preflight", "silent peer"))],
)
def test_a_node_evicted_before_training_is_gone_in_seconds(
    make: Make, phase: str, seed: int, notes: Notes
) -> None:
    """In the phase "rendezvous" node 0 waits for node 1, otherwise node 1 waits for node 0."""
    with make() as nodes:
        if phase == "silent peer":
            nodes.start(0).freeze()
        node = nodes.start(
            int(phase != "rendezvous"), *(("pipeline", "doctor") if phase == "preflight" else ())
        )
        nodes.wait_for(lambda: str(BIN) in command_line(node.process.pid), "command")
        time.sleep(random.Random(seed).uniform(0, 12 if phase == "preflight" else 6))
        assert node.process.poll() is None, nodes.log()
        began = time.monotonic()
        kill(node.process.pid, signal.SIGTERM)
        code = node.process.wait(60)
        notes.note("L4", seconds=time.monotonic() - began)
        assert code != 0, "it must not count as a success"
