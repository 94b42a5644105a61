"""A tokenizer and a network of a few words, for tests of models that take texts."""

import json

import torch
from torch import nn

from brainet_pl._utils.texts import TextSteps

TOPICS = (("rain", "sun", "cloud", "wind"), ("loan", "bank", "card", "money"), ("goal", "ball", "match", "team"))
COMMON = ("the", "is", "my", "today", "where", "a")
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *COMMON, *(word for words in TOPICS for word in words)]
NUMBER = {word: i for i, word in enumerate(VOCABULARY)}


def tiny_steps(max_tokens=10):
    """Words as numbers between [CLS] and [SEP]."""
    tokenizers = __import__("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(NUMBER, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [(name, NUMBER[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    made.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    assert json.loads(made.to_str())["model"]["type"] == "WordLevel"
    return TextSteps(made.to_str(), max_tokens)


class Bag(nn.Module):
    """The mean of the vectors of words, and a classification layer."""

    def __init__(self, classes=3, width=12):
        super().__init__()
        self.words, self.classifier = nn.Embedding(len(VOCABULARY), width), nn.Linear(width, classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, :, None].float()
        return self.classifier((self.words(input_ids) * mask).sum(dim=1) / mask.sum(dim=1))


def sentences(count, seed, topics=TOPICS):
    """Sentences of five to seven words and their topics: two words of the topic, and one of any."""
    draw = torch.Generator().manual_seed(seed)

    def some(words, number):
        return [words[int(i)] for i in torch.randint(len(words), (number,), generator=draw)]

    found = []
    labels = torch.arange(count) % len(topics)
    for label in labels.tolist():
        extra = int(torch.randint(3, (1,), generator=draw))
        other = int(torch.randint(len(topics), (1,), generator=draw))
        found.append(" ".join(some(COMMON, 2 + extra) + some(topics[label], 2) + some(topics[other], 1)))
    return found, labels
