"""Completion of a shell: every command and option is in what is installed, and bash completes them from it."""

import shutil
import subprocess
import sys

import pytest

from layerbudget.cli import main
from layerbudget.cli.commands import VERBS, requests_of_all
from layerbudget.cli.completion import SHELLS, whole_app
from layerbudget.requests import flag_of, positional


@pytest.fixture(scope="module")
def scripts():
    app = whole_app()
    return {shell: app.generate_completion(shell=shell) for shell in SHELLS}


def test_every_shell_gets_every_command_and_option(scripts):
    requests = requests_of_all()
    flags = {flag_of(r, n) for r in requests.values() for n, f in r.options().items() if not positional(n, f)}
    words = {word for command in requests for word in command.split()} | {flag.removeprefix("--") for flag in flags}
    assert len(words) > 80 and words >= {"sparsity", "dry-run", "sweep", "four-bit"}
    assert set(VERBS) - {"finetune"} <= {command.split()[0] for command in requests}
    for shell, script in scripts.items():
        assert [word for word in words if word not in script] == [], shell


@pytest.mark.parametrize(
    ("typed", "among"),
    [
        (["pl"], {"plan"}),
        (["plan", "spa"], {"sparsity"}),
        (["plan", "sparsity", "--sp"], {"--sparsity"}),
        (["explain", "sweep", "s.json", "--kind", "ra"], {"ranks"}),
        (["score", "--dry"], {"--dry-run"}),
        (["export", "pla"], {"plan.json"}),
        (["plan", "sparsity", "s.json", "--curves", "pla"], {"plan.json"}),
    ],
)
def test_bash_completes(scripts, tmp_path, typed, among):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "c.bash").write_text(scripts["bash"])
    words = " ".join(["layerbudget", *typed])
    ask = f"source ./c.bash; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _layerbudget; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert set(done.stdout.split()) == among, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(scripts, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "c").write_text(scripts[shell])
    assert subprocess.run([shell, "-n", str(tmp_path / "c")], capture_output=True).returncode == 0


@pytest.mark.parametrize(("shell", "file"), [("bash", ".local/share/bash-completion"), ("fish", ".config/fish/completions")])
def test_completion_is_installed_where_the_shell_reads_it(shell, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "BASH_COMPLETION_USER_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--install-completion", shell]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Written to {tmp_path / file}") and said.endswith("It works in the next shell that you start.\n")
    assert [f for f in tmp_path.rglob("*") if f.is_file() and "layerbudget" in f.read_text()]


def test_a_shell_that_is_not_known_is_refused(capsys):
    assert main(["--install-completion", "tcsh"]) == 2
    assert "There are bash, zsh, fish." in capsys.readouterr().err


def test_a_start_loads_nothing_for_it():
    ask = "import sys; from layerbudget.cli import main; main(['report', 'x', '--help']); "
    ask += "print({'torch', 'scipy'} & {*sys.modules}); print('layerbudget.cli.completion' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["set()", "False"], done.stderr
