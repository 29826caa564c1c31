"""Text out of tokens: the same whatever the grouping, whole characters, nothing of a stop string."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from datetime import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from toy_model import EOS, FILES, TOKENIZER, VOCAB, ids, piece

from gateway.domain import ChatPrompt, Delta, Message, Token
from gateway.errors import RequestError, StartError
from gateway.text.chat_template import ChatTemplate
from gateway.text.model_text import load_text
from gateway.text.output_text import OutputText
from gateway.text.stop_strings import StopStrings
from gateway.text.token_bytes import SPIECE_SPACE, read_token_bytes

NOW = datetime(2026, 1, 2)
TABLE = read_token_bytes(FILES.tokenizer_json)
TEXT = load_text(FILES, lambda: NOW)


def tokens(id_list: list[int]) -> list[Token]:
    return [Token(id_, -0.1 * i) for i, id_ in enumerate(id_list)]


def run(groups: list[list[Token]], stops: list[str]) -> tuple[list[Delta], OutputText]:
    output = OutputText(TABLE, stops)
    deltas = []
    for group in groups:
        deltas += output.push(group)
        if output.stopped:
            break
    return [*deltas, *output.finish()], output


@given(st.lists(st.lists(st.integers(0, VOCAB + 3), min_size=1, max_size=6), max_size=6), st.booleans(), st.booleans())
def test_joined_deltas_say_the_same_in_fewer_words(groups: list[list[int]], strips: bool, continues: bool) -> None:
    table = dataclasses.replace(TABLE, strips_leading_space=strips)
    said = []
    for joins in (False, True):
        output = OutputText(table, [], continues=continues, joins=joins)
        pushed = [output.push(tokens(group)) for group in groups]
        deltas = [*itertools.chain.from_iterable(pushed), *output.finish()]
        said.append((text_of(deltas), [token for delta in deltas for token in delta.tokens], output.consumed))
        assert not joins or max(map(len, pushed), default=0) <= 1
    assert said[0] == said[1]


def test_stop_strings_and_spelled_tokens_are_looked_for_token_by_token() -> None:
    for more in ({"stops": ["b"]}, {"stops": [], "spelled": ("<|start|>",)}):
        output = OutputText(TABLE, joins=True, **more)  # type: ignore[arg-type]
        assert len(output.push(tokens(ids("aaaa")))) == 4


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def expected_cut(text: str, stops: list[str]) -> str:
    """The rule, spelt out: read characters until some stop string is complete; cut before the longest such."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_byte_table_agrees_with_the_tokenizer() -> None:
    assert len(TABLE.of) == VOCAB
    assert TABLE.of[piece(" Paris")] == b" Paris"
    assert (TABLE.of[EOS], TABLE.names[EOS]) == (b"", b"<|end|>")
    assert TABLE.of[TOKENIZER.token_to_id("<think>")] == b"<think>"
    assert sorted(TABLE.of[:256]) == [bytes([byte]) for byte in range(256)]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_text_equals_the_tokenizers_own_decoding(id_list: list[int]) -> None:
    deltas, _ = run([tokens(id_list)], [])
    whole = TOKENIZER.decode(id_list, skip_special_tokens=True)
    # An unfinished character at the very end is dropped, where the library writes U+FFFD.
    assert whole.removeprefix(text_of(deltas)) in ("", "\N{REPLACEMENT CHARACTER}")


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [SPIECE_SPACE, SPIECE_SPACE + "Hello", "Hello", SPIECE_SPACE + "wor", "ld", "<0x1>", "\N{SNOWMAN}"]
    vocab = {name: id_ for id_, name in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize(
    "pieces",
    [
        [SPIECE_SPACE + "Hello", SPIECE_SPACE + "wor", "ld", "</s>"],
        ["<s>", SPIECE_SPACE + "Hello", "<0x0A>", SPIECE_SPACE + "Hello"],
        ["<0xE2>", "<0x98>", "<0x83>", SPIECE_SPACE, SPIECE_SPACE],
        [SPIECE_SPACE, "Hello", "<0x1>", "\N{SNOWMAN}"],
    ],
)
def test_sentencepiece_decoding(pieces: list[str]) -> None:
    tokenizer = sentencepiece()
    table = read_token_bytes(tokenizer.to_str())
    id_list = [tokenizer.token_to_id(name) for name in pieces]
    output = OutputText(table, [])
    deltas = [*output.push(tokens(id_list)), *output.finish()]
    assert text_of(deltas) == tokenizer.decode(id_list, skip_special_tokens=True)


def test_an_answer_that_goes_on_with_a_text_keeps_its_first_space() -> None:
    tokenizer = sentencepiece()
    table = read_token_bytes(tokenizer.to_str())
    said = tokens([tokenizer.token_to_id(name) for name in (SPIECE_SPACE + "Hello", SPIECE_SPACE + "wor", "ld")])
    for continues, text in ((True, " Hello world"), (False, "Hello world")):
        output = OutputText(table, [], continues=continues)
        assert text_of([*output.push(said), *output.finish()]) == text


def test_spelled_tokens_are_shown() -> None:
    output = OutputText(TABLE, [], spelled=("<|start|>",))
    start = TOKENIZER.token_to_id("<|start|>")
    assert text_of([*output.push(tokens([start, *ids("a"), EOS])), *output.finish()]) == "<|start|>a"


def test_unigram_vocabularies_and_foreign_pieces() -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), (SPIECE_SPACE + "a", -1.0), ("b", -2.0)], 0, False))
    unigram.decoder = sentencepiece().decoder
    assert read_token_bytes(unigram.to_str()).of[1:] == (b" a", b"b")
    foreign = Tokenizer(models.BPE({"\N{SNOWMAN}": 0}, merges=[]))
    foreign.decoder = decoders.ByteLevel()
    assert read_token_bytes(foreign.to_str()).of[0].decode() == foreign.decode([0]) == "\N{SNOWMAN}"


