"""What goes wrong, and what is said then. Writes results/robustness.md and architectures.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "kill": "every verb killed at a random moment and run again",
    "processes": "one of two processes that share a verb killed, and the verb run again by one, two or three",
    "fuzz": "changed files and odd flags through the command line",
    "places": "full disks, missing rights, odd targets, two writers",
    "large": "60,000 blocks through the command line",
    "first_result": "time from a clone to a first result",
    "architectures": "tiny models of 92 architectures through every verb",
}

if __name__ == "__main__":
    run_parts("robustness", __doc__, PARTS)
