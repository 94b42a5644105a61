"""Networks that take texts as they are, because their tokenizer is a part of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brainet_pl._utils.tensor_file import check_build
from brainet_pl._utils.texts import MOST_TOKENS, Texts, TextSteps
from brainet_pl.backbones.stages import output_parts

STATE = "_extra_state"  # what torch calls the state of a module beside its weights
USUAL = 512  # tokens that a network reads where nothing says how many
FOLDER_FILES = {"sentence_bert_config.json": "max_seq_length", "tokenizer_config.json": "model_max_length"}


class TextEncoder(nn.Module):
    """A network of `transformers` with its tokenizer: texts → the states of their tokens, or logits of a classifier.

    Give it to `swap_head`, `BRAINet` or `Backbone`: they then take lists of strings. The tokenizer travels in the state
    dict, so that checkpoints, files and exported folders have it.

    Args:
        network: a model or classifier of `transformers`, or any module that takes `input_ids` and `attention_mask`.
        tokenizer: its fast tokenizer, or `TextSteps`.
        max_tokens: the longest text that it reads; None is what the tokenizer says.
    """

    def __init__(self, network: nn.Module, tokenizer: Any, max_tokens: int | None = None) -> None:
        super().__init__()
        self.network, self.steps = network, text_steps(tokenizer, max_tokens)

    @staticmethod
    def from_pretrained(name: str | Path, max_tokens: int | None = None) -> TextEncoder:
        """The encoder in a folder or of a hub, such as "sentence-transformers/all-MiniLM-L6-v2".

        Args:
            name: a folder, or the name of one of a hub.
            max_tokens: the longest text that it reads; None is what its files say.
        """
        transformers = _transformers()
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(name))
        network = transformers.AutoModel.from_pretrained(str(name)).eval()
        usual = [tokenizer.model_max_length, getattr(network.config, "max_position_embeddings", USUAL)]
        for file, key in FOLDER_FILES.items():
            path = Path(name) / file
            if path.is_file():
                usual.append(json.loads(path.read_text(encoding="utf-8")).get(key, USUAL))
        return TextEncoder(network, tokenizer, min(usual) if max_tokens is None else max_tokens)

    @property
    def head_layer(self) -> str | None:
        """The classification layer to remove: "" of a network that ends in states of tokens, None is to be found."""
        return "" if getattr(self.network, "base_model", None) is self.network else None

    def tokens(self, texts: Texts) -> dict[str, Tensor]:
        """Texts (B,) → `input_ids` and `attention_mask`, each (B, T), where the network is; warns of those it cuts."""
        tokens = self.steps(texts)
        self.steps.warn_of_cut(tokens.cut)
        device = next((p.device for p in self.network.parameters()), None)
        return {name: torch.from_numpy(array).to(device) for name, array in tokens.inputs().items()}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token numbers (B, T) → the states of tokens (B, T, d), or the logits (B, C) of a classifier."""
        output = self.network(input_ids=input_ids, attention_mask=attention_mask)
        if isinstance(output, Tensor):
            return output
        parts = output_parts(output)
        return torch.as_tensor(parts["logits"] if "logits" in parts else parts["last_hidden_state"])

    def get_extra_state(self) -> Tensor:
        """The tokenizer, and what builds the network where it is one of `transformers`, as bytes."""
        config = getattr(self.network, "config", None)
        content = {
            "steps": self.steps.to_dict(),
            "network": type(self.network).__name__,
            "config": None if config is None else config.to_dict(),
        }
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the tokenizer from a state dict."""
        self.steps = TextSteps(**_content(state)["steps"])


def text_steps(tokenizer: Any, max_tokens: int | None = None) -> TextSteps:
    """How a tokenizer of `transformers` reads texts.

    Args:
        tokenizer: a fast one, which has a `backend_tokenizer`; or `TextSteps`.
        max_tokens: the longest text; None is what the tokenizer says.
    """
    if isinstance(tokenizer, TextSteps):
        return tokenizer if max_tokens is None else TextSteps(tokenizer.tokenizer, max_tokens, tokenizer.pad)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"expected a fast tokenizer of transformers, got {type(tokenizer).__name__}: load it by "
            "AutoTokenizer.from_pretrained(…), or give TextSteps(tokenizer_json)"
        )
    longest = tokenizer.model_max_length if max_tokens is None else max_tokens
    usual = longest if longest <= MOST_TOKENS else USUAL  # of many tokenizers it is 10³⁰
    return TextSteps(backend.to_str(), int(usual), int(tokenizer.pad_token_id or 0))


def restored_encoder(weights: Mapping[str, Tensor]) -> TextEncoder:
    """An encoder like the one whose state is among these weights; its own weights are still to be loaded."""
    (key,) = [name for name in weights if name.endswith(f"model.{STATE}")]
    content = _content(weights[key])
    transformers = _transformers()
    kind = getattr(transformers, content["network"], None)
    if content["config"] is None or not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(
            f"expected a network of transformers in the file, got a {content['network']}: give one like it, "
            "load_swapped(path, TextEncoder(network, tokenizer))"
        )
    config = transformers.AutoConfig.for_model(**content["config"])
    check_build(lambda: kind(config), weights)
    return TextEncoder(kind(config).eval(), TextSteps(**content["steps"]))


def _content(state: Tensor) -> dict[str, Any]:
    content = json.loads(np.asarray(state.cpu(), dtype=np.uint8).tobytes())
    if not isinstance(content, dict) or set(content) != {"steps", "network", "config"}:
        raise ValueError("expected the state of a TextEncoder, got another: take another copy")
    return content


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("encoders of texts need transformers: pip install 'brainet_pl[text]'") from error
    return transformers
