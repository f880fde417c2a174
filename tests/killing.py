"""A command killed at the n-th change that it makes to the file system: one helper for tests and benchmarks."""

import os
import signal

CHANGES = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")


def count_changes(kill_at=0):
    """From now on count changes of the file system in this process, and die by SIGKILL at the n-th; the counter."""
    count = [0]

    def counted(function):
        def inner(*arguments, **options):
            count[0] += 1
            if count[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return inner

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    return count


def killed_at(step, call):
    """Run ``call`` in a forked child that is killed by its n-th change of the file system; whether it was."""
    child = os.fork()
    if child == 0:
        try:
            count_changes(step)
            call()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
