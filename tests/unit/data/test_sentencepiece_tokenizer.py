"""SentencePiece directories: agreement with SentencePiece and transformers, and what they add."""

import io
import json

import pytest

from megatron_rl.data.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_rl.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_rl.data.types import PromptRow

spm = pytest.importorskip("sentencepiece")

WORDS = "one two three four five plus equals the sum of number answer is what hello world"
SENTENCES = [f"{a} {b} 1{i} + 2{i} = {i}" for i, a in enumerate(WORDS.split()) for b in ("is", "a")]
TEXTS = [
    "one plus two equals 3",
    "  two  spaces",
    "trailing ",
    "a\nnew line",
    "naïve 数字 🙂",
    "one <s> in text</s>",
    "[A]one[/A] two",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[A]{{ m['content'] }}[/A]{% endfor %}"
    "{% if add_generation_prompt %} say{% endif %}"
)
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
ADDED = {"300": {"content": "[A]", "special": True}, "301": {"content": "[/A]", "special": False}}


@pytest.fixture(scope="module")
def model_bytes():
    stream = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=stream,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return stream.getvalue()


@pytest.fixture
def write(tmp_path, model_bytes):
    def make(**settings):
        (tmp_path / "tokenizer.model").write_bytes(model_bytes)
        settings = {"added_tokens_decoder": ADDED, "legacy": False, **settings}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return make


@pytest.fixture
def plain(model_bytes):
    return spm.SentencePieceProcessor(model_proto=model_bytes)


def row(prompt):
    return PromptRow(index=0, data_source="rows", prompt=prompt, ground_truth="")


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_decodes_to_itself(write, text, legacy):
    tokenizer = SentencePieceTokenizer(write(legacy=legacy, add_bos_token=False))
    ids = tokenizer.encode_prompt(row(text), False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["one two", "数字", "a\nb", " leading", "  two", "=7"])
def test_a_response_continues_its_prompt(write, text):
    tokenizer = SentencePieceTokenizer(write())
    prompt = tokenizer.encode_prompt(row("what is one"), False)
    whole = tokenizer.decode((*prompt, *tokenizer.encode_response(text)))
    assert whole == "what is one" + text


@pytest.mark.parametrize("text", [t for t in TEXTS if "<s>" not in t and "[" not in t])
def test_text_is_what_sentencepiece_makes_of_it(write, plain, text):
    with_bos = SentencePieceTokenizer(write()).encode_prompt(row(text), False)
    without = SentencePieceTokenizer(write(add_bos_token=False)).encode_prompt(row(text), False)
    assert with_bos == (plain.bos_id(), *without)
    assert without == tuple(plain.encode(text))


# Before a text that begins with spaces, transformers leaves out the space that SentencePiece adds.
@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith(" ")])
def test_text_is_what_transformers_make_of_it(write, text):
    path = write(add_bos_token=False, **LLAMA)
    ours = SentencePieceTokenizer(path).encode_prompt(row(text), False)
    assert ours == HuggingFaceTokenizer(path).encode_prompt(row(text), False)


def test_a_chat_goes_through_the_template(write, plain):
    path = write(chat_template=TEMPLATE, bos_token="<s>")
    tokenizer = SentencePieceTokenizer(path)
    chat = [{"role": "user", "content": "one"}]
    expected = (plain.bos_id(), 300, *tokenizer.encode_response("one"), 301)
    expected += tokenizer.encode_response(" say")
    assert tokenizer.encode_prompt(row(tuple(chat)), False) == expected
    assert tokenizer.encode_prompt(row("one"), True) == expected
    # A file beside the settings comes first, as in transformers.
    (path / "chat_template.jinja").write_text("two")
    ids = SentencePieceTokenizer(path).encode_prompt(row("one"), True)
    assert ids == tuple(plain.encode("two"))


def test_chats_that_cannot_be_rendered_are_refused(write):
    with pytest.raises(ValueError, match="has no chat template"):
        SentencePieceTokenizer(write()).encode_prompt(row("one"), True)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="row 0 of 'rows': roles must alternate"):
        SentencePieceTokenizer(write(chat_template=refusing)).encode_prompt(row("one"), True)


def test_special_tokens_are_skipped_and_foreign_ids_have_no_text(write, plain):
    tokenizer = SentencePieceTokenizer(write())
    ids = (plain.bos_id(), *plain.encode("one"), 300, 301, plain.eos_id(), 999)
    assert tokenizer.decode(ids) == "one[/A]"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>one[A][/A]</s>"
    assert tokenizer.decode(()) == ""


def test_eos_and_stop_tokens(write, plain):
    assert SentencePieceTokenizer(write()).eos_token_id == plain.eos_id()
    tokenizer = SentencePieceTokenizer(write(eos_token={"content": "[/A]"}))
    assert tokenizer.eos_token_id == 301
    newline = plain.piece_to_id("<0x0A>")
    assert tokenizer.stop_token_ids(["\n", "[A]"]) == (newline, 300)
    with pytest.raises(ValueError, match="tokens of this tokenizer and must be one"):
        tokenizer.stop_token_ids(["数字"])
    with pytest.raises(ValueError, match="eos_token '<end>', which is no token"):
        SentencePieceTokenizer(write(eos_token="<end>"))


def test_the_directory_decides(write):
    path = write()
    assert isinstance(load_tokenizer(path), SentencePieceTokenizer)
    (path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="no SentencePiece model"):
        load_tokenizer(path)


def test_tokenizer_json_comes_first(tiny_model_dir):
    assert isinstance(load_tokenizer(tiny_model_dir("llama")), HuggingFaceTokenizer)
