"""Run a server that listens on loopback only, and forward one of its ports to the other containers.

    python3 forward.py PORT SERVER_PORT COMMAND…

The image `store` uses it: SeaweedFS binds its S3 protocol, which needs credentials, to the same
address as its gRPC, which creates administrators without any. Needs nothing but Python.
"""

import asyncio
import signal
import sys
from contextlib import suppress

_PIECE_BYTES = 256 << 10


async def run(port: int, server_port: int, command: list[str]) -> int:
    """Return the exit code of the command, which gets SIGTERM."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", server_port)
        except OSError:  # it is starting
            writer.close()
            return
        await asyncio.gather(_copy(reader, requests), _copy(answers, writer))

    await asyncio.start_server(forward, "0.0.0.0", port)
    process = await asyncio.create_subprocess_exec(*command)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.terminate)
    return await process.wait()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
