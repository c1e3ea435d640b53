"""Published traces, read in the formats in which they are published, and what is wrong in a file told with its line."""

import json
import re
from itertools import islice

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.testing.workload import context
from hotswap.plugins.workloads.azure import AzureTrace
from hotswap.plugins.workloads.burstgpt import BurstGPTTrace
from hotswap.plugins.workloads.mooncake import BailianTrace, MooncakeTrace
from hotswap.plugins.workloads.prompts import PromptsWorkload

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def read(tmp_path):
    def read(cls, text, given=None, **options):
        path = tmp_path / "trace"
        path.write_text(text)
        return list(cls(cls.Options(path=path, **options)).items(given or context(max_model_len=100_000)))

    return read


def mooncake(*requests, **more):
    return "".join(
        json.dumps({"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": list(ids), **more}) + "\n"
        for at, length, ids in requests)


def common(one, other):
    """How many tokens two prompts have in common from the start."""
    return next((n for n, (a, b) in enumerate(zip(one.prompt, other.prompt, strict=False)) if a != b),
                min(len(one.prompt), len(other.prompt)))


def test_azure_s_timestamps_become_seconds_from_the_first(read):
    items = read(AzureTrace, HEAD + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    assert [(len(item.prompt), item.max_tokens) for item in items] == [(374, 44), (396, 109)]
    assert items[0].at == 0 and items[1].at == pytest.approx(4.314579, abs=1e-6)


def test_azure_s_timestamps_of_2024_have_a_zone_and_sometimes_no_fraction(read):
    items = read(AzureTrace, HEAD + "2024-05-10 00:00:00.009930+00:00,10,1\r\n2024-05-10 00:00:01+00:00,11,2\r\n")
    assert items[1].at == pytest.approx(0.99007)


def test_burstgpt_is_read_by_its_head_and_failures_are_left_out(read):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,1,3.2,ChatGPT,472,18,490,Chat", "45,,1,GPT-4,1087,0,1087,API log", "118,,2,GPT-4,417,276,693,Chat"
    items = read(BurstGPTTrace, head + "\n".join(rows))
    assert [(item.at, len(item.prompt), item.max_tokens) for item in items] == [(0, 472, 18), (113, 417, 276)]


def test_prompts_with_the_same_first_hash_ids_have_the_same_first_tokens_and_no_more(read):
    one, two, three = read(MooncakeTrace, mooncake(
        (0, 1500, (7, 8, 9)), (250, 1100, (7, 8, 10)), (1000, 600, (11, 12))))
    assert [item.at for item in (one, two, three)] == [0, 0.25, 1.0]
    assert [len(item.prompt) for item in (one, two, three)] == [1500, 1100, 600]
    assert common(one, two) == 1024
    assert common(one, three) == 0
    assert (one.key, one.shared, three.key) == ("block 7", 512, "block 11")


@pytest.mark.parametrize("scale", [0.5, 0.1, 0.0137, 0.004])
def test_scaling_shortens_lengths_and_blocks_alike_and_changes_neither_arrivals_nor_what_is_shared(read, scale):
    requests = [(100 * n, 512 * 6 + 80 * n, [*range(n % 5), *range(100 * n, 100 * n + 7 - n % 5)]) for n in range(40)]
    whole, scaled = read(MooncakeTrace, mooncake(*requests)), read(MooncakeTrace, mooncake(*requests), scale=scale)
    assert [item.at for item in scaled] == [item.at for item in whole]
    assert [len(item.prompt) for item in scaled] == [max(1, round(scale * len(item.prompt))) for item in whole]
    for one in range(40):
        for other in range(one):
            blocks = common(whole[one], whole[other]) // 512
            assert common(scaled[one], scaled[other]) == round(blocks * 512 * scale) or blocks == 7


def test_bailian_s_blocks_have_16_tokens_and_its_clock_seconds(read):
    one, two = read(BailianTrace, mooncake(
        (61.114, 40, (1, 2, 3)), (62.5, 52, (1, 2, 3, 4)), chat_id=159, parent_chat_id=-1, type="text", turn=1))
    assert two.at == pytest.approx(1.386)
    assert common(one, two) == 40
    other, = read(BailianTrace, mooncake((1, 40, (1, 2, 5))))
    assert common(one, other) == 32


def test_what_no_block_covers_is_the_request_s_own(read):
    one, two = read(MooncakeTrace, mooncake((0, 700, (1,)), (0, 700, (1,))))
    assert common(one, two) == 512


def test_longer_requests_are_cut_where_that_is_asked_for(read):
    [item] = read(MooncakeTrace, mooncake((0, 6000, range(12))), max_prompt=700, max_output=2)
    assert (len(item.prompt), item.max_tokens) == (700, 2)


def test_the_clock_can_be_made_faster(read):
    assert read(MooncakeTrace, mooncake((0, 5, (1,)), (3000, 5, (2,))), speed=2)[1].at == 1.5


WRONG = [
    (AzureTrace, "Time,Context\n", ":1: the head has no column 'TIMESTAMP'; expected are TIMESTAMP, ContextTokens, "),
    (AzureTrace, "", ":0: the head has no column"),
    (AzureTrace, HEAD + "then,1,2\n", ":2: TIMESTAMP should be a date and time such as 2023-11-16 18:15:46.680590"),
    (AzureTrace, HEAD + "2023-11-16 18:15:46,1\n", ":2: has fewer than the 3 columns of the head."),
    (AzureTrace, HEAD + "2023-11-16 18:15:46,-3,2\n", ":2: ContextTokens should be a number of at least 0, not '-3'."),
    (AzureTrace, HEAD + "2023-11-16 18:15:46,3,nan\n", ":2: GeneratedTokens should be"),
    (AzureTrace, HEAD + "2023-11-16 18:15:46,3,2\n\n2023-11-16 18:15:45,3,2\n",
     ":4: is earlier than the line before it: sort the file by time."),
    (BurstGPTTrace, "Timestamp,Request tokens,Response tokens\n1,x,1\n", ":2: Request tokens should be"),
    (MooncakeTrace, '{"timestamp": 0\n', ":1: is no JSON: "),
    (MooncakeTrace, "[1, 2]\n", ":1: should be a JSON object, not [1, 2]."),
    (MooncakeTrace, '{"timestamp": 0, "input_length": 4}\n', ":1: output_length should be a number of at least"),
    (MooncakeTrace, mooncake((0, 4, "ab")), ":1: hash_ids should be a list of whole numbers, not ['a', 'b']."),
    (MooncakeTrace, mooncake((0, 4, (1,)), (0, 90_000, (1,)), (0, 100_000, (1,))),
     ":3: a prompt of 100000 and an output of 5 tokens do not fit the model's context of 100000. Set scale (now 1) "),
    (PromptsWorkload, '{"prompt": "a", "tokens": [1]}\n', ":1: should have one of prompt, messages, tokens, and has p"),
    (PromptsWorkload, '{"prompt": "a"}\n{"text": "a"}\n', ":2: should have one of prompt, messages, tokens, and has n"),
    (PromptsWorkload, '{"prompt": ""}\n', ":1: its prompt has no token."),
    (PromptsWorkload, '{"tokens": [1000]}\n', ":1: tokens should be a list of ids from 0 to 999, not [1000]."),
    (PromptsWorkload, '{"messages": ["hi"]}\n', ":1: messages should be a list of {role, content}, not ['hi']."),
    (PromptsWorkload, '{"prompt": "a", "max_tokens": "3"}\n', ":1: max_tokens should be a whole number of at leas"),
]


@pytest.mark.parametrize(("cls", "text", "message"), WRONG)
def test_what_is_wrong_is_told_with_file_and_line(read, tmp_path, cls, text, message):
    with pytest.raises(ConfigError) as caught:
        read(cls, text)
    assert f"path: {tmp_path / 'trace'}{message}" in str(caught.value)


@pytest.mark.parametrize("length", [997, 1000, 10_049, 99_999, 123_457])
def test_the_scale_that_a_refusal_names_is_small_enough(read, length):
    text, given = mooncake((0, length, (1, 2))), context(max_model_len=997)
    with pytest.raises(ConfigError) as caught:
        read(MooncakeTrace, text, given)
    scale = float(re.search(r"Set scale \(now 1\) to (\S+) or less", str(caught.value))[1])
    assert read(MooncakeTrace, text, given, scale=scale)


def test_messages_need_a_chat_template(read):
    text = '{"messages": [{"role": "user", "content": "hi"}]}\n'
    [item] = read(PromptsWorkload, text)
    assert bytes(item.prompt) == b"user:hi;"
    bare = context()
    with pytest.raises(ConfigError, match="the model has no chat template: give prompt or tokens"):
        read(PromptsWorkload, text, given=type(bare)(1, 1000, 100, bare.encode))


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"path: there is no file .*/none\.csv\."):
        AzureTrace(AzureTrace.Options(path=tmp_path / "none.csv")).items(context())
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary:0: cannot be read: 'utf-8' codec"):
        list(AzureTrace(AzureTrace.Options(path=tmp_path / "binary")).items(context()))


def test_of_a_trace_of_many_lines_only_those_that_are_asked_for_are_read(tmp_path):
    """The rest of the file is no JSON: whoever read ahead would stumble."""
    path = tmp_path / "long"
    path.write_text(mooncake(*((n, 20, (n,)) for n in range(5000))) + "no JSON\n" * 5000)
    items = MooncakeTrace(MooncakeTrace.Options(path=path)).items(context())
    assert len(list(islice(items, 5000))) == 5000
    with pytest.raises(ConfigError, match="long:5001: is no JSON"):
        next(items)
