# SPDX-License-Identifier: Apache-2.0
"""What the commands show and write when all is well (what they refuse is in tests/test_bad_input.py)."""

import io
import json
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from executor import cli
from executor.config import ModelSection
from executor.prompts import Prompt
from executor.report import percentile, write_json
from tests import checkpoint_files as files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return files.make_checkpoint(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def command(folder, tmp_path, capsys, monkeypatch):
    """Run ``main`` on a recipe for a tiny random model; returns (exit code, stdout, stderr, report)."""

    def run(name, *options, stdin="", **sections):
        recipe = {
            "model_config": {
                "model_name": "case",
                "model_path": str(folder),
                "dtype": "float32",
                "platform_version": "cpu",
                "enable_thinking": False,
                **sections.pop("model", {}),
            },
            "scheduler_config": {"block_size": 16, "batch_size": 2, "max_new_tokens": 4, "max_seq_len": 96},
            "output_config": {"dir": str(tmp_path / "output")},
            **sections,
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        monkeypatch.setattr(sys, "argv", ["executor", name, str(tmp_path / "recipe.yaml"), *options])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main()
        captured = capsys.readouterr()
        written = sorted((tmp_path / "output" / "recipe").glob("*"))
        reports = {path.name: json.loads(path.read_text()) for path in written}
        return code, captured.out, captured.err, reports

    return run


@settings(deadline=None, max_examples=60)
@given(
    answers=st.lists(st.lists(st.text("ab \n[/]", max_size=3), min_size=1, max_size=4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_answers_are_printed_one_after_the_other(answers, order):
    """However the pieces of several answers interleave, the screen shows prompt, answer, prompt, answer."""
    pieces = [n for n, answer in enumerate(answers) for _ in answer]
    order.shuffle(pieces)
    left = [list(answer) for answer in answers]
    printer = cli.OrderedPrinter([Prompt(text=f"prompt {n}") for n in range(len(answers))])
    printed: list[str] = []
    printer._write = printed.append
    printer.end_line()  # nothing is open yet
    printer.announce()
    for n in pieces:
        text = left[n].pop(0)
        printer(n, text, not left[n])
    assert "".join(printed) == "".join(f"> prompt {n}\n{''.join(answer)}\n" for n, answer in enumerate(answers))


@pytest.mark.parametrize(("pieces", "end"), [(["a"], "a\n"), (["a", "b\n"], "ab\n"), (["a\n", "b"], "a\nb\n")])
def test_an_answer_that_breaks_off_ends_its_line(capsys, pieces, end):
    printer = cli.OrderedPrinter([Prompt(text="1")])
    for piece in pieces:
        printer(0, piece, False)
    printer.end_line()
    assert capsys.readouterr().out == end


def weight_bytes(folder):
    return sum(tensor.numel() * tensor.element_size() for tensor in load_file(folder / files.WEIGHTS).values())


def test_infer_reports_what_it_printed(command, folder):
    code, out, _, reports = command("infer", "--prompt", "12+3", "--prompt", "sort [b]a", "--prompt", "x")
    assert code == 0
    report = reports["report.json"]
    figures, answers = report["figures"], report["answers"]
    assert [a["prompt"] for a in answers] == ["12+3", "sort [b]a", "x"]
    for answer in answers:
        assert answer["started"] < answer["token_times"][0]
        assert answer["token_times"] == sorted(answer["token_times"])
        assert len(answer["token_times"]) == len(answer["ids"])
        assert f"> {answer['prompt']}\n{answer['text']}\n" in out
    assert figures["requests"] == 3
    assert figures["output_tokens"] == sum(len(a["ids"]) for a in answers)
    assert figures["stop_reasons"] == {
        reason: [a["stop_reason"] for a in answers].count(reason) for reason in {a["stop_reason"] for a in answers}
    }
    assert figures["ttft"]["p50_ms"] <= figures["ttft"]["p99_ms"]
    assert figures["load_bytes"] == weight_bytes(folder)
    assert report["config"]["model_config"]["model_name"] == "case"
    assert (figures["ranks"], figures["groups"]) == (1, {})
    assert figures["moe_strategies"] == {"prefill": "tp", "decode": "tp"}
    assert "tp in prefill, tp in decode" in out
    assert "layout" not in out
    assert set(reports) == {"report.json"}


def test_prompts_from_a_file_and_from_the_recipe(command, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "1+2", "max_new_tokens": 2}\n{"messages": [{"role": "user", "content": "sort ba"}]}\n'
    )
    _, _, _, by_option = command("infer", "--file", str(tmp_path / "prompts.jsonl"))
    _, _, _, by_recipe = command("infer", data_config={"dataset": str(tmp_path / "prompts.jsonl")})
    ids = [[answer["ids"] for answer in reports["report.json"]["answers"]] for reports in (by_option, by_recipe)]
    assert ids[0] == ids[1]
    assert [len(ids[0]), len(ids[0][0])] == [2, 2]


def test_input_truncated_len_keeps_the_end_of_the_prompt(command):
    data = {"chat_template": False}
    _, _, _, cut = command("infer", "--prompt", "abcdefgh", data_config={**data, "input_truncated_len": 3})
    _, _, _, short = command("infer", "--prompt", "fgh", data_config=data)
    _, _, _, whole = command("infer", "--prompt", "abcdefgh", data_config=data)
    assert cut["report.json"]["figures"]["prompt_tokens"] == 3
    assert cut["report.json"]["answers"][0]["ids"] == short["report.json"]["answers"][0]["ids"]
    assert whole["report.json"]["figures"]["prompt_tokens"] == 8


def test_explain_prints_the_plan_and_runs_nothing(command):
    code, out, _, reports = command("infer", "--explain")
    assert code == 0
    for word in ("layout", "KV cache", "MoE strategy, prefill", "moe_ep_size=1", "mem_fraction_static"):
        assert word in out
    assert reports == {}


def test_eval_scores_exact_answers(command, tmp_path):
    questions = ["1+2", "sort cab", "reverse abc"]
    _, _, _, first = command("infer", *(x for q in questions for x in ("--prompt", q)))
    texts = [a["text"] for a in first["report.json"]["answers"]]
    rows = [{"prompt": q, "answer": t.strip()} for q, t in zip(questions, texts)]
    rows[1]["answer"] += "?"
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _, reports = command("eval", "--file", str(tmp_path / "q.jsonl"))
    assert code == 0
    assert "exact: 2 of 3 = 66.7%" in out
    assert reports["eval.json"]["score"] == {"exact": 2, "total": 3, "wrong": [1]}


def test_chat_keeps_the_history_and_survives_a_turn_that_does_not_fit(command):
    data = {"chat_template": True}
    code, out, err, reports = command(
        "infer", "--chat", stdin="1+1\n\n" + "9" * 200 + "\n2+2\n/new\n1+1\n/exit\n", data_config=data
    )
    assert code == 0
    assert "empty" in err
    assert "which leaves no room for an answer" in err
    answers = out.split("\n")
    assert answers[0] == answers[2]  # the same first turn, before and after /new
    assert reports == {}


def test_random_weights_need_neither_checkpoint_nor_tokenizer(command, folder, monkeypatch):
    """The shapes come from assets/model_configs/<model_name>; here a directory that holds only a config.json."""
    monkeypatch.setattr(ModelSection, "config_dir", property(lambda self: folder))
    code, out, err, reports = command(
        "infer", model={"model_path": None, "with_ckpt": False}, data_config={"input_truncated_len": 5}
    )
    assert code == 0
    assert "random weights" in err
    figures, answers = reports["report.json"]["figures"], reports["report.json"]["answers"]
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (2, 10, 8)
    assert answers[0]["ids"] != answers[1]["ids"]
    assert f"> (random ids)\n{' '.join(map(str, answers[0]['ids']))}" in out


@pytest.mark.parametrize("switch", ["force_eplb", "with_ckpt"])
def test_answers_that_mean_nothing_say_so(command, switch):
    _, _, err, _ = command("infer", "--prompt", "1", model={switch: switch == "force_eplb"})
    assert f"model_config.{switch}=" in err
    assert "the answers do not" in err


def test_profile_is_written_beside_the_report(command):
    code, _, _, reports = command("infer", "--prompt", "1", model={"enable_profiler": True})
    assert code == 0
    names = {event.get("name") for event in reports["trace.json"]["traceEvents"]}
    assert {"npu::npu_grouped_matmul", "npu::npu_fused_infer_attention_score_v2"} <= names


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": [1] * 1000, "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_percentile_is_the_nearest_rank():
    hundred = [float(n) for n in range(100, 0, -1)]
    assert [percentile(hundred, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert percentile([7.0], 0.99) == 7.0
