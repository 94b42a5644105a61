"""The same with `import lightning as L`: what is imported first decides which of the two packages is used.

python examples/lightning_namespace.py
"""

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from brainet_pl import BRAINet
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.datamodules import Digits

L.seed_everything(0)
model = BRAINet(num_classes=8, lr=0.01)
trainer = L.Trainer(
    max_epochs=5,
    logger=CSVLogger("runs", name="digits"),
    callbacks=[StructureLearning(threshold=0.1), Evaluation(), EarlyStopping("val/cls/NLL")],
)
trainer.fit(model, datamodule=Digits())
(results, *_) = trainer.test(model, datamodule=Digits())
answers = trainer.predict(model, datamodule=Digits())
print(isinstance(model, L.LightningModule), results["test/cls/Acc"], answers[0]["probabilities"].shape)
