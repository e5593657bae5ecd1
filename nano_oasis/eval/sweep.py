"""The job: every sample under every setting, each prompt prefilled once, dense computed once.

Owns: the order of work, which records are still to be made, what a failure costs.
Must not know: how tasks are made, how the store works inside, tables and plots.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from nano_oasis.eval.decoder import Decoder
from nano_oasis.eval.recall import Choice, measure_recall
from nano_oasis.eval.records import Record, RecordFile
from nano_oasis.eval.score import score_answer
from nano_oasis.eval.session import Measured, Session
from nano_oasis.eval.settings import Setting
from nano_oasis.eval.tasks import Sample, fingerprint

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what is being done, records done, records in all)
PIECES = 512  # tokens of an answer whose texts are kept, for the strip of the report


@dataclass
class Plan:
    """What is to be made. steps: teacher-forced tokens per sample; batch: samples decoded together."""

    samples: list[Sample]
    settings: list[Setting]
    steps: int
    batch: int
    salt: str  # whatever else shapes a result: model, dtype, version
    bandwidth: float | None = None  # bytes per second of a simulated link
    recall_samples: int | None = None  # of each group and context, the first so many; None: all

    def __post_init__(self) -> None:
        shared = self.salt, self.steps, self.bandwidth, self.batch
        self._digests = {s.name: fingerprint(*shared, s) for s in self.samples}
        self.keys = [self.key(s, w) for s in self.samples for w in self.wanted(s)]

    def wanted(self, sample: Sample) -> list[Setting | Choice | None]:
        """One record each; None: dense."""
        return [None, *self.settings, *self.choices(sample)]

    def choices(self, sample: Sample) -> list[Choice]:
        """What recall is measured for."""
        if self.recall_samples is not None and sample.index >= self.recall_samples:
            return []
        context = sample.context or len(sample.ids)
        made = [
            Choice(s.selector, s.tokens(context), s.block, s.head_groups, s.budget) for s in self.settings
        ]
        return list(dict.fromkeys(made))

    def key(self, sample: Sample, what: Setting | Choice | None) -> str:
        """Changes with everything that shapes the record."""
        options: object = what
        if isinstance(what, Setting):
            # Two budgets may come to the same number of tokens here and to others in another context.
            options = what.budget, what.engine(what.tokens(sample.context or len(sample.ids)), 1)
        return fingerprint(self._digests[sample.name], options)


@dataclass
class _Dense:
    """What the others are compared with, per row of a batch."""

    outputs: list[list[int]]
    teacher: list[list[int]]
    logprobs: list[list[Tensor]] = field(default_factory=list)  # [V] per teacher-forced step


def run_plan(plan: Plan, decoder: Decoder, records: RecordFile, progress: Progress) -> None:
    """Make every record of the plan that is not there yet. A sample that fails is recorded as failed."""

    def tell(what: str) -> None:
        progress(what, sum(map(records.done, plan.keys)), len(plan.keys))

    tell("starting")
    for batch in batches(plan):
        todo = [s for s in batch if not all(records.done(plan.key(s, w)) for w in plan.wanted(s))]
        if not todo:
            continue
        try:
            _run_batch(plan, decoder, records, todo, tell)
        except Exception as error:
            log.debug("a batch failed", exc_info=True)
            if len(todo) == 1:
                _record_failure(plan, records, todo[0], error)
                continue
            for sample in todo:  # alone, so that only what is broken fails
                try:
                    _run_batch(plan, decoder, records, [sample], tell)
                except Exception as alone:
                    _record_failure(plan, records, sample, alone)
    tell("done")


def batches(plan: Plan) -> list[list[Sample]]:
    """Samples that are decoded together: of one task or text, and of one context."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in plan.samples:
        groups.setdefault((sample.group, sample.context), []).append(sample)
    return [g[i : i + plan.batch] for g in groups.values() for i in range(0, len(g), plan.batch)]


def _run_batch(
    plan: Plan, decoder: Decoder, records: RecordFile, samples: list[Sample], tell: Callable[[str], None]
) -> None:
    where = f"{samples[0].group} {samples[0].context or ''}".strip()
    room = max(max(s.max_new, len(s.teacher)) for s in samples)
    session = Session(decoder, samples, room, plan.bandwidth)
    try:
        for row in range(len(samples)):
            tell(f"{where}: prefill {row + 1} of {len(samples)}")
            session.prefill(row)
        tell(f"{where}: dense")
        dense = _run_dense(plan, session)
        for row, sample in enumerate(samples):
            if not records.done(plan.key(sample, None)):
                records.add(_dense_record(plan, session, sample, dense.outputs[row]))
        for setting in plan.settings:
            rows = [i for i, s in enumerate(samples) if not records.done(plan.key(s, setting))]
            if rows:
                tell(f"{where}: {setting}")
                for record in _try_setting(plan, session, setting, rows, dense):
                    records.add(record)
        for row in range(len(samples)):
            tell(f"{where}: recall")
            for record in _try_recall(plan, session, records, row, dense.teacher[row]):
                records.add(record)
        tell(where)
    finally:
        session.close()


