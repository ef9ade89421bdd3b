"""Tables that the commands print: a value is a word of its own, whatever its size."""

from dataclasses import replace

import pytest

from megatron_cp.config import CPConfig
from megatron_cp.plan.study.compare import Outcome
from megatron_cp.report.dry_run.study import DryRun, corpus_of_source, dry_run_text, plan_corpus
from megatron_cp.report.simulation.replicas import replicas_text, study_replicas
from megatron_cp.report.simulation.study import Step, Study, run_study, study_text
from megatron_cp.report.sources import MaskChoice, source_of_lengths, source_of_workload

LARGE = 65163968.85
LONG = "per_document_zigzag_of_many"


def table_under(header_word, text):
    """The lines from the header on, up to the first that is a sentence."""
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith(f"  {header_word}")) :]


@pytest.fixture
def study():
    config = CPConfig(num_heads=8, num_kv_heads=2)
    choice = MaskChoice("causal")
    return run_study(source_of_workload("W2"), choice, [(2, 512)], config, ["contiguous", "ring"])


def test_simulate_s_figures_stand_apart_and_under_their_heads_whatever_their_size(study):
    step: Step = study.steps[0]
    huge = replace(
        step.outcomes[0], planner=LONG, simulated_ms=0.040, predicted_ms=6.657e20, bound_ms=1.0,
        imbalance=LARGE, volume_mean=LARGE, volume_max=LARGE, plan_ms=LARGE,
    )  # fmt: skip
    refused: Outcome = replace(huge, planner="usp", refusal="no such degree", plan=None)
    steps = (replace(step, outcomes=(step.outcomes[1], huge, refused)),)
    wide: Study = replace(study, steps=steps)
    header, first, second, third, *_ = table_under("planner", study_text(wide))
    words = [second[2:].split(), first[2:].split()]
    assert [len(one) for one in words] == [8, 8]
    expected = [0.040, 6.657e20, 6.657e20, LARGE, LARGE, LARGE, LARGE]
    assert words[0][0] == LONG
    assert [float(word) for word in words[0][1:]] == pytest.approx(expected, rel=1e-3)
    assert len(header) == len(first) == len(second)
    assert third.split(maxsplit=1) == ["usp", "no such degree"]
    assert third.index("no such") > len(f"  {LONG}")


def test_a_mask_without_documents_names_no_source_of_them(study):
    assert "data: no documents; mask causal; seed 0" in study_text(study)
    config, choice = CPConfig(num_heads=8, num_kv_heads=2), MaskChoice("causal")
    replicas = study_replicas(source_of_workload("W1"), choice, (2, 2, 512, 4), config)
    assert "data: no documents; mask causal; seed 0" in replicas_text([replicas])


def test_plan_s_figures_stand_apart_and_under_their_heads_whatever_their_size():
    config = CPConfig(planner="zigzag", num_heads=8, num_kv_heads=2)
    source, choice = source_of_lengths([64]), MaskChoice("causal")
    corpus = corpus_of_source(source, choice, seq_length=64, num_packs=1, seed=0)
    run = plan_corpus(corpus, 2, config, ["zigzag"])
    huge = Outcome(LONG, LARGE, LARGE * 1e9, 1.0, LARGE, LARGE, LARGE, plan_ms=LARGE)
    refused = Outcome("usp", refusal="no such degree")
    wide: DryRun = replace(run, outcomes=(*run.outcomes, huge, refused))
    header, first, second, third, *_ = table_under("planner", dry_run_text(wide))
    assert [len(line[2:].split()) for line in (first, second)] == [8, 8]
    assert first.startswith("* zigzag ") and len(header) == len(first) == len(second)
    values = [float(word) for word in second.split()[1:]]
    expected = [LARGE * 1e9, LARGE, LARGE, LARGE, LARGE, LARGE, LARGE]
    assert values == pytest.approx(expected, rel=1e-3)
    assert third.split(maxsplit=1) == ["usp", "no such degree"]
