"""A rendezvous for torchrun in which every wait ends: `torchrun --rdzv-backend pipeline`.

The torchrun agents of a job's nodes meet here before each start of their ranks. The agent of node 0
leads: it hosts a TCPStore and decides which nodes form the next round, a world of ranks. Each agent
sends a heartbeat; the leader's answer is the state of the rounds.

torchrun's own backend, c10d, is not enough when a node loses power (torch 2.14): an agent that asks
a store whose node went dark waits until the kernel gives up the connection, peers of a dark node
learn of it only when a collective times out, an agent in native code reacts to no signal, and it
forms a world of any size between --nnodes MIN:MAX. Here

- a node that is silent for LOST_S ends the round: the other agents stop their ranks and wait;
- if that node is the leader, they look for a new one under the same name;
- an agent that did not run for LOST_S (its machine was frozen) exits, and its ranks with it;
- only numbers of nodes in `allowed_nodes` form a round, the others wait.

Options in --rdzv-conf: join_timeout (seconds to wait for a round, default 600) and allowed_nodes
(such as 1+2+4, default all from MIN to MAX). On a single machine (--nnodes 1, the default) there is
no other agent, see `LocalRendezvous`. torch finds this module by an entry point of the group
`torchrun.handlers`.
"""

import atexit
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from torch.distributed.elastic.utils.distributed import get_free_port

from pipeline.addons.deploy.local_rendezvous import LocalRendezvous, OpenRendezvous
from pipeline.addons.deploy.membership import LOST_S, STOPPING_S, Membership, Node, alive
from pipeline.addons.run.streams import tolerate_failures
from pipeline.errors import OK, RequestError, TemporaryError, count_of
from pipeline.guards.signals import is_hangup_ignored

_BEAT_S = 1.0
_CONNECT_S = 10.0
_LOG_EVERY_S = 30.0
_STORE_TIMEOUT = timedelta(seconds=60)
_JOIN_TIMEOUT_S = 600
_PORT = 29400  # torchrun's default
# where torchrun's agents wait for each other after success (torch 2.14, `_exit_barrier`)
_EXIT_BARRIER = "torchelastic/agent/terminal_state/last_member"