def _run_dense(plan: Plan, session: Session) -> _Dense:
    """Greedy answers, and the log-probabilities along each sample's teacher: its text, or its dense
    answer."""
    samples, decoder = session.samples, session.decoder
    everyone = range(len(samples))
    kept: list[list[Tensor]] = [[] for _ in samples]

    def keep(step: int, going: list[int], logits: Tensor) -> None:
        if step < plan.steps:
            for i, row in zip(going, _log_softmax(logits), strict=True):
                kept[i].append(row)

    outputs, errors = decoder.play(
        session.dense, session.dense_requests(everyone), [s.max_new for s in samples], keep
    )
    texts = [i for i in everyone if samples[i].teacher]
    if texts:  # one group of samples is all texts, or all prompts
        for i in texts:
            kept[i].clear()
        teacher = [list(samples[i].teacher[: plan.steps]) for i in texts]
        _, errors = decoder.play(
            session.dense, session.dense_requests(texts), [len(t) for t in teacher], keep, teacher
        )
    assert not errors, "the dense store reports no errors"
    teachers = [list((s.teacher or o)[: plan.steps]) for s, o in zip(samples, outputs, strict=True)]
    return _Dense(outputs, teachers, kept)


def _try_setting(
    plan: Plan, session: Session, setting: Setting, rows: list[int], dense: _Dense
) -> list[Record]:
    """A setting that fails costs no other setting, and a sample that fails no other sample."""
    try:
        return _run_setting(plan, session, setting, rows, dense)
    except Exception as error:
        log.debug("setting %s failed", setting, exc_info=True)
        if len(rows) > 1:
            return [r for row in rows for r in _try_setting(plan, session, setting, [row], dense)]
        return [_failure(plan, session.samples[rows[0]], setting, error)]


def _run_setting(
    plan: Plan, session: Session, setting: Setting, rows: list[int], dense: _Dense
) -> list[Record]:
    """Teacher-forced along dense's answer, then greedy for the rows whose answer that does not already
    show."""
    kl: list[list[float]] = [[] for _ in rows]
    same: list[list[bool]] = [[] for _ in rows]

    def compare(step: int, going: list[int], logits: Tensor) -> None:
        sparse = _log_softmax(logits)
        for at, i in enumerate(going):
            exact = dense.logprobs[rows[i]][step]
            kl[i].append(float((exact.exp() * (exact - sparse[at])).sum().clamp(min=0)))
            same[i].append(int(exact.argmax()) == int(sparse[at].argmax()))

    teacher = [dense.teacher[i] for i in rows]
    _, errors, measured = session.oasis(setting, rows, [len(t) for t in teacher], compare, teacher)
    outputs = [dense.outputs[i] for i in rows]
    # While every top token agrees, the teacher's tokens are the ones greedy decoding would have taken.
    free = [
        i for i, row in enumerate(rows)
        if not (all(same[i]) and teacher[i] == dense.outputs[row]) and i not in errors
    ]  # fmt: skip
    if free:
        lengths = [session.samples[rows[i]].max_new for i in free]
        answers, failed, _ = session.oasis(setting, [rows[i] for i in free], lengths)
        for at, i in enumerate(free):
            outputs[i] = answers[at]
        errors |= {free[at]: message for at, message in failed.items()}
    made = []
    for i, row in enumerate(rows):
        sample = session.samples[row]
        record = _start(plan, sample, setting)
        if i in errors:
            made.append({**record, "status": "failed", "error": errors[i]})
            continue
        record |= _answer(session, sample, outputs[i], dense.outputs[row])
        record |= {"kl": [float(f"{x:.4g}") for x in kl[i]], "same_top": same[i]}
        record |= _cost(session, setting, sample, measured, i, len(teacher[i]))
        made.append(record)
    return made


def _log_softmax(logits: Tensor) -> Tensor:
    """[n, V] -> [n, V]. Raises ArithmeticError: with damaged weights every comparison would come out well."""
    if not bool(logits.isfinite().all()):
        raise ArithmeticError("the model's logits are not finite numbers; are its weights damaged?")
    return logits.float().log_softmax(-1)