def test_an_unknown_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(StartError, match="WordPiece"):
        read_token_bytes(tokenizer.to_str())
    tokenizer.decoder = None
    with pytest.raises(StartError):
        read_token_bytes(tokenizer.to_str())


def test_a_broken_tokenizer_is_refused() -> None:
    with pytest.raises(StartError, match="tokenizer"):
        load_text(msgspec.structs.replace(FILES, tokenizer_json="{}"), lambda: NOW)


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    output = OutputText(TABLE, [])
    assert output.push([Token(VOCAB + 5, -1.0)]) == ()
    assert TEXT.token_bytes.name(VOCAB + 5) == b""


# --- characters ------------------------------------------------------------------------------------------------------


def test_no_half_character_is_shown() -> None:
    snowman = tokens(ids("\N{SNOWMAN}"))
    assert len(snowman) == 3
    output = OutputText(TABLE, [])
    assert output.push(snowman[:1]) == ()
    assert output.push(snowman[1:2]) == ()
    assert output.push(snowman[2:]) == (Delta("\N{SNOWMAN}", tuple(snowman)),)


def test_an_unfinished_character_is_dropped_and_its_tokens_kept() -> None:
    part = tokens(ids("a\N{SNOWMAN}"))[:3]
    deltas, output = run([part], [])
    assert deltas == [Delta("a", (part[0],)), Delta("", tuple(part[1:]))]
    assert output.consumed == 3


# --- stop strings ----------------------------------------------------------------------------------------------------


@given(
    text=st.text("ab\N{SNOWMAN}", max_size=25),
    stops=st.lists(st.text("ab\N{SNOWMAN}", min_size=1, max_size=5), max_size=4),
    data=st.data(),
)
def test_the_cut_depends_on_characters_alone(text: str, stops: list[str], data: st.DataObject) -> None:
    stream = tokens(ids(text))
    expected = expected_cut(text, stops)
    groups, rest = [], stream
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        groups.append(rest[:size])
        rest = rest[size:]
    deltas, output = run(groups, stops)
    assert text_of(deltas) == expected
    assert output.stopped == (expected != text or any(text.endswith(stop) for stop in stops))
    assert deltas == run([stream], stops)[0]
    assert sum((delta.tokens for delta in deltas), ()) == tuple(stream[: output.consumed])


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_nothing_shown_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    filter_ = StopStrings(stops)
    shown, whole = "", ""
    for part in pieces:
        text, cut = filter_.push(part)
        shown += text
        whole += part
        assert expected_cut(whole, stops).startswith(shown)
        if cut:
            assert shown == expected_cut(whole, stops)
            return
    assert shown + filter_.flush() == whole


