"""The program behind `warm.python()`: has a process run for it, passes signals on, and ends as that process ends."""

import json
import os
import signal
import socket
import sys
import time

path, *arguments = sys.argv[1:]
while not os.path.exists(path):  # the server is starting
    time.sleep(0.05)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(path)
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])  # a program inherits this as well
socket.send_fds(server, [json.dumps([arguments, dict(os.environ), os.getcwd(), list(blocked)]).encode()], [0, 1, 2])
pid = int(server.recv(64))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_SETMASK, [])
status = int(server.recv(64) or -signal.SIGKILL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
