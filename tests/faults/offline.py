"""Who reaches for the network: an audit hook that writes down every address but this machine's own, and refuses it.

It sees what Python does, in the process and in those that it starts: `sitecustomize.py` is imported by each of them.
gloo's and wandb's own programs open sockets that it cannot see.
"""

import contextlib
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

_EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_OWN = ("127.", "::1", "localhost")


def write_sitecustomize(folder: Path) -> dict[str, str]:
    """The variables of processes whose interpreters are to listen; attempts are lines of `<folder>/attempts`."""
    root = Path(__file__).resolve().parents[2]
    (folder / "sitecustomize.py").write_text(
        "from tests.faults import offline\noffline.listen(0)\n"
    )
    path = f"{folder}{os.pathsep}{root}"
    return {"ATTEMPTS": str(folder / "attempts"), "PYTHONPATH": path}


def listen(rank: int) -> None:
    """From now on this interpreter reaches nobody else, and attempts are written down."""
    attempts = os.environ["ATTEMPTS"]

    def look(event: str, arguments: tuple) -> None:
        if event in _EVENTS:
            address = arguments[1]
            host = (
                address[0] if isinstance(address, tuple) else "localhost"
            )  # a path: a UNIX socket
        elif event in _LOOKUPS:
            host = arguments[0] or "localhost"
        else:
            return
        host = host.decode() if isinstance(host, bytes) else host
        if not host.startswith(_OWN):
            descriptor = os.open(attempts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"{event} {host}\n".encode())
            os.close(descriptor)
            raise PermissionError(f"{event} {host}")

    sys.addaudithook(look)


def reach_out(rank: int) -> None:
    """Two attempts, in this process and in one that it starts: does the hook see them?"""
    listen(rank)
    with contextlib.suppress(PermissionError), socket.socket() as one:
        one.connect(("192.0.2.1", 9))  # of no machine (RFC 5737)
    program = "import socket; socket.getaddrinfo('example.org', 443)"
    subprocess.run([sys.executable, "-c", program], capture_output=True)
    raise SystemExit(0)


def ask(rank: int) -> None:
    """The commands in `COMMANDS`, one a line, in this process; probes of `doctor` too."""
    from megatron_cp import doctor
    from megatron_cp.__main__ import main

    listen(rank)
    doctor.run_probe = _here
    for line in os.environ["COMMANDS"].splitlines():
        assert main(line.split()) == 0, line
    raise SystemExit(0)


def _here(program: str, *more: object) -> tuple[bool, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(program, {})
    return True, said.getvalue().strip()
