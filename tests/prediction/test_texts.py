"""Texts as they are: tokens beside a look-up by hand, every form, what can't be read, files, and a hostile file."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("tokenizers")
from tiny_texts import NUMBER, Bag, sentences, tiny_steps

from brainet_pl import TextEncoder, load_swapped, swap_head
from brainet_pl._utils.texts import Texts
from brainet_pl.backbones import Backbone
from brainet_pl.network import Linear

TRAIN, HELD, TEST = sentences(240, 1), sentences(120, 2), sentences(150, 3)


def encoder(max_tokens=10):
    torch.manual_seed(0)
    return TextEncoder(Bag(), tiny_steps(max_tokens))


@pytest.fixture(scope="module")
def model():
    return swap_head(encoder(), TRAIN, held=HELD, head=Linear(), layers=None, progress=False).fit(
        max_epochs=30, progress=False
    )


def naive_tokens(texts, most):
    """Word by word, with a place for [CLS] and one for [SEP]."""
    words = [[NUMBER.get(word, NUMBER["[UNK]"]) for word in text.split()] for text in texts]
    rows = [[NUMBER["[CLS]"], *one[: most - 2], NUMBER["[SEP]"]] for one in words]
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows], [[1] * len(r) + [0] * (longest - len(r)) for r in rows]


def test_tokens_are_those_of_a_look_up():
    texts = [*TEST[0][:9], "the rain", "the unheard rain is my loan bank card today a"]
    tokens = tiny_steps()(texts)
    ids, mask = naive_tokens(texts, 10)
    assert tokens.input_ids.tolist() == ids
    assert tokens.attention_mask.tolist() == mask
    assert tokens.cut.tolist() == [len(text.split()) > 8 for text in texts]


def test_texts_are_predicted_in_every_form(model):
    x, y = TEST
    expected = model.predict(x)["probabilities"]
    assert float((expected.argmax(1) == y).double().mean()) > 0.7
    forms = [tuple(x), np.array(x), np.array(x, dtype=object), Texts(x), DataLoader(list(zip(x, y, strict=True)), 40)]
    forms += [DataLoader([{"sentence": one, "label": 0} for one in x], 40), tiny_tensors(x)]
    for form in forms:
        torch.testing.assert_close(model.predict(form)["probabilities"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.predict(x[0])["probabilities"], expected[:1], rtol=1e-4, atol=1e-5)


def tiny_tensors(texts):
    return {name: torch.from_numpy(array) for name, array in tiny_steps()(texts).inputs().items()}


def test_features_of_many_texts_are_those_of_one_at_a_time():
    body, x = Backbone(encoder(), layers=None).build(), TEST[0]
    many = body(Texts(x), more=True)
    alone = [body(Texts([one]), more=True) for one in x]
    torch.testing.assert_close(many.features, torch.cat([one.features for one in alone]))
    torch.testing.assert_close(many.base_logits, torch.cat([one.base_logits for one in alone]))


def test_what_is_unlike_all_training_texts_is_not_known(model):
    assert float(model.predict(TEST[0])["known"].double().mean()) > 0.85
    strange = ["qué tiempo hace", "jaka jest pogoda dzisiaj", "天气 怎么样"]
    assert not bool(model.predict(strange)["known"].any())


def test_a_long_text_is_cut_with_a_word(model):
    with pytest.warns(UserWarning, match="1 of 2 texts have more than 10 tokens"):
        found = model.predict(["rain " * 10_000, "the rain"])["probabilities"]
    with pytest.warns(UserWarning, match="more than 10 tokens"):
        torch.testing.assert_close(found[:1], model.predict(["rain " * 9])["probabilities"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("", "at least one word, got ''"),
        (["the rain", " \t"], "at least one word, got .* at place 1"),
        (["the rain", None], "expected a text, got None at place 1"),
        (["the rain", float("nan")], "expected a text, got nan at place 1"),
    ],
)
def test_what_is_no_text_is_refused(model, texts, message):
    with pytest.raises(ValueError, match=message):
        model.predict(texts)


def test_texts_for_a_network_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"got texts, which Bag does not read: .*TextEncoder\(network, tokenizer\)"):
        swap_head(Bag(), TRAIN, progress=False).fit(progress=False)
    with pytest.raises(ValueError, match="expected a fast tokenizer"):
        TextEncoder(Bag(), object())


def test_held_out_texts_that_were_trained_on_are_noticed():
    with pytest.raises(ValueError, match="held-out samples that are not in the training data"):
        swap_head(encoder(), TRAIN, held=(TRAIN[0][:60], TRAIN[1][:60]), progress=False).fit(progress=False)


def test_a_file_brings_the_tokenizer_with_it(model, tmp_path):
    model.save(tmp_path / "model.pt")
    other = TextEncoder(Bag(), tiny_steps(max_tokens=4))  # another length, which the file knows better
    found = load_swapped(tmp_path / "model.pt", other).predict(TEST[0])["probabilities"]
    torch.testing.assert_close(found, model.predict(TEST[0])["probabilities"], rtol=0, atol=0)
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="expected a network of transformers in the file, got a Bag"):
        load_swapped(tmp_path / "model.pt")


def test_a_network_of_transformers_is_built_from_its_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    network = transformers.BertModel(transformers.BertConfig(vocab_size=len(NUMBER), **sizes)).eval()
    made = TextEncoder(network, tiny_steps())
    assert made.head_layer == ""
    fitted = swap_head(made, TRAIN, held=HELD, head=Linear(), progress=False).fit(max_epochs=3, progress=False)
    fitted.save(tmp_path / "model.pt")
    found = load_swapped(tmp_path / "model.pt").predict(TEST[0])["probabilities"]
    torch.testing.assert_close(found, fitted.predict(TEST[0])["probabilities"], rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected a network of the class TextEncoder, got Linear"):
        load_swapped(tmp_path / "model.pt", nn.Linear(2, 2))
