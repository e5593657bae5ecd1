"""The Python API: LLM, AsyncEngine and the shapes they return, on a tiny real checkpoint (B034)."""

import asyncio
import gc
import threading

import numpy as np
import pytest
from make_checkpoints import make_hf
from make_tokenizers import write_bpe_folder

from nano_oasis import LLM, AsyncEngine, ConfigError, EngineDead, RequestError, SamplingParams

OPTIONS = {"max_model_len": 256, "num_device_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
PROMPTS = ["The sun", "x = 1", "Hello there, general", "a", "once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_hf("llama", path, vocab_size=640)
    write_bpe_folder(path, chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def ids_of(outputs):
    return [[o.token_ids for o in out.outputs] for out in outputs]


def test_results_are_shaped_like_vllm(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True, n=2)
    (out,) = llm.generate("The sun", params)
    assert out.prompt == "The sun" and out.prompt_token_ids == llm.tokenizer.encode("The sun")
    assert out.finished and [o.index for o in out.outputs] == [0, 1]
    first = out.outputs[0]
    assert len(first.token_ids) == 4 and first.finish_reason == "length" and first.stop_reason is None
    assert first.text == llm.tokenizer.decode(first.token_ids)
    assert len(first.logprobs) == 4
    for token, entry in zip(first.token_ids, first.logprobs, strict=True):
        assert next(iter(entry)) == token and entry[token].rank == 1 and 2 <= len(entry) <= 3
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
    assert first.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(first.logprobs, first.token_ids, strict=True))
    )
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(out.prompt_token_ids)


def test_B034_batch_calls_are_independent_and_ordered(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 7, 3)]
    first, second = llm.generate(PROMPTS, params), llm.generate(PROMPTS, params)
    assert [len(o.outputs[0].token_ids) for o in first] == [9, 1, 5, 7, 3]
    assert [o.prompt for o in first] == PROMPTS
    assert (
        ids_of(first)
        == ids_of(second)
        == [ids_of(llm.generate(p, q))[0] for p, q in zip(PROMPTS, params, strict=True)]
    )


def test_token_id_prompts_equal_text_prompts(llm):
    ids = [{"prompt_token_ids": llm.tokenizer.encode(p)} for p in PROMPTS]
    assert ids_of(llm.generate(ids, GREEDY)) == ids_of(llm.generate(PROMPTS, GREEDY))


def test_B034_two_threads_share_one_engine(llm):
    expected = ids_of(llm.generate(PROMPTS, GREEDY))
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: ids_of(llm.generate(PROMPTS, GREEDY))}))
        for i in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert results == dict.fromkeys(range(3), expected)


def test_generators_and_foreign_integers_are_prompts_too(llm):
    ids = [{"prompt_token_ids": list(np.array(llm.tokenizer.encode(p)))} for p in PROMPTS]
    assert ids_of(llm.generate(iter(ids), GREEDY)) == ids_of(llm.generate(PROMPTS, GREEDY))


def test_an_llm_that_is_dropped_ends_its_thread(folder):
    dropped = LLM(str(folder), **OPTIONS)
    thread = dropped.engine._thread
    assert thread.is_alive()
    del dropped
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_chat_renders_the_template(llm):
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, GREEDY)
    two = llm.chat([conversation, conversation], GREEDY)
    assert one[0].prompt_token_ids == llm.tokenizer.encode("user: hi\n>", add_special_tokens=False)
    assert ids_of(two) == ids_of(one) * 2


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (5, None, "prompt must be a string"),
        ([None], None, "prompt must be a string"),
        ({"prompt_token_ids": [1], "multi_modal_data": 1}, None, "unknown keys: multi_modal_data"),
        ({"prompt_token_ids": []}, None, "at least one token"),
        ({"prompt_token_ids": [640]}, None, "between 0 and 639"),
        ({"prompt_token_ids": [5] * 256}, None, "256 tokens, but the context limit is 256"),
        (["a", "b"], [SamplingParams()], "2 prompts, but 1 sampling_params"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_is_left_running(llm, prompts, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)
    with pytest.raises(RequestError, match="context limit"):
        llm.generate(["fine", {"prompt_token_ids": [5] * 999}])
    assert ids_of(llm.generate("a", GREEDY)) and llm.engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_sequences": 3}, "did you mean 'max_num_seqs'"),
        ({"block_size": 0}, "block_size: must be between 1 and 1024"),
        ({"dtype": "int3"}, "dtype: must be one of auto, float32"),
        ({"device_kv_memory": "lots"}, "device_kv_memory: expected a number of bytes"),
        ({"device_kv_memory": "1KiB", "num_device_blocks": None}, "holds no KV block"),
        ({"max_model_len": 100000}, "more than the model's context of 4096"),
        ({"max_model_len": 4000}, "4000 tokens need 250 KV blocks"),
        ({"max_num_batched_tokens": 4}, "must be at least max_num_seqs"),
        ({"seed": -1}, "seed: must be between 0"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ],
)
def test_bad_options_are_refused_by_name(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), **{**OPTIONS, **options})


def test_pool_smaller_than_the_context_lowers_max_model_len(folder):
    with LLM(str(folder), num_device_blocks=4, max_num_seqs=4) as small:
        assert small.engine.info.max_model_len == 64
        out = small.generate({"prompt_token_ids": [5] * 60}, SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(out[0].outputs[0].token_ids) == 4 and out[0].outputs[0].finish_reason == "length"


def test_B034_a_closed_engine_says_so(folder):
    llm = LLM(str(folder), **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="stopped"):
        llm.generate("a", GREEDY)


async def test_async_generate_equals_llm_and_yields_snapshots(folder, llm):
    engine = AsyncEngine(model=str(folder), **OPTIONS)
    assert engine.health() == "loading"
    stages = []
    await engine.start(lambda what, done, total: stages.append(what))
    assert engine.health() == "ok" and {"weights", "tokenizer"} <= set(stages)

    async def collect(prompt):
        return [o async for o in engine.generate(prompt, GREEDY)]

    runs = await asyncio.gather(*map(collect, PROMPTS))
    for history, expected in zip(runs, llm.generate(PROMPTS, GREEDY), strict=True):
        final = history[-1].outputs[0]
        assert final.token_ids == expected.outputs[0].token_ids and final.text == expected.outputs[0].text
        assert [h.finished for h in history] == [False] * (len(history) - 1) + [True]
        lengths = [len(h.outputs[0].token_ids) for h in history]
        assert lengths == sorted(lengths)  # B034: what was yielded earlier has not grown
        assert all(final.text.startswith(h.outputs[0].text) for h in history)
    await engine.shutdown()
    assert engine.health() == "stopped"
    with pytest.raises(EngineDead):
        engine.submit([1], GREEDY)


async def test_async_abort_and_leaving_early_free_everything(folder):
    engine = AsyncEngine(model=str(folder), **OPTIONS)
    await engine.start()
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    last = None
    async for out in engine.generate("a", long, request_id="mine"):
        last = out
        engine.abort("mine")
    assert last.finished and last.outputs[0].finish_reason == "abort"
    async for _ in engine.generate("a", long):
        break
    for _ in range(500):
        if not engine.engine.num_live and not engine.engine.scheduler.blocks.num_used:
            break
        await asyncio.sleep(0.01)
    assert engine.engine.num_live == 0 and engine.engine.scheduler.blocks.num_used == 0
    await engine.shutdown()


async def test_a_model_that_does_not_load_is_never_ready(tmp_path):
    engine = AsyncEngine(model=str(tmp_path))
    with pytest.raises(ValueError):
        await engine.start()
    assert engine.health() == "dead"
