"""run(): from names and numbers to a Result.

Owns: the options of an evaluation, their checks, and the order of loading.
Must not know: argparse, terminals, how a sample is decoded.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import nano_oasis
from nano_oasis.config import ConfigError, ModelConfig, default_threads, parse_bytes
from nano_oasis.eval.data import Data, data_samples, read_data
from nano_oasis.eval.decoder import Decoder
from nano_oasis.eval.records import RecordFile, model_salt
from nano_oasis.eval.results import Result
from nano_oasis.eval.settings import Setting, make_settings
from nano_oasis.eval.sweep import Plan, run_plan, samples_per_batch
from nano_oasis.eval.tasks import choose_tasks, make_sample
from nano_oasis.tokenizer import Tokenizer, load_tokenizer
from nano_oasis.weights import load_config, resolve_model

Progress = Callable[[str, int, int], None]
_DEFAULT = Setting()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(
    model: str = "smollm2",
    *,
    tasks: str | Sequence[str] = (),
    data: str | Path | Sequence[str | Path] = (),
    context: int | Sequence[int] = 4000,
    samples: int = 20,
    budget: int | str | Sequence[int | str] = _DEFAULT.budget,
    selector: str | Sequence[str] = _DEFAULT.selector,
    predictor: str | Sequence[str] = _DEFAULT.predictor,
    miss_policy: str | Sequence[str] = _DEFAULT.miss_policy,
    block: int | Sequence[int] = _DEFAULT.block,
    head_groups: int | Sequence[int | None] | None = _DEFAULT.head_groups,
    seed: int = 0,
    steps: int = 64,
    recall_samples: int = 5,
    max_new_tokens: int | None = None,
    batch: int | None = None,
    link_bandwidth: int | str | None = None,
    dtype: str = "float32",
    threads: int = 0,
    output: str | Path | None = None,
    progress: Progress | None = None,
    loading: Progress | None = None,
) -> Result:
    """Evaluate a model's oasis mode against its dense mode; every option that takes a list is swept.

    tasks: names or groups (niah, ruler, all). data: text files, folders, or JSONL files of prompts. context:
    in tokens, answer included (of a text: before the first step). samples: per task and context. budget:
    tokens, or a share of the context such as "1/8". steps: teacher-forced tokens per sample, for KL and
    recall. recall_samples: recall is measured on so many samples per task and context, each of which takes
    another dense pass over the prompt; 0: on none. max_new_tokens: instead of a task's own; of data's
    replies, 64; texts are followed for `steps`. batch: samples decoded together; by default what a third of
    the memory holds, at most 16. link_bandwidth: of a simulated link, bytes a second (or "2GiB"); by default
    copies take the time they take. threads: 0 = OMP_NUM_THREADS or all cores. output: a folder; what is
    already in its results.jsonl is not done again, and eval.json and report.html are written there.
    progress(what, done, total) is called as records are made, loading(part, done, total) before.

    Raises ConfigError, TaskError or DataError for what cannot be run, weights.CheckpointError and
    tokenizer.TokenizerError for a model that cannot be loaded. A sample that fails is in the result's
    `failed`.
    """
    settings = make_settings(
        _list("budget", budget), _list("selector", selector), _list("predictor", predictor),
        _list("miss_policy", miss_policy), _list("block", block), _list("head_groups", head_groups),
    )  # fmt: skip
    _check_numbers(1, samples=samples, max_new_tokens=max_new_tokens, batch=batch)
    _check_numbers(2, steps=steps)  # what was foretold, and what was found, is known from the second on
    _check_numbers(0, recall_samples=recall_samples, threads=threads)
    bandwidth = None if link_bandwidth is None else float(parse_bytes(link_bandwidth, "link_bandwidth"))
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    records = RecordFile(Path(output) if output is not None else None)
    chosen = choose_tasks(_list("tasks", tasks) if tasks else [])
    texts = [read_data(path) for path in ([data] if isinstance(data, (str, Path)) else data)]
    names = [t.name for t in chosen] + [t.name for t in texts]
    if not names:
        raise ConfigError("nothing to evaluate: give tasks (such as ruler), data, or both")
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise ConfigError(f"data: two sources are called {twice!r}; rename one")
    torch.set_num_threads(threads or default_threads())
    path = resolve_model(model)
    config = load_config(path)
    swept = bool(chosen or any(t.text for t in texts))  # a prompt has its own length
    contexts = _list("context", context) if swept else []
    contexts = _contexts(contexts, config, steps if any(t.text for t in texts) else 0)
    _check_settings(settings, config)
    tokenizer = load_tokenizer(path)
    made = [
        make_sample(task, tokenizer, length, i, seed, max_new_tokens)
        for task in chosen for length in contexts for i in range(samples)
    ]  # fmt: skip
    for text in texts:
        made += data_samples(
            text, tokenizer, contexts, samples, steps, max_new_tokens or 64, config.max_position
        )
    longest = max(len(s.ids) + max(s.max_new, len(s.teacher)) for s in made) + 1
    batch = batch or samples_per_batch(
        config.kv_bytes_per_token(DTYPES[dtype].itemsize), longest, len({s.block for s in settings}),
        steps * config.vocab_size, _memory() // 3,
    )  # fmt: skip
    salt = model_salt(config, path, DTYPES[dtype], nano_oasis.__version__)
    plan = Plan(made, settings, steps, batch, salt, bandwidth, recall_samples)
    if not all(map(records.done, plan.keys)):
        report = loading or (lambda what, done, total: None)
        decoder = Decoder.load(
            path, tokenizer, min(longest, config.max_position), DTYPES[dtype],
            lambda done, total: report("weights", done, total),
        )  # fmt: skip
        run_plan(plan, decoder, records, progress or (lambda what, done, total: None))
    meta = _meta(model, config, plan, dtype, seed, contexts, samples, tokenizer)
    result = Result(meta | {"notes": _notes(plan, texts, samples)}, records.take(plan.keys))
    if output is not None:
        result.save(output)
    return result


def _notes(plan: Plan, texts: list[Data], samples: int) -> list[str]:
    """What was not done quite as asked, or says less than it seems to."""
    notes = [
        f"{t.name}: the first {samples} of {len(t.prompts)} prompts (--samples)"
        for t in texts if len(t.prompts) > samples
    ]  # fmt: skip
    for setting in plan.settings:
        lengths = [s.context or len(s.ids) for s in plan.samples]
        raised = sum(setting.asked(n) < setting.tokens(n) for n in lengths)
        whole = sum(setting.tokens(n) >= len(s.ids) for n, s in zip(lengths, plan.samples, strict=True))
        if raised:
            notes.append(f"{setting}: raised to {setting.tokens(0)} tokens, the least, in {raised} samples")
        if whole:
            notes.append(f"{setting}: the budget covers the whole prompt in {whole} samples")
    return notes


def _meta(
    model: str, config: ModelConfig, plan: Plan, dtype: str, seed: int, contexts: list[int], samples: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model": Path(model).name if Path(model).exists() else model, "family": config.family,
        "layers": config.num_layers, "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "dtype": dtype, "seed": seed, "contexts": contexts, "samples": samples,
        "steps": plan.steps, "recall_samples": plan.recall_samples, "batch": plan.batch,
        "link_bandwidth": plan.bandwidth,
        "settings": [vars(s) for s in plan.settings],
        "chat_template": tokenizer.chat_template is not None, "version": nano_oasis.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def _list(name: str, value: Any) -> list[Any]:
    """A list of one, or of many; text with commas counts as many."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if not found or "" in found:
        raise ConfigError(f"{name}: a value is empty, in {value!r}")
    return found


def _check_numbers(least: int, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(f"{name}: must be a whole number of at least {least}, got {value!r}")


def _contexts(values: list[int], config: ModelConfig, steps: int) -> list[int]:
    """Checked against the model's context, of which `steps` tokens are needed beside."""
    found = []
    for value in values:
        try:
            length = int(value)
        except (TypeError, ValueError):
            length = 0
        if length < 16:
            raise ConfigError(f"context: must be whole numbers of at least 16 tokens, got {value!r}")
        if length + steps > config.max_position:
            beside = f" less the {steps} of --steps" if steps else ""
            raise ConfigError(
                f"context: {length} tokens are more than the model's {config.max_position}{beside}"
            )
        found.append(length)
    return list(dict.fromkeys(found))


def _check_settings(settings: list[Setting], config: ModelConfig) -> None:
    for setting in settings:
        setting.engine(setting.tokens(4096), 1).groups_of(config.num_kv_heads)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
