# SPDX-License-Identifier: Apache-2.0
"""Bad input on the command line: one line that names key, value or file, constraint and fix; exit code 2; no output.

Most cases call ``main`` in this process; a few start a real one. What must not fail (a tied head that differs, a
prompt at the very limit) is run to the end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from executor import cli
from executor.platform import features, select
from tests import checkpoint_files as files
from tests.models import checkpoints as ck

ROOT = Path(__file__).parents[1]
MAX_SEQ_LEN = 48


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Checkpoints that nobody may write to."""
    base = tmp_path_factory.mktemp("whole")
    files.make_checkpoint(base / "moe")
    files.make_checkpoint(base / "tied", "dense", tie_word_embeddings=True, max_position_embeddings=100000)
    return base


class CommandLine:
    """A recipe with a checkpoint to spoil, and ``main`` to run it."""

    def __init__(self, whole, folder, capsys, monkeypatch):
        self.whole, self.folder, self.capsys, self.monkeypatch = whole, folder, capsys, monkeypatch
        self.output = folder / "output"
        self.recipe = {
            "model_config": {
                "model_name": "case",
                "dtype": "float32",
                "platform_version": "cpu",
                "enable_thinking": False,  # greedy thinking would add a note to what is printed
            },
            "data_config": {"chat_template": False},
            "scheduler_config": {
                "block_size": 16,
                "batch_size": 2,
                "max_new_tokens": 4,
                "max_seq_len": MAX_SEQ_LEN,
                "max_prefill_tokens": 32,
            },
            "sampling_config": {"ignore_eos": True},
            "output_config": {"dir": str(self.output)},
        }
        self.path = folder / "recipe.yaml"

    def checkpoint(self, name="moe"):
        """A copy of a whole checkpoint, which the recipe then names."""
        copied = shutil.copytree(self.whole / name, self.folder / "model")
        self.recipe["model_config"]["model_path"] = str(copied)
        return copied

    def arguments(self, *options, command="infer"):
        """The recipe is written first, unless the test took it away to put something else in its place."""
        if self.recipe is not None:
            self.path.write_text(yaml.safe_dump(self.recipe))
        return [command, str(self.path), *options]

    def main(self, *options, command="infer"):
        """(exit code, stdout, stderr)."""
        self.monkeypatch.setattr(sys, "argv", ["executor", *self.arguments(*options, command=command)])
        code = cli.main()
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def refuse(self, *options, words, command="infer"):
        """Run with a prompt unless ``options`` say otherwise; all of ``words`` have to be in the one line."""
        code, out, err = self.main(*(options or ("--prompt", "1+1")), command=command)
        assert (code, out) == (2, "")
        check_refusal(err, words)
        self.nothing_written()

    def nothing_written(self):
        assert not self.output.exists()
        assert not list(self.folder.rglob("*.tmp"))


def check_refusal(err, words):
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.fixture
def line(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    return CommandLine(whole, tmp_path, capsys, monkeypatch)


# --- what is in the recipe ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("recipe.yaml: no such file", "configs/README.md")),
        (b"model_config: [", ("recipe.yaml, line 1", "not valid YAML")),
        (b"\xff\xfe\x00", ("recipe.yaml: not UTF-8 at byte 0", "save the file as UTF-8")),
        (b"", ("recipe.yaml: the file is empty", "model_config.model_name")),
        (b"- a\n", ("recipe.yaml: the top level must be a mapping", "not list")),
        (b"model_config: {model_nam: x}", ("unknown key `model_config.model_nam`", "did you mean `model_name`?")),
        (b"modelconfig: {model_name: x}", ("unknown key `modelconfig`", "did you mean `model_config`?")),
        (b"model_config: {}", ("missing key `model_config.model_name`", "non-empty text")),
        (
            b"{model_config: {model_name: x}, scheduler_config: {batch_size: four}}",
            ('scheduler_config.batch_size="four"', "expected integer >= 1"),
        ),
        (
            b"{model_config: {model_name: x}, scheduler_config: {mem_fraction_static: 1.5}}",
            ("scheduler_config.mem_fraction_static=1.5", "> 0 and <= 1"),
        ),
        (
            b"{model_config: {model_name: x}, scheduler_config: {block_size: 17}}",
            ("scheduler_config.block_size=17", "a multiple of 16"),
        ),
        (b"model_config: {model_name: x, exe_mode: fast}", ('model_config.exe_mode="fast"', "one of eager")),
        (b"model_config: {model_name: x, model_name: y}", ("line 1", "duplicate key `model_name`")),
    ],
)
def test_recipe(line, content, words):
    line.recipe = None
    if content is not None:
        line.path.write_bytes(content)
    line.refuse(words=words)


