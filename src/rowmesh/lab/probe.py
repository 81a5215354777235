"""One end of a TCP connection that is being measured; run by path, so it imports nothing of ours.

::

    probe.py count ADDRESS PORT WARM_S WINDOW_S   ready, then the bytes received in a window
    probe.py send  ADDRESS PORT                   send until the other end closes
    probe.py echo  ADDRESS PORT                   ready, then send back every byte
    probe.py ping  ADDRESS PORT COUNT             the median round trip of one byte
"""

import json
import socket
import statistics
import sys
import time

__all__: list[str] = []

_CHUNK = 1 << 18
_IN_FLIGHT = 1 << 18


def count(address: str, port: int, warm_s: float, window_s: float) -> None:
    connection = _accept(address, port)
    received, begin = len(connection.recv(_CHUNK)), time.monotonic()
    while time.monotonic() - begin < warm_s:
        connection.recv(_CHUNK)
    received, begin = 0, time.monotonic()
    while (took := time.monotonic() - begin) < window_s:
        received += len(connection.recv(_CHUNK))
    print(json.dumps({"bytes": received, "seconds": took}), flush=True)


def send(address: str, port: int) -> None:
    block = bytes(_CHUNK)
    with socket.create_connection((address, port), timeout=10) as connection:
        # more in flight only lengthens the shaper's queue, and acknowledgements wait in it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_FLIGHT)
        try:
            while True:
                connection.sendall(block)
        except OSError:
            return


def echo(address: str, port: int) -> None:
    connection = _accept(address, port)
    while byte := connection.recv(1):
        connection.sendall(byte)


def ping(address: str, port: int, number: int) -> None:
    took = []
    with socket.create_connection((address, port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(number):
            begin = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            took.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": statistics.median(took)}), flush=True)


def _accept(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        server.settimeout(10)
        connection = server.accept()[0]
    connection.settimeout(10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def main(verb: str, address: str, port: str, *numbers: str) -> None:
    if verb == "count":
        warm_s, window_s = map(float, numbers)
        count(address, int(port), warm_s, window_s)
    elif verb == "send":
        send(address, int(port))
    elif verb == "echo":
        echo(address, int(port))
    else:
        ping(address, int(port), int(numbers[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
