"""Python under torchrun."""

import os
import socket
import subprocess
import sys


def free_port():
    """A port that nobody uses, as text: a fixed one may be that of another run."""
    with socket.socket() as found:
        found.bind(("", 0))
        return str(found.getsockname()[1])


def launched(arguments, processes=2):
    """Run Python with these arguments in several processes; return what it printed and how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*command, "--nproc-per-node", str(processes), *arguments]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=500)