def test_recipe_is_a_directory(line):
    line.recipe = None
    line.path.mkdir()
    line.refuse(words=("recipe.yaml: is a directory", "name one YAML file"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scheduler_config.batch_sise=2", ("unknown key `scheduler_config.batch_sise`", "did you mean `batch_size`?")),
        ("batch_size=2", ("override `batch_size=2`", "expected section.key=value")),
        ("model_config.dtype=int8", ('model_config.dtype="int8"', "one of bfloat16")),
        ("scheduler_config.max_new_tokens=48", ("max_new_tokens=48", "max_seq_len=48", "counts prompt and answer")),
        ("scheduler_config.max_prefill_tokens=2", ("max_prefill_tokens=2 must exceed the batch of 2",)),
        ("scheduler_config.max_seq_len=2000", ("max_seq_len=2000 exceeds the model's context of 1024", "rope_scaling")),
        ("sampling_config.stop=['']", ("sampling_config.stop", "non-empty")),
        ("parallel_config.attn_dp_size=2", ("unknown key `parallel_config.attn_dp_size`", "world_size / attn_tp_size")),
        ("parallel_config.hosts=[a, b, a]", ("parallel_config.hosts lists a more than once", "each machine once")),
        ("parallel_config.hosts=['10.0.0.1:29500']", ('parallel_config.hosts="10.0.0.1:29500"', "MASTER_PORT")),
        ("parallel_config.hosts=['a b']", ('parallel_config.hosts="a b"', "an address or the name of a machine")),
    ],
)
def test_overrides(line, override, words):
    line.checkpoint()
    line.refuse("--prompt", "1+1", "--set", override, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--bogus"], ("--bogus",)), (["extra"], ("extra",)), (["--prompt"], ("--prompt", "argument"))],
)
def test_options(line, options, words):
    line.refuse(*options, words=words)


# --- what is in the model directory ---


@pytest.mark.parametrize("made", ["nothing", "a file"])
def test_model_directory_missing(line, made):
    folder = line.folder / "absent"
    if made == "a file":
        folder.write_text("")
    line.recipe["model_config"]["model_path"] = str(folder)
    line.refuse(words=(f"model_config.model_path={folder}", "no such directory"))


def test_model_path_not_given(line):
    line.recipe["model_config"]["model_name"] = "Qwen3-0.6B"
    line.recipe["model_config"]["dtype"] = "bfloat16"
    line.refuse(words=("model_config.model_path is not set", "--set model_config.model_path=DIR"))


def test_model_name_unknown(line):
    line.refuse(words=(f"{Path('assets', 'model_configs', 'case', 'config.json')}: no such file",))


def change_config(**changes):
    def change(folder):
        ck.edit_config(folder, lambda raw: raw.update(changes))

    return change


def change_rope(**rope):
    """Replace both spellings of rope settings by the given one."""

    def change(folder):
        ck.edit_config(folder, lambda raw: (raw.pop("rope_parameters"), raw.update(rope)))

    return change