class _Link:
    """A connection of this agent to the leader, or the leader itself. It lives until it is lost."""

    def __init__(self, host: str, port: int, local_address: str | None, allowed: Sequence[int]) -> None:
        self._host, self._port, self._local_address, self._allowed = host, port, local_address, allowed
        # sent with each heartbeat; the leader sets the two times
        self.state = Node(socket.gethostname())
        self.key = 0  # the number of this agent in the store
        self.is_leader = False
        self.answer: dict[str, Any] = {}  # the leader's last answer, see `_lead`
        self.error = ""
        self.changed = threading.Condition()
        self._closed = threading.Event()
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True if this connection must be replaced by a new one."""
        return bool(self.error) or self.silence_s > (LOST_S if self.answer else _CONNECT_S)

    @property
    def silence_s(self) -> float:
        """Seconds since the last new answer, or since the first attempt to connect."""
        return time.monotonic() - self._progress

    def close(self) -> None:
        """Send the last state of this agent, and end the thread unless it hangs."""
        self._closed.set()
        if self.answer:  # otherwise it may still wait in native code for a leader that is silent
            self._thread.join(2 * _BEAT_S)

    def _run(self) -> None:
        try:
            self._connect()
            self._beat()
            while not self._closed.wait(_BEAT_S):
                self._beat()
            self._beat()  # the last state
        except Exception as error:  # torch raises various kinds; the agent connects again
            self.error = str(error).partition("\n")[0] or type(error).__name__
            with self.changed:
                self.changed.notify_all()

    def _connect(self) -> None:
        if _is_this_machine(self._host):
            with suppress(RuntimeError, ValueError):  # the port is in use: an agent beside this one leads
                self._store = self._open_store(is_leader=True)
                self.is_leader = True
        if not self.is_leader:
            self._store = self._open_store()
        self.agent_store = self._open_store()  # for torchrun: one that waits for a key blocks other threads
        self.key = self._store.add("nodes", 1)
        self._sent = 0
        self._nodes: dict[int, Node] = {}
        # address for the process group of the current round, of which the leader has rank 0
        self._master: tuple[str, int] | None = None
        self._membership = Membership(self.key, self._allowed)

    def _open_store(self, *, is_leader: bool = False) -> TCPStore:
        timeout = timedelta(seconds=_CONNECT_S)
        store = TCPStore(self._host, self._port, is_master=is_leader, timeout=timeout, wait_for_workers=False)
        store.set_timeout(_STORE_TIMEOUT)
        return store

    def _beat(self) -> None:
        self._sent += 1
        self._store.set(f"node/{self.key}", json.dumps(asdict(self.state) | {"beat": self._sent}))
        if self.is_leader:
            self._store.set("round", json.dumps(self._lead()))
        answer = json.loads(self._store.get("round"))
        if answer["beat"] != self.answer.get("beat"):
            self._progress = time.monotonic()
        self.answer = answer
        with self.changed:
            self.changed.notify_all()

    def _lead(self) -> dict[str, Any]:
        """Read all heartbeats, decide, and return the answer to all agents."""
        now, nodes, before = time.monotonic(), self._nodes, self._membership.round
        for key in range(1, self._store.add("nodes", 0) + 1):
            known = nodes.get(key)
            if (known and known.has_left) or not self._store.check([f"node/{key}"]):
                continue
            node = Node(**json.loads(self._store.get(f"node/{key}")))
            if known is None:
                nodes[key] = replace(node, heard=now, arrived=now)
            elif node.beat != known.beat:
                nodes[key] = replace(node, heard=now, arrived=known.arrived)
        current = self._membership.update(nodes, now)
        if current.is_over and not before.is_over:
            _log(f"{current.reason}: all nodes stop their ranks and form a new world")
            # release the agents that have succeeded, and wait there for a node that is lost
            self._store.set(f"{current.number}/{_EXIT_BARRIER}", "the round is over")
        elif current.number != before.number:
            hosts = ", ".join(nodes[key].host for key in current.members)
            _log(f"training with {count_of(len(current.members), 'node')}: {hosts}")
            port: int = get_free_port()  # type: ignore[no-untyped-call]
            self._master = self._local_address or socket.getfqdn(), port
        # a leader whose own ranks were stopped at the end learns of it from another node
        is_one_done = any(node.is_done for node in nodes.values())
        is_done = self.state.is_done or (self.state.is_waiting and is_one_done)
        return {
            "number": current.number, "members": current.members, "over": current.is_over,
            "waiting": self._membership.waiting_for(nodes, now), "others": len(alive(nodes, now)) - 1,
            "master": self._master, "done": is_done, "beat": self._sent,
        }  # fmt: skip


class Rendezvous(OpenRendezvous):
    """The rendezvous of one agent. torchrun calls its methods in the main thread."""

    def __init__(self, parameters: api.RendezvousParameters) -> None:
        super().__init__(parameters.backend, parameters.run_id)
        self._local_address = parameters.local_addr
        self._endpoint = parse_rendezvous_endpoint(parameters.endpoint, _PORT)
        self._allowed = _allowed_nodes(parameters)
        self._join_timeout_s = parameters.get_as_int("join_timeout", _JOIN_TIMEOUT_S) or _JOIN_TIMEOUT_S
        self._link: _Link | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._guard, name="rendezvous-guard", daemon=True).start()
        atexit.register(self._leave)  # torchrun does not call `shutdown` after a signal
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:  # until torchrun starts ranks, and handles it
                    signal.signal(number, lambda *_: sys.exit(TemporaryError.code))
        self._exit_if_finished()

    def next_rendezvous(self) -> api.RendezvousInfo:
        """Wait for the next round that has this node in it.

        Raises SystemExit: with 0 if the training is done, with 75 after join_timeout.
        """
        if self._link:
            self._link.state = replace(self._link.state, is_waiting=True)
        started = logged = time.monotonic()
        while True:
            link = self._connected()
            with link.changed:
                link.changed.wait(0.2)
            answer, now = link.answer, time.monotonic()
            if answer.get("done"):
                _log("the training is done on the other nodes")
                raise SystemExit(OK)
            if answer and not answer["over"]:
                if link.key in answer["members"] and answer["number"] > link.state.round:
                    store = PrefixStore(str(answer["number"]), link.agent_store)
                    link.state = replace(link.state, round=answer["number"], is_waiting=False)
                    if self._are_all_here(link, store, answer["members"]):
                        break
                    link.state = replace(link.state, is_waiting=True)
                started = now  # the others train: a spare node waits without limit
            waited = f"{now - started:.0f} s of {self._join_timeout_s} s"
            lacking = answer.get("waiting") or f"{self._endpoint[0]} ({link.error or 'no answer'})"
            if now - started > self._join_timeout_s:
                _exit(TemporaryError(f"waited for {lacking}, {waited}: start all nodes of the job"))
            if now - logged >= _LOG_EVERY_S:
                _log(f"waiting for {lacking}, {waited}")
                logged = now
        rank, size = answer["members"].index(link.key), len(answer["members"])
        return api.RendezvousInfo(store, rank, size, api.RendezvousStoreInfo(*answer["master"]))

    def _are_all_here(self, link: _Link, store: PrefixStore, members: Sequence[int]) -> bool:
        """Wait until all members of the round have come; return False if it ends before.

        A node that is lost while it waits may be among them: torchrun would wait for it, and fail.
        """
        with suppress(RuntimeError):  # the leader is lost
            store.set(f"here/{link.key}", "")
            while not (are_here := store.check([f"here/{key}" for key in members])):
                if self.num_nodes_waiting():
                    break
                time.sleep(0.02)
            return are_here
        return False

    def num_nodes_waiting(self) -> int:
        """Return 1 if this agent must stop its ranks, else 0. torchrun asks ten times a second."""
        link = self._link
        assert link is not None
        answer = link.answer
        return int(link.is_lost or answer["over"] or answer["number"] > link.state.round)

    def shutdown(self) -> bool:
        """Leave. torchrun calls it in a `finally`: without an exception the ranks here are done.

        The leader waits until the other nodes know that. Raises SystemExit with 75 in another node
        that does not hear of it: the leader was lost, and may not have recorded the end.
        """
        link, deadline = self._link, time.monotonic() + LOST_S
        if sys.exc_info()[0] is None and link:
            link.state = replace(link.state, is_done=True)
            with link.changed:
                while not link.is_lost and time.monotonic() < deadline:
                    if link.is_leader and not link.answer.get("others"):
                        break
                    if not link.is_leader and link.answer.get("done"):
                        break
                    link.changed.wait(_BEAT_S)
            if not link.is_leader and not link.answer.get("done"):
                self._leave()
                problem = f"{self._endpoint[0]} was lost before it recorded the end"
                _exit(TemporaryError(problem, "start this node again"))
        self._leave()
        return True

    def _connected(self) -> _Link:
        """Return the link to the leader; replace one that is lost."""
        if self._link is None or self._link.is_lost:
            if self._link is not None:
                reason = self._link.error or "silent"
                if self._link.is_leader:
                    _exit_now(f"the rendezvous of this node failed ({reason})")
                if self._link.answer:
                    _log(f"{self._endpoint[0]} did not answer ({reason}): looking for its replacement")
                # sent if the old leader comes back
                self._link.state = replace(self._link.state, has_left=True)
                self._link.close()
            self._link = _Link(*self._endpoint, self._local_address, self._allowed)
        return self._link

    def _exit_if_finished(self) -> None:
        """Exit with 0 if this is node 0 and its preflight found that the run is finished.

        No round may ever form: other nodes may have ended for good. If another node finds it, its
        ranks do, too: it can meet node 0, or the job is complete.
        """
        file = os.environ.get("PIPELINE_FINISHED")
        if file and os.path.exists(file) and _is_this_machine(self._endpoint[0]):
            print(Path(file).read_text(encoding="utf-8"), flush=True)
            _log("the run is already finished")
            raise SystemExit(OK)

    def _leave(self) -> None:
        is_first = not self._is_closed.is_set()
        self._is_closed.set()
        if self._link and is_first:
            self._link.state = replace(self._link.state, has_left=True)
            self._link.close()

    def _guard(self) -> None:
        """End this process if it was frozen, or if its main thread hangs in torch's store."""
        last = time.monotonic()
        while not self._is_closed.wait(_BEAT_S):
            now = time.monotonic()
            if now - last > LOST_S:
                _exit_now(f"this node did not run for {now - last:.0f} s; its peers continue without it")
            link = self._link
            if link and link.is_lost and not link.state.is_waiting and link.silence_s > LOST_S + STOPPING_S:
                _exit_now(f"{self._endpoint[0]} has not answered for {link.silence_s:.0f} s")
            last = now


