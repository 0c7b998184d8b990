"""MinHash signatures and LSH clusters by datatrove's pipeline steps, without its terminal output and with bounded memory per document."""

import contextlib
import io
import resource
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

from data_prep.ngrams import ngram_hashes, word_hashes

_BLOCK = 1 << 15
"""Shingles whose hashes are in memory at once: 8 bytes for each of buckets * hashes of them."""


@dataclass(frozen=True)
class MinHash:
    """Shingles of `ngram` words, `buckets` bands of `hashes` hashes each."""

    ngram: int
    buckets: int
    hashes: int
    seed: int

    def probability(self, similarity: float) -> float:
        """That a pair of documents of this Jaccard index shares at least one band."""
        return 1 - (1 - similarity**self.hashes) ** self.buckets

    @property
    def half(self) -> float:
        """The similarity at which half of the pairs are found."""
        return (1 - 0.5 ** (1 / self.buckets)) ** (1 / self.hashes)

    def config(self) -> MinhashConfig:
        """For datatrove."""
        return MinhashConfig(n_grams=self.ngram, num_buckets=self.buckets, hashes_per_bucket=self.hashes, seed=self.seed)


class _Words(WordTokenizer):
    """Words between white space: what data_prep/ngrams.py makes of a text. datatrove's own need spaCy or NLTK."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class _Signatures(MinhashDedupSignature):
    """datatrove's signatures, of shingles that are hashed here at once (its own hash function fails with xxhash 4, which takes bytes only), in
    blocks: the signature of a set is the least of the signatures of its parts."""

    def get_shingles(self, text: str) -> np.ndarray:
        """[S, 1] uint64: the hash of every shingle."""
        return ngram_hashes(word_hashes(text.split()), self.config.n_grams).reshape(-1, 1)

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """[buckets][hashes]."""
        blocks = [super(_Signatures, self).get_signature(shingles[start : start + _BLOCK]) for start in range(0, len(shingles), _BLOCK)]
        return np.min(np.asarray(blocks, np.uint64), axis=0).tolist() if len(blocks) > 1 else blocks[0]


def write_signatures(method: MinHash, folder: Path, rank: int, texts: Iterator[str]) -> None:
    """The signatures of normalised texts, as file number `rank`. Texts of fewer words than a shingle have none."""
    logger.disable("datatrove")
    step = _Signatures(str(folder / "signatures"), config=method.config(), language=_Words())
    step.run((Document(text=text, id="") for text in texts), rank=rank)


def similarity(method: MinHash, first: str, second: str) -> float:
    """The Jaccard index of two normalised texts' sets of shingles, exactly; 0 where one has none."""
    one, other = (_shingles(text.split(), method.ngram) for text in (first, second))
    return len(one & other) / len(one | other) if one and other else 0.0


def find_clusters(method: MinHash, folder: Path, workers: int) -> np.ndarray:
    """[C, 3] uint32 (file number, document of the file, cluster), sorted by cluster: every document that shares a band with another one."""
    context = get_context("spawn")
    if workers > 1:
        with ProcessPoolExecutor(min(workers, method.buckets), mp_context=context) as pool:
            list(pool.map(partial(_bucket, method, folder), range(method.buckets)))
    else:
        for bucket in range(method.buckets):
            _bucket(method, folder, bucket)
    logger.disable("datatrove")
    step = MinhashDedupCluster(str(folder / "pairs"), str(folder / "clusters"), config=method.config(), save_cluster_id=True)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        step.run()
    found = [np.zeros((0, 3), np.uint32)]
    for path in sorted((folder / "clusters").glob("*.clusters")):
        pairs = np.frombuffer(path.read_bytes(), "<u4").reshape(-1, 2)
        found.append(np.column_stack((np.full(len(pairs), int(path.stem), np.uint32), pairs)))
    members = np.concatenate(found)
    return members[np.argsort(members[:, 2], kind="stable")]


def _bucket(method: MinHash, folder: Path, bucket: int) -> None:
    logger.disable("datatrove")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every file's signatures are open at once
    step = MinhashDedupBuckets(str(folder / "signatures"), str(folder / "pairs"), config=method.config(), lines_to_buffer=1000)
    step.run(None, rank=bucket, world_size=method.buckets)


def _shingles(words: list[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}