NO_TOKENIZER = ("no tokenizer", "tokenizer.json", "copy the tokenizer files")
MODEL_FILES = {
    "no config.json": (
        lambda f: (f / "config.json").unlink(),
        ("config.json: no such file", "a model directory holds"),
    ),
    "config.json not JSON": (lambda f: files.truncate(f / "config.json", 0.5), ("config.json: not JSON", "download")),
    "config.json is a list": (lambda f: (f / "config.json").write_text("[]"), ("config.json: expected a JSON object",)),
    "model_type": (change_config(model_type="llama"), ("model_type='llama'", "one of qwen3, qwen3_moe")),
    "config key missing": (
        lambda f: ck.edit_config(f, lambda raw: raw.pop("hidden_size")),
        ("config.json: missing key hidden_size", "came with the weights"),
    ),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("tokenizer*")], NO_TOKENIZER),
    "tokenizer damaged": (lambda f: files.truncate(f / "tokenizer.json", 0.5), ("cannot load the tokenizer", "check")),
    "tokenizer git-lfs": (lambda f: files.lfs_pointer(f / "tokenizer.json"), ("tokenizer.json", "git lfs pull")),
    "generation_config.json": (
        lambda f: (f / "generation_config.json").write_text("{"),
        ("generation_config.json: not JSON", "download it again"),
    ),
    "temperature": (
        lambda f: (f / "generation_config.json").write_text('{"temperature": -1}'),
        ("generation_config.json: temperature=-1", "must be 0, which means greedy"),
    ),
    "vocabulary too small": (
        change_config(vocab_size=10),
        ("prompt 1 has token id", "vocab_size=10", "do not belong together"),
    ),
    "rope type, 4.x": (
        change_rope(rope_scaling={"type": "linear", "factor": 2.0}),
        ("rope_scaling.type='linear'", "one of default, yarn"),
    ),
    "rope type, 4.x late": (
        change_rope(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        ("rope_scaling.rope_type='dynamic'", "one of default, yarn"),
    ),
    "rope type, 5.x": (
        change_rope(rope_parameters={"rope_type": "llama3", "factor": 2.0, "rope_theta": 1e6}),
        ("rope_parameters.rope_type='llama3'", "one of default, yarn"),
    ),
    "yarn without factor": (
        change_rope(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
        ("rope_parameters.factor=None", "must be a number >= 1"),
    ),
    **{f"weights: {name}": (damage.spoil, damage.words) for name, damage in files.DAMAGES.items()},
}


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_files(line, name):
    spoil, words = MODEL_FILES[name]
    spoil(line.checkpoint())
    line.refuse(words=words)


def test_tied_with_a_different_head_is_served_with_a_warning(line):
    """Which of the two wins is said, and the run goes on."""
    folder = line.checkpoint("tied")
    plain = line.main("--prompt", "1+1")
    assert (plain[0], plain[2]) == (0, "")
    head = "lm_head.weight"
    files.edit(folder, lambda tensors: tensors.update({head: -tensors["model.embed_tokens.weight"]}))
    code, out, err = line.main("--prompt", "1+1")
    assert code == 0
    assert len(err.splitlines()) == 1
    assert err.startswith("warning: ")
    for words in ("tie_word_embeddings=true", "lm_head.weight differs", "lm_head.weight wins", "to silence this"):
        assert words in err
    assert out.splitlines()[:2] != plain[1].splitlines()[:2]  # and it is true: the answer is another one


# --- prompts ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("prompts.txt: holds no prompt", "one per line")),
        (b" \n\n", ("prompts.txt: holds no prompt", "one per line")),
        (b"1+1\n\xff\n", ("prompts.txt:2: not UTF-8", "convert the file")),
    ],
)
def test_prompt_files(line, content, words):
    line.checkpoint()
    path = line.folder / "prompts.txt"
    path.write_bytes(content)
    line.refuse("--file", str(path), words=words)


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_prompt_file_missing(line, name):
    line.checkpoint()
    line.refuse("--file", str(line.folder / name), words=(str(line.folder), "name a readable file of prompts"))


@pytest.mark.parametrize("prompt", ["", " \n"])
@pytest.mark.parametrize("chat_template", [True, False])
def test_empty_prompt(line, prompt, chat_template):
    line.checkpoint()
    line.recipe["data_config"]["chat_template"] = chat_template
    line.refuse("--prompt", prompt, words=("the prompt is empty", "give at least one character"))