def make_handler() -> Callable[[api.RendezvousParameters], api.RendezvousHandler]:
    """Return the factory that torchrun calls (entry point), before it reads its arguments.

    torchrun handles SIGHUP even if it is ignored (`nohup`): for this program, leave it ignored.
    """
    if "pipeline" in sys.argv:
        tolerate_failures()
        if is_hangup_ignored():
            os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    return lambda given: LocalRendezvous(given) if given.max_nodes == 1 else Rendezvous(given)


def _allowed_nodes(parameters: api.RendezvousParameters) -> list[int]:
    """Return the numbers of nodes that may form a round. Exits with 2 if there is none."""
    low, high = parameters.min_nodes, parameters.max_nodes
    given = str(parameters.get("allowed_nodes") or "")
    is_list = re.fullmatch(r"\d+(\+\d+)*", given)
    numbers = map(int, given.split("+") if is_list else ()) if given else range(low, high + 1)
    allowed = [number for number in numbers if low <= number <= high]
    if not allowed:
        problem = f"allowed_nodes={given} in --rdzv-conf has no number from {low} to {high} (--nnodes)"
        _exit(RequestError(problem, "give numbers joined by +, such as 1+2+4"))
    return allowed


def _is_this_machine(host: str) -> bool:
    try:
        return _matches_machine_hostname(host)
    except OSError:  # this machine's own name does not resolve yet
        return False


def _log(line: str) -> None:
    print(f"pipeline: {line}", file=sys.stderr, flush=True)


def _exit(error: RequestError | TemporaryError) -> NoReturn:
    _log(str(error))
    raise SystemExit(error.code)


def _exit_now(reason: str) -> NoReturn:
    """End this process from any thread. The kernel ends its ranks (`supervision`)."""
    _log(f"{reason}: this node exits, and may be started again")
    os._exit(TemporaryError.code)