def test_a_stop_string_over_several_tokens() -> None:
    stream = tokens([*ids("say "), piece("Stop"), piece("!!"), *ids("more")])
    deltas, output = run([[token] for token in stream], ["Stop!"])
    assert text_of(deltas) == "say "
    assert output.stopped
    assert output.consumed == 6


def test_a_stop_string_that_ends_inside_a_token() -> None:
    stream = tokens([*ids("in"), piece(" Paris"), *ids(".")])
    deltas, output = run([stream], ["Pari"])
    assert text_of(deltas) == "in "
    assert deltas[-1] == Delta(" ", (stream[2],))
    assert output.consumed == 3


def test_what_only_began_a_stop_string_is_shown_at_the_end() -> None:
    stream = tokens([*ids("a"), piece("Par")])
    deltas, _ = run([stream], ["Paris"])
    assert deltas == [Delta("a", (stream[0],)), Delta("Par", (stream[1],))]


# --- templates -------------------------------------------------------------------------------------------------------


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, special, lambda: NOW).render(ChatPrompt((Message("user", "<\N{SNOWMAN}>"),)))


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("{{ messages[0]['content'] | tojson }}", '"<\N{SNOWMAN}>"'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{{ bos_token }}{% generation %}x{% endgeneration %}", "<s>x"),
        (
            "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% break %}{% endfor %}",
            "user\n",
        ),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
    ],
)
def test_template_features(source: str, out: str) -> None:
    assert render(source, bos_token="<s>") == out


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages.append(1) }}", "{{ a.b }}"]
)
def test_a_template_that_refuses_blames_the_messages(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(messages) }}",
    "{{ '%s' | format(messages.__class__) }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
    "{{ messages[0].update({'content': 'other'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
    "{{ range(10 ** 9) | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_but_the_messages(source: str) -> None:
    try:
        text = render(source)
    except (RequestError, StartError):
        return
    assert not any(word in text for word in ("class", "environ", "root:", "uid=", "function", "module"))


@pytest.mark.parametrize("source", ["{{ 1 / flavour }}", "{{ 'a' + flavour }}", "{{ flavour.x.y }}"])
def test_variables_a_template_cannot_use_are_the_requests_fault(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}, lambda: NOW).render(ChatPrompt((Message("user", "hi"),), variables={"flavour": 0}))
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(StartError, match="template"):
        render("{% if %}")


def test_chat_is_encoded_with_its_special_tokens() -> None:
    prompt = TEXT.encode(TEXT.render_chat(ChatPrompt((Message("user", "hi"),))), special_tokens=False)
    assert TOKENIZER.decode(list(prompt), skip_special_tokens=False) == "<|start|>user\nhi<|end|><|start|>assistant\n"


def test_no_template_no_chat() -> None:
    text = load_text(msgspec.structs.replace(FILES, chat_template=None), lambda: NOW)
    with pytest.raises(RequestError, match="template"):
        text.render_chat(ChatPrompt(()))


def test_a_tokenizers_own_truncation_and_padding_do_not_touch_a_prompt() -> None:
    trained = Tokenizer.from_str(FILES.tokenizer_json)
    trained.enable_truncation(3)
    trained.enable_padding(length=8)
    text = load_text(msgspec.structs.replace(FILES, tokenizer_json=trained.to_str()), lambda: NOW)
    assert text.encode("hello", special_tokens=False) == tuple(ids("hello"))
    assert text.encode("a", special_tokens=False) == tuple(ids("a"))


def test_a_long_prompt_is_tokenised_without_holding_up_other_threads() -> None:
    """The other thread runs in between, not only before and after."""
    prompt = "The quick brown fox. " * 40_000
    done = threading.Event()
    beats: list[float] = []

    def beat() -> None:
        while not done.wait(0.001):
            beats.append(time.perf_counter())

    beating = threading.Thread(target=beat)
    beating.start()
    start = time.perf_counter()
    TEXT.encode(prompt, special_tokens=False)
    end = time.perf_counter()
    done.set()
    beating.join()
    assert sum(start + 0.1 * (end - start) < at < end - 0.1 * (end - start) for at in beats) >= 2