def test_no_prompt_at_all(line):
    line.checkpoint()
    line.refuse("--set", "scheduler_config.batch_size=1", words=("nothing to answer", "--prompt TEXT"))


def test_prompt_of_half_a_character(line):
    line.checkpoint()
    line.refuse("--prompt", "1+\udc80", words=("lone surrogate", "give valid UTF-8"))


@pytest.mark.parametrize("length", [MAX_SEQ_LEN, MAX_SEQ_LEN + 1, 500])
def test_prompt_longer_than_the_context(line, length):
    """The tokenizer has one token per character."""
    line.checkpoint()
    fix = ("shorten it", "data_config.input_truncated_len", "scheduler_config.max_seq_len")
    line.refuse("--prompt", "7" * length, words=(f"prompt 1 has {length} tokens", f"max_seq_len={MAX_SEQ_LEN}", *fix))


def test_longest_prompt_yields_one_token(line):
    line.checkpoint()
    code, _, err = line.main("--prompt", "7" * (MAX_SEQ_LEN - 1))
    assert (code, err) == (0, "")
    report = json.loads((line.output / "recipe" / "report.json").read_text())
    assert [len(answer["ids"]) for answer in report["answers"]] == [1]
    assert report["answers"][0]["stop_reason"] == "context"
    assert report["figures"]["prompt_tokens"] == MAX_SEQ_LEN - 1


def test_input_truncated_len_is_the_fix_it_is_said_to_be(line):
    line.checkpoint()
    truncated = ("--set", "data_config.input_truncated_len=40")
    code, _, err = line.main("--prompt", "7" * 500, *truncated)
    assert (code, err) == (0, "")


def test_prompt_longer_than_the_cache(line):
    """Two blocks of 16 after the scratch block: 28 + 4 tokens fit, 29 + 4 do not, though the context is longer."""
    line.checkpoint()
    line.recipe["scheduler_config"]["num_blocks"] = 3
    fix = ("raise scheduler_config.num_blocks", "lower max_new_tokens")
    line.refuse("--prompt", "7" * 29, words=("29 + 4 tokens", "needs 3 cache blocks, the cache has 2", *fix))
    code, _, err = line.main("--prompt", "7" * 28)
    assert (code, err) == (0, "")


# --- memory, machine, output ---


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("scheduler_config.mem_fraction_static=0.00001", "scheduler_config.mem_fraction_static above 1e-05"),
        ("scheduler_config.num_blocks=100000000", "scheduler_config.num_blocks below 100000000"),
    ],
)
def test_out_of_memory_is_predicted(line, override, fix):
    """Before anything is allocated: no runner is made. The machine is said to have 8 GiB, whatever it has."""
    line.checkpoint()
    machine = dict(vars(features.cpu()), memory_bytes=8 << 30)
    line.monkeypatch.setattr(select, "cpu", lambda: features.Features(**machine))
    line.monkeypatch.setattr("executor.session.Session.load", lambda *_: pytest.fail("the model was built"))
    line.refuse("--prompt", "1+1", "--set", override, words=("out of memory, predicted", "of 8.0 GiB", fix))


@pytest.mark.parametrize("platform", ["a2", "a3", "950"])
def test_recipe_for_a_machine_that_this_is_not(line, platform):
    line.checkpoint()
    line.recipe["model_config"].update(platform_version=platform, dtype="bfloat16")
    line.refuse(
        words=(
            f"model_config.platform_version={platform}",
            "this machine has no NPU",
            "--explain",
            "--set model_config.platform_version=cpu",
        )
    )
    code, out, err = line.main("--explain")  # the plan can be read all the same
    assert (code, err) == (0, "")
    assert platform in out


def test_a_strategy_that_the_layout_has_no_use_for(line):
    """Refused before any rank is started."""
    line.checkpoint()
    line.recipe["parallel_config"] = {
        "world_size": 2,
        "attn_tp_size": 2,
        "moe_ep_size": 2,
        "moe_prefill_strategy": "ep_allgather",
    }
    line.refuse(words=("parallel_config.moe_prefill_strategy=ep_allgather", "replicated", "legal: ep_local"))


