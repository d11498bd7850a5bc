"""Which nodes of a job form the next world of ranks: the decisions of the rendezvous' leader.

Without communication, and without torch: `rendezvous` reads the heartbeats and passes them on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

LOST_S = 30.0
"""Seconds without a heartbeat after which a node is lost. A network may be cut for less."""
STOPPING_S = 120.0
"""Seconds in which the agents of a round that is over come back. torchrun gives ranks 30 s."""
_FRESH_S = 5.0  # without a heartbeat: a node that was just killed must not be in the next round
_SETTLE_S = 10.0  # for more nodes to come, before a round smaller than the largest forms or ends for them


@dataclass(frozen=True)
class Node:
    """The state of an agent, as the leader has heard of it."""

    host: str
    is_waiting: bool = True  # it waits for a round; otherwise it runs, or stops, the ranks of `round`
    round: int = 0  # the last round that it took part in
    has_left: bool = False
    is_done: bool = False  # its ranks are done
    beat: int = 0
    heard: float = 0.0  # when its last heartbeat was read, on the leader's monotonic clock
    arrived: float = 0.0


@dataclass(frozen=True)
class Round:
    """A world of ranks, or the time between two."""

    number: int = 0
    members: tuple[int, ...] = ()  # agents in the order of their ranks; the leader is the first
    is_over: bool = True
    reason: str = ""  # why it is over
    since: float = 0.0  # when it began or ended


def alive(nodes: dict[int, Node], now: float) -> dict[int, Node]:
    """Return the nodes that have not left and are not lost."""
    return {key: node for key, node in nodes.items() if not node.has_left and now - node.heard <= LOST_S}


class Membership:
    """The leader's decisions, without communication."""

    def __init__(self, leader: int, allowed: Sequence[int]) -> None:
        """Begin without a round. leader: the leader's own number; allowed: numbers of nodes."""
        self._leader, self._allowed = leader, sorted(allowed)
        self.round = Round()

    def update(self, nodes: dict[int, Node], now: float) -> Round:
        """End the round, or form the next one, if that is due; return the round."""
        present, current = alive(nodes, now), self.round
        if current.is_over:
            members = self._next_members(present, now)
            if members:
                self.round = Round(current.number + 1, members, is_over=False, since=now)
        else:
            reason = self._reason_to_end(nodes, present, now)
            if reason:
                self.round = replace(current, is_over=True, reason=reason, since=now)
        return self.round

    def waiting_for(self, nodes: dict[int, Node], now: float) -> str:
        """Return what the nodes that wait lack, for their logs."""
        present = alive(nodes, now)
        if not self.round.is_over:
            members = len(self.round.members)
            return f"{len(present)} nodes are here; {members} of them train, the most that are allowed"
        if len(present) < self._allowed[0]:
            hosts = ", ".join(node.host for node in present.values())
            return f"more nodes ({len(present)} of {self._allowed[0]} are here: {hosts})"
        return "the other nodes to stop their ranks"

    def _reason_to_end(self, nodes: dict[int, Node], present: dict[int, Node], now: float) -> str:
        number, members = self.round.number, self.round.members
        for key in members:
            if nodes[key].is_done:
                return ""
            if key not in present:
                verb = "left" if nodes[key].has_left else f"has not been heard of for {LOST_S:.0f} s"
                return f"{nodes[key].host} {verb}"
            if present[key].is_waiting and present[key].round == number:
                return f"{present[key].host} has stopped its ranks"
            if present[key].round != number and now - present[key].heard > _FRESH_S:
                return f"{present[key].host} was lost before it began"
        new = [key for key in present if key not in members]
        is_settled = bool(new) and now - max(present[key].arrived for key in new) >= _SETTLE_S
        if is_settled and self._largest(len(members) + len(new)) > len(members):
            return f"{', '.join(present[key].host for key in new)} can join"
        return ""

    def _next_members(self, nodes: dict[int, Node], now: float) -> tuple[int, ...]:
        """Return the members of the next round, or () if it cannot form yet. nodes: those alive."""
        last = self.round
        stopping = [key for key in last.members if key in nodes and nodes[key].round == last.number
                    and not nodes[key].is_waiting]  # fmt: skip
        here = {key: node for key, node in nodes.items() if node.is_waiting and now - node.heard <= _FRESH_S}
        count = self._largest(len(here))
        if self._leader not in here or not count:
            return ()
        is_stopping = bool(stopping) and now - last.since < STOPPING_S
        is_settled = now - max(node.arrived for node in here.values()) >= _SETTLE_S
        if count < self._allowed[-1] and (is_stopping or not is_settled):
            return ()

        def name(key: int) -> tuple[object, ...]:
            parts = re.findall(r"(\D*)(\d*)", here[key].host)  # pod-10 comes after pod-9
            return key != self._leader, [(text, int(number or -1)) for text, number in parts], key

        preferred = sorted(here, key=lambda key: (key != self._leader, key not in last.members, name(key)))
        return tuple(sorted(preferred[:count], key=name))

    def _largest(self, count: int) -> int:
        return max((number for number in self._allowed if number <= count), default=0)
