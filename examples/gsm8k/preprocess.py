"""Turns GSM8K's own files into tasks: JSON lines, and parquet in verl's layout.

    python examples/gsm8k/preprocess.py train.jsonl --split train --out data/gsm8k --val-rows 500
    python examples/gsm8k/preprocess.py test.jsonl --split test --out data/gsm8k

Every line of a file holds a question and a worked answer that ends in ``#### NUMBER``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl_envs.qa.answers import stated_answer

from agentrl.data.jsonl import read_jsonl
from agentrl.errors import AgentRLError, DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Reason step by step. End with #### and the number alone."


def read_rows(path: Path, split: str) -> list[dict[str, Any]]:
    """Return ``id``, ``prompt``, ``answer`` (the number as text) and ``solution`` of every line.

    Raises:
        DataError: a line without a question, or whose answer does not state exactly one number.
    """
    table = read_jsonl(path)
    rows = []
    for index, row in enumerate(table.rows):
        question, solution = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise DataError(
                f"{table.place(index)}: want texts 'question' and 'answer', got {row!r}"
            )
        answer = stated_answer(solution)
        if answer is None:
            raise DataError(f"{table.place(index)}: the answer must hold #### and a number, once")
        rows.append(
            {
                "id": f"gsm8k-{split}-{index}",
                "prompt": question.strip(),
                "answer": answer.replace(",", ""),
                "solution": solution,
            }
        )
    return rows


def hold_out(rows: Sequence[dict[str, Any]], count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Return (the rest, ``count`` rows drawn with ``seed``), both in their order."""
    if not 0 <= count < len(rows):
        raise DataError(f"--val-rows {count}: must be less than the {len(rows)} rows there are")
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    kept = [row for index, row in enumerate(rows) if index not in chosen]
    return kept, [rows[index] for index in sorted(chosen)]


def verl_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Lay a row out as verl's trainers read it."""
    content = f"{row['prompt']}\n{INSTRUCTION}"
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": split, "index": index, "solution": row["solution"]},
    }


def write(rows: Sequence[dict[str, Any]], out: Path, split: str, *, parquet: bool) -> None:
    """Write ``out/split.jsonl`` and, if asked for, ``out/split.parquet``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{split}.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(rows)} tasks")
    if parquet:
        import pyarrow
        from pyarrow.parquet import write_table

        table = pyarrow.Table.from_pylist(
            [verl_row(row, split, index) for index, row in enumerate(rows)]
        )
        write_table(table, out / f"{split}.parquet")
        print(f"{out / f'{split}.parquet'}: {len(rows)} tasks")


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description="Turn a file of GSM8K into tasks.")
    parser.add_argument("file", type=Path, help="train.jsonl or test.jsonl of GSM8K")
    parser.add_argument("--split", required=True, choices=["train", "val", "test"])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--val-rows", type=int, default=0, help="rows to keep for validation")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--parquet", action="store_true", help="write verl's layout too")
    given = parser.parse_args(arguments)
    try:
        rows, held_out = hold_out(read_rows(given.file, given.split), given.val_rows, given.seed)
        write(rows, given.out, given.split, parquet=given.parquet)
        if held_out:
            write(held_out, given.out, "val", parquet=given.parquet)
    except AgentRLError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
