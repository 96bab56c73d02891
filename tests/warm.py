"""A stand-in for the interpreter whose programs start at once: they are forked from a process that has torch imported.

    subprocess.run([warm.python(), "-m", "zerodp.cli", ...])

For programs whose work is what is tested, and not their start; what they start by `sys.executable` is warm as well. Only
what libraries read from the environment while they are loaded (MALLOC_..., OMP_NUM_THREADS) is the server's: one thread.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

CLIENT = Path(__file__).with_name("warm_client.py")
ROOT = Path(__file__).parents[1]
SHARED = (
    "ZERODP_TESTS_WARM"  # in the environment: the path of a stand-in that another process has made, for all of them
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # only such may be forked
# arguments, environment, working folder, blocked signals, standard streams
Program = tuple[list[str], dict[str, str], str, list[int], list[int]]


@functools.cache
def python() -> str:
    """The path of the stand-in. Its server ends with this process, or with the one that shares it."""
    if shared := os.environ.get(SHARED):
        return shared
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    where = ":".join([str(ROOT / "src"), str(ROOT)])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(folder)],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": where},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(server.communicate)  # the end of its input is its own
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(folder / "socket")])} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def serve(folder: Path) -> Program:
    """Fork for every client; the result is for the fork to run. The server itself never returns."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "starting"))
    listener.listen(16)
    (folder / "starting").rename(folder / "socket")
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    waiting.register(listener, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in waiting.select():
            if key.fileobj == 0:  # the tests have ended
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
                os._exit(0)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                message, streams, _, _ = socket.recv_fds(client, 2**20, 3)
                pid = os.fork()
                if pid == 0:
                    waiting.close()
                    return (*json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                client.send(str(pid).encode())
                running[pid] = client
                waiting.register(client, selectors.EVENT_READ, pid)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            elif isinstance(key.fileobj, socket.socket):  # the client was killed
                waiting.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            else:
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                client = running.pop(key.data)
                if client in waiting.get_map():
                    waiting.unregister(client)
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
                client.close()


def status_of(program: Program, executable: str) -> int:
    """What `python` with these arguments ends with."""
    try:
        become(program, executable)
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            return int(ended.code or 0)
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> None:
    """As the interpreter does, without taking apart what was imported, which would take seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def become(program: Program, executable: str) -> None:
    """Run it as `python` with these arguments does."""
    arguments, environment, folder, blocked, streams = program
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = executable
    if arguments[0] == "-u":
        arguments = arguments[1:]
    paths = [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:1] = [folder, *paths]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[:1] = [str(Path(arguments[0]).absolute().parent), *paths]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.launcher.api  # noqa: F401

    import zerodp.cli.training.report
    import zerodp.cli.training.worker  # noqa: F401

    gc.collect()
    gc.freeze()  # a fork looks through its own garbage only
    place = Path(sys.argv[1])
    end(status_of(serve(place), str(place / "python")))