def _cost(
    session: Session, setting: Setting, sample: Sample, measured: Measured, at: int, steps: int
) -> Record:
    looked_up = measured.hits + measured.misses
    return {
        "hit_rate": measured.hits / looked_up if looked_up else None,
        "skipped": measured.skipped / looked_up if looked_up else None,
        "wait_share": measured.exposed_s / measured.seconds if looked_up and measured.seconds else None,
        "batch": len(measured.device_bytes),
        "budget_tokens": setting.tokens(sample.context or len(sample.ids)),
        "device_bytes": measured.device_bytes[at],
        "dense_bytes": _dense_bytes(session, len(sample.ids) - 1 + steps),
    }


def _dense_bytes(session: Session, tokens: int) -> int:
    return session.decoder.config.kv_bytes_per_token(session.decoder.dtype.itemsize) * tokens


def _dense_record(plan: Plan, session: Session, sample: Sample, output: list[int]) -> Record:
    size = _dense_bytes(session, len(sample.ids) + len(output) - 1)
    record = _start(plan, sample, None) | _answer(session, sample, output, output)
    return record | {"device_bytes": size, "dense_bytes": size}


def _answer(session: Session, sample: Sample, output: list[int], dense: list[int]) -> Record:
    tokenizer = session.decoder.tokenizer
    text = tokenizer.decode(output)
    pairs = zip(output, dense, strict=False)
    divergence = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(dense)))
    return {
        "prompt_tokens": len(sample.ids),
        "output_tokens": len([t for t in output if t not in tokenizer.eos_ids]),
        "output": text,
        "pieces": [tokenizer.token_text(t) for t in output[:PIECES]],
        "score": score_answer(text, sample.answers, sample.match) if sample.answers else None,
        "divergence": None if output == dense else divergence,
    }


def _try_recall(
    plan: Plan, session: Session, records: RecordFile, row: int, teacher: list[int]
) -> list[Record]:
    try:
        return _run_recall(plan, session, records, row, teacher)
    except Exception as error:
        log.debug("recall failed", exc_info=True)
        sample = session.samples[row]
        return [_failure(plan, sample, choice, error) for choice in plan.choices(sample)]


def _run_recall(
    plan: Plan, session: Session, records: RecordFile, row: int, teacher: list[int]
) -> list[Record]:
    sample = session.samples[row]
    choices = [c for c in plan.choices(sample) if not records.done(plan.key(sample, c))]
    made = []
    if choices and len(teacher) > 1:
        for choice, recall in measure_recall(session, row, teacher, choices).items():
            record = _start(plan, sample, choice) | {"choice": dataclasses.asdict(choice)}
            made.append(record | {"budget": choice.asked} | dataclasses.asdict(recall))
    elif (
        choices
    ):  # an answer of one token predicts nothing; noted, so that a run that continues does not ask again
        made = [_start(plan, sample, choice) | {"status": "ok", "layers": []} for choice in choices]
    return made


def _start(plan: Plan, sample: Sample, what: Setting | Choice | None) -> Record:
    record: Record = {
        "key": plan.key(sample, what), "kind": "recall" if isinstance(what, Choice) else "run",
        "group": sample.group, "context": sample.context, "index": sample.index, "status": "ok",
    }  # fmt: skip
    if not isinstance(what, Choice):
        record["setting"] = dataclasses.asdict(what) if what else None
    record["label"] = "recall" if isinstance(what, Choice) else str(what) if what else "dense"
    return record


def _failure(plan: Plan, sample: Sample, what: Setting | Choice | None, error: Exception) -> Record:
    message = f"{type(error).__name__}: {error}"
    return _start(plan, sample, what) | {"status": "failed", "error": message}


def _record_failure(plan: Plan, records: RecordFile, sample: Sample, error: Exception) -> None:
    """Nothing of this sample could be run."""
    for what in (None, *plan.settings):
        if not records.done(plan.key(sample, what)):
            records.add(_failure(plan, sample, what, error))


def samples_per_batch(kv_bytes_per_token: int, tokens: int, tiers: int, logits: int, memory: int) -> int:
    """How many samples of so many tokens may be held at once in `memory` bytes, at most 16.

    Each is held once densely and once per block size, with sketches of up to its own size for each, and with
    `logits` fp32 numbers of dense's distribution.
    """
    per_sample = kv_bytes_per_token * tokens * (1 + 2 * tiers) + 4 * logits
    return max(1, min(16, memory // per_sample))
