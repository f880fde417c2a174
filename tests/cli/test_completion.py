"""Completion of a shell: every command and option is in what shtab writes, and bash completes them from it."""

import shutil
import subprocess
import sys

import pytest

from layerbudget.cli import COMMANDS, build_parser, leaves_below, options_below, whole_parser


def test_the_whole_parser_has_the_options_of_every_command():
    whole, common = {leaf.prog: leaf for leaf in leaves_below(whole_parser())}, {"--json", "--quiet", "--dry-run"}
    single = {leaf.prog: leaf for verb in COMMANDS for leaf in leaves_below(build_parser(verb))}
    assert whole.keys() == single.keys() and len(whole) == 22
    for name, leaf in single.items():
        assert options_below(leaf) | common <= options_below(whole[name])
    assert options_below(build_parser()) <= options_below(whole_parser())


@pytest.fixture(scope="module")
def scripts():
    shtab = pytest.importorskip("shtab")
    return {shell: shtab.complete(whole_parser(), shell) for shell in ("bash", "zsh", "fish")}


def test_all_shells_get_verbs_and_options(scripts):
    for shell, script in scripts.items():
        assert all(word in script for word in (*COMMANDS, "kept-experts", "like", "mean-rank", "dry-run")), shell


@pytest.mark.parametrize(
    ("typed", "among"),
    [
        (["pl"], {"plan"}),
        (["plan", "k"], {"kept-experts"}),
        (["plan", "bits", "--li"], {"--like"}),
        (["plan", "bits", "demo", "--format", "gg"], {"gguf"}),
        (["finetune", "--dry"], {"--dry-run"}),
        (["apply", "demo", "pla"], {"plan.json"}),
    ],
)
def test_bash_completes(scripts, tmp_path, typed, among):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "c.bash").write_text(scripts["bash"])
    words = " ".join(["layerbudget", *typed])
    ask = f"source ./c.bash; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _shtab_layerbudget; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert set(done.stdout.split()) == among, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(scripts, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "c").write_text(scripts[shell])
    assert subprocess.run([shell, "-n", str(tmp_path / "c")], capture_output=True).returncode == 0


@pytest.mark.parametrize(("typed", "among"), [(["pl"], {"plan"}), (["plan", "bits", "demo", "--meth"], {"--method"})])
def test_fish_completes(scripts, tmp_path, typed, among):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "c.fish").write_text(scripts["fish"])
    ask = f"source ./c.fish; complete -C '{' '.join(['layerbudget', *typed])}'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == among, done.stderr


def test_zsh_takes_the_script_for_the_command(scripts, tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_layerbudget").write_text(scripts["zsh"])
    load = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D; autoload +X _layerbudget"
    done = subprocess.run(["zsh", "-f", "-c", f"{load} && echo $_comps[layerbudget]"], capture_output=True, text=True)
    assert done.stdout.strip() == "_layerbudget", done.stderr


def test_a_start_loads_nothing_for_it():
    ask = "import sys; from layerbudget.cli import parse; parse(['report', 'x']); print({'shtab', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.strip() == "set()"
