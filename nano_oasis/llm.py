"""The embedded Python API: `LLM(model).generate(prompts, params)`.

Owns: blocking calls over the engine, results in the order given, the progress bar.
Must not know: sockets, asyncio, how a step works.
"""

from __future__ import annotations

import itertools
import queue
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nano_oasis.build import build_engine
from nano_oasis.config import EngineConfig
from nano_oasis.outputs import OutputBuilder, RequestOutput, parse_prompt
from nano_oasis.request import RequestError, SamplingParams, TokenEvent
from nano_oasis.tokenizer import Tokenizer

Prompt = str | dict[str, Any]
Messages = list[dict[str, Any]]


class LLM:
    """A model in this process. Options are those of EngineConfig; unknown ones are refused.

    Calls from several threads are independent. Use as a context manager, or call close().
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.config = EngineConfig.make(model=model, **options)
        self.engine = build_engine(self.config)
        self.engine.start()
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt: a string, {"prompt_token_ids": [...]}, or a list of these.

        Results come in the order of the prompts. `use_tqdm` shows a progress bar (many prompts, on a
        terminal). Raises RequestError before anything runs, GenerationError if a request fails.
        """
        many = (
            list(prompts)
            if isinstance(prompts, Iterable) and not isinstance(prompts, (str, dict))
            else [prompts]
        )
        jobs = []
        for prompt in many:
            text, ids = parse_prompt(prompt)
            jobs.append((text, self.tokenizer.encode(text or "") if ids is None else ids))
        return self._run(jobs, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of {"role", "content"}), or each of a list of conversations.

        Raises TemplateError with the chat template's message, and what generate() raises.
        """
        one = not messages or isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        jobs: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            ids = self.tokenizer.encode_chat(
                conversation, tools=tools, add_generation_prompt=add_generation_prompt
            )
            jobs.append((None, ids))
        return self._run(jobs, sampling_params, use_tqdm)

    def _run(
        self,
        jobs: list[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(jobs)
        else:
            each = list(params)
        if len(each) != len(jobs):
            raise RequestError(f"{len(jobs)} prompts, but {len(each)} sampling_params", "sampling_params")
        for (_, ids), p in zip(jobs, each, strict=True):
            self.engine.check(ids, p)  # all of them before the first one runs
        inbox: queue.SimpleQueue[tuple[int, TokenEvent]] = queue.SimpleQueue()
        builders = [
            OutputBuilder(f"req-{next(self._ids)}", text, ids, p.n, self.tokenizer)
            for (text, ids), p in zip(jobs, each, strict=True)
        ]
        submissions = []
        try:
            for i, ((_, ids), p) in enumerate(zip(jobs, each, strict=True)):
                submissions.append(self.engine.submit(ids, p, lambda e, i=i: inbox.put((i, e))))  # type: ignore[misc]
            with _bar(show and len(jobs) > 1 and sys.stdout.isatty()) as bar:
                task = bar.add_task("generating", total=len(jobs))
                left = len(jobs)
                while left:
                    i, event = inbox.get()
                    builders[i].add(event)
                    if builders[i].result.finished:
                        left -= 1
                        bar.update(task, completed=len(jobs) - left)
        except BaseException:  # a refused prompt, a failed one, Ctrl-C: nothing is left running
            for submission in submissions:
                self.engine.abort(submission)
            raise
        return [b.result for b in builders]

    def close(self) -> None:
        """Abort what runs (it ends with finish_reason "abort") and stop; later calls raise EngineDead."""
        self.engine.stop()

    def __del__(self) -> None:
        if "engine" in vars(self):  # not if the constructor failed
            self.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _bar(show: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, disable=not show, transient=True)
