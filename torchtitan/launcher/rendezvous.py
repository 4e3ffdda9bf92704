"""Where the launcher and its processes meet. On one machine that is a port on loopback: torch unpickles what it reads
there, so whoever can reach the port runs code as this user."""

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOOPBACK = "127.0.0.1"


def find_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """torchrun's own rendezvous for several machines; a store on loopback for one, whatever the backend."""
    return get_rendezvous_handler(parameters) if parameters.max_nodes > 1 else OneMachine(parameters.run_id)


class OneMachine(StaticTCPRendezvous):
    """A store that listens only on loopback. torch would listen on all addresses, but accepts a given socket."""

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        super().__init__(LOOPBACK, port, rank=0, world_size=1, run_id=run_id, timeout=60)
        self._store = TCPStore(LOOPBACK, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
