"""A process that ends tells the others why; one that dies is noticed by all, whatever they are doing."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.launching import free_port

from layerbudget.cli.running import _take_slurms_words
from layerbudget.execution import partners

CHILD = """
import argparse, pathlib, sys, time
from layerbudget.cli import display, running
from layerbudget.errors import InvalidInput
from layerbudget.execution import partners

rank, size, folder, words = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4:]


class Store:
    def set(self, name, value):
        (folder / "part").write_text(value)
        (folder / "part").rename(folder / "port")

    def get(self, name):
        while not (folder / "port").exists():
            time.sleep(0.01)
        return (folder / "port").read_bytes()


partners.GRACE = 1.0
partners.meet(rank, size, "localhost", Store(), 240.0)


def run(what):
    if what == "die":
        time.sleep(300)
    if what == "refuse":
        raise InvalidInput("The number is 7.", "It is below 5.", "Use 3.")
    if what == "full":
        raise OSError(28, "No space left on device", "out")
    if what == "break":
        raise RuntimeError("connection reset by peer")
    if what == "fail":
        raise KeyError("unknown")
    if what == "compute":
        until = time.monotonic() + 300
        while time.monotonic() < until:
            sum(range(1000))
    if what == "deaf":
        import _thread, signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        (folder / "deaf").touch()
        time.sleep(300)
    if what == "slow":
        time.sleep(0.5)
    if what == "refused elsewhere":  # by the others, while this one is at work
        for _ in range(6000):
            time.sleep(0.05)
    return {}


command = display.Display(argparse.Namespace(command="score", json=False, dry_run=False))
(folder / f"ready-{rank}").touch()
if words[0] == "later":
    time.sleep(2)
codes = [running.carried(command, lambda: run(what), lambda: "") for what in words]
partners.part()
print(codes)
sys.exit(codes[-1])
"""


def together(folder, *words, kill=None):
    """Run processes with their words; return the exit code, what each printed, and the seconds from the kill on."""
    folder.mkdir(exist_ok=True)
    commands = [[sys.executable, "-c", CHILD, str(rank), str(len(words)), str(folder), *w] for rank, w in enumerate(words)]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    until = time.monotonic() + 240
    while kill is not None and len(list(folder.glob("ready-*"))) < len(words) and time.monotonic() < until:
        time.sleep(0.02)
    began = time.monotonic()
    if kill is not None:
        time.sleep(0.2)
        running[kill].send_signal(signal.SIGKILL)
    said = [process.communicate(timeout=240) for process in running]
    return [p.returncode for p in running], said, time.monotonic() - began


def test_a_process_that_dies_ends_the_others_with_a_sentence(tmp_path):
    for kill in (0, 2):
        words = [["compute"], ["deaf"], ["compute"]]
        words[kill] = ["die"]
        codes, said, seconds = together(tmp_path / str(kill), *words, kill=kill)
        assert seconds < 120 and codes[kill] == -signal.SIGKILL
        for rank in {0, 1, 2} - {kill}:
            assert codes[rank] == 1 and "--resume" in said[rank][1] and "A process of this run ended" in said[rank][1]
            assert "Traceback" not in said[rank][1]


JOINING = """
import os
from layerbudget.errors import LostProcess
from layerbudget.execution import processes

if os.environ["RANK"] == "0":
    processes.dist.init_process_group = lambda *words, **names: os._exit(9)
try:
    processes.join()
except LostProcess as error:
    print(error)
"""


def test_a_process_that_dies_while_they_join_ends_the_others(tmp_path):
    """Before a command begins, and with the sentence that others have: torch's own error is pages long."""
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    both = [
        subprocess.Popen([sys.executable, "-c", JOINING], stdout=subprocess.PIPE, text=True, env={**shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[0] for process in both]
    assert both[0].returncode == 9 and both[1].returncode == 0
    assert said[1].startswith("A process of this run ended (number 0).")


def test_a_refusal_of_one_is_that_of_all(tmp_path):
    """Also where the others hear of it from a connection that broke, or do not hear at all."""
    for rank, words in enumerate(([["compute"], ["refuse"], ["break"]], [["full"], ["deaf"], ["compute"]])):
        codes, said, _ = together(tmp_path / str(rank), *words)
        assert codes == [2, 2, 2]
        sentences = {errors for _, errors in said}
        assert len(sentences) == 1
        assert "The number is 7. It is below 5. Use 3." in sentences.pop() if rank == 0 else "No space left on device: out"


@pytest.mark.parametrize("other", ["compute", "later"])  # also where the connection has broken before the command begins
def test_a_bug_in_one_process_ends_all(tmp_path, other):
    codes, said, _ = together(tmp_path, ["fail"], [other])
    assert codes[0] == 1 and "KeyError" in said[0][1] and "Traceback" in said[0][1]
    assert codes[1] == 1 and "KeyError: 'unknown'" in said[1][1] and "Traceback" not in said[1][1]


def test_processes_that_refuse_alike_go_on_with_the_next_command(tmp_path):
    """One of them is always later, and what it hears of a command that is over ends no other."""
    words = ["refuse", "slow", "refuse", "fine"]
    codes, said, _ = together(tmp_path, words, ["refused elsewhere", *words[1:]], ["refuse", "fine", "refuse", "slow"])
    assert codes == [0, 0, 0], said
    assert [out.strip() for out, _ in said] == ["[2, 0, 2, 0]"] * 3


def test_an_error_of_its_own_stays_one(monkeypatch, tmp_path):
    """A RuntimeError that no other process has caused."""
    with pytest.raises(RuntimeError, match="out of memory"), partners.working():
        raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}, ("1", "4", "1", "localhost")),
        (
            {
                "SLURM_STEP_ID": "2",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "2",
                "SLURM_NODELIST": "gpu[07-09]",
                "MASTER_PORT": "5",
            },
            ("0", "2", "0", "gpu07"),
        ),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "RANK": "7", "WORLD_SIZE": "9"},
            ("7", "9", None, None),
        ),
    ],
)
def test_tasks_of_slurm_are_processes(monkeypatch, told, expected):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = dict(told)
    monkeypatch.setattr("os.environ", environment)
    _take_slurms_words()
    assert tuple(environment.get(name) for name in names[:4]) == (expected or (None,) * 4)
    assert expected is None or "RANK" in told or environment["MASTER_PORT"] == told.get("MASTER_PORT", "20000")
