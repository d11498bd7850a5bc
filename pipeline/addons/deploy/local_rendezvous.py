"""The rendezvous of one machine: nothing that it starts can be reached from another one.

torchrun's own, c10d (`--standalone`), is not used: its stores listen on every address, and its
agent unpickles what it finds there, so whoever reaches the machine runs code in it (torch 2.14).
"""

import socket
import uuid

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import api

_LOOPBACK = "127.0.0.1"


class OpenRendezvous(api.RendezvousHandler):
    """A rendezvous that no agent closes for the others."""

    def __init__(self, backend: str, run_id: str) -> None:
        self._backend, self._run_id = backend, run_id

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass


class LocalRendezvous(OpenRendezvous):
    """The rendezvous of an agent that needs no other. Each round has a store of its own."""

    def __init__(self, parameters: api.RendezvousParameters) -> None:
        # not the id of --rdzv-id: a later launch must have another
        super().__init__(parameters.backend, uuid.uuid4().hex)

    @property
    def use_agent_store(self) -> bool:
        return True  # for the ranks: they open none of their own

    def next_rendezvous(self) -> api.RendezvousInfo:
        listener = socket.create_server((_LOOPBACK, 0))  # TCPStore itself would listen on every address
        port, file = listener.getsockname()[1], listener.detach()
        store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
        return api.RendezvousInfo(store, 0, 1, api.RendezvousStoreInfo(_LOOPBACK, port))

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
