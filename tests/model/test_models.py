"""Real models with random weights: the head found, taps found, fit, test, a checkpoint alone, predict."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from brainet_pl import Backbone, BRAINet
from brainet_pl._utils.framework import pl
from brainet_pl.callbacks import Evaluation, StructureLearning
from brainet_pl.network import Tree
from brainet_pl.scores import KNN

CLASSES = 3


class Batches(pl.LightningDataModule):
    """One data set for everything, and a far one; batches as `collate` makes them."""

    def __init__(self, known, unknown, collate=None):
        super().__init__()
        self.known, self.unknown, self.collate = known, unknown, collate

    def loader(self, data, shuffle=False):
        return DataLoader(data, batch_size=16, shuffle=shuffle, collate_fn=self.collate)

    def train_dataloader(self):
        return self.loader(self.known, shuffle=True)

    def val_dataloader(self):
        return self.loader(self.known)

    def test_dataloader(self):
        return {"known": self.loader(self.known), "noise": self.loader(self.unknown)}


def images(side, n=32, known=True):
    """Images whose mean tells the class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % CLASSES
    x = torch.randn(n, 3, side, side, generator=generator) + y[:, None, None, None]
    return TensorDataset(x, y) if known else TensorDataset(3 * torch.randn(n, 3, side, side, generator=generator))


def run(folder, trainer_of, backbone, data, batch, again=None):
    """Fit, test, load the checkpoint alone and predict the same; what was found of the backbone."""
    pl.seed_everything(0, verbose=False)
    scores = [KNN(k=3, layers="auto", pool="mean_std")]
    model = BRAINet(CLASSES, backbone, Tree(num_params=30_000), scores=scores, passes=2)
    callbacks = [StructureLearning(threshold=0.3, max_order=0, cache="", progress=False), Evaluation(figures=False)]
    trainer = trainer_of(folder, *callbacks)
    trainer.fit(model, datamodule=data)
    (found, *_) = trainer.test(model, datamodule=data, verbose=False)
    assert found["test/cls/NLL"] > 0
    assert 0 <= found["ood/noise/knn/AUROC"] <= 1
    trainer.save_checkpoint(folder / "a.ckpt")
    given = {} if again is None else {"backbone": again}  # a module can't be stored by its name
    again = BRAINet.load_from_checkpoint(folder / "a.ckpt", **given).eval()
    predicted = []
    for one in (model.eval(), again):
        torch.manual_seed(0)
        predicted.append(one.predict_step(copy.deepcopy(batch), 0))
    assert predicted[0].keys() == predicted[1].keys()
    for name, values in predicted[0].items():
        torch.testing.assert_close(predicted[1][name], values, msg=name)
    assert again.backbone.removed == model.backbone.removed
    return model.backbone


def check(folder, trainer_of, name, side, options, head, taps):
    known = images(side)
    data = Batches(known, images(side, known=False))
    body = run(folder, trainer_of, Backbone(name, options=options), data, [known.tensors[0][:4]])
    assert body.removed.name == head
    assert [tap.layer for tap in body.views[0].resolved] == taps


