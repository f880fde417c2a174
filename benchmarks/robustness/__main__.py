"""What goes wrong, and what is said then. Writes results/robustness.md and architectures.md."""

from benchmarks.stamp import run_parts

PARTS = {
    "kill": "every verb killed at a random moment and run again",
    "fuzz": "changed files and odd flags through the command line",
    "places": "full disks, missing rights, odd targets, two writers",
    "large": "60,000 blocks through the command line",
    "first_result": "time from a clone to a first result",
    "architectures": "tiny models of 92 architectures through every verb",
}

if __name__ == "__main__":
    run_parts("robustness", __doc__, PARTS)
