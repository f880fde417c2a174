"""What plans of bits, of the cache and of memory can be asked: the same on the command line and in Python."""

import inspect
import subprocess
import sys

import pytest

from layerbudget.cli import main
from layerbudget.decisions.bits.blocks import formats_table
from layerbudget.decisions.bits.plan import plan_bits
from layerbudget.decisions.bits.request import BitsRequest
from layerbudget.decisions.bits.sensitivity import rounding_damage
from layerbudget.decisions.cache.plan import plan_cache
from layerbudget.decisions.cache.request import CacheRequest
from layerbudget.decisions.memory.plan import plan_memory
from layerbudget.decisions.memory.request import MemoryRequest
from layerbudget.errors import InvalidInput
from layerbudget.registry import options_of
from layerbudget.requests import PLACING, READING, Request, line_of, names

FILLED = {"batch_size", "seed", "tokenizer", "overwrite", "progress", "table", "finished"}  # by the command itself
USUAL = {  # chosen where nothing is given, and said in the help in other words
    BitsRequest: {"family", "unwritten", "group"},
    CacheRequest: {"runtime", "group"},
    MemoryRequest: {"family", "unwritten", "group"},
}


@pytest.mark.parametrize(
    ("request_type", "planners"),
    [
        (BitsRequest, (formats_table, rounding_damage, plan_bits)),
        (CacheRequest, (plan_cache,)),
        (MemoryRequest, (formats_table, rounding_damage, plan_memory)),
    ],
)
def test_the_planner_and_the_command_have_the_same_options(request_type, planners):
    fields = request_type.options()
    asked = set(fields) - {*Request.options(), *READING, *PLACING, "source", "out", "checked"}
    taken = {name: option.default for planner in planners for name, option in options_of(planner).items() if name not in FILLED}
    assert asked == set(taken) - ({"family"} if request_type is MemoryRequest else set())  # its runtime says it
    for name in asked - USUAL[request_type]:
        default, words = fields[name].default, str(fields[name].metadata["help"])
        if taken[name] in (None, (), inspect.Parameter.empty):
            assert default in (None, ()) or fields[name].metadata["flag"], name
        else:
            assert default == taken[name] or f"default: {taken[name]}" in words, name


def test_lists_are_typed_at_once_or_one_after_the_other_and_repeated_at_once():
    from layerbudget.cli.parser import parse

    for words in (["--formats", "Q4_0,Q8_0"], ["--formats", "Q4_0", "--formats", "Q8_0"]):
        request = parse(BitsRequest, ["demo", "--bits", "5", *words, "--keep", "a=Q4_0", "--keep", "b=Q8_0"], "")
        assert request.formats == ("Q4_0", "Q8_0") and request.kept == {"a": "Q4_0", "b": "Q8_0"}
        assert "--formats Q4_0,Q8_0 --keep a=Q4_0 --keep b=Q8_0" in line_of(request)
    assert names("Q4_0, Q8_0,") == ("Q4_0", "Q8_0")


@pytest.mark.parametrize(
    ("request_type", "given", "said"),
    [
        (BitsRequest, {}, "No budget was given. Give one of --bits, --budget and --like."),
        (BitsRequest, {"bits": 4.0, "like": "Q4_K_M"}, "--bits and --like were given together"),
        (CacheRequest, {"context": "32", "bits": 4.0, "budget": "1 MiB"}, "--bits and --budget were given together"),
        (BitsRequest, {"bits": 4.0, "keep": ("lm_head",)}, "--keep lm_head names no format"),
        (MemoryRequest, {"memory": "1 MiB", "context": "many"}, "The context 'many' is no number of tokens"),
    ],
)
def test_what_no_model_can_make_possible_is_refused_at_once(request_type, given, said):
    with pytest.raises(InvalidInput, match=said):
        request_type(source="MODEL", **given).check()


@pytest.mark.parametrize("flag", ["--draws=4", "--whole", "--imatrix=x", "--check=0", "--group=32", "--unwritten=plan"])
def test_options_of_the_measurement_are_refused_beside_scores(flag, capsys):
    assert main(["plan", "memory", "sizes.json", "--memory", "1 MiB", "--context", "32", flag]) == 2
    assert f"{flag.partition('=')[0]} has no meaning for scores that were measured before" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bits", "cache", "memory"])
def test_help_is_quick(kind):
    code = (
        "import sys\nfrom layerbudget.cli import main\n"
        f"assert main(['plan', {kind!r}, '--help-all']) == 0\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--draws" in done.stdout, done.stderr
