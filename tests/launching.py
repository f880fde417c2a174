"""Python under torchrun."""

import os
import subprocess
import sys


def launched(arguments, processes=2):
    """Run Python with these arguments in several processes; return what it printed and how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*command, "--nproc-per-node", str(processes), *arguments]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=500)
