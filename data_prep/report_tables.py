"""The reports on contamination and duplicates as tables for people."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data_prep.progress import say
from pretrain.errors import counted


def wide_console() -> Console:
    """Standard output; 140 characters wide where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def show_contamination(report: dict[str, Any], output: Path) -> None:
    """Print a table of the evaluation sets and one of the sources."""
    settings = report["request"]["settings"]
    sets = Table(title=f"Evaluation items in the corpus ({settings['ngram']}-grams of words{', numbers masked' if settings['mask_numbers'] else ''})")
    for heading in ("evaluation set", "items", "touched", "half found", "n-grams found", "longest run (words)", "too short to search"):
        sets.add_column(heading, justify="left" if heading == "evaluation set" else "right")
    for one in report["sets"]:
        share = one["ngrams_found"] / max(one["ngrams"], 1)
        found = f"{one['ngrams_found']:,} of {one['ngrams']:,} ({share:.2%})"
        numbers = (f"{one['items']:,}", f"{one['items_touched']:,}", f"{one['items_half_found']:,}", found)
        sets.add_row(one["set"], *numbers, str(one["longest_run"]), f"{one['items_not_searched']:,}")
    sources = Table(title="Where they stand")
    for heading in ("source", "documents", "with a hit", "unreadable", "words", "items touched"):
        sources.add_column(heading, justify="left" if heading == "source" else "right")
    for name, one in report["sources"].items():
        counts = (one["documents"], one["touched_documents"], one["unreadable"], one["words"], one["items"])
        sources.add_row(name, *(f"{count:,}" for count in counts))
    console = wide_console()
    console.print(sets)
    console.print(sources)
    say(f"every item with its share and longest run: {output / 'report.json'}; every hit with its file, document and text: {output / 'hits.jsonl'}")


def show_duplicates(report: dict[str, Any], output: Path) -> None:
    """Print a table of exact and near duplicates by source, and what was found across sources."""
    console = wide_console()
    method = report["request"]["settings"]["method"]
    for kind in ("exact", "near"):
        if kind not in report:
            continue
        found = report[kind]
        title = f"Exact duplicates ({report['request']['settings']['exact'].replace('_', ' ')})"
        if kind == "near":
            half = f"half of the pairs found at similarity {found['similarity_at_which_half_is_found']:.2f}"
            bands = f"{method['buckets']} x {method['hashes']} hashes"
            title = f"Near duplicates, exact ones included ({method['ngram']}-grams, {bands}: {half})"
        table = Table(title=title)
        for heading in ("source", "documents", "tokens", "redundant documents", "redundant tokens"):
            table.add_column(heading, justify="left" if heading == "source" else "right")
        for name, one in {**found["sources"], **found["leaked"]}.items():
            redundant = [f"{one[f'found_{what}']:,} ({one[f'share_of_{what}']:.2%})" for what in ("documents", "tokens")]
            table.add_row(name, f"{one['documents']:,}", f"{one['tokens']:,}", *redundant)
        console.print(table)
        for pair in found["across_sources"]:
            groups, (one, other) = counted(pair["groups"], f"group of {kind} duplicates", f"groups of {kind} duplicates"), pair["sources"]
            console.print(f"in {one} and {other}: {groups}", highlight=False)
    notes = "a document is redundant if an earlier one is its duplicate; of a source in against, if the corpus holds one; raw text is in words"
    say(f"{notes}; largest groups, with text: {output / 'report.json'}")
