"""The tasks of launchers/prepare_data.py: name -> (its configuration, what it does)."""

from collections.abc import Callable
from typing import Any

from data_prep.audit import audit_corpora
from data_prep.config import AuditConfig, FinishConfig, PlaysConfig, TokenizeConfig, TrainTokenizerConfig
from data_prep.contamination import report_contamination
from data_prep.duplicates import report_duplicates
from data_prep.finish import finish
from data_prep.gsm8k import write_gsm8k
from data_prep.gsm_symbolic import write_symbolic
from data_prep.plays import write_plays
from data_prep.prepare import prepare
from data_prep.problem_config import Gsm8kConfig, GsmSymbolicConfig
from data_prep.report_config import ContaminationConfig, DuplicatesConfig
from data_prep.train_tokenizer import train_tokenizer

TASKS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "tokenize": (TokenizeConfig, prepare),
    "train_tokenizer": (TrainTokenizerConfig, train_tokenizer),
    "finish": (FinishConfig, finish),
    "slimpajama_llama2": (TokenizeConfig, prepare),
    "nemotron_phase1": (TokenizeConfig, prepare),
    "nemotron_phase2": (TokenizeConfig, prepare),
    "audit": (AuditConfig, audit_corpora),
    "plays": (PlaysConfig, write_plays),
    "gsm8k": (Gsm8kConfig, write_gsm8k),
    "contamination": (ContaminationConfig, report_contamination),
    "duplicates": (DuplicatesConfig, report_duplicates),
    "gsm_symbolic": (GsmSymbolicConfig, write_symbolic),
}