@pytest.mark.parametrize(
    ("name", "side", "options", "head", "taps"),
    [
        ("resnet18", 32, {}, "fc", ["layer1", "layer2", "layer3", "layer4"]),
        (
            "mobilenet_v3_small",
            32,
            {"width_mult": 0.25},
            "classifier.3",
            ["features.1", "features.3", "features.8", "features"],
        ),
        pytest.param("resnet50", 32, {}, "fc", ["layer1", "layer2", "layer3", "layer4"], marks=pytest.mark.slow),
        pytest.param(
            "vgg16",
            32,
            {},
            "classifier.6",
            ["features.3", "features.8", "features.15", "features.22", "features.29"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "convnext_tiny",
            64,
            {},
            "classifier.2",
            ["features.1", "features.3", "features.5", "features"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "vit_b_16",
            32,
            {"image_size": 32},
            "heads.head",
            [f"encoder.layers.encoder_layer_{i}" for i in (2, 5, 8, 11)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_torchvision_models(tmp_path, quiet_trainer, name, side, options, head, taps):
    check(tmp_path, quiet_trainer, f"torchvision/{name}", side, {"num_classes": 5, **options}, head, taps)


def test_a_small_vision_transformer(tmp_path, quiet_trainer):
    options = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    taps = ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]
    check(tmp_path, quiet_trainer, "torchvision.models:VisionTransformer", 16, options, "heads.head", taps)


# -- timm -------------------------------------------------------------------------------------------------------------

TIMM = {
    "test_resnet": (32, "fc", ["act1", "layer1", "layer2", "layer3", "layer4"]),
    "test_vit": (160, "head", ["blocks.1", "blocks.2", "blocks.3", "blocks.5"]),
    "test_mambaout": (32, "head.fc", ["stages.0", "stages.1", "stages.2", "stages"]),
}
LARGER = {
    "test_convnext": (64, "head.fc", ["stages.0", "stages.1", "stages.2", "stages"]),
    "test_efficientnet": (32, "classifier", ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "bn2"]),
    "test_byobnet": (32, "head.fc", ["stages.0", "stages.1", "stages.2", "stages"]),
    "test_nfnet": (64, "head.fc", ["stem.act4", "stages.0", "stages.1", "stages.2", "final_act"]),
    "mobilenetv3_small_050": (64, "classifier", ["blocks.0", "blocks.1", "blocks.3", "blocks"]),
    "mixer_s32_224": (224, "head", ["blocks.1", "blocks.3", "blocks.5", "blocks.7"]),
    "swin_tiny_patch4_window7_224": (224, "head.fc", ["layers.0", "layers.1", "layers.2", "norm"]),
    "regnetx_002": (64, "head.fc", ["s1", "s2", "s3", "s4"]),
    "mobilevit_xxs": (64, "head.fc", ["stages.0", "stages.1", "stages.2", "stages.3", "final_conv"]),
    "dpn48b": (64, "classifier", ["features.conv2_3", "features.conv3_4", "features.conv4_6", "features"]),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_models(tmp_path, quiet_trainer, name):
    pytest.importorskip("timm")
    side, head, taps = TIMM[name]
    check(tmp_path, quiet_trainer, f"timm/{name}", side, {"num_classes": 5}, head, taps)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_more_timm_models(tmp_path, quiet_trainer, name):
    pytest.importorskip("timm")
    side, head, taps = LARGER[name]
    check(tmp_path, quiet_trainer, f"timm/{name}", side, {"num_classes": 5}, head, taps)


# -- transformers -----------------------------------------------------------------------------------------------------


class Texts(Dataset):
    """Tokens of texts whose words tell the class, of all lengths."""

    def __init__(self, n=32, known=True):
        generator = torch.Generator().manual_seed(0 if known else 1)
        self.labels = torch.arange(n) % CLASSES
        lengths = torch.randint(4, 12, (n,), generator=generator)
        low = 10 + 20 * self.labels if known else torch.full((n,), 80)
        self.tokens = [
            int(a) + torch.randint(0, 20, (int(length),), generator=generator)
            for a, length in zip(low, lengths, strict=True)
        ]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.tokens[i], self.labels[i]


def encoded(rows, longest=None, left=False):
    """What a tokenizer and its collator give: a `BatchEncoding`, as long as its longest text."""
    from transformers import BatchEncoding

    longest = longest or max(len(tokens) for tokens, _ in rows)
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for i, (tokens, _) in enumerate(rows):
        place = slice(longest - len(tokens), None) if left else slice(0, len(tokens))
        ids[i, place], mask[i, place] = tokens, 1
    labels = torch.stack([label for _, label in rows])
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


TEXT = {
    "vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "num_labels": 4, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "num_labels": 4,
}  # fmt: skip


def built(kind, task, **settings):
    """A model of transformers by the names of its classes, without a download."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}For{task}")(config).eval()


@pytest.mark.parametrize(
    ("kind", "settings", "head", "taps"),
    [
        ("Bert", TEXT, "classifier", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        (
            "GPT2",
            {"vocab_size": 120, "n_embd": 16, "n_layer": 2, "n_head": 2, "num_labels": 4, "pad_token_id": 0},
            "score",
            ["transformer.h.0", "transformer.h.1"],
        ),
    ],
)
def test_text_classifiers(tmp_path, quiet_trainer, kind, settings, head, taps):
    model = built(kind, "SequenceClassification", **settings)
    known = Texts()
    data = Batches(known, Texts(known=False), encoded)
    batch = encoded([known[i] for i in range(5)])
    body = run(tmp_path, quiet_trainer, Backbone(model), data, batch, again=Backbone(model))
    assert body.removed.name == head
    assert [tap.layer for tap in body.views[0].resolved] == taps
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        torch.testing.assert_close(body(inputs, more=True).base_logits, model(**inputs).logits)


def test_an_image_classifier_of_transformers(tmp_path, quiet_trainer):
    model = built("ViT", "ImageClassification", **VISION)
    known = images(16)

    def collate(rows):
        found = {"pixel_values": torch.stack([row[0] for row in rows]), "name": [f"{i}.png" for i in range(len(rows))]}
        return found | ({"labels": torch.stack([row[1] for row in rows])} if len(rows[0]) > 1 else {})

    data = Batches(known, images(16, known=False), collate)
    batch = collate([known[i] for i in range(5)])
    body = run(tmp_path, quiet_trainer, Backbone(model), data, batch, again=Backbone(model))
    assert body.removed.name == "classifier"
    assert [tap.layer for tap in body.views[0].resolved] == ["vit.layers.0", "vit.layers.1"]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pool", ["mean", "mean_std", "cls", "tokens"])
def test_padding_does_not_change_the_features_of_a_text(pool, left):
    if left and pool == "cls":
        pytest.skip("Bert counts positions from the left")
    model = built("Bert", "SequenceClassification", **TEXT)
    if left:  # positions would count padding too
        model.bert.embeddings.position_embeddings.weight.data.zero_()
    body = Backbone(model, layers="stages", pool=pool).build().eval()
    known = Texts()
    rows = sorted((known[i] for i in range(6)), key=lambda row: len(row[0]))
    whole = encoded(rows, longest=15, left=left)
    found = body({name: whole[name] for name in ("input_ids", "attention_mask")})
    for i, row in enumerate(rows):
        alone = encoded([row], left=left)
        expected = body({name: alone[name] for name in ("input_ids", "attention_mask")})
        torch.testing.assert_close(found[i : i + 1], expected, atol=1e-5, rtol=1e-5)