def test_nothing_to_split_in_a_sequence_parallel_prefill(line):
    line.checkpoint()
    line.recipe["parallel_config"] = {"sequence_parallel_prefill": True}
    line.refuse(words=("parallel_config.sequence_parallel_prefill=true", "attn_tp_size=1", "set it to false"))


def test_chat_on_several_ranks(line):
    line.checkpoint()
    line.recipe["parallel_config"] = {"world_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    line.refuse("--chat", words=("--chat on several ranks", "parallel_config.world_size=1"))


def test_ranks_that_do_not_divide_the_heads(line):
    line.checkpoint()
    line.recipe["parallel_config"] = {"world_size": 3, "attn_tp_size": 3, "moe_tp_size": 3}
    line.refuse(words=("parallel_config.attn_tp_size=3", "num_attention_heads=4", "legal with world_size=3: 1"))


@pytest.mark.parametrize("inside", [False, True])
def test_output_directory_is_a_file(line, inside):
    """Said before the work, not after it."""
    line.checkpoint()
    blocker = line.folder / "blocker"
    blocker.write_text("mine")
    line.recipe["output_config"]["dir"] = str(blocker / "deep" if inside else blocker)
    line.monkeypatch.setattr("executor.session.Session.load", lambda *_: pytest.fail("the model was built"))
    line.refuse(words=("output_config.dir=", "cannot be written", "name a writable directory"))
    assert blocker.read_text() == "mine"


def test_output_directory_that_even_root_cannot_make(line):
    """/proc says that root may write to it."""
    line.checkpoint()
    line.recipe["output_config"]["dir"] = "/proc/x"
    line.refuse(words=("output_config.dir=/proc/x", "cannot be written", "name a writable directory"))


def test_logs_is_a_file(line):
    """Said before a rank is started."""
    line.checkpoint()
    line.recipe["parallel_config"] = {"world_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    blocker = line.folder / "results/recipe/logs"
    blocker.parent.mkdir(parents=True)
    blocker.write_text("mine")
    line.recipe["output_config"]["dir"] = str(line.folder / "results")
    line.refuse(words=(f"output_config.dir={line.folder / 'results'}", f"{blocker}", "name a writable directory"))
    assert [path.name for path in blocker.parent.iterdir()] == ["logs"]


def test_eval_needs_answers(line):
    line.checkpoint()
    path = line.folder / "questions.jsonl"
    path.write_text('{"prompt": "1+1"}\n')
    line.refuse("--file", str(path), command="eval", words=("questions.jsonl: eval needs an `answer`",))


# --- real processes ---


def start(line, *options):
    command = [sys.executable, "-m", "executor", *line.arguments(*options)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell's background jobs, such as these tests may be, start their children deaf to SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_real_process_unknown_key(line):
    line.recipe = {"model_config": {"model_nam": "x"}}
    process = start(line, "--prompt", "1+1")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    check_refusal(err.decode(), ("unknown key `model_config.model_nam`", "did you mean `model_name`?"))


def test_real_process_truncated_shard(line):
    files.DAMAGES["truncated shard"].spoil(line.checkpoint())
    del line.recipe["model_config"]["enable_thinking"]  # no note of greedy thinking beside an error
    process = start(line, "--prompt", "1+1")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    check_refusal(err.decode(), files.DAMAGES["truncated shard"].words)
    line.nothing_written()


def test_real_process_interrupted(line):
    """SIGINT while an answer of 90000 tokens is streamed: 130, one line, nothing left behind."""
    line.checkpoint("tied")
    line.recipe["scheduler_config"].update(max_new_tokens=90000, max_seq_len=100000)
    process = start(line, "--prompt", "1+1")
    try:
        seen, deadline = b"", time.monotonic() + 120
        while len(seen) < 10 and time.monotonic() < deadline:  # more than the announced prompt: tokens are coming
            seen += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert seen.startswith(b"> 1+1\n")
    assert (process.returncode, err) == (130, b"interrupted\n")
    line.nothing_written()
