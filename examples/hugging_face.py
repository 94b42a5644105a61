"""A Hugging Face model in a LightningModule of your own: its classifier becomes a BRAINet. Nothing is downloaded.

python examples/hugging_face.py  (pip install transformers)
"""

import pytorch_lightning as pl
import torch
import transformers
from torch.utils.data import DataLoader

from brainet_pl.callbacks import Evaluation, SwapHead


class Texts(pl.LightningModule):
    """As you have written it; a model with learned weights comes from `from_pretrained`."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=60, num_labels=3, max_position_embeddings=16, **sizes)
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, **batch):
        return self.bert(**batch)

    def training_step(self, batch, batch_idx):
        return self(**batch).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(**batch).loss)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def sentences(n, seed):
    """Sentences of 12 words, three in four from the vocabulary of their class."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    own = torch.randint(15, (n, 12), generator=g) + 15 * y[:, None]
    words = torch.where(torch.rand(n, 12, generator=g) < 0.75, own, torch.randint(45, (n, 12), generator=g))
    rows = [{"input_ids": w, "attention_mask": torch.ones_like(w), "labels": c} for w, c in zip(words, y, strict=True)]
    return DataLoader(rows, batch_size=32, shuffle=seed == 0)


unseen = torch.randint(45, 60, (200, 12))  # words that training has never met
unknown = {"unseen": {"input_ids": unseen, "attention_mask": torch.ones_like(unseen)}}

pl.seed_everything(0)
settings = {"max_epochs": 6, "log_every_n_steps": 5, "enable_progress_bar": False}
callbacks = [SwapHead("bert.classifier", scores=["KNN"]), Evaluation(unknown=unknown)]
trainer = pl.Trainer(callbacks=callbacks, **settings)
model = Texts()
trainer.fit(model, sentences(480, 0), sentences(240, 1))
results = trainer.test(model, sentences(240, 2), verbose=False)[0]
for name in ("test_loss", "test/cls/Acc", "test/cal/ECE", "ood/unseen/entropy/AUROC", "ood/unseen/knn/AUROC"):
    print(f"{name:26} {results[name]:.3f}")
