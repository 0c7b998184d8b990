"""Planted duplicates: exact ones by hand, near ones with known Jaccard index against the closed form of MinHash LSH."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.duplicates import report_duplicates
from data_prep.minhash import MinHash, find_clusters, similarity, write_signatures
from data_prep.report_config import DuplicatesConfig
from pretrain.errors import UserError
from tests.data.examples import prepared, write_jsonl

LAUNCHER = Path(__file__).resolve().parents[2] / "launchers/prepare_data.py"


def words(seed: int, count: int = 60) -> list[str]:
    return [f"v{number}" for number in np.random.default_rng(seed).integers(0, 10**9, count)]


def document(seed: int, count: int = 60) -> str:
    return " ".join(words(seed, count))


def pair(shared: int, own: int, seed: int) -> tuple[str, str]:
    """Two texts with `shared` equal words and `own` words of their own each: single words are the shingles, so J = shared / (shared + 2 own)."""
    drawn = words(seed, shared + 2 * own)
    return " ".join(drawn[: shared + own]), " ".join(drawn[:shared] + drawn[shared + own :])


@pytest.mark.parametrize(("buckets", "hashes"), [(14, 8), (6, 4)])
@pytest.mark.parametrize("shared", [50, 60, 70, 80, 90])
def test_pairs_are_found_as_often_as_the_closed_form_says(tmp_path: Path, buckets: int, hashes: int, shared: int) -> None:
    method, pairs = MinHash(1, buckets, hashes, seed=1), 600
    made = [pair(shared, (100 - shared) // 2, seed) for seed in range(pairs)]
    s = shared / 100
    assert similarity(method, *made[0]) == pytest.approx(s)
    for rank in range(2):
        write_signatures(method, tmp_path, rank, iter([texts[rank] for texts in made]))
    members = find_clusters(method, tmp_path, workers=1)
    clusters = {}
    for file, number, cluster in members.tolist():
        clusters.setdefault(cluster, []).append((file, number))
    assert all(len(found) == 2 and found[0][1] == found[1][1] for found in clusters.values())  # nothing but the planted pairs
    expected = 1 - (1 - s**hashes) ** buckets
    assert method.probability(s) == pytest.approx(expected)
    # one hash function decides for all pairs at once, and min-wise hashing by a linear function is not quite independent: twice the binomial error
    error = 2 * 3 * np.sqrt(expected * (1 - expected) / pairs) + 0.01
    assert len(clusters) / pairs == pytest.approx(expected, abs=error)


def test_half_of_the_pairs_are_found_at_the_stated_similarity() -> None:
    for method in (MinHash(5, 14, 8, 1), MinHash(5, 20, 3, 1)):
        assert method.probability(method.half) == pytest.approx(0.5)
    assert MinHash(5, 14, 8, 1).half == pytest.approx(0.684698, abs=1e-6)


def test_a_long_text_has_the_signature_of_its_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, text = MinHash(5, 14, 8, 1), document(1, 500)
    write_signatures(method, tmp_path / "whole", 0, iter([text]))
    monkeypatch.setattr("data_prep.minhash._BLOCK", 64)
    write_signatures(method, tmp_path / "blocks", 0, iter([text]))
    whole, blocks = ([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.sig"))] for name in ("whole", "blocks"))
    assert len(whole) == 14 and whole == blocks


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """a: 12 documents, of which 2 repeat the first and 1 is near the second. b: 5, of which 1 repeats the first of a. v: 4, of which 1 is the
    third of a and 1 near the fourth of a."""
    a = [document(n) for n in range(8)] + [document(0), document(0).upper() + "!", " ".join([*words(1)[:-1], "other"]), "short text"]
    b = [document(0), *(document(n) for n in range(20, 24))]
    v = [document(2), " ".join(["other", *words(3)[1:]]), document(30), document(31)]
    return {name: write_jsonl(tmp_path / f"{name}.jsonl", texts) for name, texts in (("a", a), ("b", b), ("v", v))}


def check_counts(report: dict, a: str, b: str, v: str, exact: int) -> None:
    found = report["exact"]
    assert (found["groups"], found["redundant_documents"]) == (2, exact)
    assert {name: one["found_documents"] for name, one in found["sources"].items()} == {a: exact - 1, b: 1}
    assert {name: one["found_documents"] for name, one in found["leaked"].items()} == {f"{v} (against)": 1}
    assert {tuple(one["sources"]): one["groups"] for one in found["across_sources"]} == {(a, b): 1, (a, f"{v} (against)"): 1}
    near = report["near"]
    assert (near["groups"], near["redundant_documents"]) == (4, 4)
    assert {name: one["found_documents"] for name, one in near["leaked"].items()} == {f"{v} (against)": 2}


def test_raw_text(tmp_path: Path, sources: dict[str, Path]) -> None:
    a, b, v = (str(sources[name]) for name in "abv")
    config = DuplicatesConfig(corpus=[a, b], against=v, output=str(tmp_path / "report"), workers=1)
    report = report_duplicates(config)
    check_counts(report, a, b, v, exact=3)
    assert report["exact"]["redundant_tokens"] == 180 and report["exact"]["share_of_documents"] == pytest.approx(3 / 17)
    assert report["near"]["too_short_for_a_shingle"] == 1
    largest = report["exact"]["largest"][0]
    assert largest["documents"] == 4 and largest["members"] == [{"file": a, "document": n} for n in (1, 9, 10)] + [{"file": b, "document": 1}]
    assert largest["text"] == document(0)[:160]
    (near,) = [one for one in report["near"]["largest"] if one["members"] == [{"file": a, "document": 2}, {"file": a, "document": 11}]]
    assert near["similarity_of_the_first_two"] == pytest.approx(55 / 57)
    assert report_duplicates(config) == json.loads((tmp_path / "report" / "report.json").read_text())
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.json"]


@pytest.mark.slow
def test_prepared_corpora_in_two_processes(tmp_path: Path, sources: dict[str, Path], model_file: Path) -> None:
    folders = {}
    for name, path in sources.items():
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        folders[name] = str(prepared(tmp_path / name, model_file, texts, files=2 if name == "a" else 1).folder)
    settings = {"corpus": [folders["a"], folders["b"]], "against": folders["v"], "tokenizer": str(model_file), "workers": 2}
    report = report_duplicates(DuplicatesConfig(**settings, output=str(tmp_path / "text")))  # type: ignore[arg-type]
    check_counts(report, folders["a"], folders["b"], folders["v"], exact=3)
    by_ids = report_duplicates(DuplicatesConfig(**{**settings, "workers": 1}, output=str(tmp_path / "ids"), exact="token_ids"))  # type: ignore[arg-type]
    check_counts(by_ids, folders["a"], folders["b"], folders["v"], exact=2)  # the one in capitals has other ids


def test_the_same_groups_however_much_is_sorted_at_once(tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"corpus": str(sources["a"]), "near": False, "workers": 1}
    whole = report_duplicates(DuplicatesConfig(**settings, output=str(tmp_path / "whole")))  # type: ignore[arg-type]
    monkeypatch.setattr("data_prep.duplicates._SORTED_AT_ONCE", 3)
    parts = report_duplicates(DuplicatesConfig(**settings, output=str(tmp_path / "parts")))  # type: ignore[arg-type]
    assert whole["exact"] == parts["exact"] and "near" not in whole


def test_mistakes(tmp_path: Path, sources: dict[str, Path]) -> None:
    a, output = str(sources["a"]), str(tmp_path / "report")
    with pytest.raises(UserError, match="exact=token_ids compares prepared corpora, and raw text is among them"):
        report_duplicates(DuplicatesConfig(corpus=a, output=output, exact="token_ids"))
    with pytest.raises(UserError, match="is both in corpus and in against"):
        report_duplicates(DuplicatesConfig(corpus=a, against=a, output=output))
    with pytest.raises(UserError, match="buckets=0 must"):
        DuplicatesConfig(corpus=a, output=output, buckets=0)
    (tmp_path / "empty.jsonl").write_text('{"text": null}\n')
    with pytest.raises(UserError, match="holds no readable document"):
        report_duplicates(DuplicatesConfig(corpus=str(tmp_path / "empty.jsonl"), output=output, workers=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UserError, match="is not empty and holds no report"):
        report_duplicates(DuplicatesConfig(corpus=a, output=str(tmp_path / "full")))


def test_the_launcher(tmp_path: Path, sources: dict[str, Path]) -> None:
    arguments = ["duplicates", "corpus=[a.jsonl,b.jsonl]", "against=v.jsonl", "output=report", "workers=1"]
    result = subprocess.run([sys.executable, str(LAUNCHER), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "in a.jsonl and b.jsonl: 1 group of exact duplicates" in result.stdout, result.stderr
    assert len(result.stderr.splitlines()) == 2, result.stderr  # nothing of the libraries' logs
