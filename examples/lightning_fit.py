"""Fit, test and predict with Lightning: structure, calibration, unknown digits, conformal sets.

python examples/lightning_fit.py
"""

import pytorch_lightning as pl

from brainet_pl import BRAINet
from brainet_pl.calibration import Conformal
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.datamodules import Digits

pl.seed_everything(0)
data = Digits()  # eight digits are known, two are held out as unknown
model = BRAINet(
    num_classes=8,
    scores=["Generative", "KNN"],
    calibration="TemperatureScaling",
    conformal=Conformal(level=0.95),
    lr=3e-3,
)
trainer = pl.Trainer(
    max_epochs=15,
    callbacks=[StructureLearning(progress=False), Evaluation()],
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=10,
)
trainer.fit(model, datamodule=data)
trainer.test(model, datamodule=data, verbose=False)
found = trainer.callback_metrics
for key in ("test/cls/Acc", "test/cls/NLL", "test/cal/ECE", "test/conformal/Coverage", "test/conformal/Size"):
    print(f"{key:32s} {float(found[key]):.3f}")
for score in ("one_minus_max_p", "mutual_information", "generative", "knn"):
    print(f"{f'ood/held_out/{score}/AUROC':32s} {float(found[f'ood/held_out/{score}/AUROC']):.3f}")
answer = trainer.predict(model, datamodule=data)[0]
print("first classes", answer["class"][:5].tolist(), "sizes of their sets", answer["set"][:5].sum(1).tolist())
