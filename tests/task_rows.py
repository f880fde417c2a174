"""A few rows of every task in the publishers' formats."""

import csv
import json


def options(*texts):
    return [{"text": t, "label": "ABCD"[i]} for i, t in enumerate(texts)]


def zero_shot(d):
    """Files of the seven zero-shot tasks below a folder."""

    def lines(name, rows):
        (d / name).parent.mkdir(exist_ok=True)
        (d / name).write_text("\n".join(json.dumps(r) for r in rows) + "\n")

    labels = ["entailment", "not_entailment", "entailment"] * 3
    table = [["index", "sentence1", "sentence2", "label"]]
    table += [[str(i), f"Dogs {i} bark.", f"A dog {i} is loud.", label] for i, label in enumerate(labels)]
    (d / "rte").mkdir()
    with (d / "rte/dev.tsv").open("w") as f:
        csv.writer(f, delimiter="\t", quoting=csv.QUOTE_NONE, escapechar="\\").writerows(table)
    lines(
        "boolq/val.jsonl",
        [{"question": f"is {i} odd", "passage": f"The number {i}.", "label": str(i % 2 == 1).lower()} for i in range(9)],
    )
    for task, name in (("arc_easy", "ARC-Easy-Test.jsonl"), ("arc_challenge", "ARC-Challenge-Test.jsonl")):
        lines(f"{task}/{name}", [{"id": f"{task}{i}", "answerKey": "ABC"[i % 3], "question": {
            "stem": f"What is {i}?", "choices": options("a stone", "a number", f"the {i}")}} for i in range(8)])  # fmt: skip
    lines("openbookqa/test.jsonl", [{"id": str(i), "answerKey": "ABCD"[i % 4], "question": {
        "stem": f"Item {i} is", "choices": options("hot", "cold", "wet", "dry")}} for i in range(8)])  # fmt: skip
    lines("hellaswag/hellaswag_val.jsonl", [{"ind": i, "activity_label": "Baking", "ctx_a": "A man bakes.", "ctx_b": "he",
        "ctx": "A man bakes. he", "endings": ["sings.", "eats [title] bread.", "runs.", "waits."],
        "source_id": "x", "split": "val",
        "split_type": "indomain", "label": i % 4} for i in range(8)])  # fmt: skip
    lines("winogrande/dev.jsonl", [{"qID": str(i), "sentence": f"Ann saw Bea because _ waved {i} times.", "option1": "Ann",
        "option2": "Bea", "answer": str(1 + i % 2)} for i in range(8)])  # fmt: skip


def labelled(d, count=12):
    """Files of CoLA and CommonsenseQA below a folder."""
    (d / "cola").mkdir()
    for name, n in (("in_domain_train.tsv", count), ("in_domain_dev.tsv", 6), ("out_of_domain_dev.tsv", 6)):
        rows = [f"x\t{i % 2}\t\t{'The cat sat' if i % 2 else 'Cat the sat'} {i}." for i in range(n)]
        (d / "cola" / name).write_text("\n".join(rows) + "\n")
    (d / "commonsenseqa").mkdir()
    for name, n in (("train_rand_split.jsonl", count), ("dev_rand_split.jsonl", 6)):
        rows = [
            {"answerKey": "AB"[i % 2], "question": {"stem": f"Is {i} odd?", "choices": options("no", "yes")}} for i in range(n)
        ]
        (d / "commonsenseqa" / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
